// Take away what is seen: the page as one file, the matrix as a picture, the weights as a table, the view as a link.
import { $, $$, canvasOf, el, under } from "./util.js";
import { along, otherText, say, view, writeHash } from "./state.js";

// The page before anything is drawn on it, without its data: what a saved copy begins with.
const isPage = (part) => !part.matches("script, meta");
export const untouched = [...document.body.children].filter(isPage).map((part) => part.outerHTML);

function wholePage() {
  const data = [...document.body.children].filter((part) => !isPage(part)).map((part) => part.outerHTML);
  const parts = ["<!doctype html>", '<html lang="en">', document.head.outerHTML, '<body class="waiting">'];
  return new Blob([[...parts, ...untouched, ...data, "</body>", "</html>"].join("\n")], {
    type: "text/html",
  });
}

function weightsTable() {
  const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
  const lines = [...along(view.token)].map((w, i) => `${i},${quoted(otherText().tokens[i])},${w}`);
  return new Blob([["token,text,weight", ...lines, ""].join("\n")], { type: "text/csv" });
}

const matrixPicture = () => new Promise((done) => canvasOf("#canvas").toBlob(done, "image/png"));

const thisHead = () => `layer${view.head.layer}-head${view.head.head}`;
const CHOICES = {
  page: ["This page, as one file", wholePage, () => "clearhead.html"],
  picture: ["The matrix, as a picture", matrixPicture, () => thisHead() + ".png"],
  weights: [
    "The weights of this token",
    weightsTable,
    () => `${thisHead()}-${view.direction}-${view.token}.csv`,
  ],
};

async function saveAs(choice) {
  const [, make, name] = CHOICES[choice];
  const address = URL.createObjectURL(await make());
  el("a", { href: address, download: name() }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
  toast(`Saved ${name()}`);
}

let toasting = 0;

export function toast(words) {
  const box = $("#toast");
  box.textContent = words;
  box.classList.add("on");
  clearTimeout(toasting);
  toasting = setTimeout(() => box.classList.remove("on"), 2500);
  say(words);
}

function shareView() {
  writeHash();
  const copied = () => toast("The link to this view is copied");
  const not = () => toast("Copy the address of this page: it holds this view");
  navigator.clipboard ? navigator.clipboard.writeText(location.href).then(copied, not) : not();
}

function openMenu(open) {
  $("#save-menu").hidden = !open;
  $("#save").setAttribute("aria-expanded", String(open));
  if (open) $("#save-menu button").focus();
}

function menuKey(event) {
  const items = $$("#save-menu button"),
    at = items.findIndex((one) => one === document.activeElement);
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step) items[(at + step + items.length) % items.length].focus();
  else if (event.key === "Escape") (openMenu(false), $("#save").focus());
  else if (event.key === "Tab") return openMenu(false);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

export function startSaving() {
  const menu = $("#save-menu");
  const whole = document.querySelector("#facts-data"); // a live page does not hold its numbers
  const choices = Object.keys(CHOICES).filter((choice) => choice !== "page" || whole);
  menu.replaceChildren(
    ...choices.map((choice) =>
      el("button", { role: "menuitem", tabindex: -1, "data-v": choice }, CHOICES[choice][0]),
    ),
  );
  menu.addEventListener("keydown", menuKey);
  menu.addEventListener("click", (event) => {
    const item = under(event, "button");
    if (!item) return;
    openMenu(false);
    $("#save").focus();
    saveAs(item.dataset.v);
  });
  $("#save").addEventListener("click", () => openMenu(menu.hidden));
  document.addEventListener("pointerdown", (event) => under(event, ".menu") || openMenu(false));
  $("#share").hidden = location.protocol === "about:"; // a page inside another has no address of its own
  $("#share").addEventListener("click", shareView);
}
