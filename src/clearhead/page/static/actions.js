// What a person can do, whatever the pane it is done in.
import { clamp, percent, shown } from "./util.js";
import { roleName } from "./roles.js";
import { along, emit, faded, keyOf, queryOf, say, sinksOf, view, writeHash } from "./state.js";

const named = (i) => `${i} ${shown(view.trace.tokens[i])}`;
const weightNow = () => percent(view.weights.at(queryOf(), keyOf()), view.weights.exact);

function strongest(token) {
  let best = token,
    most = -1;
  along(token).forEach((w, i) => {
    if (w > most && !(view.direction === "from" && faded(i))) [best, most] = [i, w];
  });
  return best;
}

function changed() {
  view.hover = null;
  writeHash();
  emit("pair");
}

// A query worth opening with: in the later text, the strongest weight between two different words, no sink among them.
export function openingQuery() {
  const { n, tokens } = view.trace,
    sinks = new Set(sinksOf(view.head));
  const word = tokens.map((token, i) => /\p{L}{2}/u.test(token) && !sinks.has(i));
  let best = n - 1,
    most = 0;
  view.weights.each((i, j, w) => {
    if (i !== j && i >= n / 2 && word[i] && word[j] && w > most) [best, most] = [i, w];
  });
  return best;
}

let latest = null; // the head asked for last: an earlier one that is decoded later does not win

export async function selectHead(head, at = {}) {
  latest = head;
  const weights = await view.trace.weights(head);
  if (latest !== head) return;
  Object.assign(view, { head, weights, hover: null });
  if (at.first) view.token = view.direction === "from" ? (at.query ?? openingQuery()) : (at.key ?? 0);
  const given = view.direction === "from" ? at.key : at.query;
  view.other = given ?? strongest(view.token);
  emit("head");
  changed();
  if (!at.first) say(`layer ${head.layer} head ${head.head}, ${head.role}`);
}

export function selectToken(i) {
  view.token = clamp(i, 0, view.trace.n - 1);
  view.pinned = true;
  view.other = strongest(view.token);
  changed();
  say(
    `${view.direction === "from" ? "query" : "key"} ${named(view.token)}. Strongest ${named(view.other)}, ${weightNow()}`,
  );
}

export function selectOther(i) {
  const other = clamp(i, 0, view.trace.n - 1);
  const [query, key] = view.direction === "from" ? [view.token, other] : [other, view.token];
  if (!view.weights.sees(query, key)) return;
  view.other = other;
  changed();
  say(`query ${named(query)}, key ${named(key)}, ${weightNow()}`);
}

export function selectPair(query, key) {
  if (!view.weights.sees(query, key)) return;
  [view.token, view.other] = view.direction === "from" ? [query, key] : [key, query];
  view.pinned = true;
  changed();
  say(`query ${named(query)}, key ${named(key)}, ${weightNow()}`);
}

export function unpin() {
  view.pinned = !view.pinned;
  emit("hover");
  say(view.pinned ? `query ${named(view.token)} is pinned` : "the query follows the pointer");
}

export function hoverToken(i) {
  view.hover = i;
  view.hoverOther = i == null ? null : strongest(i);
  emit("hover");
}

// The next or previous head, in the order of layers: of the same role, or of those that the legend shows.
export function nextHead(step) {
  const { heads } = view.trace,
    { filter } = view;
  const shown = (head) => (filter.size ? filter.has(roleName(head.role)) : head.role === view.head.role);
  const from = heads.indexOf(view.head);
  for (let i = 1; i <= heads.length; i++) {
    const head = heads[(from + i * step + i * heads.length) % heads.length];
    if (shown(head)) return selectHead(head);
  }
}

export function setDirection(direction) {
  if (direction === view.direction) return;
  view.direction = direction;
  view.other = strongest(view.token);
  changed();
}

export function setMode(mode) {
  Object.assign(view, { mode, hover: null });
  writeHash();
  emit("layout");
}

export function setSheet(sheet) {
  Object.assign(view, { sheet, wide: false, hover: null });
  writeHash();
  emit("layout");
  say(sheet ? "contact sheet: every head by role" : "contact sheet closed");
}

export function setWide(wide) {
  Object.assign(view, { wide, sheet: false, hover: null });
  writeHash();
  emit("layout");
}

export function setTab(tab) {
  if (tab === view.tab) return;
  view.tab = tab;
  emit("layout");
}

export function setLook(changes) {
  Object.assign(view, changes, { hover: null });
  if ("fade" in changes && view.direction === "from") view.other = strongest(view.token);
  writeHash();
  emit("look");
}

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
