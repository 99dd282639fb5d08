// Keys and switches that work wherever the focus is.
import { $, $$, inputOf, under } from "./util.js";
import { setTheme, theme } from "./colour.js";
import { emit, on, view } from "./state.js";
import {
  clearFilter,
  moveToken,
  nextHead,
  setDirection,
  setLook,
  setMode,
  setSheet,
  setTab,
  setWide,
} from "./actions.js";
import { focusAtlas, selectSide } from "./atlas.js";
import { focusTable } from "./tables.js";
import { openHelp } from "./help.js";
import { zoomCells, zoomIn, zoomOut, zoomWhole } from "./zoom.js";

export function switchTheme(dark = !theme.dark) {
  view.theme = dark ? "dark" : "light";
  setTheme(dark);
  emit("theme");
}

const enlarge = () => setWide(!view.wide);

function toSheet() {
  setSheet(!view.sheet);
  if (view.sheet) $("#sheet [aria-current=true]")?.focus();
  else focusAtlas();
}

function escape() {
  if (view.sheet) toSheet();
  else if (view.wide) enlarge();
  else clearFilter();
}

/** @type {Record<import("./types").Scale, import("./types").Scale>} */
const nextScale = { root: "log", log: "linear", linear: "root" };
const SHORTCUTS = {
  "?": openHelp,
  1: focusAtlas,
  2: () => $(view.mode === "text" ? "#text" : "#columns").focus(),
  3: () => (setTab("matrix"), $("#canvas").focus()),
  4: () => (setTab("derivation"), focusTable()),
  f: () => setDirection("from"),
  t: () => setDirection("to"),
  m: () => setMode(view.mode === "text" ? "columns" : "text"),
  l: () => setLook({ lines: !view.lines }),
  s: () => setLook({ fade: !view.fade }),
  c: () => setLook({ scale: nextScale[view.scale] }),
  d: () => switchTheme(),
  a: toSheet,
  x: enlarge,
  "+": zoomIn,
  "=": zoomIn, // + without shift
  "-": zoomOut,
  0: zoomWhole,
  z: zoomCells,
  "[": () => nextHead(-1),
  "]": () => nextHead(1),
  "/": () => $("#find").focus(),
  ArrowLeft: () => moveToken(-1),
  ArrowRight: () => moveToken(1),
  Escape: escape,
};

function shortcut(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !view.singleKeys || !view.weights || view.beside != null) return;
  if (under(event, "input[type=search], #pages, dialog")) return;
  const action = SHORTCUTS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

// A group of buttons of which one is on: click, or arrows while it has the focus.
function choice(id, change) {
  const box = $(id);
  box.addEventListener("click", (event) => {
    const button = under(event, "button");
    if (button) change(button.dataset.v);
  });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const buttons = $$(id + " button");
    const next =
      buttons[
        (buttons.findIndex((one) => one === document.activeElement) + step + buttons.length) % buttons.length
      ];
    change(next.dataset.v);
    next.focus();
  });
}

function showChoices() {
  for (const name of ["direction", "mode", "scale", "tab"]) {
    for (const button of $$(name === "tab" ? "#tabs button" : `#${name} button`)) {
      const chosen = button.dataset.v === view[name];
      button.setAttribute(name === "tab" ? "aria-selected" : "aria-checked", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    }
  }
  $("#enlarge").setAttribute("aria-pressed", String(view.wide));
  $("#atlas-sheet").setAttribute("aria-pressed", String(view.sheet));
  inputOf("#lines").checked = view.lines;
  inputOf("#fade").checked = view.fade;
}

export function startKeys() {
  document.addEventListener("keydown", shortcut);
  // A shift-click sets the key or adds a role: the browser is not to select text with it as well.
  document.addEventListener("mousedown", (event) => {
    const pane = event.shiftKey && under(event, "#text, #columns, #legend");
    if (!pane) return;
    event.preventDefault();
    if (pane.tabIndex >= 0) pane.focus({ preventScroll: true }); // what the click would have done
  });
  choice("#direction", setDirection);
  choice("#mode", setMode);
  choice("#scale", (scale) => setLook({ scale }));
  choice("#tabs", setTab);
  choice("#sides", selectSide);
  $("#lines").addEventListener("change", () => setLook({ lines: inputOf("#lines").checked }));
  $("#fade").addEventListener("change", () => setLook({ fade: inputOf("#fade").checked }));
  $("#before").addEventListener("click", () => nextHead(-1));
  $("#after").addEventListener("click", () => nextHead(1));
  $("#theme").addEventListener("click", () => switchTheme());
  $("#ask").addEventListener("click", openHelp);
  $("#enlarge").addEventListener("click", enlarge);
  on("pair look layout", showChoices);
}
