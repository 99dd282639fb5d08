// The steps in one head as formulas: each a hint and markup. MathML is made of letters and numbers only.
import { addingUp, bold, bracketed, decimal, digits, factor, length, matrix, mi, mn, mo } from "./maths.js";
import { over, piece, power, root, spare, sub, summed, sumOver, trimmed, vector } from "./maths.js";
import { decimalsForSums, scaleOf, WRITTEN_OUT } from "./numbers.js";

/** @param {import("./types").Numbers} numbers @param {number} places @returns {import("./types").Step} */
export function compare({ query, key, d, pairs, dot }, places) {
  const formula = piece(mi("ω"), mo("="), vector("q", query, "query"), mo("·"), vector("k", key, "key"));
  const whole = mn(decimal(dot, places));
  if (d > WRITTEN_OUT) {
    const each = sumOver("m") + sub(mi("q"), mi("m"), "query") + sub(mi("k"), mi("m"), "key");
    return ["multiply query and key, add up", formula + spare(mo("="), each) + piece(mo("="), whole)];
  }
  const products = pairs.map(
    ([a, b]) => factor(a, places + 1, "query") + mo("×") + factor(b, places + 1, "key"),
  );
  const texts = addingUp(
    pairs.map(([a, b]) => a * b),
    dot,
    places,
  );
  const sum = d > 1 ? piece(mo("="), summed(texts)) : "";
  return [
    "multiply query and key, add up",
    formula + piece(mo("="), products.join(mo("+"))) + sum + piece(mo("="), whole),
  ];
}

/** @param {import("./types").Numbers} numbers @param {number} places @returns {import("./types").Step} */
export function rescale(numbers, places) {
  const { d, byRoot, dot, score } = numbers,
    from = decimal(dot, places),
    scale = scaleOf(numbers, places);
  const [named, shown] = byRoot
    ? [over(mi("ω"), root(mi("d"))), over(mn(from), root(mn(d)))]
    : [mn(scale) + mo("×") + mi("ω"), mn(scale) + mo("×") + bracketed(from)];
  const result = mn(decimal(score, places));
  return [
    byRoot ? `divide by √${d}` : `multiply by ${scale}`,
    piece(mi("s"), mo("="), named, mo("="), shown, mo("="), result),
  ];
}

/** @param {import("./types").Numbers} numbers @param {number} places @returns {import("./types").Step} */
export function softmax(numbers, places) {
  const { score, lse, weight } = numbers,
    result = digits(weight, "key");
  const total = sub(mo("∑"), mi("j")) + power(sub(mi("s"), mi("j")));
  const exponent = mn(decimal(score, places)) + mo("−") + bracketed(decimal(lse, places));
  return [
    "share of the row’s total, whose logarithm is lse",
    piece(mi("α"), mo("="), over(power(mi("s")), total)) +
      spare(mo("="), power(mi("s") + mo("−") + mi("lse"))) +
      `<span class="after">${piece(mo("="), power(exponent))}</span>` +
      piece(mo("="), result),
  ];
}

/** @param {import("./types").Numbers} numbers @param {{ texts: string[], whole: string }} short @param {number} places */
export function wholeRow({ row, key, weight }, { texts, whole }, places) {
  const powers = row.map((s) => power(mn(decimal(s, places)))),
    one = mn(texts[key]);
  return (
    piece(mi("α"), mo("="), over(powers[key], powers.join(mo("+")))) +
    piece(mo("="), over(one, summed(texts))) +
    piece(mo("="), over(one, mn(whole)), mo("="), digits(weight, "key"))
  );
}

const mixed = piece(
  bold("z"),
  mo("="),
  sumOver("j"),
  sub(mi("α"), mi("j")),
  sub(bold("v"), mi("j"), "value"),
);

// z of a short row, written out; else what one key brings.
/** @param {import("./types").Numbers} numbers @returns {import("./types").Step} */
export function mix(numbers) {
  const { key, row, dv, weight, z } = numbers,
    hint = "add the values, weighted";
  if (row.length && dv <= WRITTEN_OUT) return [hint, mixed + writtenOut(numbers)];
  const norm = numbers.norm(key),
    brought = weight * norm;
  let after = 2;
  while (
    after < 6 &&
    digits(Number(weight.toPrecision(after + 1)) * Number(norm.toPrecision(after + 1))) !== digits(brought)
  )
    after++;
  const shown = (x) => mn(Number(x.toPrecision(after + 1)));
  const size = spare(
    length(mi("α") + vector("v", key, "value")),
    mo("="),
    shown(weight),
    mo("×"),
    shown(norm),
    mo("="),
    digits(brought),
  );
  return [hint, mixed + (z.some(Boolean) ? size : "")];
}

/** @param {import("./types").Numbers} numbers */
function writtenOut({ row, lse, z, value }) {
  const weights = row.map((s) => Math.exp(s - lse));
  const places = decimalsForSums([...z].map((sum, c) => [weights.map((w, j) => [w, value(j)[c]]), sum]));
  const terms = weights.map(
    (w, j) =>
      mn(trimmed(w, places)) + mo("×") + matrix([[...value(j)].map((x) => trimmed(x, places))], "value"),
  );
  return (
    terms.map((term, j) => piece(mo(j ? "+" : "="), term)).join("") +
    piece(mo("="), matrix([[...z].map((x) => decimal(x, 3))]))
  );
}
