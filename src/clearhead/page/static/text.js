// Tokens as flowing text, tinted by the weights of the token that leads.
import { $, el } from "./util.js";
import { ink, rgb, tint } from "./colour.js";
import { along, faded, keyOf, on, queryOf, shownToken, view } from "./state.js";
import { sizes } from "./layout.js";
import { buildFlow, eachBuilt, estimateHeights, fillWindow, scrollToToken, spans } from "./flow.js";
import { drawRuler, startRuler } from "./ruler.js";
import { startReading } from "./reading.js";

const TINTED = 0.004,
  LABELLED = 0.03,
  LABELS = 12;
let weightsNow = null,
  tinted = [], // tokens whose weight is tinted, in the order of the text
  labelled = [],
  seen = [0, Infinity]; // what can be seen from the token that leads

// The largest reading size at which the text needs no scrolling.
function fitText() {
  const box = $("#text");
  if (!box.clientHeight) return;
  if (box.classList.contains("long")) return estimateHeights();
  box.scrollTop = 0;
  const most = sizes.small ? 19 : 23;
  for (let size = most; size >= 15; size--) {
    const factor = sizes.small ? 2.05 : size > 16 ? 2.2 : 2.1; // room for the labels between lines
    box.style.fontSize = size + "px";
    box.style.lineHeight = Math.round(size * factor) + "px";
    if (box.scrollHeight <= box.clientHeight + 1) break;
  }
}

// Tokens outside [low, high) cannot be seen from the one that leads.
/** @param {number} low @param {number} high */
function muteOutside(low, high) {
  const [a, b] = seen;
  seen = [low, high];
  eachBuilt((i) => {
    const was = i >= a && i < b,
      is = i >= low && i < high;
    if (was !== is) spans[i].classList.toggle("unseen", !is);
  });
}

const floor = () => (view.scale === "log" ? 2e-4 : TINTED);
/** @param {number} i @param {number} token */
const isTinted = (i, token) =>
  weightsNow[i] >= floor() && !(view.direction === "from" && i !== token && faded(i));

function tintToken(i) {
  const fill = tint(view.scale, weightsNow[i]);
  spans[i].style.background = rgb(fill);
  spans[i].style.color = ink(fill);
}

/** @param {number} token */
function paintTints(token) {
  for (const i of tinted) if (spans[i]) spans[i].style.background = spans[i].style.color = "";
  tinted = [...weightsNow.keys()].filter((i) => isTinted(i, token));
  for (const i of tinted) if (spans[i]) tintToken(i);
}

// A share under the strongest tokens; the weaker of two that would touch is left out.
function paintLabels() {
  for (const label of labelled) label.remove();
  labelled = [];
  const strong = [...weightsNow.keys()]
    .filter((i) => weightsNow[i] >= LABELLED)
    .sort((a, b) => weightsNow[b] - weightsNow[a]);
  const boxes = [];
  for (const i of strong.slice(0, LABELS)) {
    if (!spans[i]) continue;
    const label = el("i", { "aria-hidden": "true" }, Math.round(100 * weightsNow[i]) + "%");
    spans[i].append(label);
    const box = label.getBoundingClientRect();
    if (boxes.some((b) => Math.abs(b.top - box.top) < 9 && box.left < b.right + 2 && b.left < box.right + 2))
      label.remove();
    else boxes.push(box) && labelled.push(label);
  }
}

function markTokens() {
  for (const span of document.querySelectorAll("#text .is-query, #text .is-key, #text [aria-selected]")) {
    span.classList.remove("is-query", "is-key");
    span.removeAttribute("aria-selected");
  }
  const leading = shownToken();
  if (keyOf() !== queryOf()) spans[keyOf()]?.classList.add("is-key");
  spans[queryOf()]?.classList.add("is-query");
  spans[leading]?.setAttribute("aria-selected", "true");
  $("#text").setAttribute("aria-activedescendant", "t" + leading);
}

function drawLines() {
  $("#line-layer")?.remove();
  if (!view.lines || !spans[shownToken()]) return;
  const box = $("#text"),
    frame = box.getBoundingClientRect(),
    leading = shownToken();
  const middle = (i) => {
    const r = spans[i].getBoundingClientRect();
    return [r.left - frame.left + r.width / 2, r.top - frame.top + box.scrollTop];
  };
  const [x0, y0] = middle(leading);
  const strong = tinted
    .filter((i) => i !== leading && spans[i] && weightsNow[i] >= 0.02)
    .sort((a, b) => weightsNow[b] - weightsNow[a])
    .slice(0, 6);
  const layer = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  layer.id = "line-layer";
  layer.setAttribute("aria-hidden", "true");
  for (const i of strong) {
    const [x1, y1] = middle(i),
      high = Math.max(2, Math.min(y0, y1) - 10 - 0.06 * Math.abs(x1 - x0));
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", `M${x0} ${y0}C${x0} ${high} ${x1} ${high} ${x1} ${y1}`);
    path.setAttribute("stroke-width", (0.6 + 3.2 * weightsNow[i]).toFixed(2));
    layer.append(path);
  }
  box.append(layer);
}

function paintText() {
  if (view.mode !== "text" || !view.weights) return; // nothing can be measured while it is not shown: painted when it is
  const token = shownToken(),
    from = view.direction === "from";
  weightsNow = along(token);
  const { causal, n } = view.weights;
  muteOutside(causal && !from ? token : 0, causal && from ? token + 1 : n);
  paintTints(token);
  paintLabels();
  markTokens();
  drawLines();
  drawRuler(tinted, weightsNow);
}

// Blocks that came into the window look like the rest.
function dress(blocks) {
  if (!weightsNow) return;
  for (const { first, end } of blocks)
    for (let i = first; i < end; i++) {
      if (i < seen[0] || i >= seen[1]) spans[i].classList.add("unseen");
      if (isTinted(i, shownToken())) tintToken(i);
    }
  paintLabels();
  markTokens();
  drawLines();
}

export function startText() {
  const box = $("#text");
  buildFlow(dress);
  startRuler();
  startReading(box);
  let waiting = false;
  box.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(
      () => ((waiting = false), fillWindow(), weightsNow && drawRuler(tinted, weightsNow)),
    );
  });
  on("layout", () => {
    fitText();
    fillWindow();
    if (view.weights) (scrollToToken(view.token), paintText());
  });
  on("pair", () => (scrollToToken(view.token), paintText()));
  on("hover look theme", paintText);
}
