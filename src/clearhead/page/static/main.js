// Start: read, lay out, open the first head. Panes draw themselves when something changes.
import { $, el } from "./util.js";
import { drawRamp, setTheme } from "./colour.js";
import { Fault, framed, source } from "./source.js";
import { Trace } from "./data.js";
import { emit, keyOf, layerOf, leadText, on, pageAsked, queryOf, queryText, readHash, view } from "./state.js";
import { darkHere, startKernel } from "./kernel.js";
import { hasOthers, headAskedFor, selectHead } from "./actions.js";
import { beginWith, listen, renewPages, showPage } from "./pages.js";
import { leave, renewBeside, standBeside, startBeside } from "./beside.js";
import { layOut } from "./layout.js";
import { glyph, roleName, sentence } from "./roles.js";
import { drawHeader } from "./header.js";
import { startAtlas } from "./atlas.js";
import { startChips } from "./chips.js";
import { startSheet } from "./sheet.js";
import { startSaving } from "./saving.js";
import { startText } from "./text.js";
import { startColumns } from "./columns.js";
import { startDerivation } from "./derivation.js";
import { startTables } from "./tables.js";
import { forgetTiles } from "./tiles.js";
import { startMatrix } from "./matrix.js";
import { startKeys, switchTheme } from "./keys.js";

// What the buttons beside the name walk through; empty for heads of any role.
function walked() {
  if (!hasOthers()) return "";
  const [only, ...more] = view.filter;
  return more.length ? "shown" : (only ?? roleName(view.head.role));
}

function drawHeadline() {
  const { head, trace } = view,
    known = head.role != null; // a live page reads its heads one layer after another
  const { side } = layerOf(head.layer);
  $("#head-title").textContent = `Layer ${head.layer} · head ${head.head}${side && ` · ${side}`}`;
  $("#mode [data-v=text]").textContent = queryText().image ? "Image" : "Text";
  $("#badge").replaceChildren(...(known ? [glyph(roleName(head.role), 16), head.role] : []));
  $("#why").textContent = known ? sentence(trace, layerOf(head.layer), head) : "This head is being read.";
  const role = walked();
  for (const [id, sign, words] of [
    ["#before", "‹", "Previous"],
    ["#after", "›", "Next"],
  ]) {
    const name = el("span", {}, role || "head");
    $(id).hidden = trace.heads.length < 2;
    $(id).replaceChildren(...(sign === "‹" ? ["‹ ", name] : [name, " ›"]));
    $(id).title = `${words} ${role && role + " "}head (${sign === "‹" ? "[" : "]"})`;
    $(id).setAttribute("aria-label", $(id).title);
  }
}

function startPanes() {
  startAtlas();
  startSheet();
  startText();
  startChips();
  startColumns();
  startDerivation(); // before the tables, which take the room that it leaves
  startTables();
  startMatrix();
  startSaving();
  startKeys();
  on("head heads filter layout", drawHeadline);
  on("look theme layout", () => drawRamp(view.scale));
}

function fail(fault) {
  const known = fault instanceof Fault;
  document.body.className = "failed";
  $("#state").setAttribute("role", "alert");
  $("#state").replaceChildren(
    el("h2", {}, known ? fault.title : "This page met an error"),
    el("p", {}, known ? fault.message : String(fault)),
    known && fault.call ? el("pre", {}, fault.call) : "",
  );
}

function follow(system) {
  system.addEventListener(
    "change",
    (event) => view.theme === "auto" && (switchTheme(darkHere(event.matches)), (view.theme = "auto")),
  );
  addEventListener("hashchange", async ({ newURL }) => {
    const address = /** @type {any} */ (new URL(newURL)), // the page may have written its own meanwhile
      [wanted, other] = [pageAsked(address), pageAsked(address, "beside")];
    leave();
    if (wanted != null && wanted !== view.trace.page) await showPage(wanted, address);
    else {
      const at = readHash(address);
      await selectHead(at.head || view.head, { ...at, first: true });
    }
    emit("layout");
    if (other != null) standBeside(other);
  });
  let waiting = 0;
  addEventListener("resize", () => (clearTimeout(waiting), (waiting = setTimeout(() => emit("layout"), 80))));
}

let ready = () => {}; // the page is there, whatever comes later

// Header, text and empty thumbnails at once; then the thumbnails, then the numbers of one head.
async function start() {
  view.trace = /** @type {any} */ (new Trace(await source.facts()));
  const system = matchMedia("(prefers-color-scheme: dark)");
  setTheme(darkHere(system.matches));
  const address = /** @type {any} */ (framed ? { hash: framed.dataset.at } : { hash: location.hash }),
    wanted = pageAsked(address),
    at = readHash(address);
  view.head = at.head || view.trace.find(...view.trace.opening);
  view.token = at.query ?? at.key ?? leadText().n - 1;
  if (source.live) view.trace.weights(view.head); // on its way while the page lays itself out
  document.body.className = "reading";
  $("main").inert = true;
  drawHeader();
  on("trace", () => (forgetTiles(), drawHeader(), emit("layout")));
  on("layout", layOut); // first: the panes measure themselves in it
  startPanes();
  emit("layout");
  await painted();
  await view.trace.readThumbs();
  emit("heads");
  await selectHead(view.head, { ...at, first: true });
  document.body.classList.remove("reading");
  $("main").inert = false;
  emit("layout"); // the sentence about the head takes a line or two
  follow(system);
  beginWith(view.trace);
  if (wanted != null) await showPage(wanted, address);
  await startBeside(pageAsked(address, "beside"));
  document.body.dataset.ready = "1";
  ready();
  listen(view.trace);
}

// The same view with the numbers of another source, which are exact or only those of a file.
async function renew() {
  await renewPages();
  forgetTiles();
  drawHeader();
  await selectHead(headAskedFor(), { query: queryOf(), key: keyOf(), first: true });
  renewBeside();
}

const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));

addEventListener("unhandledrejection", (event) => {
  if (event.reason instanceof Fault) event.preventDefault(); // said on the page, no need to say it in the console
  fail(event.reason);
});
startKernel(new Promise((done) => (ready = done)), renew, start);
