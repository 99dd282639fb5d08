// The line above the text: the strongest weights of the row, and the rest, so that the row adds up.
import { $, atOnce, clamp, el, fill, percent, shown, soon, under } from "./util.js";
import { along, on, otherText, shownOther, shownToken, textOf, view } from "./state.js";
import { selectOther } from "./actions.js";

export const subscript = (i) => el("sub", {}, String(i));

// A token with its position, in the colour of the query or of the key.
/** @param {number} i @param {"query" | "key"} kind */
export const naming = (i, kind) =>
  el("span", { class: "naming " + kind }, el("b", {}, shown(textOf(kind).tokens[i])), subscript(i));

function chip(i, weight) {
  const pressed = i === shownOther();
  return el(
    "button",
    { class: "chip", "data-i": i, "aria-pressed": pressed },
    el("b", {}, shown(otherText().tokens[i])),
    subscript(i),
    " " + percent(weight, view.weights.exact),
  );
}

// How many chips of a line that is too long may fit, measured at once: it is seen then whether they do.
/** @param {HTMLElement} line @param {number} most */
function fitting(line, most) {
  const ends = [...line.querySelectorAll(".chip")].map((chip) => chip.getBoundingClientRect().right),
    rest = /** @type {HTMLElement} */ (line.lastElementChild).offsetWidth - 12; // it may become shorter
  return clamp(ends.filter((end) => end + rest <= line.getBoundingClientRect().right).length, 1, most);
}

function drawChips() {
  if (!view.weights) return void $("#chips").replaceChildren(el("span", { class: "mute" }, "reading weights …"));
  const from = view.direction === "from",
    token = shownToken(),
    weights = along(token);
  const order = [...weights.keys()]
    .filter((i) => weights[i] >= 0.001)
    .sort((a, b) => weights[b] - weights[a])
    .slice(0, 6);
  const total = weights.reduce((sum, w) => sum + w, 0);
  const line = $("#chips");
  const fillWith = (count) => {
    const shownOnes = order.slice(0, count),
      told = shownOnes.reduce((sum, i) => sum + weights[i], 0);
    const rest = from ? Math.max(0, 1 - told) : 0;
    const end = !from
      ? order.length
        ? `in all ${total.toFixed(2)}`
        : ""
      : rest > 0.0005
        ? `rest ${percent(rest, view.weights.exact)}`
        : "";
    fill(
      line,
      naming(token, from ? "query" : "key"),
      from ? " attends to " : " is attended by ",
      ...(order.length ? shownOnes.map((i) => chip(i, weights[i])) : ["nothing above 0.1%"]),
      el("span", { class: "mute num" }, end ? " " + end : ""),
    );
  };
  let count = order.length;
  fillWith(count);
  return () => {
    while (count > 1 && line.scrollWidth > line.clientWidth + 1) fillWith((count = fitting(line, count - 1)));
  };
}

export function startChips() {
  $("#chips").addEventListener("click", (event) => {
    const button = under(event, ".chip");
    if (button) selectOther(Number(button.dataset.i));
  });
  on("pair look layout", atOnce(drawChips));
  on("hover", soon(drawChips));
}
