// The matrix as tiles: parts of a picture, asked for when they come into sight, nearest to the middle first. What is
// out of sight again before it was answered is not waited for.
import { clamp, drawingOn } from "./util.js";
import { theme, tone } from "./colour.js";
import { sinksOf, view } from "./state.js";

const WIDTH = 256, // pixels a tile
  FINEST = 16, // weights a pixel that Python takes from what it has kept: multiples of it cost next to nothing
  DEAR = 4096, // weights across a tile that it has to look at
  HELD = 160, // tiles
  AT_ONCE = 3; // questions

/**
 * @typedef {{ key: string, weights: import("./types").Weights, side: number, i0: number, i1: number, j0: number, j1: number, width: number, height: number,
 *   values: Float32Array | null, failed: boolean, look: string, canvas: HTMLCanvasElement | null }} Tile
 */
/** @type {Map<string, Tile>} */
const tiles = new Map(); // the latest used last
/** @type {Map<Tile, AbortController>} */
const asked = new Map();
/** @type {Tile[]} */
let queue = [];
let arrived = () => {};
export const forgetTiles = () => tiles.clear();
export const onArrival = (listener) => (arrived = listener);

// How many weights a pixel stands for, so that it is `least` CSS pixels wide: any number from near, a multiple of the
// blocks that Python keeps from afar.
export function sideFor(size, least) {
  if (size >= 1) return 1;
  const side = Math.ceil(least / size - 1e-6);
  return side <= FINEST ? side : Math.ceil(side / FINEST) * FINEST;
}

function widthFor(side) {
  const dear = side > FINEST && view.head.role == null; // nothing is kept of a head that was not read yet
  return dear ? clamp(Math.floor(DEAR / side), 8, WIDTH) : side === 1 ? WIDTH / 2 : WIDTH;
}

// The tiles over a part of the matrix, coarser ones first, and how many of this side are missing.
export function tilesOver({ i0, i1, j0, j1 }, side) {
  const { columns, causal } = view.weights,
    step = widthFor(side) * side,
    own = [];
  for (let i = Math.floor(i0 / step) * step; i < i1; i += step) {
    for (let j = Math.floor(j0 / step) * step; j < j1; j += step) {
      if (causal && j > Math.min(columns, i + step) - 1) continue;
      own.push(tileAt(i, j, step, side));
    }
  }
  const middle = [(i0 + i1) / 2, (j0 + j1) / 2];
  const away = (t) => Math.hypot((t.i0 + t.i1) / 2 - middle[0], (t.j0 + t.j1) / 2 - middle[1]);
  ask(own.filter((t) => !t.values && !t.failed).sort((a, b) => away(a) - away(b)));
  const here = own.filter((tile) => tile.values);
  return {
    tiles: [...coarser({ i0, i1, j0, j1 }, side), ...here],
    missing: own.length - here.length,
    failed: own.some((tile) => tile.failed),
  };
}

function tileAt(i0, j0, step, side) {
  const { weights } = view,
    key = [view.head.layer, view.head.head, side, step, i0, j0].join();
  const [i1, j1] = [Math.min(weights.rows, i0 + step), Math.min(weights.columns, j0 + step)];
  const tile = tiles.get(key) || {
    ...{ key, weights, side, i0, i1, j0, j1, values: null, failed: false, look: "", canvas: null },
    width: Math.ceil((j1 - j0) / side),
    height: Math.ceil((i1 - i0) / side),
  };
  tiles.delete(key);
  tiles.set(key, tile);
  for (const old of tiles.keys()) {
    if (tiles.size <= HELD) break;
    tiles.delete(old);
  }
  return tile;
}

// Until a tile is here, a part of one that stands for more weights a pixel is in its place.
function coarser({ i0, i1, j0, j1 }, side) {
  const mine = `${view.head.layer},${view.head.head},`;
  const over = (t) => t.side > side && t.values && t.i0 < i1 && t.i1 > i0 && t.j0 < j1 && t.j1 > j0;
  return [...tiles.values()].filter((t) => t.key.startsWith(mine) && over(t)).sort((a, b) => b.side - a.side);
}

function ask(wanted) {
  for (const [tile, control] of asked) if (!wanted.includes(tile)) control.abort();
  queue = wanted.filter((tile) => !asked.has(tile));
  askMore();
}

function askMore() {
  while (queue.length && asked.size < AT_ONCE) {
    const tile = /** @type {Tile} */ (queue.shift()),
      control = new AbortController(),
      { i0, i1, j0, j1, side } = tile;
    const found = tile.weights.picture(i0, i1, j0, j1, side, control.signal);
    if (found instanceof Float32Array) tile.values = found;
    else {
      asked.set(tile, control);
      found
        .then((values) => (tile.values = values))
        .catch(() => (tile.failed = !control.signal.aborted))
        .finally(() => (asked.delete(tile), askMore(), arrived()));
    }
  }
}

// A tile's pixels in the colours of the moment.
export function pictureOf(tile) {
  const { i0, j0, side, width, height, weights } = tile,
    values = /** @type {Float32Array} */ (tile.values);
  const look = [view.scale, theme.dark, view.fade].join();
  if (tile.canvas && tile.look === look) return tile.canvas;
  const canvas = Object.assign(tile.canvas || document.createElement("canvas"), { width, height }),
    context = drawingOn(canvas),
    image = context.createImageData(width, height),
    pixels = new Uint32Array(image.data.buffer),
    palette = theme.weights.map(([r, g, b]) => new Uint32Array(Uint8Array.of(r, g, b, 255).buffer)[0]),
    dim = dimmed(tile);
  for (let y = 0, at = 0; y < height; y++) {
    const last = weights.causal ? i0 + (y + 1) * side - 1 : Infinity;
    for (let x = 0; x < width; x++, at++) {
      if (j0 + x * side > last) continue;
      const strong = dim[x] && j0 + x * side < i0 + y * side;
      pixels[at] = palette[strong ? Math.round(0.18 * tone(view.scale, values[at])) : tone(view.scale, values[at])];
    }
  }
  context.putImageData(image, 0, 0);
  return Object.assign(tile, { canvas, look }).canvas;
}

// Which columns of pixels have a faded token in them.
function dimmed({ j0, side, width }) {
  const out = new Uint8Array(width);
  if (view.fade)
    for (const j of sinksOf(view.head)) {
      const x = Math.floor((j - j0) / side);
      if (x >= 0 && x < width) out[x] = 1;
    }
  return out;
}

// A weight of the cells on the canvas; null where they are not here.
export function cellOf(i, j) {
  const step = widthFor(1),
    [a, b] = [i - (i % step), j - (j % step)];
  const tile = tiles.get([view.head.layer, view.head.head, 1, step, a, b].join());
  return tile?.values ? tile.values[(i - a) * tile.width + (j - b)] : null;
}
