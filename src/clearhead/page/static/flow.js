// The text as blocks, cut where lines are empty. Of a very long text only the blocks near the window are built: the
// others are empty boxes of about their height.
import { $, el } from "./util.js";
import { keyText, queryText, view } from "./state.js";
import { blockOf, breaks, imageOf } from "./words.js";

const LONG = 512, // more tokens are set smaller, and scroll
  WHOLE = 4_000, // more tokens are not built at once
  BLOCK = 400, // tokens of a block, where not all are built
  NEAR = 1.5, // windows above and below that are built
  KEPT = 60; // blocks that stay built when the window moves on

// One text, or the source above the target: each with its blocks, and one element a token where it is built.
/**
 * @typedef {{ first: number, end: number, box: HTMLElement, built: boolean, characters: number }} Block
 * @typedef {{ text: import("./types").Text, id: string, spans: HTMLElement[], blocks: Block[], sparse: boolean }} Flow
 */
/** @type {{ query: Flow, key: Flow }} */
export const flows = /** @type {any} */ ({ query: null, key: null });
/** @type {(flow: Flow, blocks: Block[]) => void} */
let whenBuilt = () => {};
/** @returns {Flow[]} */
const all = () => (flows.query === flows.key ? [flows.key] : [flows.key, flows.query]);
const isSparse = () => all().some(({ sparse }) => sparse);

// Where the text is cut: at every empty line; in a long text also within, at the end of a line or of a word.
/** @param {string[]} tokens @param {boolean} sparse */
function cuts(tokens, sparse) {
  const at = new Set([0]);
  tokens.forEach((token, i) => {
    const [before, after] = breaks(token);
    if (before > 1) at.add(i);
    if (after > 1) at.add(i + 1);
  });
  const edges = [...at.add(tokens.length)].sort((a, b) => a - b);
  return sparse
    ? edges
        .slice(1)
        .flatMap((end, p) => shorter(tokens, edges[p], end))
        .concat(tokens.length)
    : edges;
}

// Cuts of [first, end) into blocks of at most BLOCK tokens, its start among them.
/** @param {string[]} tokens @param {number} first @param {number} end */
function shorter(tokens, first, end) {
  const at = [first];
  for (let from = first; end - from > BLOCK; at.push(from)) {
    const last = from + BLOCK,
      window = Array.from({ length: BLOCK / 2 }, (_, i) => last - i);
    const line = window.find((i) => breaks(tokens[i])[0] || breaks(tokens[i - 1])[1]);
    from = line ?? window.find((i) => /^\s/.test(tokens[i])) ?? last;
  }
  return at;
}

// Lay out the texts of the chosen head, unless they are there already.
export function buildFlow(built) {
  const [queries, keys] = [queryText(), keyText()],
    pane = $("#text");
  if (flows.query?.text === queries && flows.key?.text === keys) return;
  whenBuilt = built;
  flows.key = flowOf(keys, "t");
  flows.query = queries === keys ? flows.key : flowOf(queries, "u");
  pane.classList.toggle("long", Math.max(queries.n, keys.n) > LONG);
  pane.classList.toggle("two", queries !== keys);
  pane.classList.toggle("pictured", keys.image != null);
  pane.replaceChildren(
    ...all().flatMap((flow) => [
      ...(queries === keys ? [] : [el("h3", { class: "side-name", role: "presentation" }, flow.text.name)]),
      ...flow.blocks.map(({ box }) => box),
    ]),
  );
  for (const flow of all()) if (!flow.sparse) flow.blocks.forEach((block) => build(flow, block));
}

/** @param {import("./types").Text} text @param {string} id @returns {Flow} */
function flowOf(text, id) {
  const { tokens } = text,
    sparse = tokens.length > WHOLE,
    edges = text.image ? [0, tokens.length] : cuts(tokens, sparse),
    length = tokens.map((token) => token.length);
  const blocks = edges.slice(1).map((end, b) => ({
    first: edges[b],
    end,
    built: false,
    box: document.createElement("div"),
    characters: length.slice(edges[b], end).reduce((sum, x) => sum + x, 0),
  }));
  return { text, id, spans: [], blocks, sparse };
}

