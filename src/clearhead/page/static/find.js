// Find words in the text: every Enter goes to the next place, with shift to the one before.
import { $, inputOf } from "./util.js";
import { leadText, say, view } from "./state.js";
import { selectToken } from "./actions.js";

/** @type {{ of: import("./types").Text, words: string, starts: number[] } | null} */
let text = null; // the whole text in small letters, and where each token begins in it

function wholeText() {
  const of = leadText();
  if (text?.of === of) return text;
  const starts = [];
  let at = 0;
  const parts = of.tokens.map((token) => {
    starts.push(at);
    const small = token.toLowerCase();
    at += small.length;
    return small;
  });
  return (text = { of, words: parts.join(""), starts });
}

// The token in which a character stands.
function tokenAt(starts, character) {
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= character) low = middle;
    else high = middle - 1;
  }
  return low;
}

// The tokens that begin what is looked for, in the order of the text.
/** @param {string} words */
function placesOf(words) {
  const { words: all, starts } = wholeText(),
    wanted = words.toLowerCase(),
    found = [];
  for (let at = all.indexOf(wanted); at >= 0; at = all.indexOf(wanted, at + 1)) {
    const token = tokenAt(starts, at);
    if (found.at(-1) !== token) found.push(token);
  }
  return found;
}

/** @param {string} words @param {boolean} back */
function find(words, back) {
  const places = placesOf(words),
    after = places.findIndex((i) => i > view.token),
    before = places.findLastIndex((i) => i < view.token);
  if (!places.length) return tell(`“${words}” is not in the text`);
  const at = back ? (before < 0 ? places.length - 1 : before) : Math.max(after, 0);
  selectToken(places[at]);
  tell(`“${words}”: place ${at + 1} of ${places.length}`);
}

function tell(words) {
  $("#reader").replaceChildren(words);
  say(words);
}

export function startFind() {
  const box = inputOf("#find");
  box.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter" && box.value) find(box.value, event.shiftKey);
    if (event.key === "Escape") ((box.value = ""), box.blur(), $("#text").focus()); // which columns hide
  });
}
