// The row and the column of the chosen pair as tables: what the query looks at, and what looks at the key.
import { $, clamp, el, grouped, percent, shown } from "./util.js";
import { keyOf, on, queryOf, view } from "./state.js";
import { selectPair } from "./actions.js";
import { naming } from "./chips.js";
import { sizes } from "./layout.js";

const ROW = 17,
  SHORTEST_SCALE = 0.1; // a full bar stands for this weight at least

// As many lines as fit under the heading and above the note.
function room() {
  const space = $("#two").clientHeight - 26 - ROW * 2;
  return clamp(Math.floor(space / ROW), 1, sizes.small ? 14 : 18);
}

function line(i, rank, weight, most, chosen) {
  const bar = el("b", { style: `width:${(100 * weight) / most}%` });
  return el(
    "tr",
    { "data-i": i, tabindex: -1, class: chosen ? "on" : "", "aria-current": chosen },
    el("td", { class: "left mute" }, String(rank)),
    el("td", { class: "left word" }, shown(view.trace.tokens[i])),
    el("td", { class: "mute" }, grouped(i)),
    el("td", { class: "bars" }, bar),
    el("td", {}, percent(weight, view.weights.exact)),
  );
}

function heading(word) {
  return el(
    "thead",
    {},
    el(
      "tr",
      {},
      el("th"),
      el("th", { class: "left" }, word),
      el("th", {}, "at"),
      el("th", { class: "left bars" }, "weight, α"),
      el("th"),
    ),
  );
}

// `among`: how many could be in the list. `most`: the weight of a full bar. `total`: 1 for a row; null where
// shares do not add up to one.
function fill(table, word, weights, chosen, among, most, total) {
  const order = [...weights.keys()].filter((i) => weights[i] > 0).sort((a, b) => weights[b] - weights[a]);
  const space = room();
  const lines = order.slice(0, among === space + 1 ? among : space), // one more takes the line of the others
    at = order.indexOf(chosen);
  if (at >= lines.length) lines[lines.length - 1] = chosen; // the chosen one stays in sight, with its rank
  const others = among - lines.length;
  const body = el(
    "tbody",
    {},
    ...lines.map((i) => line(i, order.indexOf(i) + 1, weights[i], most, i === chosen)),
  );
  if (others > 0) {
    const rest = total == null ? null : total - lines.reduce((sum, i) => sum + weights[i], 0);
    body.append(
      el(
        "tr",
        { class: "rest" },
        el("td"),
        el("td", { class: "left", colspan: 3 }, othersOf(others, word)),
        // never 0%: what is too little to be told is not nothing
        el("td", {}, rest == null ? "" : percent(Math.max(rest, 1e-9), view.weights.exact)),
      ),
    );
  }
  table.replaceChildren(heading(word), body);
}

const PLURAL = { key: "keys", query: "queries" };
const othersOf = (count, word) => `${grouped(count)} other ${count === 1 ? word : PLURAL[word]}`;

function drawTables() {
  if (!$("#tables").clientWidth) return;
  const { weights } = view,
    query = queryOf(),
    key = keyOf(),
    row = weights.row(query),
    column = weights.column(key);
  // One scale for both tables, so that their bars compare, and weights of a few percent stay small.
  const most = [row, column].reduce((a, list) => list.reduce((x, w) => Math.max(x, w), a), SHORTEST_SCALE);
  $("#looks-title").replaceChildren(naming(query, "query"), " looks at");
  fill($("#looks"), "key", row, key, weights.causal ? query + 1 : weights.n, most, 1);
  $("#seen-title").replaceChildren(naming(key, "key"), " is looked at by");
  fill($("#seen"), "query", column, query, weights.causal ? weights.n - key : weights.n, most, null);
}

// Whether this head's numbers are exact, and what the file leaves out.
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
    const row = event.target.closest("tr[data-i]");
    if (row) choose(row, true);
  });
  box.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr[data-i]");
    const next = row && { ArrowUp: row.previousElementSibling, ArrowDown: row.nextElementSibling }[event.key];
    if (!row || !["ArrowUp", "ArrowDown"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    if (next?.dataset.i) choose(next, true);
  });
  on("pair hover layout", drawTables);
  on("head", drawNote);
}
