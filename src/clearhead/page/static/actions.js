// What a person can do, whatever the pane it is done in.
import { clamp, percent, shown } from "./util.js";
import { roleName } from "./roles.js";
import { along, emit, faded, keyOf, leadKind, leadText, otherText, queryOf, say } from "./state.js";
import { keyText, layerOf, queryText, textOf, view, writeHash } from "./state.js";

/** @param {number} i @param {"query" | "key"} kind */
const named = (i, kind) => `${kind} ${i} ${shown(textOf(kind).tokens[i])}`;
const weightNow = () => percent(view.weights.at(queryOf(), keyOf()), view.weights.exact);

/** @param {number} token */
function strongest(token) {
  let best = token,
    most = -1;
  along(token).forEach((w, i) => {
    if (w > most && !(view.direction === "from" && faded(i))) [best, most] = [i, w];
  });
  return best;
}

// Where a token or its partner is about to go: the next step of an arrow counts from there.
/** @type {{ token: number | null, other: number | null }} */
const aimed = { token: null, other: null };

function changed() {
  view.hover = aimed.token = aimed.other = null;
  writeHash();
  emit("pair");
}

// Do something once the weights along a token, and those along its partner, are here: in a file they always are. Of
// several that wait, the last is done.
const turns = { pair: 0, hover: 0 };
function whenHere(kind, tokens, then) {
  const turn = ++turns[kind],
    missing = needed(view.weights, ...tokens);
  if (kind === "pair") turns.hover++; // a click is not undone by the pointer on its way there
  if (!missing) return then();
  missing.then(() => turn === turns[kind] && then());
}

function needed(weights, token, other) {
  const [leads, partner] = [token, other].map((i) => (i == null ? [] : [i]));
  return view.direction === "from" ? weights.need(leads, partner) : weights.need(partner, leads);
}

// Make a token lead, with its strongest partner or another.
function lead(token, given, then) {
  whenHere("pair", [token], () => {
    const other = given ?? strongest(token);
    whenHere("pair", [token, other], () => {
      Object.assign(view, { token, other });
      changed();
      then?.();
    });
  });
}

// A query worth opening with: in the later text, the strongest weight between two different words, no sink among them.
function openingQuery(trace, weights, head) {
  const { queries, keys, sinks: resting } = trace.byLayer.get(head.layer),
    [rows, columns] = [queries, keys].map((text) => trace.texts[text]),
    sinks = new Set(resting),
    isWord = (token) => /\p{L}{2}/u.test(token);
  const asks = rows.tokens.map((token, i) => (rows.image || isWord(token)) && (queries !== keys || !sinks.has(i))),
    told = columns.tokens.map((token, j) => (columns.image || isWord(token)) && !sinks.has(j));
  let best = rows.n - 1,
    most = 0;
  weights.each((i, j, w) => {
    if ((queries !== keys || i !== j) && i >= rows.n / 2 && asks[i] && told[j] && w > most) [best, most] = [i, w];
  });
  return best;
}

/** @param {import("./types").Head} a @param {import("./types").Head} b */
function sameTexts(a, b) {
  const [one, other] = [layerOf(a.layer), layerOf(b.layer)];
  return one.queries === other.queries && one.keys === other.keys;
}

/** @type {import("./types").Head | null} */
let latest = null; // the head asked for last: an earlier one that is decoded later does not win
export const headAskedFor = () => latest ?? view.head;

/**
 * @param {import("./types").Head} head
 * @param {{ query?: number | null, key?: number | null, first?: boolean }} at
 * @param {import("./types").Trace} trace another where the page is to show another
 */
export async function selectHead(head, at = {}, trace = view.trace) {
  latest = head;
  const weights = await trace.weights(head),
    from = view.direction === "from",
    opening = from ? (at.query ?? openingQuery(trace, weights, head)) : (at.key ?? 0);
  const token = !at.first && sameTexts(head, view.head) ? view.token : opening;
  await needed(weights, token);
  if (latest !== head) return;
  const moved = trace !== view.trace;
  Object.assign(view, { trace, head, weights, token, hover: null });
  view.other = (from ? at.key : at.query) ?? strongest(token);
  await needed(weights, token, view.other);
  if (latest !== head) return;
  if (moved) emit("trace");
  emit("head");
  changed();
  if (!at.first) say(`layer ${head.layer} head ${head.head}, ${head.role ?? "not read yet"}`);
}

