// The row and the column of the chosen pair as tables: what the query looks at, and what looks at the key.
import { $, clamp, el, grouped, percent, shown } from "./util.js";
import { keyOf, on, queryOf, shownToken, view } from "./state.js";
import { selectPair } from "./actions.js";
import { naming } from "./chips.js";
import { sizes } from "./layout.js";

const ROW = 17;

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

// `among`: how many could be in the list. `total`: 1 for a row; null where shares do not add up to one.
function fill(table, word, weights, chosen, among, total) {
  const order = [...weights.keys()].filter((i) => weights[i] > 0).sort((a, b) => weights[b] - weights[a]);
  const lines = order.slice(0, room()),
    at = order.indexOf(chosen);
  if (at >= lines.length) lines[lines.length - 1] = chosen; // the chosen one stays in sight, with its rank
  const most = Math.max(1e-9, ...lines.map((i) => weights[i])),
    others = among - lines.length;
  const body = el(
    "tbody",
    {},
    ...lines.map((i) => line(i, order.indexOf(i) + 1, weights[i], most, i === chosen)),
  );
  if (others > 0) {
    const left =
      total == null
        ? ""
        : percent(Math.max(0, total - lines.reduce((sum, i) => sum + weights[i], 0)), view.weights.exact);
    body.append(
      el(
        "tr",
        { class: "rest" },
        el("td"),
        el(
          "td",
          { class: "left", colspan: 3 },
          `${grouped(others)} other ${word === "key" ? "keys" : "queries"}`,
        ),
        el("td", {}, left),
      ),
    );
  }
  table.replaceChildren(heading(word), body);
}

function drawTables() {
  if (getComputedStyle($("#tables")).display === "none") return;
  const { weights } = view,
    from = view.direction === "from",
    leading = shownToken(),
    led = leading !== view.token;
  const query = from ? leading : queryOf(),
    key = from ? keyOf() : leading;
  if (!led || from) {
    $("#looks-title").replaceChildren(naming(query, "query"), " looks at");
    fill($("#looks"), "key", weights.row(query), led ? -1 : key, weights.causal ? query + 1 : weights.n, 1);
  }
  if (!led || !from) {
    $("#seen-title").replaceChildren(naming(key, "key"), " is looked at by");
    fill(
      $("#seen"),
      "query",
      weights.column(key),
      led ? -1 : query,
      weights.causal ? weights.n - key : weights.n,
      null,
    );
  }
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
