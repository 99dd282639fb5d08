// Tokens as flowing text, tinted by the weights of the token that leads.
import { $, drawingOn, el, inputOf, soon } from "./util.js";
import { colour, ink, rgb, theme, tone } from "./colour.js";
import { along, faded, keyOf, leadKind, on, otherKind, otherText, queryOf, shownToken, view } from "./state.js";
import { setLook } from "./actions.js";
import { sizes } from "./layout.js";
import { buildFlow, eachBuilt, estimateHeights, fillWindow, flows, scrollToToken } from "./flow.js";
import { drawRuler, startRuler } from "./ruler.js";
import { startReading } from "./reading.js";

const TINTED = 0.004,
  LABELLED = 0.03,
  LABELS = 12,
  PALEST = 120; // of the 256 colours, over an image
let weightsNow = null,
  tinted = [], // tokens whose weight is tinted, in the order of the text
  /** @type {Map<HTMLElement, number>} */
  dressed = new Map(), // their elements, and how strong each one's tint is
  /** @type {Map<HTMLElement, HTMLElement>} */
  labelled = new Map(), // elements of tokens, and the labels in them
  /** @type {HTMLElement[]} */
  marked = [], // the query and the key
  seen = [0, Infinity]; // what can be seen from the token that leads

// The largest reading size at which the text needs no scrolling.
function fitText() {
  const box = $("#text");
  if (!box.clientHeight) return;
  if (box.classList.contains("pictured")) return fitImage(box);
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

// As large as the pane allows.
/** @param {HTMLElement} box */
function fitImage(box) {
  const { rows, columns } = /** @type {import("./types").Picture} */ (flows.key.text.image),
    above = $("#text .specials").offsetHeight + 28;
  box.style.fontSize = "14px";
  const [width, height] = [box.clientWidth - 24, Math.max(120, box.clientHeight - above)];
  $("#text .image").style.width = Math.floor(Math.min(width, (height * columns) / rows)) + "px";
}

// Tokens outside [low, high) cannot be seen from the one that leads.
/** @param {number} low @param {number} high */
function muteOutside(low, high) {
  const [a, b] = seen,
    { spans } = flows[otherKind()];
  seen = [low, high];
  eachBuilt(otherKind(), (i) => {
    const was = i >= a && i < b,
      is = i >= low && i < high;
    if (was !== is) spans[i].classList.toggle("unseen", !is);
  });
}

const floor = () => (view.scale === "log" ? 2e-4 : TINTED);
/** @param {number} i @param {number} token */
const isTinted = (i, token) =>
  weightsNow[i] >= floor() && !(view.direction === "from" && (i !== token || flows.query !== flows.key) && faded(i));

// A patch lets the image through, the less the more weight it has; too pale a colour would only whiten it.
/** @param {HTMLElement} span @param {number} weight */
function tintToken(span, weight) {
  const strength = tone(view.scale, weight);
  if (dressed.get(span) === strength) return;
  dressed.set(span, strength);
  const patch = span.classList.contains("patch"),
    fill = theme.weights[patch ? Math.max(strength, PALEST) : strength];
  span.style.background = patch ? `rgba(${fill.join()},${((0.9 * strength) / 255).toFixed(3)})` : rgb(fill);
  span.style.color = ink(fill);
}

function paintTints() {
  const { spans } = flows[otherKind()],
    now = new Set(tinted.map((i) => spans[i]));
  for (const span of dressed.keys()) if (!now.has(span)) undress(span);
  for (const i of tinted) if (spans[i]) tintToken(spans[i], weightsNow[i]);
}

/** @param {HTMLElement} span */
const undress = (span) => ((span.style.background = span.style.color = ""), dressed.delete(span));

const context = drawingOn(el("canvas"));
/** @type {Record<string, number>} */
const widths = {};
/** @param {string} label */
function widthOf(label) {
  if (!widths[label]) context.font = "10.5px " + colour("sans");
  return (widths[label] ??= context.measureText(label).width);
}

// A share under the strongest tokens; the weaker of two that would touch is left out.
function paintLabels() {
  const { spans } = flows[otherKind()];
  const strong = [...weightsNow.keys()]
    .filter((i) => weightsNow[i] >= LABELLED)
    .sort((a, b) => weightsNow[b] - weightsNow[a])
    .slice(0, LABELS)
    .filter((i) => spans[i]);
  const places = strong.map((i) => spans[i].getBoundingClientRect()), // all are measured before any changes
    kept = [],
    before = labelled;
  labelled = new Map();
  strong.forEach((i, at) => {
    const words = Math.round(100 * weightsNow[i]) + "%",
      { top, left, width } = places[at],
      [middle, half] = [left + width / 2, widthOf(words) / 2];
    if (kept.some((b) => Math.abs(b.top - top) < 9 && Math.abs(b.middle - middle) < b.half + half + 2)) return;
    kept.push({ top, middle, half });
    const label = before.get(spans[i]) ?? spans[i].appendChild(el("i", { "aria-hidden": "true" }));
    if (label.textContent !== words) label.textContent = words;
    labelled.set(spans[i], label);
  });
  for (const [span, label] of before) if (!labelled.has(span)) label.remove();
}

function markTokens() {
  for (const span of marked) {
    span.classList.remove("is-query", "is-key");
    span.removeAttribute("aria-selected");
  }
  const leading = shownToken(),
    { spans, id } = flows[leadKind()],
    [query, key] = [flows.query.spans[queryOf()], flows.key.spans[keyOf()]];
  if (key !== query) key?.classList.add("is-key");
  query?.classList.add("is-query");
  spans[leading]?.setAttribute("aria-selected", "true");
  marked = [query, key].filter(Boolean); // the leading token is one of them
  $("#text").setAttribute("aria-activedescendant", id + leading);
}

function drawLines() {
  $("#line-layer")?.remove();
  const from = flows[leadKind()].spans,
    to = flows[otherKind()].spans;
  if (!view.lines || !from[shownToken()]) return;
  const box = $("#text"),
    frame = box.getBoundingClientRect(),
    leading = shownToken();
  const middle = (span) => {
    const r = span.getBoundingClientRect();
    return [r.left - frame.left + r.width / 2, r.top - frame.top + box.scrollTop];
  };
  const [x0, y0] = middle(from[leading]);
  const strong = tinted
    .filter((i) => (i !== leading || from !== to) && to[i] && weightsNow[i] >= 0.02)
    .sort((a, b) => weightsNow[b] - weightsNow[a])
    .slice(0, 6);
  const layer = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  layer.id = "line-layer";
  layer.setAttribute("aria-hidden", "true");
  for (const i of strong) {
    const [x1, y1] = middle(to[i]),
      high = Math.max(2, Math.min(y0, y1) - 10 - 0.06 * Math.abs(x1 - x0));
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", `M${x0} ${y0}C${x0} ${high} ${x1} ${high} ${x1} ${y1}`);
    path.setAttribute("stroke-width", (0.6 + 3.2 * weightsNow[i]).toFixed(2));
    layer.append(path);
  }
  box.append(layer);
}

// Through many layers nearly all rests on sinks: faded, they leave the rest to the others.
/** @param {Float32Array} influence */
function beside(influence) {
  if (!view.fade) return influence;
  const left = influence.reduce((sum, w, i) => (faded(i) ? sum : sum + w), 0) || 1;
  return influence.map((w, i) => (faded(i) ? 0 : w / left));
}

async function throughAllLayers() {
  const { trace } = view,
    raw = inputOf("#influence").checked ? await trace.part("influence") : null;
  if (trace === view.trace) setLook({ influence: raw && new Float32Array(raw.buffer) });
}

function offerInfluence() {
  $("#through").hidden = !view.trace.influence;
  inputOf("#influence").checked = false;
  view.influence = null;
}

function paintText() {
  if (view.mode !== "text" || !view.weights) return; // nothing can be measured while it is not shown: painted when it is
  const token = shownToken(),
    from = view.direction === "from";
  weightsNow = view.influence ? beside(view.influence) : along(token);
  const causal = view.weights.causal && !view.influence;
  tinted = [...weightsNow.keys()].filter((i) => isTinted(i, token));
  drawRuler(tinted, weightsNow); // measures, before anything changes; so do the labels
  paintLabels();
  muteOutside(causal && !from ? token : 0, causal && from ? token + 1 : otherText().n);
  paintTints();
  markTokens();
  drawLines();
}

// Blocks that came into the window look like the rest.
function dress(flow, blocks) {
  if (!weightsNow) return;
  const { spans } = flow;
  for (const { first, end } of flow === flows[otherKind()] ? blocks : [])
    for (let i = first; i < end; i++) {
      if (i < seen[0] || i >= seen[1]) spans[i].classList.add("unseen");
      if (isTinted(i, shownToken())) tintToken(spans[i], weightsNow[i]);
    }
  paintLabels();
  markTokens();
  drawLines();
}

// Other texts, where the head has others. Whether it has.
function rebuild() {
  const { query, key } = flows;
  buildFlow(dress);
  if (query === flows.query && key === flows.key) return false;
  [weightsNow, tinted, dressed, labelled, seen] = [null, [], new Map(), new Map(), [0, Infinity]];
  $("#wrote").hidden = flows.query.text.prompt == null;
  return true;
}

export function startText() {
  const box = $("#text");
  rebuild();
  startRuler();
  startReading(box);
  offerInfluence();
  $("#influence").addEventListener("change", throughAllLayers);
  on("trace", offerInfluence);
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
    if (view.weights) (scrollToToken(leadKind(), view.token), paintText());
  });
  on("head", () => rebuild() && (fitText(), fillWindow()));
  on("pair", () => (scrollToToken(leadKind(), view.token), paintText()));
  on("hover", soon(paintText));
  on("look theme", () => ([...dressed.keys()].forEach(undress), paintText()));
}
