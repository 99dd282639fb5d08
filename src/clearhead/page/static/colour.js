// One weight scale everywhere, and the tints of thumbnails. Both follow the theme.
import { $, clamp, drawingOn } from "./util.js";
import { ROLES } from "./roles.js";

/** @type {{ dark: boolean, weights: number[][], roles: Record<string, number[][]>, cell: number[] }} */
export const theme = { dark: false, weights: [], roles: {}, cell: [0, 0, 0] };

// Stops [t, value] of chroma and hue; lightness is linear. PAGE: 'one weight scale everywhere'.
const LIGHT = {
  L: [0.987, 0.3],
  C: [
    [0, 0],
    [0.2, 0.045],
    [0.5, 0.115],
    [0.75, 0.145],
    [1, 0.11],
  ],
  h: [
    [0, 215],
    [0.5, 246],
    [1, 272],
  ],
};
const DARK = {
  L: [0.198, 0.95],
  C: [
    [0, 0.01],
    [0.25, 0.085],
    [0.55, 0.125],
    [0.8, 0.09],
    [1, 0.03],
  ],
  h: [
    [0, 275],
    [0.5, 250],
    [1, 205],
  ],
};

/** @param {number[][]} stops @param {number} t */
function between(stops, t) {
  let i = 0;
  while (i < stops.length - 2 && t > stops[i + 1][0]) i++;
  const [[a, x], [b, y]] = [stops[i], stops[i + 1]];
  return x + (y - x) * clamp((t - a) / (b - a), 0, 1);
}

/** @param {number} L @param {number} C @param {number} h @returns {number[]} */
function oklch(L, C, h) {
  const a = C * Math.cos((h * Math.PI) / 180),
    b = C * Math.sin((h * Math.PI) / 180);
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((x) => {
    x = clamp(x, 0, 1);
    return Math.round(255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055));
  });
}

/** @param {string} hex */
const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
/** @type {Record<string, string>} */
let asked = {}; // of this theme: to ask the browser makes it lay out all that has changed
/** @param {string} name */
export const colour = (name) =>
  (asked[name] ??= getComputedStyle(document.documentElement)
    .getPropertyValue("--" + name)
    .trim());
export const rgb = (c) => `rgb(${c[0]},${c[1]},${c[2]})`;

/** @param {boolean} dark */
export function setTheme(dark) {
  theme.dark = dark;
  asked = {};
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const { L, C, h } = dark ? DARK : LIGHT;
  theme.weights = Array.from({ length: 256 }, (_, i) =>
    oklch(L[0] + ((L[1] - L[0]) * i) / 255, between(C, i / 255), between(h, i / 255)),
  );
  theme.weights[0] = channels(colour("paper"));
  theme.cell = channels(colour("cell"));
  for (const role of Object.keys(ROLES)) {
    const full = channels(colour(role));
    theme.roles[role] = Array.from({ length: 256 }, (_, i) => {
      const t = 0.13 + 0.87 * (i / 255) ** 0.85;
      return full.map((x, k) => Math.round(theme.cell[k] + (x - theme.cell[k]) * t));
    });
  }
}

/** @type {Record<string, (a: number) => number>} */
const SCALES = { linear: (a) => a, root: Math.sqrt, log: (a) => (a <= 1e-4 ? 0 : 1 + Math.log10(a) / 4) };
/** @param {import("./types").Scale} scale @param {number} a */
export const tone = (scale, a) => clamp(Math.round(255 * SCALES[scale](a)), 0, 255);
/** @param {import("./types").Scale} scale @param {number} a */
export const tint = (scale, a) => theme.weights[tone(scale, a)];

const linearised = (x) => ((x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
// Black or white, whichever reads better on the colour.
/** @param {number[]} c */
export function ink(c) {
  return 0.2126 * linearised(c[0]) + 0.7152 * linearised(c[1]) + 0.0722 * linearised(c[2]) > 0.179
    ? "#000"
    : "#fff";
}

export function drawRamp(scale) {
  const canvas = document.createElement("canvas");
  canvas.width = 96;
  canvas.height = 9;
  canvas.setAttribute("aria-hidden", "true");
  const context = drawingOn(canvas);
  for (let i = 0; i < 96; i++) {
    context.fillStyle = rgb(theme.weights[Math.round((255 * i) / 95)]);
    context.fillRect(i, 0, 1, 9);
  }
  const words = { linear: "colour ∝ weight", root: "colour ∝ √weight", log: "colour ∝ log weight" };
  const name = document.createElement("span");
  name.className = "names";
  name.textContent = words[scale];
  $("#ramp").replaceChildren(scale === "log" ? "0.01%" : "0", canvas, "100%", name);
}
