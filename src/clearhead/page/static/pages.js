// Several pages in one: texts, models, items of a batch, steps of a training run. One is shown at a time, or two beside
// one another, see beside.js.
import { $, el, grouped } from "./util.js";
import { Trace } from "./data.js";
import { framed, source } from "./source.js";
import { emit, keyOf, queryOf, readHash, view } from "./state.js";
import { selectHead } from "./actions.js";

/** @type {Map<number, Promise<import("./types").Trace>>} */
const read = new Map(); // with their thumbnails
/** @type {number | null} */
let first = null, // whose parts have no number before them
  asked = 0; // the latest: an earlier one that comes later does not win

// The page with which this one began.
/** @param {import("./types").Trace} trace */
export function beginWith(trace) {
  first = asked = trace.page ?? 0;
  read.set(first, Promise.resolve(trace));
}

/** @param {number} n @returns {Promise<import("./types").Trace>} */
export function pageAt(n) {
  if (!read.has(n)) read.set(n, readPage(n));
  return /** @type {any} */ (read.get(n));
}

/** @param {number} n */
async function readPage(n) {
  const prefix = n === first ? "" : n + ".",
    trace = /** @type {import("./types").Trace} */ (/** @type {any} */ (new Trace(await source.facts(prefix), prefix)));
  await trace.readThumbs();
  return trace;
}

// The same pages with the numbers of another source.
export async function renewPages() {
  for (const trace of await Promise.all(read.values())) trace.renew(await source.facts(trace.prefix));
}

/** @param {import("./types").Trace} a @param {import("./types").Trace} b */
export const sameTexts = (a, b) => a.texts.every((text, i) => text.tokens.join("\n") === b.texts[i]?.tokens.join("\n"));

// The same head, and of the same text the same query and key; or those of an address.
/** @param {number} n @param {{ hash: string }} [address] */
export async function showPage(n, address) {
  asked = n;
  const trace = await pageAt(n),
    { layer, head } = view.head;
  if (asked !== n || trace === view.trace) return;
  const same = sameTexts(trace, view.trace),
    wanted = address && readHash(address, trace),
    { zoom } = view,
    query = wanted?.query ?? (same ? queryOf() : null),
    key = wanted?.key ?? (same ? keyOf() : null);
  await selectHead(
    wanted?.head || trace.find(layer, head) || trace.find(...trace.opening),
    { query, key, first: true },
    trace,
  );
  if (wanted) ((view.zoom = zoom), emit("layout")); // which another text took back
  if (trace.reading) listen(trace);
}

/** @type {Set<import("./types").Trace>} */
const heard = new Set();

// A live page hears of the heads as they are read, one layer after another.
/** @param {import("./types").Trace} trace */
export async function listen(trace) {
  if (heard.has(trace)) return;
  heard.add(trace);
  while (trace.reading) {
    await new Promise((done) => setTimeout(done, 400));
    if ((await trace.hear()) && trace === view.trace) emit("heads");
  }
}

// --- the control ------------------------------------------------------------------------------------------------

/** @returns {HTMLInputElement | null} */
const control = () => document.querySelector("#pages");

// A slider where the pages are numbers, else a list. Made once: it is held while it moves.
/** @param {import("./types").Trace} trace */
function makeControl({ pages = [], page }) {
  const stepped = pages.every((title) => typeof title === "number");
  const choice = stepped
    ? el("input", { id: "pages", type: "range", min: 0, max: pages.length - 1, value: page, "aria-label": "Step" })
    : el(
        "select",
        { id: "pages", "aria-label": "Another text or model" },
        ...pages.map((title, n) => el("option", { value: n, selected: n === page }, String(title))),
      );
  choice.addEventListener("input", () => showPage(Number(choice.value)));
  if (!stepped) return [choice];
  const number = el("b", { class: "num" });
  const tell = () => {
    number.textContent = grouped(Number(pages[Number(choice.value)]));
    choice.setAttribute("aria-valuetext", number.textContent);
  };
  for (const event of ["input", "change"]) choice.addEventListener(event, tell);
  tell();
  return ["step", choice, number];
}

function besideButton() {
  const title = "Two pages side by side, at the same head";
  return el("button", { class: "btn", id: "two-pages", title }, framed ? "This alone" : "Side by side");
}

// To choose a page, and to see two at once; nothing where there is one page.
export function drawPages() {
  const { trace } = view,
    choice = control();
  if (trace.pages && !choice) $("#choice").replaceChildren(...makeControl(trace), besideButton());
  else if (choice && choice !== document.activeElement) {
    choice.value = String(trace.page);
    choice.dispatchEvent(new Event("change")); // its number follows
  }
}
