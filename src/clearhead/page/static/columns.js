// Tokens as two columns, queries left and keys right, joined by lines.
import { $, $$, canvasOf, clamp, el, shown, sized, under } from "./util.js";
import { colour, ink, rgb, theme, tint } from "./colour.js";
import { along, faded, keyOf, keyText, leadText, on, queryOf, queryText, shownToken, textOf, view } from "./state.js";
import { hoverToken, moveOther, moveToken, selectOther, selectToken } from "./actions.js";

const LINE = 15,
  MOST = 600,
  EDGE = 154;

/** @type {import("./types").Text[]} */
let built = []; // the texts whose columns are there

function buildColumns() {
  const box = $("#columns-in"),
    most = Math.max(queryText().n, keyText().n);
  built = [queryText(), keyText()];
  if (most > MOST)
    return box.replaceChildren(
      el("p", { class: "mute" }, `Two columns are drawn for at most ${MOST} tokens. Use Text or the matrix.`),
    );
  box.style.height = most * LINE + 8 + "px";
  box.replaceChildren(el("canvas", { "aria-hidden": "true" }));
  for (const side of /** @type {const} */ (["query", "key"]))
    textOf(side).tokens.forEach((token, i) =>
      box.append(el("div", { class: "side " + side, "data-i": i, style: `top:${i * LINE}px` }, shown(token))),
    );
}

/** @param {CanvasRenderingContext2D} context @param {number} width @param {number} leading */
function drawPairs(context, width, leading) {
  const line = (i, j, weight, strong) => {
    context.globalAlpha = strong ? clamp(0.15 + Math.sqrt(weight), 0, 1) : 0.3 * Math.sqrt(weight);
    context.lineWidth = strong ? 0.8 + 3 * weight : 0.8;
    context.beginPath();
    context.moveTo(EDGE, i * LINE + LINE / 2);
    context.lineTo(width - EDGE, j * LINE + LINE / 2);
    context.stroke();
  };
  context.strokeStyle = rgb(theme.weights[150]);
  view.weights.each((i, j, w) => w > 0.03 && !faded(j) && line(i, j, w, false));
  context.strokeStyle = colour("key");
  along(leading).forEach(
    (w, i) =>
      w > 0.005 && (view.direction === "from" ? line(leading, i, w, true) : line(i, leading, w, true)),
  );
}

function paintSides(leading) {
  const from = view.direction === "from",
    weights = along(leading),
    { causal } = view.weights;
  for (const side of $$("#columns-in .side")) {
    const i = Number(side.dataset.i),
      isQuery = side.classList.contains("query"),
      looked = from !== isQuery;
    side.classList.toggle("is-query", isQuery && i === queryOf());
    side.classList.toggle("is-key", !isQuery && i === keyOf());
    const fill = looked && weights[i] > 0.002 ? tint(view.scale, weights[i]) : null;
    side.style.background = fill ? rgb(fill) : "";
    side.style.color = fill ? ink(fill) : "";
    side.classList.toggle("unseen", looked && causal && (from ? i > leading : i < leading));
  }
}

function paintColumns() {
  if (view.mode !== "columns" || !view.weights) return;
  const box = $("#columns-in");
  if (!box.firstChild || built[0] !== queryText() || built[1] !== keyText()) buildColumns();
  if (!$("#columns-in canvas")) return;
  const canvas = canvasOf("#columns-in canvas"),
    leading = shownToken();
  drawPairs(sized(canvas, box.clientWidth, box.offsetHeight), box.clientWidth, leading);
  paintSides(leading);
}

function show() {
  if (view.mode !== "columns") return;
  const box = $("#columns");
  paintColumns();
  box.scrollTop = clamp(view.token * LINE - box.clientHeight / 2, 0, 1e9);
}

function columnsKey(event) {
  const step = { ArrowUp: -1, ArrowDown: 1, ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === "Home") selectToken(0);
  else if (event.key === "End") selectToken(leadText().n - 1);
  else if (!step) return;
  else if (event.shiftKey) moveOther(step);
  else moveToken(step);
  event.preventDefault();
  event.stopPropagation();
  const box = $("#columns"),
    y = view.token * LINE;
  if (y < box.scrollTop + 20 || y > box.scrollTop + box.clientHeight - 40)
    box.scrollTop = y - box.clientHeight / 2;
}

export function startColumns() {
  const box = $("#columns");
  const leads = (side) => side.classList.contains("query") === (view.direction === "from");
  box.addEventListener("click", (event) => {
    const side = under(event, ".side");
    if (!side) return;
    if (leads(side) && !event.shiftKey) selectToken(Number(side.dataset.i));
    else selectOther(Number(side.dataset.i));
  });
  box.addEventListener("mouseover", (event) => {
    const side = under(event, ".side");
    if (side && leads(side)) hoverToken(Number(side.dataset.i));
  });
  box.addEventListener("mouseleave", () => hoverToken(null));
  box.addEventListener("keydown", columnsKey);
  on("layout", show);
  on("pair hover look theme", paintColumns);
}
