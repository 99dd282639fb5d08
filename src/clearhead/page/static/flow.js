// The text as blocks, cut where lines are empty. Of a very long text only the blocks near the window are built: the
// others are empty boxes of about their height.
import { $ } from "./util.js";
import { view } from "./state.js";
import { blockOf, breaks } from "./words.js";

const LONG = 512, // more tokens are set smaller, and scroll
  WHOLE = 4_000, // more tokens are not built at once
  BLOCK = 400, // tokens of a block, where not all are built
  NEAR = 1.5, // windows above and below that are built
  KEPT = 60; // blocks that stay built when the window moves on

/** @type {HTMLElement[]} */
export const spans = []; // one element a token, where it is built
let blocks = [], // { first, end, box, built, characters }
  sparse = false,
  /** @type {(blocks: { first: number, end: number }[]) => void} */
  whenBuilt = () => {};

// Where the text is cut: at every empty line; in a long text also within, at the end of a line or of a word.
/** @param {string[]} tokens */
function cuts(tokens) {
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

export function buildFlow(built) {
  const { tokens } = view.trace,
    text = $("#text");
  [sparse, whenBuilt] = [tokens.length > WHOLE, built];
  text.classList.toggle("long", tokens.length > LONG);
  const edges = cuts(tokens),
    length = tokens.map((token) => token.length);
  blocks = edges.slice(1).map((end, b) => ({
    first: edges[b],
    end,
    built: false,
    box: document.createElement("div"),
    characters: length.slice(edges[b], end).reduce((sum, x) => sum + x, 0),
  }));
  text.replaceChildren(...blocks.map(({ box }) => box));
  if (!sparse) blocks.forEach(build);
}

function build(block) {
  const { tokens } = view.trace,
    box = blockOf(tokens, block.first, block.end, spans);
  if (block.first && opensParagraph(tokens, block.first)) box.classList.add("gap");
  if (sparse) for (let i = block.first; i < block.end; i++) numberOption(spans[i], i, tokens.length);
  block.box.replaceWith(box);
  Object.assign(block, { box, built: true });
}

const opensParagraph = (tokens, i) => breaks(tokens[i])[0] > 1 || breaks(tokens[i - 1])[1] > 1;

function numberOption(span, i, n) {
  span.setAttribute("aria-posinset", i + 1);
  span.setAttribute("aria-setsize", n);
}

function unbuild(block) {
  const box = document.createElement("div");
  box.style.height = block.box.offsetHeight + "px";
  block.box.replaceWith(box);
  Object.assign(block, { box, built: false });
  for (let i = block.first; i < block.end; i++) delete spans[i];
}

// Boxes that were never built get the height that their characters take.
export function estimateHeights() {
  if (!sparse) return;
  const text = $("#text"),
    perLine = Math.max(10, text.clientWidth / 8.2);
  for (const { box, built, characters } of blocks)
    if (!built) box.style.height = 33 * Math.ceil(characters / perLine) + "px";
}

const blockAt = (i) => /** @type {any} */ (blocks.findLast((block) => block.first <= i));

// Build what is near the window; returns whether anything was built.
export function fillWindow() {
  if (!sparse) return false;
  const text = $("#text"),
    { scrollTop, clientHeight } = text;
  if (!clientHeight) return false;
  const distance = ({ box }) =>
    Math.max(scrollTop - box.offsetTop - box.offsetHeight, box.offsetTop - scrollTop - clientHeight) /
    clientHeight;
  const missing = blocks.filter((block) => !block.built && distance(block) < NEAR);
  missing.forEach(build);
  const far = blocks.filter((block) => block.built).sort((a, b) => distance(b) - distance(a));
  far.slice(0, Math.max(0, far.length - KEPT)).forEach((block) => distance(block) > NEAR && unbuild(block));
  if (missing.length) whenBuilt(missing);
  return missing.length > 0;
}

// How far down in the text a token stands, near enough where it is not built.
/** @param {number} i */
export function topOf(i) {
  if (spans[i]) return spans[i].offsetTop;
  const { first, end, box } = blockAt(i);
  return box.offsetTop + (box.offsetHeight * (i - first)) / (end - first);
}

// Bring a token into the window, with the start of a line at its top.
/** @param {number} i */
export function scrollToToken(i) {
  const text = $("#text");
  if (view.mode !== "text" || text.scrollHeight <= text.clientHeight) return;
  if (!spans[i]) {
    text.scrollTop = topOf(i) - text.clientHeight / 2;
    for (let tries = 0; tries < 3 && fillWindow(); tries++) text.scrollTop = topOf(i) - text.clientHeight / 2;
  }
  const y = topOf(i);
  if (y >= text.scrollTop + 30 && y <= text.scrollTop + text.clientHeight - 70) return;
  let first = i; // the token at the start of the line that comes to the top
  while (spans[first - 1] && spans[first - 1].offsetTop >= y - text.clientHeight * 0.6) first--;
  text.scrollTop = first ? topOf(first) - 8 : 0;
  fillWindow();
}

export const eachBuilt = (visit) => {
  if (!sparse) spans.forEach((_, i) => visit(i));
  else for (const block of blocks) if (block.built) for (let i = block.first; i < block.end; i++) visit(i);
};
