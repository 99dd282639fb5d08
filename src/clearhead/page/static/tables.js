// Beside the derivation: what the query looks at, and what it gets from there. A head whose vectors are not here has
// its row and its column instead.
import { $, clamp, el, fill, grouped, percent, shown, soon, under } from "./util.js";
import { keyOf, on, queryOf, textOf, view } from "./state.js";
import { selectPair } from "./actions.js";
import { naming } from "./chips.js";
import { derived } from "./derivation.js";
import { sizes } from "./layout.js";

const ROW = 17,
  SHORTEST_SCALE = 0.1; // a full bar stands for this weight at least

const PLURAL = { key: "keys", query: "queries" };
const othersOf = (count, word) => `${grouped(count)} other ${count === 1 ? word : PLURAL[word]}`;
/** @param {string} text @param {string} [kind] */
const cell = (text, kind) => el("td", { class: kind }, text);
const shareBar = (x, most) =>
  el("b", { class: x < 0 ? "negative" : null, style: `width:${(100 * Math.abs(x)) / most}%` });

// As many lines as fit between the heading and the line of the others.
function room(box, above) {
  const space = box.clientHeight - above - ROW * 2;
  return clamp(Math.floor(space / ROW), 1, sizes.small ? 14 : 18);
}

// The lines to show, strongest first: as many as there is room for, and the chosen one among them, with its rank.
/** @param {Float32Array | Float64Array} weights @param {number} chosen @param {number} among @param {number} space @returns {[number, number][]} */
function chosenLines(weights, chosen, among, space) {
  const lines = strongest(weights, among === space + 1 ? among : space); // one more takes the line of the others
  const ranks = lines.map((_, at) => at + 1),
    at = lines.indexOf(chosen);
  if (at < 0 && weights[chosen] > 0) {
    lines[lines.length - 1] = chosen;
    ranks[lines.length - 1] = 1;
    for (const w of weights) if (w > weights[chosen]) ranks[lines.length - 1]++;
  }
  return lines.map((i, place) => [i, ranks[place]]);
}

// The indices of the largest weights above 0, in their order: few of perhaps very many.
/** @param {Float32Array | Float64Array} weights @param {number} count */
function strongest(weights, count) {
  /** @type {number[]} */
  const best = [];
  weights.forEach((w, i) => {
    if (!(w > 0) || (best.length === count && w <= weights[best[count - 1]])) return;
    let at = best.length;
    while (at > 0 && weights[best[at - 1]] < w) at--;
    best.splice(at, 0, i);
    if (best.length > count) best.pop();
  });
  return best;
}

/** @param {"key" | "query"} word */
function tableLine(word, i, rank, chosen, ...cells) {
  return el(
    "tr",
    { "data-i": i, tabindex: -1, class: i === chosen ? "on" : "", "aria-current": i === chosen },
    cell(String(rank), "left mute"),
    cell(shown(textOf(word).tokens[i]), "left word"),
    cell(grouped(i), "mute"),
    ...cells,
  );
}

function othersLine(count, word, ...cells) {
  return el("tr", { class: "rest" }, el("td"), cell(othersOf(count, word), "left"), el("td"), ...cells);
}

// Widths of the columns, then their headings.
/** @param {string[]} widths @param {"key" | "query"} word @param {HTMLElement[]} more */
function headingOf([first, ...others], word, ...more) {
  const digits = String(textOf(word).n).length,
    widths = [18 + 6 * digits + "px", first, 24 + 7 * digits + "px", ...others];
  const columns = widths.map((width) => el("col", { style: width && `width:${width}` }));
  const cells = [
    el("th", {}, el("span", { class: "sr" }, "rank")),
    el("th", { class: "left" }, word),
    el("th", {}, "at"),
    ...more,
  ];
  return [el("colgroup", {}, ...columns), el("thead", {}, el("tr", {}, ...cells))];
}

// --- what it looks at and what it gets ----------------------------------------------------------------------

const NORM =
  '<span class="sr">length of v</span><math aria-hidden="true"><mo stretchy="false" lspace="0" rspace="0">‖</mo><mi>v</mi><mo stretchy="false" lspace="0" rspace="0">‖</mo></math>';

const WIDTHS = ["", "50px", "14%", "50px", "54px", "14%", "60px"];

// A part of z in percent: it may be negative.
const partOf = (x) => (Math.abs(x) < 0.001 ? "<0.1%" : (100 * x).toFixed(1).replace("-", "−") + "%");
// What is shown of a list, as a number: the others are the whole without it.
const tenths = (x) => (Math.abs(x) < 0.001 ? 0 : Math.round(1000 * x));
const without = (shares) => (1000 - shares.reduce((sum, x) => sum + tenths(x), 0)) / 1000;

