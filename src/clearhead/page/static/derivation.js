// Why one weight is what it is: compare, scale, softmax, in numbers that a pocket calculator confirms.
// Scores have three decimals, exponentials three digits; both have more where a step, done with the numbers
// shown, would not give the number shown next.
import { $, el, percent } from "./util.js";
import { keyOf, on, queryOf, view } from "./state.js";
import { naming } from "./chips.js";
import { addingUp, bracketed, decimal, digits, factor, summed } from "./maths.js";
import { mi, mn, mo, over, piece, power, root, vector } from "./maths.js";

const WRITTEN_OUT = 4, // numbers of a head that are all shown
  WHOLE_ROW = 8, // keys of a row that are all shown
  CALCULATOR = 8; // digits of a pocket calculator

// The exact numbers behind a weight.
function numbersOf(weights, query, key) {
  const { d, q, k, scale, causal, n } = weights;
  const pairs = (j) => Array.from({ length: d }, (_, x) => [q[query * d + x], k[j * d + x]]);
  const dot = (j) => pairs(j).reduce((sum, [a, b]) => sum + a * b, 0);
  const seen = causal ? query + 1 : n;
  const row = Array.from({ length: seen > WHOLE_ROW ? 0 : seen }, (_, j) => scale * dot(j));
  const numbers = { query, key, d, scale, row, pairs: pairs(key), dot: dot(key), score: scale * dot(key) };
  const byRoot = Math.abs(scale * Math.sqrt(d) - 1) < 1e-6;
  return { ...numbers, byRoot, lse: weights.lse[query], weight: weights.at(query, key) };
}

const scaleOf = ({ byRoot, d, scale }, places) => (byRoot ? d ** -0.5 : Number(scale.toPrecision(places + 1)));

