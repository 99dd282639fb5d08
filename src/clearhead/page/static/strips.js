// Small pictures in the derivation: the products of a comparison, the scores of a row, the numbers of a value.
import { grouped } from "./util.js";
import { decimal } from "./maths.js";

const svgOf = (kind, label, inside, box = "") =>
  `<svg class="strip ${kind}" ${box} role="img" aria-label="${label}">${inside}</svg>`;

const stretched = (height) => `viewBox="0 0 100 ${height}" preserveAspectRatio="none"`;

// Bars up and down from `zero`, of numbers between -1 and 1, as one path: a hundred elements would take longer to lay out.
/** @param {number[]} numbers @param {number} zero @param {number} high @param {string} fill */
function bars(numbers, zero, high, fill) {
  const wide = 100 / numbers.length;
  const bar = (x, i) =>
    x ? `M${(wide * (i + 0.1)).toFixed(2)} ${zero}v${(-x * high).toFixed(2)}h${(wide * 0.8).toFixed(2)}V${zero}` : "";
  return `<path d="${numbers.map(bar).join("")}" fill="var(--${fill})"/>`;
}

// The product of query and key at each place; those that a table tells are dark.
/** @param {number[]} products @param {Set<number>} told */
export function spectrum(products, told) {
  const most = Math.max(...products.map(Math.abs), 1e-9);
  const those = (dark) => products.map((x, c) => (told.has(c) === dark ? x / most : 0));
  const line = '<line x1="0" x2="100" y1="22" y2="22"/>';
  const label = `The products of query and key at ${products.length} places`;
  const both = bars(those(false), 22, 20, "bar") + bars(those(true), 22, 20, "bar-selected");
  return svgOf("products", label, line + both, stretched(44));
}

const HISTOGRAM = 300; // more scores are counted, not drawn one by one

// All scores of a row from the least to the most, the key's own marked.
/** @param {Float64Array} scores @param {number} key */
export function scoreStrip(scores, key) {
  let [low, high] = [Infinity, -Infinity];
  for (const s of scores) [low, high] = [Math.min(low, s), Math.max(high, s)];
  const at = (s) => (100 * (s - low)) / Math.max(1e-9, high - low) + "%";
  const mark = (s, kind, top, bottom) =>
    `<line class="${kind}" x1="${at(s)}" x2="${at(s)}" y1="${top}" y2="${bottom}"/>`;
  const many = scores.length > HISTOGRAM;
  const all = many ? counted(scores, low, high) : [...scores].map((s) => mark(s, "score", 4, 14)).join("");
  const words = `${many ? "how many of the" : "score s of the"} ${grouped(scores.length)} keys it can see`;
  const text = `<text y="26">${decimal(low, 2)}</text><text x="50%" y="26" class="middle">${words}${many ? " score so (log)" : ""}</text><text x="100%" y="26" class="end">${decimal(high, 2)}</text>`;
  const line = '<line x1="0" x2="100%" y1="14.5" y2="14.5"/>';
  return svgOf("scores", words, all + line + mark(scores[key], "key", 0, 15) + text);
}

function counted(scores, low, high) {
  const counts = new Array(100).fill(0);
  for (const s of scores) counts[Math.min(99, Math.floor((100 * (s - low)) / Math.max(1e-9, high - low)))]++;
  const most = Math.log(1 + Math.max(...counts));
  const size = (count) => (13 * Math.log(1 + count)) / most;
  const path = counts.map((count, i) => (count ? `M${i} 14v${(-size(count)).toFixed(2)}h.8V14` : ""));
  return `<svg width="100%" height="14" ${stretched(14)}><path d="${path.join("")}" fill="var(--bar)"/></svg>`;
}

// What the key brings, α v, above what all bring together, z.
/** @param {number[]} brought @param {number[]} z */
export function valueStrip(brought, z) {
  const most = Math.max(...z.map(Math.abs), ...brought.map(Math.abs), 1e-9);
  const row = (numbers, zero, fill) =>
    bars(numbers.map((x) => x / most), zero, 6.5, fill);
  const label = `The ${z.length} numbers of α v, above those of z`;
  const both = row(brought, 7.5, "value") + row(z, 22.5, "bar-selected");
  return `<span class="rows"><i class="value">αv</i><b>z</b></span>${svgOf("values", label, both, stretched(30))}`;
}