/** @param {import("./types").Numbers} numbers */
function drawDerived(numbers) {
  const { scores, lse, key, seen, norm, share } = numbers;
  const weights = scores.map((s) => Math.exp(s - lse));
  const lines = chosenLines(weights, key, seen, room($("#tables"), 0));
  const most = lines.reduce((a, [i]) => Math.max(a, weights[i], Math.abs(share(i))), SHORTEST_SCALE);
  const made = lines.map(([i, rank]) =>
    tableLine(
      "key",
      i,
      rank,
      key,
      cell(scores[i].toFixed(2).replace("-", "−")),
      el("td", { class: "bars" }, shareBar(weights[i], most)),
      cell(percent(weights[i])),
      cell(norm(i).toPrecision(3), "norm"),
      el("td", { class: "bars" }, shareBar(share(i), most)),
      cell(partOf(share(i))),
    ),
  );
  const others = seen - lines.length;
  if (others > 0) {
    const left = without(lines.map(([i]) => weights[i])), // never 0%: what is too little to tell is not nothing
      got = without(lines.map(([i]) => share(i)));
    made.push(
      othersLine(
        others,
        "key",
        el("td"),
        el("td"),
        cell(percent(Math.max(left, 1e-9))),
        cell("", "norm"),
        el("td"),
        cell(partOf(got)),
      ),
    );
  }
  const size = el("th", { class: "norm" });
  size.innerHTML = NORM;
  const gets = ["gets from", el("span", { class: "hint" }, ", share of z")],
    why =
      "α (v·z) / |z|²: the part of z, measured along z, that the key brings. Adds up to 100%, can be negative.";
  fill(
    $("#looks"),
    ...headingOf(
      WIDTHS,
      "key",
      el("th", {}, "s"),
      el("th", { class: "left bars", colspan: 2 }, "looks at, α"),
      size,
      el("th", { class: "left bars", colspan: 2, title: why }, ...gets),
    ),
    el("tbody", {}, ...made),
  );
}

// --- the row and the column ---------------------------------------------------------------------------------

// `among`: how many could be in the list. `most`: the weight of a full bar. `total`: 1 for a row; null where
// shares do not add up to one.
function list(table, word, weights, chosen, among, most, total) {
  const lines = chosenLines(weights, chosen, among, room($("#two"), 26));
  const share = (x) => percent(x, view.weights.exact);
  const made = lines.map(([i, rank]) =>
    tableLine(
      word,
      i,
      rank,
      chosen,
      el("td", { class: "bars" }, shareBar(weights[i], most)),
      cell(share(weights[i])),
    ),
  );
  const others = among - lines.length;
  if (others > 0) {
    const left = total == null ? null : total - lines.reduce((sum, [i]) => sum + weights[i], 0);
    made.push(othersLine(others, word, el("td"), cell(left == null ? "" : share(Math.max(left, 1e-9)))));
  }
  fill(
    table,
    ...headingOf(["", "42%", "54px"], word, el("th", { class: "left bars", colspan: 2 }, "weight, α")),
    el("tbody", {}, ...made),
  );
}

function drawTables() {
  if (!$("#tables").clientWidth || !view.weights) return;
  const { weights } = view,
    numbers = derived();
  $("#looks").classList.toggle("derived", numbers != null);
  if (numbers) return drawDerived(numbers);
  const query = queryOf(),
    key = keyOf(),
    row = weights.row(query),
    column = weights.column(key);
  // One scale for both tables, so that their bars compare, and weights of a few percent stay small.
  const most = [row, column].reduce((a, list) => list.reduce((x, w) => Math.max(x, w), a), SHORTEST_SCALE);
  fill($("#looks-title"), naming(query, "query"), " looks at");
  list($("#looks"), "key", row, key, weights.causal ? query + 1 : weights.columns, most, 1);
  fill($("#seen-title"), naming(key, "key"), " is looked at by");
  list($("#seen"), "query", column, query, weights.causal ? weights.rows - key : weights.rows, most, null);
}

// What the file leaves out of this head.
function drawNote() {
  const { weights, trace } = view;
  const here = weights.exact
    ? "This head: exact weights, from q and k in float32."
    : `This head: 8-bit weights, largest error 0.004.`;
  const file = trace.notes.join(" ");
  $("#note").textContent = trace.exact === trace.heads.length ? file : here + " " + file;
}

function choose(row, focus) {
  const table = row.closest("table").id,
    i = Number(row.dataset.i);
  if (table === "looks") selectPair(queryOf(), i);
  else selectPair(i, keyOf());
  if (focus) $(`#${table} tr.on`)?.focus();
}

export const focusTable = () => $("#looks tr.on")?.focus();

export function startTables() {
  const box = $("#two");
  box.addEventListener("click", (event) => {
    const row = under(event, "tr[data-i]");
    if (row) choose(row, true);
  });
  box.addEventListener("keydown", (event) => {
    const row = under(event, "tr[data-i]");
    const next = row && { ArrowUp: row.previousElementSibling, ArrowDown: row.nextElementSibling }[event.key];
    if (!row || !["ArrowUp", "ArrowDown"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    if (next?.dataset.i) choose(next, true);
  });
  on("pair layout", drawTables);
  on("hover", soon(() => drawTables)); // once the derivation has taken its room
  on("head", drawNote);
}
