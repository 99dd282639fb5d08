// The exact numbers behind one weight, and how many decimals they need so that each step, done with the numbers
// shown, gives the number shown next. Scores have three decimals, exponentials three digits, or as many more.
import { addingUp, decimal, digits } from "./maths.js";

export const WRITTEN_OUT = 4; // numbers of a vector that are all shown
const WHOLE_ROW = 8, // keys of a row that are all shown
  CALCULATOR = 8; // digits of a pocket calculator

/** @param {import("./types").Weights} weights @param {number} query @param {number} key @returns {import("./types").Numbers} */
export function numbersOf(weights, query, key) {
  const { d, q, k, v, scale, causal, columns } = weights,
    dv = v.length / columns,
    seen = causal ? query + 1 : columns;
  /** @type {[number, number][]} */
  const pairs = Array.from({ length: d }, (_, x) => [q[query * d + x], k[key * d + x]]);
  const scores = new Float64Array(seen),
    lse = weights.lse[query],
    z = new Float64Array(dv);
  for (let j = 0; j < seen; j++) {
    for (let x = 0, a = query * d, b = j * d; x < d; x++) scores[j] += q[a + x] * k[b + x];
    scores[j] *= scale;
    const weight = Math.exp(scores[j] - lse);
    for (let x = 0; x < dv; x++) z[x] += weight * v[j * dv + x];
  }
  const size = z.reduce((sum, x) => sum + x * x, 0);
  const along = (j, other) => other.reduce((sum, x, i) => sum + x * v[j * dv + i], 0);
  return {
    query,
    key,
    d,
    dv,
    scale,
    pairs,
    scores,
    lse,
    z,
    seen,
    byRoot: Math.abs(scale * Math.sqrt(d) - 1) < 1e-6,
    dot: pairs.reduce((sum, [a, b]) => sum + a * b, 0),
    score: scores[key],
    weight: weights.at(query, key),
    row: d > WRITTEN_OUT || seen > WHOLE_ROW ? [] : [...scores],
    value: (j) => v.subarray(j * dv, (j + 1) * dv),
    norm: (j) => Math.sqrt(along(j, v.subarray(j * dv, (j + 1) * dv))),
    // The part of z, measured along z, that a key brings: these add up to 1, and some may be negative.
    share: (j) => (size ? (Math.exp(scores[j] - lse) * along(j, z)) / size : 0),
  };
}

/** @param {import("./types").Numbers} numbers @param {number} places */
export const scaleOf = ({ byRoot, d, scale }, places) =>
  byRoot ? d ** -0.5 : Number(scale.toPrecision(places + 1));

// The exponentials of a short row, with as many digits as give the weight; null for a long row, and where a
// calculator has too few.
/** @param {import("./types").Numbers} numbers */
export function exponentials({ row, key, weight }) {
  const all = row.map(Math.exp),
    sum = all.reduce((a, b) => a + b, 0);
  if (!row.length) return null;
  let after = Math.max(0, 2 - Math.floor(Math.log10(all[key])));
  for (; after + Math.log10(sum) < CALCULATOR; after++) {
    const texts = addingUp(all, sum, after),
      whole = decimal(sum, after);
    if (digits(texts[key] / whole) === digits(weight)) return { texts, whole, unit: 10 ** -after };
  }
  return null;
}

const round = (x, places) => Number(x.toFixed(places));
// Whether a number computed from numbers that are shown is the one shown; a tie could go either way.
const gives = (x, shown, places) => Math.abs(x - round(shown, places)) < 0.499 * 10 ** -places;

// Whether each step, done with numbers of so many decimals, gives the next.
/** @param {import("./types").Numbers} numbers @param {number} places */
function agree(numbers, places) {
  const { pairs, d, dot, score, lse, weight, row } = numbers,
    short = exponentials(numbers);
  const sum = pairs.reduce((total, [a, b]) => total + round(a, places + 1) * round(b, places + 1), 0);
  return (
    (d > WRITTEN_OUT || gives(sum, dot, places)) &&
    gives(round(dot, places) * scaleOf(numbers, places), score, places) &&
    digits(Math.exp(round(score, places) - round(lse, places))) === digits(weight) &&
    (!short || row.every((s, j) => Math.abs(Math.exp(round(s, places)) - short.texts[j]) < short.unit))
  );
}

/** @param {import("./types").Numbers} numbers */
export function decimalsFor(numbers) {
  let places = 3;
  while (places < 7 && !agree(numbers, places)) places++;
  return places;
}

// The decimals with which products of factors, rounded, add up to sums that have three; each is [factors, sum].
/** @param {[pairs: [number, number][], sum: number][]} sums */
export function decimalsForSums(sums) {
  let places = 3;
  const total = (pairs) => pairs.reduce((t, [a, b]) => t + round(a, places) * round(b, places), 0);
  while (places < 7 && !sums.every(([pairs, sum]) => gives(total(pairs), sum, 3))) places++;
  return places;
}