// The exponentials of a short row, with as many digits as give the weight; null for a long row, and where a
// calculator has too few.
function exponentials({ row, key, weight }) {
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

// Whether each step, done with numbers of so many decimals, gives the next.
function agree(numbers, places) {
  const round = (x, more = 0) => Number(x.toFixed(places + more));
  const gives = (x, shown) => Math.abs(x - round(shown)) < 0.499 * 10 ** -places; // a tie could go either way
  const { pairs, d, dot, score, lse, weight, row } = numbers,
    short = exponentials(numbers);
  const sum = pairs.reduce((total, [a, b]) => total + round(a, 1) * round(b, 1), 0);
  return (
    (d > WRITTEN_OUT || gives(sum, dot)) &&
    gives(round(dot) * scaleOf(numbers, places), score) &&
    digits(Math.exp(round(score) - round(lse))) === digits(weight) &&
    (!short || row.every((s, j) => Math.abs(Math.exp(round(s)) - short.texts[j]) < short.unit))
  );
}

function compare({ query, key, d, pairs, dot }, places) {
  const all = d <= WRITTEN_OUT,
    more = all ? 1 : 0;
  const told = all ? pairs : [...pairs.slice(0, 3), pairs[d - 1]];
  const products = told.map(
    ([a, b]) => factor(a, places + more, "query") + mo("×") + factor(b, places + more, "key"),
  );
  const values = told.map(([a, b]) => a * b);
  if (!all) {
    products.splice(3, 0, mi("⋯"));
    values.splice(3, 0, dot - values.reduce((a, b) => a + b, 0));
  }
  const texts = addingUp(values, dot, places);
  return [
    "multiply query and key, add up" + (all ? "" : `; ⋯ is the other ${d - 4}: ${texts[3]}`),
    piece(mi("ω"), mo("="), vector("q", query, "query"), mo("·"), vector("k", key, "key")) +
      piece(mo("="), products.join(mo("+"))) +
      (d > 1 ? piece(mo("="), summed(texts)) : "") +
      piece(mo("="), mn(decimal(dot, places))),
  ];
}

function rescale(numbers, places) {
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

function softmax(numbers, places) {
  const { score, lse, weight } = numbers,
    result = digits(weight, "key");
  const total = `<msub>${mo("∑")}${mi("j")}</msub>` + power(`<msub>${mi("s")}${mi("j")}</msub>`);
  const exponent = mn(decimal(score, places)) + mo("−") + bracketed(decimal(lse, places));
  return [
    "share of the row’s total; lse is the logarithm of that total",
    piece(mi("α"), mo("="), over(power(mi("s")), total), mo("="), power(mi("s") + mo("−") + mi("lse"))) +
      piece(mo("="), power(exponent), mo("="), result),
  ];
}

function wholeRow({ row, key, weight }, { texts, whole }, places) {
  const powers = row.map((s) => power(mn(decimal(s, places)))),
    one = mn(texts[key]);
  return (
    piece(mi("α"), mo("="), over(powers[key], powers.join(mo("+")))) +
    piece(mo("="), over(one, summed(texts))) +
    piece(mo("="), over(one, mn(whole)), mo("="), digits(weight, "key"))
  );
}

// The budget that holds q and k of every head, in whole megabytes.
function budgetForAll({ layers, n }) {
  const floats = layers.reduce((sum, l) => sum + (l.d ? n * ((l.d + 1) * l.heads + 2 * l.d * l.groups) : 0), 0);
  const already = [...document.scripts].reduce((sum, script) => sum + script.text.length, 0);
  return Math.ceil((floats * 4.8 + already) / 1e6) + "_000_000";
}

// Why this weight is not derived here, in a sentence; null where it is.
function whyNot({ weights, trace, head }, query, key) {
  const later = ": it cannot be seen, so its weight is 0.";
  if (!weights.sees(query, key))
    return [naming(key, "key"), " comes after ", naming(query, "query"), later];
  if (weights.exact)
    return Number.isFinite(weights.lse[query]) ? null : [naming(query, "query"), " may attend to nothing."];
  const code = (text) => el("code", {}, text);
  if (trace.byLayer.get(head.layer).d)
    return [
      "The derivation needs q and k of this head, which this file leaves out to stay small; a larger one has them: ",
      code(`view.save("page.html", budget=${budgetForAll(trace)})`),
    ];
  const place = trace.layers.findIndex(({ layer }) => layer === head.layer);
  return [
    "The derivation needs q and k, and this head’s weights do not follow from these alone; Python has this weight: ",
    code(`view.maps[${place}][0, ${head.head}, ${query}, ${key}]`),
  ];
}

function equationLine(step, markup, title) {
  const equation = el("div", { class: "eq" });
  equation.innerHTML = markup;
  return el("div", { class: "step", "data-step": step }, title, equation);
}

function titled(number, name, [hint, markup]) {
  const parts = [el("span", { class: "mute" }, number), name, el("span", { class: "hint" }, hint)];
  return equationLine(name.toLowerCase(), markup, el("h4", { title: hint }, ...parts));
}

function drawDerivation() {
  if (!$("#derivation").clientWidth) return;
  const [query, key] = [queryOf(), keyOf()],
    sentence = whyNot(view, query, key);
  $("#question").replaceChildren();
  if (sentence) return $("#steps").replaceChildren(el("p", {}, ...sentence));
  const numbers = numbersOf(view.weights, query, key);
  let places = 3;
  while (places < 7 && !agree(numbers, places)) places++;
  const share = percent(numbers.weight);
  $("#question").append("Why does ", naming(query, "query"), ` give ${share} of its attention to `);
  $("#question").append(naming(key, "key"), "?");
  const short = exponentials(numbers);
  $("#steps").replaceChildren(
    titled("1", "Compare", compare(numbers, places)),
    titled("2", "Scale", rescale(numbers, places)),
    titled("3", "Softmax", softmax(numbers, places)),
    ...(short ? [equationLine("row", wholeRow(numbers, short, places))] : []),
  );
}

export function startDerivation() {
  on("pair hover layout", drawDerivation);
}
