// Zoom and pan of the matrix, by wheel, drag, pinch, double click, buttons and keys.
import { $ } from "./util.js";
import { keyOf, on, queryOf, view, writeHash } from "./state.js";
import { across, down, MARGIN, port, setPort, showCells, showWhole, zoomAt } from "./port.js";

const STEP = 1.5, // a key or a button
  NUMBERS = 25, // CSS pixels a cell from which it has its number in it
  SLOP = 4; // CSS pixels that a click may move

export const zoomIn = () => zoomAt(port.size * STEP, ...middle());
export const zoomOut = () => zoomAt(port.size / STEP, ...middle());
export const zoomWhole = () => showWhole();
export const zoomCells = () => showCells(queryOf(), keyOf());

// Where keys and buttons zoom: at the chosen pair.
const middle = () => /** @type {[number, number]} */ ([across(keyOf() + 0.5), down(queryOf() + 0.5)]);

const placeOf = (canvas, event) => {
  const box = canvas.getBoundingClientRect();
  return /** @type {[number, number]} */ ([event.clientX - box.left, event.clientY - box.top]);
};

// A page inside another leaves the wheel to that one, until the matrix has the focus.
const embedded = () => location.protocol === "about:" || window.parent !== window;

function wheel(canvas, event) {
  if (embedded() && document.activeElement !== canvas && !event.ctrlKey) return;
  event.preventDefault();
  const lines = event.deltaMode === 1 ? 30 : 1;
  zoomAt(port.size * Math.exp(-event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.002)), ...placeOf(canvas, event));
}

// Once for the cells under the pointer, with their numbers; again for the whole matrix.
function twice(canvas, event) {
  const [left, top] = placeOf(canvas, event);
  if (port.size >= NUMBERS) return showWhole();
  const key = port.x + (left - MARGIN.left) / port.size,
    query = port.y + (top - MARGIN.top) / port.size;
  showCells(Math.floor(query), Math.floor(key));
}

/** @param {number[][]} two */
const between = ([a, b]) => [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2];
/** @param {number[][]} two */
const apart = ([a, b]) => Math.hypot(a[0] - b[0], a[1] - b[1]);

function startPointers(canvas, click) {
  const pointers = new Map(); // where each finger, or the pressed mouse, was last
  let moved = 0;
  const ends = (event) => pointers.delete(event.pointerId);
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return; // the right one opens a menu
    if (!pointers.size) moved = 0;
    pointers.set(event.pointerId, placeOf(canvas, event));
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = [...pointers.values()];
    if (!pointers.has(event.pointerId)) return;
    const was = pointers.get(event.pointerId),
      is = placeOf(canvas, event);
    moved += apart([was, is]);
    if (moved < SLOP) return;
    pointers.set(event.pointerId, is);
    const after = [...pointers.values()];
    if (after.length === 2) {
      const [left, top] = between(after);
      zoomAt((port.size * apart(after)) / Math.max(1, apart(before)), left, top, between(before));
    } else if (after.length === 1 && view.zoom) {
      canvas.classList.add("dragged");
      setPort({ x: port.x - (is[0] - was[0]) / port.size, y: port.y - (is[1] - was[1]) / port.size, size: port.size });
    }
  });
  canvas.addEventListener("pointercancel", ends);
  canvas.addEventListener("pointerup", (event) => {
    if (!ends(event)) return;
    canvas.classList.remove("dragged");
    if (moved < SLOP) click(event);
  });
}

export function startZoom(canvas, click) {
  canvas.addEventListener("wheel", (event) => wheel(canvas, event), { passive: false });
  canvas.addEventListener("dblclick", (event) => twice(canvas, event));
  startPointers(canvas, click);
  const buttons = { in: zoomIn, out: zoomOut, whole: zoomWhole, cells: zoomCells };
  for (const [name, act] of Object.entries(buttons)) $("#zoom-" + name).addEventListener("click", act);
  let waiting = 0;
  on("zoom", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => view.weights && writeHash(), 200);
  });
}