export function selectToken(i) {
  view.pinned = true;
  const told = () => `Strongest ${view.other} ${shown(otherText().tokens[view.other])}, ${weightNow()}`;
  aimed.token = clamp(i, 0, leadText().n - 1);
  lead(aimed.token, null, () => say(`${named(view.token, leadKind())}. ${told()}`));
}

const sayPair = () => say(`${named(queryOf(), "query")}, ${named(keyOf(), "key")}, ${weightNow()}`);

export function selectOther(i) {
  const other = clamp(i, 0, otherText().n - 1);
  const [query, key] = view.direction === "from" ? [view.token, other] : [other, view.token];
  if (!view.weights.sees(query, key)) return;
  aimed.other = other;
  lead(view.token, other, sayPair);
}

/** @param {number} step */
export const moveToken = (step) => selectToken((aimed.token ?? view.token) + step);
/** @param {number} step */
export const moveOther = (step) => selectOther((aimed.other ?? view.other) + step);

export function selectPair(query, key) {
  if (!view.weights.sees(query, key)) return;
  const [token, other] = view.direction === "from" ? [query, key] : [key, query];
  view.pinned = true;
  lead(token, other, sayPair);
}

export function unpin() {
  view.pinned = !view.pinned;
  emit("hover");
  say(view.pinned ? `${named(view.token, leadKind())} is pinned` : `the ${leadKind()} follows the pointer`);
}

export function hoverToken(i) {
  whenHere("hover", [i], () => {
    view.hover = i;
    view.hoverOther = i == null ? null : strongest(i);
    emit("hover");
  });
}

/** @param {import("./types").Head} head */
const inRole = (head) => (view.filter.size ? view.filter.has(roleName(head.role)) : head.role === view.head.role);
// Whether there is another head of the same role, or of those that the legend shows.
export const hasOthers = () => view.trace.heads.some((head) => head !== view.head && inRole(head));

// The next or previous of these heads, in the order of layers; of any role where there is no other.
/** @param {1 | -1} step */
export function nextHead(step) {
  const { heads } = view.trace,
    any = !hasOthers();
  const from = heads.indexOf(view.head);
  for (let i = 1; i <= heads.length; i++) {
    const head = heads[(from + i * step + i * heads.length) % heads.length];
    if (any || inRole(head)) return selectHead(head);
  }
}

/** @param {import("./types").Direction} direction */
export function setDirection(direction) {
  if (direction === view.direction) return;
  const token = clamp(queryText() === keyText() ? view.token : view.other, 0, otherText().n - 1);
  view.direction = direction;
  lead(token, null);
}

/** @param {import("./types").Mode} mode */
export function setMode(mode) {
  Object.assign(view, { mode, hover: null });
  writeHash();
  emit("layout");
}

/** @param {boolean} sheet */
export function setSheet(sheet) {
  Object.assign(view, { sheet, wide: false, hover: null });
  writeHash();
  emit("layout");
  say(sheet ? "contact sheet: every head by role" : "contact sheet closed");
}

/** @param {boolean} wide */
export function setWide(wide) {
  Object.assign(view, { wide, sheet: false, hover: null });
  writeHash();
  emit("layout");
}

/** @param {import("./types").Tab} tab */
export function setTab(tab) {
  if (tab === view.tab) return;
  view.tab = tab;
  emit("layout");
}

/** @param {Partial<import("./types").View>} changes */
export function setLook(changes) {
  Object.assign(view, changes, { hover: null });
  if ("fade" in changes && view.direction === "from") view.other = strongest(view.token);
  writeHash();
  emit("look");
}

/** @param {string} role @param {boolean} add */
export function filterRole(role, add) {
  const only = view.filter.size === 1 && view.filter.has(role);
  if (add) view.filter.has(role) ? view.filter.delete(role) : view.filter.add(role);
  else view.filter = new Set(only ? [] : [role]);
  writeHash();
  emit("filter");
}

export function clearFilter() {
  view.filter = new Set();
  writeHash();
  emit("filter");
}
