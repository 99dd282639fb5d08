// Matrix of the chosen head: tiles of its picture, cross-hair and numbers over them.
import { $, canvasOf, clamp, fill, percent, sized, soon } from "./util.js";
import { colour, ink, theme, tone } from "./colour.js";
import { faded, keyOf, keyText, on, queryOf, queryText, view } from "./state.js";
import { selectPair } from "./actions.js";
import { naming } from "./chips.js";
import { across, down, frame, keepInSight, MARGIN, measure, port, span } from "./port.js";
import { paintLocator, paintTicks, paintWords } from "./axes.js";
import { cellOf, onArrival, pictureOf, sideFor, tilesOver } from "./tiles.js";
import { startZoom } from "./zoom.js";

const PIXEL = 1.5; // CSS pixels a pooled pixel is wide at least, so that one spike stays visible on any screen
/** @type {[number, number] | null} */
let under = null; // the cell under the pointer
let planned = false;

const dimmedTone = (i, j, w) =>
  faded(j) && j < i ? Math.round(0.18 * tone(view.scale, w)) : tone(view.scale, w);

// Tile edges on whole device pixels: no line of paper between two tiles.
function paintPicture(context, cells) {
  const ratio = window.devicePixelRatio || 1,
    side = sideFor(port.size, PIXEL),
    { tiles, missing, failed } = tilesOver(cells, side);
  const edge = (at) => Math.round(at * ratio) / ratio;
  context.imageSmoothingEnabled = false;
  for (const tile of tiles) {
    const [left, top] = [edge(across(tile.j0)), edge(down(tile.i0))],
      right = edge(across(tile.j0 + tile.width * tile.side)),
      bottom = edge(down(tile.i0 + tile.height * tile.side));
    context.drawImage(pictureOf(tile), left, top, right - left, bottom - top);
  }
  const state = failed ? ", a part could not be read" : missing ? ", reading" : "";
  $("#pixel").textContent = (side === 1 ? cellCaption() : `each pixel = max of ${side}×${side} weights`) + state;
}

const cellCaption = () =>
  "each cell = 1 weight" +
  (frame.width < 390 ? "" : `, ${port.size >= 10 ? Math.round(port.size) : port.size.toFixed(1)} px`);

function paintGaps(context, { i0, i1, j0, j1 }) {
  if (port.size < 13) return;
  context.strokeStyle = colour("paper");
  context.lineWidth = 1;
  context.beginPath();
  for (let j = j0; j <= j1; j++) (context.moveTo(across(j), down(i0)), context.lineTo(across(j), down(i1)));
  for (let i = i0; i <= i1; i++) (context.moveTo(across(j0), down(i)), context.lineTo(across(j1), down(i)));
  context.stroke();
}

