// Small pictures in the derivation: the products of a comparison, the scores of a row, the numbers of a value.
import { grouped } from "./util.js";
import { decimal } from "./maths.js";

const svgOf = (kind, label, inside, box = "") =>
  `<svg class="strip ${kind}" ${box} role="img" aria-label="${label}">${inside}</svg>`;

const stretched = (height) => `viewBox="0 0 100 ${height}" preserveAspectRatio="none"`;

// A bar up or down from `zero`, of a number between -1 and 1.
/** @param {number} x @param {number} i @param {number} count @param {number} zero @param {number} high @param {string} fill */
function bar(x, i, count, zero, high, fill) {
  const wide = 100 / count,
    size = Math.max(0.01, Math.abs(x) * high);
  return `<rect x="${i * wide + 0.1 * wide}" width="${0.8 * wide}" y="${x < 0 ? zero : zero - size}" height="${size}" fill="var(--${fill})"/>`;
}

// The product of query and key at each place; those that a table tells are dark.
/** @param {number[]} products @param {Set<number>} told */
export function spectrum(products, told) {
  const most = Math.max(...products.map(Math.abs), 1e-9);
  const bars = products.map((x, c) =>
    bar(x / most, c, products.length, 22, 20, told.has(c) ? "bar-selected" : "bar"),
  );
  const line = '<line x1="0" x2="100" y1="22" y2="22"/>';
  const label = `The products of query and key at ${products.length} places`;
  return svgOf("products", label, line + bars.join(""), stretched(44));
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
  return counts
    .map((count, i) =>
      count
        ? `<rect x="${i}%" width="0.8%" y="${14 - size(count)}" height="${size(count)}" fill="var(--bar)"/>`
        : "",
    )
    .join("");
}

// What the key brings, α v, above what all bring together, z.
/** @param {number[]} brought @param {number[]} z */
export function valueStrip(brought, z) {
  const most = Math.max(...z.map(Math.abs), ...brought.map(Math.abs), 1e-9);
  const row = (numbers, zero, fill) =>
    [...numbers].map((x, c) => bar(x / most, c, z.length, zero, 6.5, fill)).join("");
  const label = `The ${z.length} numbers of α v, above those of z`;
  const bars = row(brought, 7.5, "value") + row(z, 22.5, "bar-selected");
  return `<span class="rows"><i class="value">αv</i><b>z</b></span>${svgOf("values", label, bars, stretched(30))}`;
}
