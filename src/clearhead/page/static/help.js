// Help: how to move, what the words mean, what this file holds.
import { $, el } from "./util.js";
import { glyph, kindOf, meaning, rolesOf } from "./roles.js";
import { keyText, queryText, view } from "./state.js";

const KEYS = {
  Move: [
    ["1 – 4", "go to atlas, text, matrix, table"],
    ["← →", "previous, next query"],
    ["↑ ↓", "line above, line below"],
    ["⇧← ⇧→", "move the key instead"],
    ["[ ]", "previous, next head of this role, or of the roles shown; of any where there is no other"],
    ["/", "find a token"],
  ],
  Look: [
    ["f", "from: what it attends to"],
    ["t", "to: what attends to it"],
    ["m", "flowing text or two columns"],
    ["l", "lines to the strongest tokens"],
    ["s", "fade sinks"],
    ["c", "colour scale: √, log, linear"],
  ],
  Page: [
    ["a", "every head by role"],
    ["x", "enlarge the matrix"],
    ["+ −", "zoom into the matrix, out of it"],
    ["0 z", "the whole matrix, its cells"],
    ["d", "light or dark"],
    ["Esc", "back, then show all roles again"],
    ["?", "this help"],
  ],
};
const MOUSE =
  "Click a token to make it the query; click it again to let the query follow the pointer. Shift-click or a long press picks the key. In the matrix a click picks query and key at once; scroll or pinch to zoom, drag to move, double-click for single cells. In the legend a click shows one role, shift-click adds another.";
const SCORES =
  "Each score is the mean share of attention that follows the pattern, over the tokens where it could; the thin mark is what a head would get that spreads evenly over all it may see. A sink is a token that collects attention whatever the query. Attention shows where a head looks, not what the model needs. Layers and heads count from 0. Entropy is in nats.";

const DERIVATION =
  "“Looks at” is the weight α. “Gets from” is α (v·z) / |z|², the part of the head’s output z that a key brings: these add up to 100%, and may be negative. q and k are those that the model compares, after any turn by position. Every step can be followed with the numbers shown.";

function keyList(title, entries) {
  const list = el("dl");
  for (const [keys, words] of entries)
    list.append(
      el("dt", {}, ...keys.split(" ").flatMap((k) => [k === "–" ? k : el("kbd", {}, k), " "])),
      el("dd", {}, words),
    );
  return el("div", {}, el("h3", {}, title), list);
}

const part = (title, ...content) => el("div", { class: "wide" }, el("h3", {}, title), ...content);

export function openHelp() {
  const dialog = /** @type {HTMLDialogElement} */ ($("#help"));
  const kind = kindOf(queryText(), keyText());
  const roles = rolesOf(kind).map((role) =>
    el("div", {}, glyph(role, 16), el("b", {}, role), el("span", {}, meaning(kind, role))),
  );
  const single = el("input", { type: "checkbox", id: "single-keys" });
  single.checked = view.singleKeys;
  single.addEventListener("change", () => (view.singleKeys = single.checked));
  const close = el("button", { class: "btn" }, "Close");
  close.addEventListener("click", () => dialog.close());
  dialog.replaceChildren(
    el("h2", { id: "help-title" }, "Reading this page"),
    el(
      "div",
      { class: "help" },
      ...Object.entries(KEYS).map(([title, entries]) => keyList(title, entries)),
      part("With a mouse or a finger", el("p", {}, MOUSE)),
      part("Roles", el("div", { class: "roles" }, ...roles), el("p", { class: "mute" }, SCORES)),
      part("Derivation", el("p", {}, DERIVATION)),
      part("This file", el("p", {}, view.trace.notes.join(" "))),
      el(
        "div",
        { class: "wide bar" },
        el("label", { class: "check" }, single, "single-key shortcuts"),
        el("span", { class: "grow" }),
        close,
      ),
    ),
  );
  dialog.showModal();
  close.focus(/** @type {any} */ ({ focusVisible: false }));
}