function paintNumbers(context, { i0, i1, j0, j1 }) {
  if (port.size < 25) return;
  context.font = `${port.size >= 40 ? 12 : port.size >= 34 ? 11 : 10}px ${colour("sans")}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let i = i0; i < i1; i++) {
    for (let j = j0; j < j1; j++) {
      const w = cellOf(i, j) ?? 0;
      if (w < 0.005) continue;
      context.fillStyle = ink(theme.weights[dimmedTone(i, j, w)]);
      const digits = w >= 0.9995 ? 0 : w < 0.0995 || (port.size >= 44 && view.weights.exact) ? 1 : 0;
      context.fillText((100 * w).toFixed(digits), across(j) + port.size / 2, down(i) + port.size / 2 + 0.5);
    }
  }
}

function paintFrame(context, right, bottom) {
  context.strokeStyle = colour("line2");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(MARGIN.left - 0.5, bottom);
  context.lineTo(MARGIN.left - 0.5, MARGIN.top - 0.5);
  context.lineTo(right, MARGIN.top - 0.5);
  context.stroke();
  if (!view.weights.causal || port.size >= 13) return;
  clipped(context, right, bottom, () => {
    context.beginPath();
    (context.moveTo(across(0), down(0)), context.lineTo(across(keyText().n), down(queryText().n)));
    context.stroke();
  });
}

function clipped(context, right, bottom, draw) {
  context.save();
  context.beginPath();
  context.rect(MARGIN.left, MARGIN.top, right - MARGIN.left, bottom - MARGIN.top);
  context.clip();
  draw();
  context.restore();
}

// Two hairlines along the row of the query and the column of the key; at small cells one.
function paintCross(context, right, bottom) {
  const { causal } = view.weights,
    query = queryOf(),
    key = keyOf(),
    { size } = port,
    wide = size >= 3;
  const hair = (name, draw) => {
    context.strokeStyle = colour(name);
    context.lineWidth = 1;
    context.beginPath();
    draw();
    context.stroke();
  };
  const edges = (a) =>
    wide ? [Math.round(a) - 0.5, Math.round(a + size) + 0.5] : [Math.round(a + size / 2) + 0.5];
  hair("key", () =>
    edges(across(key)).forEach(
      (x) => (context.moveTo(x, causal ? down(key) : MARGIN.top), context.lineTo(x, bottom)),
    ),
  );
  hair("query", () =>
    edges(down(query)).forEach(
      (y) => (
        context.moveTo(MARGIN.left, y),
        context.lineTo(causal ? Math.min(right, across(query + 1)) : right, y)
      ),
    ),
  );
  hair("ink", () => {
    context.lineWidth = size >= 6 ? 2 : 1.5;
    if (size >= 6) context.rect(across(key), down(query), size, size);
    else context.arc(across(key) + size / 2, down(query) + size / 2, 6, 0, 7);
  });
}

function paint() {
  planned = false;
  const { width, height } = frame;
  if (!view.weights || width < 40) return;
  const canvas = canvasOf("#canvas"),
    context = sized(canvas, width, height),
    cells = span();
  const right = Math.min(width - MARGIN.right, across(keyText().n)),
    bottom = Math.min(height - MARGIN.bottom, down(queryText().n));
  Object.assign(canvas.dataset, { left: MARGIN.left, top: MARGIN.top, cell: port.size, x: port.x, y: port.y });
  context.fillStyle = colour("paper");
  context.fillRect(0, 0, width, height);
  clipped(context, right, bottom, () => {
    paintPicture(context, cells);
    paintGaps(context, cells);
    paintNumbers(context, cells);
  });
  paintFrame(context, right, bottom);
  clipped(context, right + MARGIN.right, bottom + MARGIN.bottom, () => paintCross(context, right, bottom));
  if (port.size >= 12) paintWords(context, cells);
  else paintTicks(context, cells);
  paintLocator(context);
}

const plan = () => {
  if (planned) return;
  planned = true;
  requestAnimationFrame(paint);
};

function tellPair() {
  const [i, j] = under || [queryOf(), keyOf()],
    weight = view.weights.at(i, j);
  const seen = view.weights.sees(i, j),
    known = weight > 0 || view.weights.exact;
  const said = !seen
    ? "cannot be seen"
    : known
      ? percent(weight, view.weights.exact, 2)
      : `under ${percent(view.weights.floor)}`;
  const strong = document.createElement("b");
  strong.textContent = said;
  fill($("#pair"), naming(i, "query"), " → ", naming(j, "key"), strong);
  const here = cellOf(i, j) != null || !seen;
  if (under && !here) view.weights.need([i], [])?.then(() => under?.[0] === i && tellPair());
}

function cellAt(event) {
  const box = $("#canvas").getBoundingClientRect();
  const [left, top] = [event.clientX - box.left, event.clientY - box.top];
  const i = Math.floor(port.y + (top - MARGIN.top) / port.size),
    j = Math.floor(port.x + (left - MARGIN.left) / port.size);
  const within = i < queryText().n && j < keyText().n;
  return top >= MARGIN.top && left >= MARGIN.left && within ? /** @type {[number, number]} */ ([i, j]) : null;
}

function matrixKey(event) {
  const step = Math.max(1, Math.round(1 / port.size)),
    { rows, columns, causal } = view.weights;
  const move = { ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -step], ArrowRight: [0, step] }[
    event.key
  ];
  if (!move) return;
  event.preventDefault();
  event.stopPropagation();
  const query = clamp(queryOf() + move[0], 0, rows - 1);
  selectPair(query, clamp(keyOf() + move[1], 0, causal ? query : columns - 1));
}

export function startMatrix() {
  const canvas = canvasOf("#canvas");
  const point = (cell) => ((under = cell), tellPair());
  canvas.addEventListener("pointermove", (event) => view.weights && point(cellAt(event)));
  canvas.addEventListener("pointerleave", () => view.weights && point(null));
  canvas.addEventListener("keydown", matrixKey);
  startZoom(canvas, (event) => {
    const cell = cellAt(event);
    if (cell) selectPair(cell[0], cell[1]);
  });
  onArrival(plan);
  let shape = "";
  on("layout head", (change) => {
    const now = [queryText().n, keyText().n].join();
    if (now !== shape && shape) view.zoom = null; // of another matrix
    if (now !== shape || change === "layout") (shape = now), measure();
  });
  on("pair", () => (plan(), tellPair()));
  on("hover", soon(() => (tellPair(), paint)));
  on("pair", () => keepInSight(queryOf(), keyOf()));
  on("look theme heads zoom", plan);
}
