// Contact sheet: every head by role, the strongest first.
import { $, $$, el, plural, under } from "./util.js";
import { glyph, kindOf, meaning, roleName } from "./roles.js";
import { headsShown, keyText, on, queryText, view } from "./state.js";
import { selectHead, setSheet } from "./actions.js";
import { cardOf, focusAtlas, hideCard, thumbnail } from "./atlas.js";

// The order of roles: what is rare and telling comes first, sinks last.
const ORDER = ["aligned", "previous", "induction", "duplicate", "self", "local", "broad", "other", "sink"];

/** @param {import("./types").Head} head */
const strength = (head) => head.scores[head.role] ?? 0;

/** @param {import("./types").Head} head */
function cellOf(head) {
  const name = `${head.layer}.${head.head}`,
    chosen = head === view.head;
  const label = `${name}: layer ${head.layer} head ${head.head}, ${head.role}`;
  const button = el(
    "button",
    { "data-sheet": name, tabindex: chosen ? 0 : -1, "aria-label": label, "aria-current": chosen },
    thumbnail(head, false),
    el("span", { "aria-hidden": "true" }, name),
  );
  return button;
}

/** @param {string} role @param {import("./types").Head[]} heads */
function groupOf(role, heads) {
  const title = el("h3", {}, glyph(role, 16), role, el("span", { class: "mute" }, String(heads.length)));
  const own = [...heads].sort((a, b) => strength(b) - strength(a));
  return el(
    "section",
    { "aria-label": role },
    el("div", {}, title, el("p", {}, meaning(kindOf(queryText(), keyText()), role))),
    el("div", { class: "heads" }, ...own.map(cellOf)),
  );
}

function drawSheet() {
  if (!view.sheet) return $("#sheet").replaceChildren();
  const groups = ORDER.map((role) => ({
    role,
    heads: headsShown().filter((head) => roleName(head.role) === role),
  }));
  const shown = groups.filter(
    ({ role, heads }) => heads.length && (!view.filter.size || view.filter.has(role)),
  );
  const what = plural(headsShown().length, "head"),
    close = el("button", { class: "btn square", "aria-label": "Back", title: "Back (a)" }, "⤢");
  close.addEventListener("click", () => setSheet(false));
  $("#sheet").replaceChildren(
    el(
      "div",
      { class: "bar" },
      el(
        "h2",
        {},
        "Atlas",
        el("span", { class: "mute" }, `${what} by role, the strongest first; 17.5 is layer 17, head 5`),
      ),
      el("span", { class: "grow" }),
      close,
    ),
    ...shown.map(({ role, heads }) => groupOf(role, heads)),
  );
}

/** @param {Event} event @returns {any} a head, or nothing */
const headAt = (event) => {
  const button = under(event, "[data-sheet]");
  return button && view.trace.byName.get(String(button.dataset.sheet));
};

// Left and right walk the heads; up and down go to the nearest one of the line above or below.
function sheetKey(event) {
  const all = $$("#sheet [data-sheet]"),
    at = all.findIndex((one) => one === under(event, "button"));
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (!step || at < 0) return;
  event.preventDefault();
  event.stopPropagation();
  if (event.key === "ArrowLeft" || event.key === "ArrowRight") return all[at + step]?.focus();
  const box = all[at].getBoundingClientRect();
  const beyond = all.filter((one) => (one.getBoundingClientRect().top - box.top) * step > 4);
  const line = Math.min(...beyond.map((one) => Math.abs(one.getBoundingClientRect().top - box.top)));
  const off = (one) => Math.abs(one.getBoundingClientRect().left - box.left);
  const near = beyond.filter(
    (one) => Math.abs(Math.abs(one.getBoundingClientRect().top - box.top) - line) < 4,
  );
  near.sort((a, b) => off(a) - off(b))[0]?.focus();
}

export function startSheet() {
  const sheet = $("#sheet");
  $("#atlas-sheet").addEventListener("click", () => setSheet(!view.sheet));
  sheet.addEventListener("keydown", sheetKey);
  sheet.addEventListener("click", (event) => {
    const head = headAt(event);
    if (!head) return;
    setSheet(false);
    selectHead(head).then(focusAtlas);
  });
  const tell = (event) => headAt(event) && cardOf(headAt(event), /** @type {Element} */ (event.target));
  sheet.addEventListener("mouseover", tell);
  sheet.addEventListener("focusin", (event) => under(event, ":focus-visible") && tell(event));
  sheet.addEventListener("mouseleave", hideCard);
  sheet.addEventListener("focusout", hideCard);
  on("layout filter theme heads", drawSheet);
}