/** @param {Flow} flow @param {Block} block */
function build(flow, block) {
  const { text, id, spans } = flow,
    { tokens } = text,
    box = text.image ? imageOf(text, id, spans) : blockOf(text, id, block.first, block.end, spans);
  if (block.first && opensParagraph(tokens, block.first)) box.classList.add("gap");
  if (flow.sparse) for (let i = block.first; i < block.end; i++) numberOption(spans[i], i, tokens.length);
  block.box.replaceWith(box);
  Object.assign(block, { box, built: true });
}

const opensParagraph = (tokens, i) => breaks(tokens[i])[0] > 1 || breaks(tokens[i - 1])[1] > 1;

function numberOption(span, i, n) {
  span.setAttribute("aria-posinset", i + 1);
  span.setAttribute("aria-setsize", n);
}

/** @param {Flow} flow @param {Block} block */
function unbuild(flow, block) {
  const box = document.createElement("div");
  box.style.height = block.box.offsetHeight + "px";
  block.box.replaceWith(box);
  Object.assign(block, { box, built: false });
  for (let i = block.first; i < block.end; i++) delete flow.spans[i];
}

// Boxes that were never built get the height that their characters take.
export function estimateHeights() {
  const text = $("#text"),
    perLine = Math.max(10, text.clientWidth / 8.2);
  for (const { sparse, blocks } of all())
    for (const { box, built, characters } of blocks)
      if (sparse && !built) box.style.height = 33 * Math.ceil(characters / perLine) + "px";
}

/** @param {Flow} flow @param {number} i */
const blockAt = ({ blocks }, i) => /** @type {any} */ (blocks.findLast((block) => block.first <= i));

// Build what is near the window; returns whether anything was built.
export function fillWindow() {
  if (!isSparse()) return false;
  const text = $("#text"),
    { scrollTop, clientHeight } = text;
  if (!clientHeight) return false;
  const distance = ({ box }) =>
    Math.max(scrollTop - box.offsetTop - box.offsetHeight, box.offsetTop - scrollTop - clientHeight) /
    clientHeight;
  let some = false;
  for (const flow of all().filter(({ sparse }) => sparse)) {
    const missing = flow.blocks.filter((block) => !block.built && distance(block) < NEAR);
    missing.forEach((block) => build(flow, block));
    const far = flow.blocks.filter((block) => block.built).sort((a, b) => distance(b) - distance(a));
    far
      .slice(0, Math.max(0, far.length - KEPT))
      .forEach((block) => distance(block) > NEAR && unbuild(flow, block));
    if (missing.length) ((some = true), whenBuilt(flow, missing));
  }
  return some;
}

// How far down in the text a token stands, near enough where it is not built.
/** @param {"query" | "key"} kind @param {number} i */
export function topOf(kind, i) {
  const flow = flows[kind],
    span = flow.spans[i];
  const frame = /** @type {HTMLElement | null} */ (span?.closest(".image"));
  if (span) return span.offsetTop + (frame ? frame.offsetTop : 0);
  const { first, end, box } = blockAt(flow, i);
  return box.offsetTop + (box.offsetHeight * (i - first)) / (end - first);
}

// Bring a token into the window, with the start of a line at its top.
/** @param {"query" | "key"} kind @param {number} i */
export function scrollToToken(kind, i) {
  const text = $("#text"),
    { spans } = flows[kind];
  if (view.mode !== "text" || text.scrollHeight <= text.clientHeight) return;
  if (!spans[i]) {
    const there = () => (text.scrollTop = topOf(kind, i) - text.clientHeight / 2);
    there();
    for (let tries = 0; tries < 3 && fillWindow(); tries++) there();
  }
  const y = topOf(kind, i);
  if (y >= text.scrollTop + 30 && y <= text.scrollTop + text.clientHeight - 70) return;
  let first = i; // the token at the start of the line that comes to the top
  while (spans[first - 1] && topOf(kind, first - 1) >= y - text.clientHeight * 0.6) first--;
  text.scrollTop = first ? topOf(kind, first) - 8 : 0;
  fillWindow();
}

/** @param {"query" | "key"} kind @param {(i: number) => void} visit */
export function eachBuilt(kind, visit) {
  const { sparse, spans, blocks } = flows[kind];
  if (!sparse) spans.forEach((_, i) => visit(i));
  else for (const block of blocks) if (block.built) for (let i = block.first; i < block.end; i++) visit(i);
}
