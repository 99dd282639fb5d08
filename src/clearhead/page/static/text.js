// Tokens as flowing text, tinted by the weights of the token that leads.
import { $, clamp, el, percent, plural, shown, sized } from "./util.js";
import { colour, ink, rgb, theme, tint, tone } from "./colour.js";
import { along, faded, keyOf, on, queryOf, shownToken, view } from "./state.js";
import { hoverToken, selectOther, selectToken, unpin } from "./actions.js";
import { sizes } from "./layout.js";
import { buildText, spans } from "./words.js";

const TINTED = 0.004,
  LABELLED = 0.03,
  LABELS = 12;
let weightsNow = null,
  tinted = [],
  labelled = [],
  seen = [0, Infinity];

// The largest reading size at which the text needs no scrolling.
function fitText() {
  const box = $("#text");
  if (box.classList.contains("long") || !box.clientHeight) return;
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
function muteOutside(low, high) {
  const [a, b] = seen;
  for (let i = 0; i < spans.length; i++) {
    const was = i >= a && i < b,
      is = i >= low && i < high;
    if (was !== is) spans[i].classList.toggle("unseen", !is);
  }
  seen = [low, high];
}

function paintTints(token) {
  for (const i of tinted) spans[i].style.background = spans[i].style.color = "";
  const floor = view.scale === "log" ? 2e-4 : TINTED,
    from = view.direction === "from";
  tinted = [];
  weightsNow.forEach((w, i) => {
    if (w < floor || (from && i !== token && faded(i))) return;
    const fill = tint(view.scale, w);
    spans[i].style.background = rgb(fill);
    spans[i].style.color = ink(fill);
    tinted.push(i);
  });
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
  if (keyOf() !== queryOf()) spans[keyOf()].classList.add("is-key");
  spans[queryOf()].classList.add("is-query");
  spans[leading].setAttribute("aria-selected", "true");
  $("#text").setAttribute("aria-activedescendant", "t" + leading);
}

function drawLines() {
  $("#line-layer")?.remove();
  if (!view.lines) return;
  const box = $("#text"),
    frame = box.getBoundingClientRect(),
    leading = shownToken();
  const middle = (i) => {
    const r = spans[i].getBoundingClientRect();
    return [r.left - frame.left + r.width / 2, r.top - frame.top + box.scrollTop];
  };
  const [x0, y0] = middle(leading);
  const strong = tinted
    .filter((i) => i !== leading && weightsNow[i] >= 0.02)
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

// A strip beside a scrolled text: where the tinted tokens, the query and the key are.
function drawRuler() {
  const strip = $("#ruler"),
    box = $("#text"),
    height = box.clientHeight,
    all = box.scrollHeight;
  strip.style.display = all > height + 2 ? "block" : "none";
  if (strip.style.display === "none") return;
  const context = sized(strip, 14, height),
    at = (i) => (spans[i].offsetTop / all) * height;
  context.fillStyle = colour("cell");
  context.fillRect(3, 0, 8, height);
  for (const i of [...tinted].sort((a, b) => weightsNow[a] - weightsNow[b])) {
    context.fillStyle = rgb(theme.weights[clamp(tone(view.scale, weightsNow[i]) + 30, 0, 255)]);
    context.fillRect(3, at(i), 8, 2);
  }
  for (const [name, i] of [
    ["key", keyOf()],
    ["query", queryOf()],
  ]) {
    context.fillStyle = colour(name);
    context.fillRect(0, at(i) - 1, 14, 3);
  }
  context.strokeStyle = colour("mute");
  context.strokeRect(1.5, (box.scrollTop / all) * height + 0.5, 11, (height / all) * height - 1);
}

function scrollToToken(i) {
  const box = $("#text"),
    y = spans[i].offsetTop;
  if (view.mode !== "text" || box.scrollHeight <= box.clientHeight) return;
  if (y >= box.scrollTop + 30 && y <= box.scrollTop + box.clientHeight - 70) return;
  let first = i; // the token at the start of the line that comes to the top
  while (first > 0 && spans[first - 1].offsetTop >= y - box.clientHeight * 0.6) first--;
  box.scrollTop = first ? spans[first].offsetTop - 8 : 0;
}

function paintText() {
  if (view.mode !== "text") return; // nothing can be measured while it is not shown: painted when it is
  const token = shownToken(),
    from = view.direction === "from";
  weightsNow = along(token);
  const { causal, n } = view.weights;
  muteOutside(causal && !from ? token : 0, causal && from ? token + 1 : n);
  paintTints(token);
  paintLabels();
  markTokens();
  drawLines();
  drawRuler();
}

// Pinned: the pointer reads one weight, its rank and distance.
function read(i) {
  const reader = $("#reader");
  if (i == null || !view.pinned) return reader.replaceChildren();
  const [query, key] = view.direction === "from" ? [view.token, i] : [i, view.token],
    name = `“${shown(view.trace.tokens[i])}” ${i}: `;
  if (!view.weights.sees(query, key))
    return reader.replaceChildren(name + "later than the query, cannot be seen");
  const weight = weightsNow[i],
    away = Math.abs(query - key);
  const rank = 1 + weightsNow.reduce((count, w) => count + (w > weight), 0);
  const said =
    weight || view.weights.exact
      ? `${percent(weight, view.weights.exact, 2)}, rank ${rank}`
      : `under ${percent(view.weights.floor)}`;
  reader.replaceChildren(
    name + `${said}, ${away ? plural(away, "token") + (key <= query ? " back" : " ahead") : "itself"}`,
  );
}

function lineMove(step) {
  const here = spans[view.token].getBoundingClientRect(),
    middle = here.left + here.width / 2;
  let best = view.token,
    least = Infinity,
    line = null;
  for (let i = view.token + step; spans[i]; i += step) {
    const box = spans[i].getBoundingClientRect();
    if (Math.abs(box.top - here.top) < 8) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > 8) break;
    const off = Math.abs(box.left + box.width / 2 - middle);
    if (off < least) [best, least] = [i, off];
  }
  if (best !== view.token) selectToken(best);
}

function textKey(event) {
  const moves = {
    ArrowLeft: () => (event.shiftKey ? selectOther(view.other - 1) : selectToken(view.token - 1)),
    ArrowRight: () => (event.shiftKey ? selectOther(view.other + 1) : selectToken(view.token + 1)),
    ArrowUp: () => lineMove(-1),
    ArrowDown: () => lineMove(1),
    Home: () => selectToken(0),
    End: () => selectToken(view.trace.n - 1),
    Enter: unpin,
    " ": unpin,
  };
  if (!moves[event.key]) return;
  event.preventDefault();
  event.stopPropagation();
  moves[event.key]();
}

const indexOf = (event) => {
  const span = event.target.closest(".t");
  return span ? Number(span.dataset.i) : null;
};

function startPointer(box) {
  let press = 0;
  box.addEventListener("click", (event) => {
    const i = indexOf(event);
    if (i == null) return;
    if (event.shiftKey || event.altKey) selectOther(i);
    else if (view.pinned && i === view.token) unpin();
    else selectToken(i);
  });
  box.addEventListener("mouseover", (event) => {
    const i = indexOf(event);
    if (i == null) return;
    if (!view.pinned) hoverToken(i);
    read(i);
  });
  box.addEventListener("mouseleave", () => (read(null), view.pinned || hoverToken(null)));
  box.addEventListener(
    "touchstart",
    (event) => {
      const i = indexOf(event);
      if (i != null) press = setTimeout(() => ((press = -1), selectOther(i)), 450);
    },
    { passive: true },
  );
  box.addEventListener("touchend", (event) => (press === -1 ? event.preventDefault() : clearTimeout(press)));
}

function findToken(words) {
  const { tokens, n } = view.trace;
  for (let step = 1; step <= n; step++) {
    const i = (view.token + step) % n;
    if (shown(tokens[i]).toLowerCase().startsWith(words.toLowerCase())) return selectToken(i);
  }
  $("#reader").replaceChildren(`no token starts with “${words}”`);
}

function startFind() {
  $("#find").addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter" && event.target.value) findToken(event.target.value);
    if (event.key === "Escape") ((event.target.value = ""), $("#text").focus());
  });
}

export function startText() {
  const box = $("#text");
  buildText();
  startPointer(box);
  startFind();
  box.addEventListener("keydown", textKey);
  box.addEventListener("scroll", drawRuler);
  $("#ruler").addEventListener(
    "click",
    (event) => (box.scrollTop = (event.offsetY / box.clientHeight) * box.scrollHeight - box.clientHeight / 2),
  );
  on("layout", () => (fitText(), view.weights && (paintText(), scrollToToken(view.token))));
  on("pair", () => (scrollToToken(view.token), paintText()));
  on("hover look theme", paintText);
}
