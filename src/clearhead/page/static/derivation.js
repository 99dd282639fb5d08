// Why one weight is what it is: from the layer's input to its output, in numbers that a pocket calculator confirms.
import { $, $$, atOnce, clamp, el, fill, holding, percent, shown, soon } from "./util.js";
import { keyOf, keyText, layerOf, on, queryOf, view } from "./state.js";
import { naming } from "./chips.js";
import { addingUp, decimal, signed } from "./maths.js";
import { decimalsFor, exponentials, numbersOf, WRITTEN_OUT } from "./numbers.js";
import { output, project } from "./ends.js";
import { compare, mix, rescale, softmax, wholeRow } from "./steps.js";
import { scoreStrip, spectrum, valueStrip } from "./strips.js";
import { termsOf } from "./terms.js";

const LINE_HEIGHT = 17; // CSS pixels a line of a table takes
const IN_CONTEXT = 512; // of a longer text the key is shown among its neighbours

// The budget that holds q and k of every head, in whole megabytes.
function budgetForAll({ layers, n }) {
  const aHead = (l) => (l.d + 1 + 36) * l.heads + 2 * l.d * l.groups; // 36: the products of steps 0 and 5
  const floats = layers.reduce((sum, l) => sum + (l.d ? n * aHead(l) : 0), 0);
  const already = [...document.scripts].reduce((sum, script) => sum + script.text.length, 0);
  return Math.ceil((floats * 4.8 + already) / 1e6) + "_000_000";
}

