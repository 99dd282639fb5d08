// The other pages of the same server: another text or model, in place of this one or beside it. Two that stand side by
// side show the same head.
import { $, el } from "./util.js";
import { on, view } from "./state.js";
import { selectHead } from "./actions.js";

const sameHead = () => `h=${view.head.layer}.${view.head.head}`;
const beside = window.parent !== window;

// To choose one, and to see two at once; none where there is one page.
/** @param {import("./types").Trace} trace */
export function pageChoices({ pages, page = 0 }) {
  if (!pages) return [];
  const options = pages.map((title, n) => el("option", { value: n, selected: n === page }, title));
  const choice = el("select", { id: "pages", "aria-label": "Another text or model" }, ...options);
  choice.addEventListener("change", () => (location.href = `../${choice.value}/#${sameHead()}`));
  const title = "Two pages side by side, at the same head";
  const two = el("button", { class: "btn", id: "two-pages", title }, "Side by side");
  two.addEventListener("click", () => {
    window.open(beside ? "./#" + sameHead() : `beside?with=${(page + 1) % pages.length}&${sameHead()}`, "_top");
  });
  if (beside) two.textContent = "This alone";
  return [choice, two];
}

// Each tells the other of its head, unless it was the other's choice.
export function followOther() {
  if (!beside || !$("#pages")) return;
  const channel = new BroadcastChannel("clearhead" + location.pathname.split("/")[1]);
  let told = view.head;
  on("head", () => {
    if (view.head === told) return;
    told = view.head;
    channel.postMessage([told.layer, told.head]);
  });
  channel.addEventListener("message", ({ data: [layer, head] }) => {
    const wanted = view.trace.find(layer, head);
    if (!wanted || wanted === view.head) return;
    told = wanted;
    selectHead(wanted);
  });
}
