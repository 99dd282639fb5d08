// Matrix of the chosen head. `port` says which part of it is on the canvas and how large a cell is.
import { $, clamp, grouped, percent, shown, sized } from "./util.js";
import { colour, ink, theme, tint, tone } from "./colour.js";
import { faded, keyOf, on, queryOf, view } from "./state.js";
import { selectPair } from "./actions.js";
import { naming } from "./chips.js";

const PIXEL = 1.5; // CSS pixels a pooled pixel is wide, so that one spike stays visible on any screen
const MARGIN = { left: 62, top: 52, right: 8, bottom: 6 };
export const port = { x: 0, y: 0, size: 0 }; // first query row and key column shown, CSS pixels a cell
let width = 0,
  height = 0,
  under = null,
  planned = false,
  picture = { key: "" };

const across = (j) => MARGIN.left + (j - port.x) * port.size;
const down = (i) => MARGIN.top + (i - port.y) * port.size;
const area = () => [width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom];

// The whole matrix; cells take whole device pixels, so that all are equal, where that costs little room.
function fit() {
  const box = $("#canvas-frame"),
    ratio = window.devicePixelRatio || 1;
  [width, height] = [box.clientWidth, box.clientHeight];
  MARGIN.left = Math.min(width, height) < 330 ? 50 : 62;
  for (MARGIN.top of [Math.min(width, height) < 330 ? 46 : 52, 64]) {
    // upright words need more room
    const free = Math.min(64, Math.max(40, Math.min(...area())) / view.trace.n),
      even = Math.floor(free * ratio) / ratio;
    port.size = even > 0.93 * free ? even : free;
    if (!upright()) break;
  }
  port.x = port.y = 0;
}

const upright = () => port.size >= 12 && port.size < 48;

// The cells on the canvas: [first, end) of rows and of columns.
function span() {
  const [w, h] = area(),
    { n } = view.trace;
  const end = (from, room) => Math.min(n, Math.ceil(from + room / port.size));
  return { i0: Math.floor(port.y), i1: end(port.y, h), j0: Math.floor(port.x), j1: end(port.x, w) };
}

function put(image, at, fill) {
  image.data[at] = fill[0];
  image.data[at + 1] = fill[1];
  image.data[at + 2] = fill[2];
  image.data[at + 3] = 255;
}

const weightTint = (i, j, w) =>
  theme.weights[faded(j) && j < i ? Math.round(0.18 * tone(view.scale, w)) : tone(view.scale, w)];

// One pixel a cell, to be enlarged without smoothing.
function cellsPicture({ i0, i1, j0, j1 }) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [j1 - j0, i1 - i0];
  const context = canvas.getContext("2d"),
    image = context.createImageData(canvas.width, canvas.height);
  for (let i = i0; i < i1; i++) {
    const row = view.weights.row(i);
    for (let j = j0, end = view.weights.causal ? Math.min(j1, i + 1) : j1; j < end; j++)
      put(image, 4 * ((i - i0) * canvas.width + j - j0), weightTint(i, j, row[j]));
  }
  context.putImageData(image, 0, 0);
  return {
    canvas,
    left: across(j0),
    top: down(i0),
    wide: canvas.width * port.size,
    high: canvas.height * port.size,
    caption: cellCaption(),
  };
}

const cellCaption = () =>
  "each cell = 1 weight" +
  (width < 390 ? "" : `, ${port.size >= 10 ? Math.round(port.size) : port.size.toFixed(1)} px`);

// The largest weight under each pixel, from the weights that the file holds.
function pooledPicture() {
  const { n, causal } = view.weights,
    per = PIXEL / port.size,
    side = Math.ceil(n / per);
  const most = new Float32Array(side * side);
  view.weights.each((i, j, w) => {
    const at = Math.floor((i - port.y) / per) * side + Math.floor((j - port.x) / per);
    if (w > most[at]) most[at] = faded(j) && j < i ? 0.03 * w : w;
  });
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d"),
    image = context.createImageData(side, side);
  for (let y = 0; y < side; y++)
    for (let x = 0, end = causal ? y + 1 : side; x < end; x++)
      put(image, 4 * (y * side + x), tint(view.scale, most[y * side + x]));
  context.putImageData(image, 0, 0);
  const k = Math.ceil(per - 1e-6);
  return {
    canvas,
    left: MARGIN.left,
    top: MARGIN.top,
    wide: side * PIXEL,
    high: side * PIXEL,
    caption: `each pixel = max of ${k}×${k} weights`,
  };
}

// Drawn anew only when head, part, scale or theme change; the cross-hair is drawn over it.
function paintPicture(context, cells) {
  const key = [
    view.head.layer,
    view.head.head,
    port.x,
    port.y,
    port.size,
    width,
    height,
    view.scale,
    theme.dark,
    view.fade,
  ].join();
  if (picture.key !== key) picture = { key, ...(port.size >= 1 ? cellsPicture(cells) : pooledPicture()) };
  context.imageSmoothingEnabled = false;
  context.drawImage(picture.canvas, picture.left, picture.top, picture.wide, picture.high);
  $("#pixel").textContent = picture.caption;
}

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
      const w = view.weights.at(i, j);
      if (w < 0.005) continue;
      context.fillStyle = ink(weightTint(i, j, w));
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
  if (view.weights.causal && port.size < 13)
    (context.moveTo(across(0), down(0)), context.lineTo(right, bottom));
  context.stroke();
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

const short = (i) => {
  const word = shown(view.trace.tokens[i]);
  return word.length > 8 ? word.slice(0, 7) + "…" : word;
};