// Why this weight is not derived here, in a sentence; null where it is.
/** @param {import("./types").View} view @param {number} query @param {number} key */
function whyNot({ weights, trace, head }, query, key) {
  const later = ": it cannot be seen, so its weight is 0.";
  if (!weights.sees(query, key)) return [naming(key, "key"), " comes after ", naming(query, "query"), later];
  if (weights.q)
    return Number.isFinite(weights.lse[query]) ? null : [naming(query, "query"), " may attend to nothing."];
  const code = (text) => el("code", {}, text);
  if (layerOf(head.layer).d)
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

function lineOf(step, markup, title) {
  const equation = holding(el("div", { class: "eq" }), markup);
  return el("div", { class: "step", "data-step": step }, title, equation);
}

/** @param {string} number @param {string} name @param {import("./types").Step} step */
function titled(number, name, [hint, markup], inside = true) {
  const parts = [el("span", { class: "mute" }, number), name];
  if (hint && inside) parts.push(el("span", { class: "hint" }, hint));
  return lineOf(name.toLowerCase(), markup, el("h4", { title: hint || null }, ...parts));
}

const pictureOf = (markup, kind = "") => holding(el("div", { class: "picture " + kind }), markup);

// The largest products of query and key, the rest, and their sum; and which these are.
/** @param {import("./types").Numbers} numbers @param {number} places @param {number} room @returns {[HTMLElement, HTMLElement]} */
function productsTable({ pairs, dot, d }, places, room) {
  const values = pairs.map(([a, b]) => a * b);
  const order = [...values.keys()].sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  const told = order.slice(0, Math.min(room, d)),
    rest = dot - told.reduce((sum, c) => sum + values[c], 0);
  const texts = addingUp([...told.map((c) => values[c]), ...(told.length < d ? [rest] : [])], dot, places);
  const cell = (text, kind) => el("td", { class: kind }, text);
  const factors = ([a, b]) => [
    cell(decimal(a, 3), "query"),
    cell("×"),
    cell(decimal(b, 3), "key"),
    cell("="),
  ];
  const lines = told.map((c, i) =>
    el("tr", {}, cell(`dim ${c}`, "left mute"), ...factors(pairs[c]), cell(signed(texts[i]))),
  );
  const last = (words, text, kind) =>
    el("tr", { class: kind }, el("td", { class: "left", colspan: 5 }, words), cell(text));
  if (told.length < d) lines.push(last(`${d - told.length} other dims`, signed(texts.at(-1)), "rest"));
  lines.push(last("sum, ω", decimal(dot, places), "sum"));
  return [
    el("table", { class: "numbers products" }, el("tbody", {}, ...lines)),
    pictureOf(spectrum(values, new Set(told))),
  ];
}

// A head of many numbers: pictures, and the largest.
/** @param {import("./types").Numbers} numbers @param {import("./types").Terms} terms @param {number} places @param {number} heads */
function wide(numbers, terms, places, heads) {
  const [table, picture] = productsTable(numbers, places, lines || 1);
  const first = titled("1", "Compare", compare(numbers, places)),
    third = titled("3", "Softmax", softmax(numbers, places)),
    fourth = titled("4", "Mix", mix(numbers));
  const brought = [...numbers.value(numbers.key)].map((x) => numbers.weight * x);
  first.append(picture, table, titled("2", "Scale", rescale(numbers, places)));
  third.append(pictureOf(scoreStrip(numbers.scores, numbers.key)));
  fourth.append(pictureOf(valueStrip(brought, [...numbers.z]), "pair"));
  return [
    titled("0", "Project", project(numbers, terms), false),
    first,
    third,
    fourth,
    titled("5", "Concatenate", output(numbers, terms, heads), false),
  ];
}

let lines = 0; // products that the column of the comparison has room for; 0 before that is measured

function measureProducts() {
  const column = $("[data-step=compare]"),
    ends = ["project", "concatenate"].map((step) => $(`[data-step=${step}]`).offsetHeight);
  const free =
    $("#work").clientHeight -
    ends[0] -
    ends[1] -
    column.children[column.children.length - 1].getBoundingClientRect().bottom +
    column.getBoundingClientRect().top;
  lines = clamp(1 + Math.floor(free / LINE_HEIGHT), 1, 8);
}

// A head of few numbers: everything is written out.
/** @param {import("./types").Numbers} numbers @param {import("./types").Terms} terms @param {number} places @param {number} heads */
function narrow(numbers, terms, places, heads) {
  const short = exponentials(numbers);
  return [
    titled("0", "Project", project(numbers, terms)),
    titled("1", "Compare", compare(numbers, places)),
    titled("2", "Scale", rescale(numbers, places)),
    titled("3", "Softmax", softmax(numbers, places)),
    ...(short ? [lineOf("row", wholeRow(numbers, short, places))] : []),
    titled("4", "Mix", mix(numbers)),
    titled("5", "Concatenate", output(numbers, terms, heads)),
  ];
}

// The key among its neighbours, where the text is too long to see it.
/** @param {import("./types").Text} text @param {number} key */
function contextOf({ tokens, n }, key) {
  if (n <= IN_CONTEXT) return [];
  const words = (from, to) => tokens.slice(Math.max(0, from), to).join("").replace(/\s+/g, " ");
  return [
    `key in context: … ${words(key - 9, key)}`,
    el("b", { class: "key" }, shown(tokens[key])),
    `${words(key + 1, key + 8)} …`,
  ];
}

// A formula takes one line: what does not fit is left out, the products first. All are measured before any changes.
function shorten() {
  let formulas = $$("#steps .eq");
  for (const kind of ["brief", "terse", "short", "bare"]) {
    formulas = formulas.filter((line) => line.scrollWidth > line.clientWidth);
    for (const line of formulas) line.classList.add(kind);
  }
}

let visible = false; // the pane
/** @type {import("./types").Numbers | null} */
let drawn = null; // the numbers on the page, for the table beside them
export const derived = () => drawn;

function drawDerivation() {
  if (!visible) return;
  if (!view.weights)
    return void $("#steps").replaceChildren(el("p", { class: "mute" }, "The derivation follows the weights."));
  const [query, key] = [queryOf(), keyOf()],
    { weights, trace, head } = view,
    sentence = whyNot(view, query, key);
  drawn = sentence ? null : numbersOf(weights, query, key);
  const kind = !drawn ? "untold" : drawn.d <= WRITTEN_OUT ? "narrow" : "wide";
  $("#work").className = kind;
  if (!drawn) {
    $("#question").replaceChildren();
    $("#context").replaceChildren();
    return void $("#steps").replaceChildren(el("p", {}, ...(sentence || [])));
  }
  const gives = ` give ${percent(drawn.weight)} of its attention to `;
  fill($("#question"), "Why does ", naming(query, "query"), gives, naming(key, "key"), "?");
  fill($("#context"), ...contextOf(keyText(), key));
  const { heads } = layerOf(head.layer),
    terms = termsOf(weights, query, key, atOnce(drawDerivation)),
    places = decimalsFor(drawn);
  if (kind === "narrow") return fill($("#steps"), ...narrow(drawn, terms, places, heads));
  fill($("#steps"), ...wide(drawn, terms, places, heads));
  if (!lines) (measureProducts(), fill($("#steps"), ...wide(drawn, terms, places, heads)));
  return shorten;
}

export function startDerivation() {
  on("layout head", () => (lines = 0));
  on("layout", () => (visible = $("#work").clientWidth > 0)); // asked for before anything is written
  on("pair layout", atOnce(drawDerivation));
  on("hover", soon(drawDerivation));
}
