// Two pages side by side, each in a frame of its own, at the same head. The page around them lends both its numbers, from
// wherever it has them: a frame is the page without data, that asks as a page in a notebook asks the kernel.
import { $, el, under } from "./util.js";
import { theme } from "./colour.js";
import { framed, source } from "./source.js";
import { emit, hashOf, on, view, writeHash } from "./state.js";
import { selectHead } from "./actions.js";
import { pageAt, sameTexts, showPage } from "./pages.js";
import { untouched } from "./saving.js";

/** @type {HTMLIFrameElement[]} */
let frames = [];

// --- the page around --------------------------------------------------------------------------------------------

// The page once more, about to show page `n` as this one shows its own; another text has a query and a key of its own.
/** @param {number} n @param {boolean} same */
function frameOf(n, same) {
  const head = /** @type {HTMLElement} */ (document.head.cloneNode(true)),
    at = hashOf().replace(/&page=\d+/, "&page=" + n).replace(/&(beside|sheet|wide)=\w+/g, "");
  head.querySelectorAll("[name=source], [rel=preload]").forEach((one) => one.remove());
  head.append(el("meta", { name: "source", content: "around", "data-at": same ? at : at.replace(/&(q|k|zoom)=[^&]+/g, "") }));
  const srcdoc = `<!doctype html><html lang="en">${head.outerHTML}<body class="waiting">${untouched.join("")}</body></html>`;
  return el("iframe", { title: String(view.trace.pages?.[n]), srcdoc });
}

/** @param {number} other */
export async function standBeside(other) {
  const same = sameTexts(await pageAt(other), view.trace);
  leave();
  view.beside = other;
  frames = [frameOf(view.trace.page || 0, true), frameOf(other, same)];
  cover(true);
  document.body.append(el("div", { id: "beside" }, ...frames));
  frames[0].focus();
  writeHash();
}

function cover(on) {
  for (const part of ["header", "main"]) $(part).inert = on;
}

export function leave() {
  if (view.beside == null) return;
  view.beside = null;
  $("#beside").remove();
  cover(false);
  frames = [];
}

// Again, after the numbers became those of another source.
export const renewBeside = () => view.beside != null && standBeside(view.beside);

/** @param {string} name @param {Record<string, string>} query */
async function part(name, query) {
  const facts = name.match(/^(.*)facts$/);
  return facts ? new TextEncoder().encode(JSON.stringify(await source.facts(facts[1]))) : source.part(name, query);
}

/** @param {Window} frame */
function lend(frame) {
  const { port1: port, port2 } = new MessageChannel();
  port.onmessage = async ({ data: { id, name, query } }) => {
    try {
      port.postMessage({ id, bytes: (await part(name, query))?.buffer });
    } catch (error) {
      const { message, title } = /** @type {import("./source").Fault} */ (error);
      port.postMessage({ id, error: message, title });
    }
  };
  frame.postMessage({ clearhead: "theme", dark: theme.dark }, "*");
  frame.postMessage({ clearhead: "kernel", live: source.live }, "*", [port2]);
}

async function showAlone({ page, layer, head }) {
  leave();
  await showPage(page);
  await selectHead(view.trace.find(layer, head));
  emit("layout");
}

function hear({ source: sender, data }) {
  const from = frames.find((frame) => frame.contentWindow === sender);
  if (!from || !data) return;
  if (data.clearhead === "page") lend(sender);
  if (data.clearhead === "alone") showAlone(data);
  if (data.clearhead !== "head") return;
  for (const frame of frames) if (frame !== from) frame.contentWindow?.postMessage(data, "*");
  writeHash(`${data.layer}.${data.head}`);
}

// --- a page in a frame ------------------------------------------------------------------------------------------

function tell(what) {
  const { layer, head } = view.head;
  window.parent.postMessage({ clearhead: what, page: view.trace.page, layer, head }, "*");
}

// Each tells the other of its head, unless it was the other's choice.
function followOther() {
  let told = view.head;
  on("head", () => {
    if (view.head === told) return;
    told = view.head;
    tell("head");
  });
  addEventListener("message", ({ source: sender, data }) => {
    if (sender !== window.parent || data?.clearhead !== "head") return;
    const wanted = view.trace.find(data.layer, data.head);
    if (!wanted || wanted === view.head) return;
    told = wanted;
    selectHead(wanted);
  });
}

/** @param {number | null} asked the page that the address wants beside this one */
export function startBeside(asked) {
  if (framed) followOther();
  else addEventListener("message", hear);
  $("#choice").addEventListener("click", (event) => {
    const { pages = [], page = 0 } = view.trace;
    if (!under(event, "#two-pages")) return;
    if (framed) tell("alone");
    else standBeside((page + 1) % pages.length);
  });
  if (asked != null) return standBeside(asked);
}
