// Tokens as elements: words of tokens, and where lines and paragraphs end.
import { CONTINUED, el, isInvisible, shown } from "./util.js";

const SPECIAL = /^(\[[A-Z]+\]|<\|?[\w/ ]+\|?>)$/;
const UNSPACED = /^[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/u;
const RIGHT_TO_LEFT = /^[^\p{L}]*[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/u;
const LETTER_BEFORE = /[\p{L}\p{N}]$/u;
const LETTER = /^[\p{L}\p{N}]/u;
const WORD = 40; // characters that are kept on one line

// How many lines end before the words of a token, and how many after them (or in a token of space alone).
/** @param {string} token @returns {[before: number, after: number]} */
export function breaks(token) {
  const count = (space) => space.split("\n").length - 1;
  const [before, after] = [token.length - token.trimStart().length, token.trimEnd().length];
  return token.trim() ? [count(token.slice(0, before)), count(token.slice(after))] : [0, count(token)];
}

// What a token looks like in running text: the space and the line ends before it stand there, not in it.
/** @param {string} token */
function visible(token) {
  if (isInvisible(token)) return shown(token);
  if (token.includes("\n")) return token.trim().replace(/\s*\n\s*/g, "⏎") + (breaks(token)[1] ? "⏎" : "");
  if (token && !token.trim()) return /\t/.test(token) ? "⇥" : "·".repeat(Math.min(token.length, 8));
  return shown(token.replace(/^ /, ""));
}

/** @param {string} token @param {number} i @param {string} previous @param {string} id */
export function spanOf(token, i, previous, id) {
  const names = ["t"];
  if (token === CONTINUED && i > 0) {
    const words = "continues the character before";
    return el("span", {
      class: "t continued",
      role: "option",
      id: id + i,
      "data-i": i,
      title: words,
      "aria-label": words,
    });
  }
  if (!token.trim() || isInvisible(token)) names.push("blank");
  if (SPECIAL.test(token.trim())) names.push("apart");
  if (token.length > 30) names.push("vast");
  if (LETTER_BEFORE.test(previous) && LETTER.test(token) && !UNSPACED.test(token)) names.push("joint");
  const dir = RIGHT_TO_LEFT.test(token) ? "rtl" : null;
  return el(
    "span",
    { class: names.join(" "), role: "option", id: id + i, "data-i": i, dir },
    visible(token),
  );
}

// The tokens [first, end) as one block; `spans` gets one element a token.
/** @param {import("./types").Text} text @param {string} id @param {number} first @param {number} end @param {HTMLElement[]} spans */
export function blockOf({ tokens, prompt = Infinity }, id, first, end, spans) {
  const dir = RIGHT_TO_LEFT.test(tokens.slice(first, end).join("")) ? "rtl" : null;
  const box = el("div", { class: "paragraph", role: "none", dir });
  let word = null,
    held = 0;
  for (let i = first; i < end; i++) {
    const token = tokens[i],
      previous = i ? tokens[i - 1] : " ",
      [before, after] = breaks(token);
    if (before && i > first) box.append(el("br"));
    if (token[0] === " " && token.trim() && i > first) box.append(" ");
    if (!word || held > WORD || /^\s/.test(token) || /\s$/.test(previous) || UNSPACED.test(token)) {
      box.append((word = el("span", { class: "word", role: "none" })));
      held = 0;
    }
    word.append((spans[i] = spanOf(token, i, previous, id)));
    if (i >= prompt) spans[i].classList.add("written");
    if (i === prompt) spans[i].before(el("span", { class: "seam", title: "The model wrote what follows" }));
    held += token.length;
    if (after && i + 1 < end) box.append(el("br"));
    if (after) word = null;
  }
  return box;
}

// The image with an element over each patch, and the tokens that stand for none of it above.
/** @param {import("./types").Text} text @param {string} id @param {HTMLElement[]} spans */
export function imageOf({ tokens, image }, id, spans) {
  const { uri, rows, columns, first } = /** @type {import("./types").Picture} */ (image),
    last = first + rows * columns,
    box = el("div", { class: "paragraph", role: "none" }),
    apart = el("div", { class: "specials", role: "none" }),
    frame = el("div", { class: "image", role: "none", style: `aspect-ratio:${columns}/${rows}` });
  frame.append(el("img", { src: uri, alt: "", draggable: "false" }));
  tokens.forEach((token, i) => {
    if (i < first || i >= last) return apart.append((spans[i] = spanOf(token, i, " ", id)));
    const [row, column] = [Math.floor((i - first) / columns), (i - first) % columns];
    const place = `left:${(100 * column) / columns}%;top:${(100 * row) / rows}%;width:${100 / columns}%;height:${100 / rows}%`;
    const label = `row ${row}, column ${column}`;
    spans[i] = el("span", { class: "t patch", role: "option", id: id + i, "data-i": i, "aria-label": label, title: label });
    spans[i].style.cssText = place;
    frame.append(spans[i]);
  });
  box.append(apart, frame);
  return box;
}