function paintWords(context, { i0, i1, j0, j1 }) {
  const query = queryOf(),
    key = keyOf(),
    half = port.size / 2;
  context.textBaseline = "middle";
  for (let i = i0; i < i1; i++) {
    context.font = `${i === query ? "600 " : ""}11px ${colour("mono")}`;
    context.fillStyle = colour(i === query ? "query" : "ink2");
    context.textAlign = "right";
    context.fillText(short(i), MARGIN.left - 6, down(i) + half);
  }
  for (let j = j0; j < j1; j++) {
    context.save();
    context.translate(across(j) + half, MARGIN.top - 6);
    if (upright()) context.rotate(-Math.PI / 2);
    context.font = `${j === key ? "600 " : ""}11px ${colour("mono")}`;
    context.fillStyle = colour(j === key ? "key" : "ink2");
    context.textAlign = upright() ? "left" : "center";
    context.fillText(short(j), 0, upright() ? 0 : -5);
    context.restore();
  }
}

// Positions at round steps; the query and the key by word and position, with room made for them.
function paintTicks(context, { i0, i1, j0, j1 }) {
  const least = 52 / port.size,
    power = 10 ** Math.floor(Math.log10(least)),
    half = port.size / 2;
  const step = Math.max(
    1,
    [1, 2, 5, 10].map((a) => a * power).find((a) => a >= least),
  );
  const atQuery = clamp(down(queryOf()) + half, MARGIN.top + 6, height - 18), // two lines of label
    atKey = across(keyOf()) + half;
  const small = `10px ${colour("sans")}`,
    bold = `600 11px ${colour("mono")}`;
  context.textBaseline = "middle";
  context.strokeStyle = colour("line2");
  context.beginPath();
  context.font = small;
  context.fillStyle = colour("mute");
  for (let i = Math.ceil(i0 / step) * step; i < i1; i += step) {
    const y = down(i) + half;
    (context.moveTo(MARGIN.left - 4, y), context.lineTo(MARGIN.left, y));
    context.textAlign = "right";
    if (y < atQuery - 12 || y > atQuery + 22) context.fillText(grouped(i), MARGIN.left - 7, y);
  }
  for (let j = Math.ceil(j0 / step) * step; j < j1; j += step) {
    const x = across(j) + half;
    (context.moveTo(x, MARGIN.top - 4), context.lineTo(x, MARGIN.top));
    context.textAlign = "center";
    if (Math.abs(x - atKey) > 26) context.fillText(grouped(j), x, MARGIN.top - 11);
  }
  context.stroke();
  context.fillStyle = colour("query");
  context.textAlign = "right";
  context.fillText(grouped(queryOf()), MARGIN.left - 7, atQuery + 12);
  context.font = bold;
  context.fillText(short(queryOf()), MARGIN.left - 6, atQuery);
  context.fillStyle = colour("key");
  context.textAlign = "center";
  const x = clamp(atKey, 30, width - 32);
  context.fillText(short(keyOf()), x, MARGIN.top - 24);
  context.font = small;
  context.fillText(grouped(keyOf()), x, MARGIN.top - 11);
}

function paint() {
  planned = false;
  if (!view.weights || width < 40) return;
  const canvas = $("#canvas"),
    context = sized(canvas, width, height),
    cells = span();
  const right = Math.min(width - MARGIN.right, across(view.trace.n)),
    bottom = Math.min(height - MARGIN.bottom, down(view.trace.n));
  Object.assign(canvas.dataset, { left: MARGIN.left, top: MARGIN.top, cell: port.size });
  context.fillStyle = colour("paper");
  context.fillRect(0, 0, width, height);
  context.save();
  context.beginPath();
  context.rect(MARGIN.left, MARGIN.top, right - MARGIN.left, bottom - MARGIN.top);
  context.clip();
  paintPicture(context, cells);
  paintGaps(context, cells);
  paintNumbers(context, cells);
  context.restore();
  paintFrame(context, right, bottom);
  paintCross(context, right, bottom);
  if (port.size >= 12) paintWords(context, cells);
  else paintTicks(context, cells);
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
  $("#pair").replaceChildren(naming(i, "query"), " → ", naming(j, "key"), strong);
}

function cellAt(event) {
  const box = $("#canvas").getBoundingClientRect();
  const i = Math.floor(port.y + (event.clientY - box.top - MARGIN.top) / port.size);
  const j = Math.floor(port.x + (event.clientX - box.left - MARGIN.left) / port.size);
  return i >= 0 && j >= 0 && i < view.trace.n && j < view.trace.n ? [i, j] : null;
}

function matrixKey(event) {
  const step = Math.max(1, Math.round(1 / port.size)),
    { n, causal } = view.weights;
  const move = { ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -step], ArrowRight: [0, step] }[
    event.key
  ];
  if (!move) return;
  event.preventDefault();
  event.stopPropagation();
  const query = clamp(queryOf() + move[0], 0, n - 1);
  selectPair(query, clamp(keyOf() + move[1], 0, causal ? query : n - 1));
}

export function startMatrix() {
  const canvas = $("#canvas");
  canvas.addEventListener("pointermove", (event) => ((under = cellAt(event)), tellPair()));
  canvas.addEventListener("pointerleave", () => ((under = null), tellPair()));
  canvas.addEventListener("click", (event) => cellAt(event) && selectPair(...cellAt(event)));
  canvas.addEventListener("keydown", matrixKey);
  on("layout", () => (fit(), plan()));
  on("pair hover", () => (plan(), tellPair()));
  on("look theme", plan);
}
