// What a person does in the text: point, press keys, find.
import { $, percent, plural, shown, under } from "./util.js";
import { along, keyText, leadKind, leadText, otherKind, otherText, queryText, view } from "./state.js";
import { hoverToken, moveOther, moveToken, selectOther, selectToken, unpin } from "./actions.js";
import { flows } from "./flow.js";
import { startFind } from "./find.js";

// Pinned: the pointer reads one weight, its rank and distance.
function read(i) {
  const reader = $("#reader");
  if (i == null || !view.pinned) return reader.replaceChildren();
  const [query, key] = view.direction === "from" ? [view.token, i] : [i, view.token],
    name = `“${shown(otherText().tokens[i])}” ${i}: `;
  if (view.influence)
    return reader.replaceChildren(`${name}${percent(view.influence[i], true, 2)} of the last token, through all layers`);
  if (!view.weights.sees(query, key))
    return reader.replaceChildren(name + "later than the query, cannot be seen");
  const weights = along(view.token),
    weight = weights[i],
    away = Math.abs(query - key);
  const rank = 1 + weights.reduce((count, w) => count + Number(w > weight), 0);
  const said =
    weight || view.weights.exact
      ? `${percent(weight, view.weights.exact, 2)}, rank ${rank}`
      : `under ${percent(view.weights.floor)}`;
  const where = away ? plural(away, "token") + (key <= query ? " back" : " ahead") : "itself",
    { image } = otherText();
  reader.replaceChildren(name + said + (queryText() !== keyText() || image ? "" : ", " + where));
}

function lineMove(step) {
  const { spans, text } = flows[leadKind()],
    { image } = text;
  if (image && view.token >= image.first) {
    const at = view.token + step * image.columns - image.first;
    return at >= 0 && at < image.rows * image.columns && selectToken(at + image.first);
  }
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
    ArrowLeft: () => (event.shiftKey ? moveOther(-1) : moveToken(-1)),
    ArrowRight: () => (event.shiftKey ? moveOther(1) : moveToken(1)),
    ArrowUp: () => lineMove(-1),
    ArrowDown: () => lineMove(1),
    Home: () => selectToken(0),
    End: () => selectToken(leadText().n - 1),
    Enter: unpin,
    " ": unpin,
  };
  if (!moves[event.key]) return;
  event.preventDefault();
  event.stopPropagation();
  moves[event.key]();
}

const indexOf = (event) => {
  const span = under(event, ".t");
  return span ? Number(span.dataset.i) : null;
};

// Whether a token belongs to the text in which none leads, in cross-attention.
const isOther = (event) => queryText() !== keyText() && flows[otherKind()].spans.some((span) => span === under(event, ".t"));

function startPointer(box) {
  let press = 0;
  box.addEventListener("click", (event) => {
    const i = indexOf(event);
    if (i == null) return;
    if (event.shiftKey || event.altKey || isOther(event)) selectOther(i);
    else if (view.pinned && i === view.token) unpin();
    else selectToken(i);
  });
  box.addEventListener("mouseover", (event) => {
    const i = indexOf(event);
    if (i == null) return;
    const apart = queryText() !== keyText();
    if (!view.pinned && !isOther(event)) hoverToken(i);
    read(apart && !isOther(event) ? null : i);
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

export function startReading(box) {
  startPointer(box);
  startFind();
  box.addEventListener("keydown", textKey);
}
