// What is looked at. Panes read `view`, call actions, and listen for what changed.
import { $, clamp } from "./util.js";
import { ROLES } from "./roles.js";

/** @type {import("./types").View} */
export const view = {
  trace: /** @type {any} */ (null), // these three are there before a pane draws numbers
  head: /** @type {any} */ (null),
  weights: /** @type {any} */ (null),
  direction: "from", // "from": `token` is the query, `other` the key; "to": the other way round
  token: 0,
  other: 0,
  pinned: true,
  hover: null, // the token under the pointer, and its strongest partner
  hoverOther: null,
  mode: "text",
  sheet: false, // the contact sheet covers the other panes
  wide: false, // so does the matrix
  zoom: null, // the part of the matrix on the canvas; null: all of it
  tab: "derivation", // of the lower pane on a small page: "derivation" or "matrix"
  scale: "root",
  lines: false,
  fade: false,
  influence: null, // of each token on the last one, where the text is tinted by that
  filter: new Set(),
  theme: "auto",
  singleKeys: true,
  beside: null, // the page that stands beside this one
};

// The pair that every pane shows: the pointer leads while nothing is pinned, and in columns always.
const pointerLeads = () => view.hover != null && (!view.pinned || view.mode === "columns");
/** @returns {number} */
export const shownToken = () => (pointerLeads() ? Number(view.hover) : view.token);
/** @returns {number} */
export const shownOther = () => (pointerLeads() ? Number(view.hoverOther) : view.other);
export const queryOf = () => (view.direction === "from" ? shownToken() : shownOther());
export const keyOf = () => (view.direction === "from" ? shownOther() : shownToken());

// The weights that lead from a token or to it: of every pane that asks, the first computes them.
/** @type {any} */
let latestRow = {};
/** @param {number} token @returns {Float32Array} */
export function along(token) {
  const { weights, direction } = view;
  if (latestRow.weights !== weights || latestRow.direction !== direction || latestRow.token !== token) {
    const row = direction === "from" ? weights.row(token) : weights.column(token);
    latestRow = { weights, direction, token, row };
  }
  return latestRow.row;
}
/** @param {number} layer @returns {import("./types").Layer} */
export const layerOf = (layer) => /** @type {any} */ (view.trace.byLayer.get(layer));
// The layers of the chosen head's side, of an encoder-decoder model; else all.
export const layersShown = () => view.trace.layers.filter(({ side }) => side === layerOf(view.head.layer).side);
export const headsShown = () => {
  const layers = new Set(layersShown().map(({ layer }) => layer));
  return view.trace.heads.filter((head) => layers.has(head.layer));
};
// What stands for the rows and the columns of the chosen head's map: in cross-attention they are two texts.
export const queryText = () => view.trace.texts[layerOf(view.head.layer).queries];
export const keyText = () => view.trace.texts[layerOf(view.head.layer).keys];
/** @param {"query" | "key"} kind */
export const textOf = (kind) => (kind === "query" ? queryText() : keyText());
/** @returns {"query" | "key"} */
export const leadKind = () => (view.direction === "from" ? "query" : "key");
/** @returns {"query" | "key"} */
export const otherKind = () => (view.direction === "from" ? "key" : "query");
export const leadText = () => textOf(leadKind());
export const otherText = () => textOf(otherKind());
/** @param {import("./types").Head} head */
export const sinksOf = (head) => layerOf(head.layer).sinks;
export const faded = (j) => view.fade && sinksOf(view.head).includes(j);

// Changes: "head" another head, "pair" another query or key, "hover" the pointer, "look" scale, theme or a
// switch, "trace" another text, model or step, "layout" sizes, "filter" roles shown, "zoom" the part of the matrix, "heads" what is known of them.
/** @type {Record<string, ((change: string) => void)[]>} */
const listeners = {};
export function on(changes, listener) {
  for (const change of changes.split(" ")) (listeners[change] ||= []).push(listener);
}
export function emit(change) {
  for (const listener of listeners[change] || []) listener(change);
}

export function say(words) {
  $("#live").textContent = words;
}

/** @param {string} head */
export function hashOf(head = `${view.head.layer}.${view.head.head}`) {
  const parts = [
    `h=${head}`,
    `q=${queryOf()}`,
    `k=${keyOf()}`,
    `dir=${view.direction}`,
    `scale=${view.scale}`,
  ];
  if (view.trace.pages) parts.push("page=" + view.trace.page);
  if (view.mode !== "text") parts.push("mode=" + view.mode);
  if (view.lines) parts.push("lines=1");
  if (view.fade) parts.push("fade=1");
  if (view.sheet) parts.push("sheet=1");
  if (view.wide) parts.push("wide=1");
  if (view.zoom) parts.push("zoom=" + [view.zoom.x, view.zoom.y, view.zoom.size].map((x) => +x.toFixed(3)).join());
  if (view.filter.size) parts.push("roles=" + [...view.filter].join("."));
  if (view.beside != null) parts.push("beside=" + view.beside);
  return "#" + parts.join("&");
}

// The view in the address, so that a link shows the same. An embedded page has no address of its own.
/** @param {string} [head] */
export function writeHash(head) {
  if (location.protocol !== "about:") history.replaceState(null, "", hashOf(head));
}

// Which of several pages the address asks for, to be shown or to stand beside.
export function pageAsked({ hash } = location, name = "page") {
  const asked = new URLSearchParams(hash.slice(1)).get(name) ?? "";
  return /^\d+$/.test(asked) && Number(asked) < (view.trace.pages?.length || 0) ? Number(asked) : null;
}

// The view that an address asks for, of the page that it is about: another has other heads and a text of its own.
/** @param {{ hash: string }} address */
export function readHash(address = location, trace = view.trace) {
  const hash = new URLSearchParams(address.hash.slice(1));
  const one = (name, values) => /** @type {any} */ (values.includes(hash.get(name)) ? hash.get(name) : null);
  view.direction = one("dir", ["from", "to"]) || "from";
  view.mode = one("mode", ["columns"]) || "text";
  view.scale = one("scale", ["linear", "root", "log"]) || (trace.n <= 1024 ? "root" : "linear"); // n: the longest text
  view.lines = hash.has("lines");
  view.fade = hash.has("fade");
  view.sheet = hash.has("sheet");
  view.wide = hash.has("wide") && !view.sheet;
  const [x, y, size] = (hash.get("zoom") || "").split(",").map(Number);
  view.zoom = size > 0 && x >= 0 && y >= 0 ? { x, y, size } : null;
  view.filter = new Set((hash.get("roles") || "").split(".").filter((role) => role in ROLES));
  const [layer, number] = (hash.get("h") || "").split(".").map(Number);
  const head = trace.find(layer, number),
    own = /** @type {import("./types").Layer} */ (trace.byLayer.get((head || trace.heads[0]).layer));
  const position = (name, text) =>
    /^\d+$/.test(hash.get(name) ?? "") ? clamp(Number(hash.get(name)), 0, trace.texts[text].n - 1) : null;
  return { head, query: position("q", own.queries), key: position("k", own.keys) };
}
