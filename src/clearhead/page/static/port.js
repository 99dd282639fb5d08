// Which part of the matrix is on the canvas: its first query and key, and how many CSS pixels a weight takes.
import { $, clamp } from "./util.js";
import { emit, keyText, queryText, view } from "./state.js";

const LARGEST = 64; // CSS pixels a cell
export const MARGIN = { left: 62, top: 52, right: 8, bottom: 6 };
export const port = { x: 0, y: 0, size: 0 };
export const frame = { width: 0, height: 0 };
let whole = 0, // the size at which everything fits
  wholeTop = MARGIN.top; // and the margin above it then

// Of the whole matrix: how many queries, how many keys.
const counts = () => [queryText().n, keyText().n];
export const across = (j) => MARGIN.left + (j - port.x) * port.size;
export const down = (i) => MARGIN.top + (i - port.y) * port.size;
const area = () => [frame.width - MARGIN.left - MARGIN.right, frame.height - MARGIN.top - MARGIN.bottom];
export const upright = (size = port.size) => size >= 12 && size < 48;

// Cells take whole device pixels, so that all are equal, where that costs little room.
function wholeSize() {
  const ratio = window.devicePixelRatio || 1,
    small = Math.min(frame.width, frame.height) < 330;
  const [rows, columns] = counts();
  let size = 0;
  MARGIN.left = small ? 50 : 62;
  for (MARGIN.top of [small ? 46 : 52, 64]) {
    // upright words need more room
    const [width, height] = area(),
      free = Math.min(LARGEST, Math.max(40, width) / columns, Math.max(40, height) / rows),
      even = Math.floor(free * ratio) / ratio;
    size = even > 0.93 * free ? even : free;
    if (!upright(size)) break;
  }
  return size;
}

// The frame has another size: the whole matrix again, or the same part of it.
export function measure() {
  const box = $("#canvas-frame");
  [frame.width, frame.height] = [box.clientWidth, box.clientHeight];
  whole = wholeSize();
  wholeTop = MARGIN.top;
  setPort(view.zoom || { x: 0, y: 0, size: whole });
}

// Upright words need more room.
/** @param {number} size */
const marginAt = (size) => (size <= whole ? wholeTop : upright(size) ? 64 : 52);

export function setPort({ x, y, size }) {
  port.size = clamp(size, whole, Math.max(LARGEST, whole));
  MARGIN.top = marginAt(port.size);
  const [width, height] = area(),
    [rows, columns] = counts();
  port.x = clamp(x, 0, Math.max(0, columns - width / port.size));
  port.y = clamp(y, 0, Math.max(0, rows - height / port.size));
  if (port.size <= whole) Object.assign(port, { x: 0, y: 0 });
  view.zoom = port.size > whole ? { ...port } : null;
  emit("zoom");
}

// Larger or smaller about a point of the canvas: what was there is then `left` and `top`.
/** @param {number} size @param {number} left @param {number} top @param {number[]} from */
export function zoomAt(size, left, top, from = [left, top]) {
  const j = port.x + (from[0] - MARGIN.left) / port.size,
    i = port.y + (from[1] - MARGIN.top) / port.size;
  const next = clamp(size, whole, LARGEST);
  setPort({ x: j - (left - MARGIN.left) / next, y: i - (top - marginAt(next)) / next, size: next });
}

export const showWhole = () => setPort({ x: 0, y: 0, size: whole });

// A cell in the middle, large enough for its number.
export function showCells(query, key, size = 26) {
  const wanted = Math.max(size, whole),
    [width, height] = area();
  setPort({ x: key + 0.5 - width / wanted / 2, y: query + 0.5 - height / wanted / 2, size: wanted });
}

// Moved no further than it takes to have a cell on the canvas.
export function keepInSight(query, key) {
  const shift = (at, from, room) => {
    const span = room / port.size;
    return at < from ? at : at + 1 > from + span ? at + 1 - span : from;
  };
  const [width, height] = area(),
    [x, y] = [shift(key, port.x, width), shift(query, port.y, height)];
  if (view.zoom && (x !== port.x || y !== port.y)) setPort({ x, y, size: port.size });
}

// The cells on the canvas: [first, end) of queries and of keys.
export function span() {
  const [w, h] = area(),
    [rows, columns] = counts();
  const end = (n, from, room) => Math.min(n, Math.ceil(from + room / port.size));
  return { i0: Math.floor(port.y), i1: end(rows, port.y, h), j0: Math.floor(port.x), j1: end(columns, port.x, w) };
}
