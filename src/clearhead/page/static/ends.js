// The first and the last step of a derivation: how q comes of the layer's input, and what becomes of z.
import {
  addingUp,
  bold,
  decimal,
  factor,
  lastTerm,
  matrix,
  mi,
  mn,
  mo,
  piece,
  sideBySide,
  spare,
  sub,
  summed,
  trimmed,
  vector,
} from "./maths.js";
import { decimalsForSums } from "./numbers.js";

const BRIEF = 2; // products of a long sum that fit on its line
/** @type {Record<string, string>} */
const KIND = { q: "query", k: "key", v: "value" };
const matrixOf = (name) => sub(mi("W"), mi(name));

const atPlace = (place) => `<span class="place">dim ${place}:</span> `; // an index under a letter would read as a token's
const aside = (words) => `<span class="aside">${words}</span> `;
const escaped = (words) => words.replace(/[&<"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
/** @param {string} words @returns {import("./types").Step} */
const plain = (words) => ["", `<span class="plain" title="${escaped(words)}">${escaped(words)}</span>`];
const after = (...markup) => `<span class="after">${markup.join("")}</span>`; // left out where it does not fit
const plus = (text) => mo(text[0] === "−" ? "−" : "+") + mn(text.replace("−", ""));

// The products that are told, the rest of the sum if there is one, and the sum: a letter's number at one place.
/** @param {string} name @param {import("./types").Product[]} products @param {number} sum @param {string} rest */
function toldSum(name, products, sum, rest) {
  if (rest === "⋯") products = products.slice(0, BRIEF);
  const factors = products.map(({ factor: a, weight: b }) => factor(a, 3) + mo("×") + factor(b, 3));
  const values = products.map(({ factor: a, weight: b }) => a * b);
  if (rest) values.push(sum - values.reduce((a, b) => a + b, 0));
  return (
    piece(name) +
    spare(mo("="), [...factors, ...(rest ? [mi(rest)] : [])].join(mo("+"))) +
    piece(mo("="), summed(addingUp(values, sum, 3)), mo("="), mn(decimal(sum, 3)))
  );
}

const restOf = (all, told, bias) => (told < all ? "⋯" : bias ? "b" : "");
/** @type {Record<string, string>} */
const HOW = { turn: "turned", factor: "times a factor" };

// What becomes of a number of the product before it is compared.
/** @param {import("./types").InputNumber} number @param {import("./types").ProjectFacts} facts */
function turned({ place, product, partner, its, cos, sin }, { turn }) {
  const q = cos * product + sin * its;
  /** @type {[number, number][]} */
  const factors = [
    [cos, product],
    [sin, its],
  ];
  const places = decimalsForSums([[factors, q]]);
  const term = (a, x) => factor(a, places) + mo("×") + factor(x, places);
  const [other, terms] =
    turn === "turn" && partner !== place
      ? [" with dim " + partner, term(cos, product) + mo("+") + term(sin, its)]
      : ["", term(cos, product)];
  return after(
    aside(HOW[turn] + other + ":"),
    piece(mi("q"), mo("="), terms, mo("="), mn(decimal(q, 3), "query")),
  );
}

// One number of q: the products that are told, and what becomes of it.
/** @param {import("./types").InputNumber} number @param {import("./types").ProjectFacts} facts */
function projectOne(number, facts) {
  const { inputs, products: told, bias, turn } = facts;
  const sum = toldSum(mi(turn ? "a" : "q"), number.products, number.product, restOf(inputs, told, bias));
  return atPlace(number.place) + sum + (facts.turn ? turned(number, facts) : "");
}

// Rows of numbers as text, with as many decimals as the products need to give their sums.
function factorsOf(numbers, sums) {
  const places = decimalsForSums(sums);
  const told = numbers[0].products;
  return {
    row: told.map(({ factor: x }) => trimmed(x, places)),
    rows: told.map((_, m) => numbers.map(({ products }) => trimmed(products[m].weight, places))),
    bias: numbers.map(({ bias }) => trimmed(bias, places)),
  };
}

/** @param {{ products: import("./types").Product[] }} number @returns {[number, number][]} */
const pairsOf = ({ products }) => products.map(({ factor: a, weight: b }) => [a, b]);

const lineOfParts = (markup) => `<div class="line">${markup}</div>`;

// x W of a token, with all numbers.
/** @param {string} name @param {number} token @param {import("./types").ProjectFacts} facts @param {import("./types").InputNumber[]} numbers */
function projectAll(name, token, { bias, turn }, numbers) {
  const letter = turn && name !== "v" ? "a" : name;
  const sums = numbers.map((number) => [[...pairsOf(number), [1, number.bias]], number.product]);
  const told = factorsOf(numbers, sums);
  const result = (values, kind) => matrix([values.map((x) => decimal(x, 3))], kind);
  const own = letter === "a" ? "" : KIND[name];
  const sum = numbers.map((number) => number.product);
  const parts =
    piece(
      vector(letter, token, own),
      mo("="),
      vector("x", token),
      matrixOf(name.toUpperCase()),
      bias ? mo("+") + bold("b") : "",
    ) +
    piece(mo("="), matrix([told.row]), matrix(told.rows)) +
    (bias ? piece(mo("+"), matrix([told.bias])) : "") +
    piece(mo("="), result(sum, own));
  if (letter !== "a") return lineOfParts(parts);
  const done = numbers.map(({ cos, product: x, sin, its }) => cos * x + sin * its);
  return lineOfParts(
    parts +
      aside(HOW[turn] + ":") +
      piece(vector(name, token, KIND[name]), mo("="), result(done, KIND[name])),
  );
}

/** @param {import("./types").Numbers} numbers @param {import("./types").Terms} terms @returns {import("./types").Step} */
export function project({ query, key }, terms) {
  const { project: facts } = terms;
  if (facts.why) return plain(`How q comes of the layer’s input is not shown: ${facts.why}.`);
  if (facts.same.includes("q")) {
    const names = facts.same.join(", ").replace(/, (\w)$/, " and $1");
    return plain(
      `${names} ${facts.same.length > 1 ? "are" : "is"} the layer’s input x itself: it has no matrix.`,
    );
  }
  const told = facts.inputs === facts.products && facts.places.q > 1,
    formula = [vector(facts.turn ? "a" : "q", query, facts.turn ? "" : "query"), mo("="), vector("x", query)];
  if (!told) {
    const sums = terms.of("q", query).map((number) => projectOne(number, facts));
    return ["multiply the layer’s input with a matrix", piece(...formula, matrixOf("Q")) + sums.join("")];
  }
  const at = { q: query, k: key, v: key };
  const products = Object.entries(at)
    .filter(([name]) => facts.of.includes(name))
    .map(([name, token]) => projectAll(name, token, facts, terms.of(name, token)));
  return ["multiply the layer’s input with its matrices", products.join("")];
}

// What this head adds, what the others add, the bias, and their sum; as text that adds up.
/** @param {import("./types").OutputNumber} number @param {number} heads @returns {Record<string, string>} */
function partsOf({ added, bias, total }, heads) {
  const [mine, whole] = [decimal(added, 3), decimal(total, 3)];
  if (heads === 1) return { mine, whole, bias: lastTerm(whole, [mine], 3) };
  const fixed = decimal(bias, 3);
  return { mine, whole, bias: fixed, others: lastTerm(whole, [mine, fixed], 3) };
}

function othersIn(heads, bias) {
  const others = heads > 1 ? [`the other ${heads === 2 ? "head" : `${heads - 1} heads`}`] : [];
  return [...others, ...(bias ? ["the bias"] : [])].join(" and ");
}

// The number of the output to which the head adds most.
/** @param {import("./types").OutputNumber[]} numbers @param {import("./types").OutputFacts} facts @param {number} dv @param {number} heads */
function outputOne([number], { products, bias }, dv, heads) {
  const sum = toldSum(mi("h"), number.products, number.added, restOf(dv, products, false)),
    told = atPlace(number.place) + sum;
  const names = othersIn(heads, bias);
  if (!names) return told;
  const parts = partsOf(number, heads);
  const terms = mn(parts.mine) + (heads > 1 ? plus(parts.others) : "") + (bias ? plus(parts.bias) : "");
  const whole = piece(mi("o"), mo("="), terms, mo("="), mn(parts.whole));
  return told + after(aside(`with ${names}:`), whole);
}

/** @param {import("./types").OutputNumber[]} numbers @param {import("./types").OutputFacts} facts @param {number} heads */
function outputAll(numbers, { bias }, heads) {
  const sums = numbers.map((number) => [pairsOf(number), number.added]),
    told = factorsOf(numbers, sums),
    parts = numbers.map((number) => partsOf(number, heads)),
    names = othersIn(heads, bias);
  const row = (name) => matrix([parts.map((texts) => texts[name])]);
  const mine = piece(mo("="), matrix([told.row]), matrix(told.rows), mo("="), row("mine"));
  if (!names) return mine;
  const more = [...(heads > 1 ? ["others"] : []), ...(bias ? ["bias"] : [])];
  const terms = more.map((name) => piece(mo("+"), row(name))).join("");
  const whole = piece(bold("o"), mo("="), row("mine")) + terms + piece(mo("="), row("whole"));
  return mine + aside(`with ${names}:`) + whole;
}

/** @param {import("./types").Numbers} numbers @param {import("./types").Terms} terms @param {number} heads @returns {import("./types").Step} */
export function output({ query, dv }, terms, heads) {
  const { output: facts } = terms;
  if (facts.same && heads === 1)
    return plain("The layer’s output is z: it has one head and no matrix after it.");
  if (facts.same)
    return plain(`The layer’s output is the z of its ${heads} heads side by side, with no matrix after.`);
  if (facts.why) return plain(`What the layer makes of z is not shown: ${facts.why}.`);
  const numbers = terms.out(query),
    whole = numbers.length > 1 && facts.products === dv;
  const several = sideBySide(vector("z", 0), mi("⋯"), vector("z", heads - 1));
  const bias = facts.bias ? mo("+") + bold("b") : "";
  const formula = piece(vector("o", query), mo("="), heads > 1 ? several : bold("z"), matrixOf("O"), bias);
  const [hint, sums] = whole
    ? ["the heads side by side, times a matrix; of this head", outputAll(numbers, facts, heads)]
    : [
        `the heads side by side, times a matrix; this head adds most to dim ${numbers[0].place} of ${facts.width}`,
        "",
      ];
  return [hint, formula + (sums || outputOne(numbers, facts, dv, heads))];
}
