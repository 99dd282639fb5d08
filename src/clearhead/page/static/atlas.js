// Atlas: every head as a thumbnail in the colour of its role; the legend filters; a card tells the scores.
import { $, $$, clamp, drawingOn, el, plural, sized, under, whole } from "./util.js";
import { glyph, kindOf, meaning, nats, roleName, rolesOf } from "./roles.js";
import { theme } from "./colour.js";
import { emit, headsShown, keyText, layerOf, layersShown, on, queryText, view } from "./state.js";
import { filterRole, selectHead } from "./actions.js";
import { GUTTER, sizes } from "./layout.js";

const TOP = 14;
/** @type {Map<import("./types").Head, HTMLElement>} */
const cells = new Map(); // head -> its button
let surface = el("canvas");

const left = (h) => GUTTER + h * sizes.cell + (sizes.group ? Math.floor(h / sizes.group) * 4 : 0);
const isCardFixed = () => $("#card").style.display === "block";

function drawLegend() {
  const counts = {};
  const heads = headsShown();
  for (const head of heads) if (head.role) counts[roleName(head.role)] = (counts[roleName(head.role)] || 0) + 1;
  const legend = $("#legend");
  legend.classList.toggle("some", view.filter.size > 0);
  legend.replaceChildren(
    ...rolesOf(kindOf(queryText(), keyText())).map((role) => {
      const count = counts[role] || 0;
      const label = `${role}: ${meaning(kindOf(queryText(), keyText()), role)}. ${count} of ${heads.length} heads. Click shows only these, shift-click adds.`;
      const button = el(
        "button",
        {
          "data-role": role,
          "aria-pressed": view.filter.has(role),
          title: label,
          "aria-label": `${role} ${count} heads`,
        },
        glyph(role),
        el("span", { class: "word" }, role),
        " ",
        el("span", { class: "count" }, String(count)),
      );
      return button;
    }),
  );
}

function label(text, style, data) {
  const made = el("span", { class: "label", "aria-hidden": "true", ...data }, text);
  Object.assign(made.style, style);
  return made;
}

const labelOf = (head) => `layer ${head.layer} head ${head.head}, ${head.role ?? "not read yet"}`;

function buildGrid() {
  const { trace } = view,
    layers = layersShown(),
    width = Math.max(...layers.map(({ heads }) => heads)),
    { cell, row } = sizes,
    grid = $("#grid");
  const font = row < 14 ? 9 : 10,
    every = row >= 11 ? 1 : 2;
  cells.clear();
  surface = el("canvas", { "aria-hidden": "true" });
  grid.replaceChildren(surface);
  grid.style.width = left(width - 1) + cell + "px";
  grid.style.height = TOP + layers.length * row + "px";
  for (let h = 0; h < width; h++) {
    if (cell >= 14 || h % 4 === 0)
      grid.append(
        label(
          String(h),
          {
            left: left(h) + "px",
            top: "1px",
            width: cell - 2 + "px",
            textAlign: "center",
            fontSize: font + "px",
          },
          { "data-h": h },
        ),
      );
  }
  layers.forEach(({ layer, heads }, r) => {
    const top = TOP + r * row;
    if (r % every === 0)
      grid.append(
        label(
          String(layer),
          {
            left: 0,
            width: GUTTER - 6 + "px",
            top: top + (row - 2 - font) / 2 + "px",
            fontSize: font + "px",
          },
          { "data-l": layer },
        ),
      );
    const line = el("div", { role: "row", "aria-label": "layer " + layer });
    for (let h = 0; h < heads; h++) {
      const head = trace.find(layer, h);
      const button = el("button", {
        role: "gridcell",
        tabindex: -1,
        "data-head": `${layer}.${h}`,
        "aria-label": labelOf(head),
      });
      Object.assign(button.style, {
        left: left(h) + "px",
        top: top + "px",
        width: cell - 2 + "px",
        height: row - 2 + "px",
      });
      cells.set(head, button);
      line.append(button);
    }
    grid.append(line);
  });
  placeCard();
}

// The card stays under the grid where there is room for both; else it floats beside the cell.
function placeCard() {
  const card = $("#card");
  card.style.display = "block";
  fillCard(card, view.head);
  if (sizes.small || $("#grid-frame").clientHeight < $("#grid").offsetHeight) card.style.display = "none";
}

// A head's thumbnail, one pixel a cell, as a small canvas.
/** @param {import("./types").Head} head @param {boolean} quiet */
export function thumbnail(head, quiet) {
  const {
    causal,
    thumb: [rows, columns],
  } = layerOf(head.layer);
  const canvas = el("canvas", { width: columns, height: rows });
  const context = drawingOn(canvas),
    image = context.createImageData(columns, rows);
  const colours = theme.roles[roleName(head.role)];
  for (let y = 0; y < rows; y++) {
    for (let x = 0; x < columns; x++) {
      if (causal && x > y) continue;
      image.data.set(
        [...(quiet || !head.thumb ? theme.cell : colours[head.thumb[y * columns + x]]), 255],
        4 * (y * columns + x),
      );
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function paintGrid() {
  const grid = $("#grid"),
    ratio = window.devicePixelRatio || 1;
  const context = sized(surface, parseFloat(grid.style.width), parseFloat(grid.style.height));
  context.setTransform(1, 0, 0, 1, 0, 0); // whole device pixels, so that thumbnails stay crisp
  const width = Math.round((sizes.cell - 2) * ratio),
    height = Math.round((sizes.row - 2) * ratio);
  for (const [head, button] of cells) {
    const quiet = view.filter.size > 0 && !view.filter.has(roleName(head.role));
    context.imageSmoothingEnabled = width < layerOf(head.layer).thumb[1];
    context.imageSmoothingQuality = "high";
    context.drawImage(
      thumbnail(head, quiet),
      Math.round(parseFloat(button.style.left) * ratio),
      Math.round(parseFloat(button.style.top) * ratio),
      width,
      height,
    );
  }
}

function markHead() {
  for (const [head, button] of cells) {
    const here = head === view.head;
    button.tabIndex = here ? 0 : -1;
    if (here) button.setAttribute("aria-selected", "true");
    else button.removeAttribute("aria-selected");
  }
  for (const made of $$("#grid .label")) {
    made.classList.toggle(
      "on",
      made.dataset.l === String(view.head.layer) || made.dataset.h === String(view.head.head),
    );
  }
  if (isCardFixed()) fillCard($("#card"), view.head);
}

/** @param {import("./types").Head} head @param {string} name */
function scoreRow(head, name) {
  const own = name === head.role,
    score = head.scores[name],
    base = head.baselines[name];
  const bar = el("span", { class: "track" });
  if (score != null)
    bar.append(
      el("b", {
        style: `width:${clamp(100 * score, 0, 100)}%${own ? `;background:var(--${roleName(head.role)})` : ""}`,
      }),
    );
  if (base != null && name !== "broad")
    bar.append(el("i", { style: `left:${clamp(100 * base, 0, 99.5)}%`, title: "a uniform head" }));
  return el(
    "tr",
    { class: own ? "own" : "" },
    el("td", {}, name),
    el("td", {}, bar),
    el("td", {}, whole(score)),
    el("td", { class: "mute" }, base == null || name === "broad" ? "" : whole(base)),
  );
}

// Of the scores of all heads those that say something about this one.
/** @param {import("./types").Head} head */
function scoresOf(head) {
  const { queries, keys } = layerOf(head.layer),
    roles = rolesOf(kindOf(view.trace.texts[queries], view.trace.texts[keys]));
  return view.trace.scores.filter((name) => head.scores[name] != null || (name !== "other" && roles.includes(name)));
}

/** @param {HTMLElement} card @param {import("./types").Head} head */
function fillCard(card, head) {
  const title = el(
    "h3",
    {},
    glyph(head.role),
    `Layer ${head.layer} · head ${head.head}`,
    el("span", { class: "mute" }, head.role),
  );
  const picture = thumbnail(head, false);
  picture.className = "picture";
  const table = el(
    "table",
    {},
    el("tr", { class: "mute" }, el("td"), el("td"), el("td", {}, "score"), el("td", {}, "unif.")),
    ...scoresOf(head).map((name) => scoreRow(head, name)),
  );
  const { queries, keys } = layerOf(head.layer),
    far =
      head.distance == null || kindOf(view.trace.texts[queries], view.trace.texts[keys]) !== "text" ? "" : `mean distance ${head.distance.toFixed(1)} tokens`;
  card.replaceChildren(
    title,
    el("div", { class: "scores" }, table, picture),
    el(
      "p",
      { class: "num mute" },
      el("span", {}, `entropy ${nats(head)}` + (far && " · ")),
      el("span", {}, far),
    ),
  );
}

// The card of a head, beside a cell of it.
/** @param {import("./types").Head} head @param {Element} beside */
export function cardOf(head, beside) {
  if (isCardFixed() && !view.sheet) return fillCard($("#card"), head);
  const tip = $("#tip"),
    cell = beside.getBoundingClientRect();
  fillCard(tip, head);
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const right = cell.right + 8 + box.width < innerWidth ? cell.right + 8 : cell.left - 8 - box.width;
  tip.style.left = right + "px";
  tip.style.top = clamp(cell.top - 30, 50, innerHeight - box.height - 8) + "px";
}

export function hideCard() {
  $("#tip").style.display = "none";
  if (isCardFixed()) fillCard($("#card"), view.head);
}

/** @param {Event} event @returns {any} a head, or nothing */
const headOf = (event) => {
  const button = under(event, "#grid button");
  return button && view.trace.byName.get(String(button.dataset.head));
};

function moveFocus(event) {
  const steps = {
    ArrowUp: [-1, 0],
    ArrowDown: [1, 0],
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
    Home: [0, -1e9],
    End: [0, 1e9],
  };
  const step = steps[event.key],
    head = headOf(event);
  if (!step || !head) return;
  event.preventDefault();
  event.stopPropagation();
  const layers = layersShown(),
    at = layers.findIndex((l) => l.layer === head.layer);
  const next = layers[clamp(at + step[0], 0, layers.length - 1)];
  cells.get(view.trace.find(next.layer, clamp(head.head + step[1], 0, next.heads - 1)))?.focus();
}

export const focusAtlas = () => cells.get(view.head)?.focus();

// Encoder, decoder, and cross-attention between them: each with an atlas of its own.
function drawSides() {
  const sides = [...new Set(view.trace.layers.map(({ side }) => side))].filter(Boolean),
    layers = layersShown(),
    here = layers[0].side;
  const chooses = $("#sides").contains(document.activeElement); // and goes on to
  $("#sides").hidden = sides.length < 2;
  $("#sides").replaceChildren(
    ...sides.map((side) =>
      el("button", { role: "radio", "data-v": side, "aria-checked": side === here, tabindex: side === here ? 0 : -1 }, side),
    ),
  );
  if (chooses) $("#sides [aria-checked=true]").focus();
  $("#atlas-size").textContent =
    sides.length > 1 ? "" : `${plural(layers.length, "layer")} × ${plural(Math.max(...layers.map((l) => l.heads)), "head")}`;
}

const ORDER = ["aligned", "induction", "previous", "duplicate", "local", "self", "broad", "other", "sink"];
const remembered = {}; // the head that was looked at last on each side

export function selectSide(side) {
  remembered[layerOf(view.head.layer).side] = view.head;
  const heads = view.trace.heads.filter((head) => layerOf(head.layer).side === side),
    rank = (head) => ORDER.indexOf(roleName(head.role)) - (head.scores[head.role] ?? 0);
  selectHead(remembered[side] || heads.reduce((a, b) => (rank(b) < rank(a) ? b : a)));
}

export function startAtlas() {
  const grid = $("#grid");
  grid.addEventListener(
    "click",
    (event) => headOf(event) && (selectHead(headOf(event)), ($("#tip").style.display = "none")),
  );
  grid.addEventListener(
    "mouseover",
    (event) => headOf(event) && cardOf(headOf(event), /** @type {Element} */ (event.target)),
  );
  grid.addEventListener("mouseleave", hideCard);
  grid.addEventListener(
    "focusin",
    (event) =>
      under(event, ":focus-visible") &&
      headOf(event) &&
      cardOf(headOf(event), /** @type {Element} */ (event.target)),
  );
  grid.addEventListener("focusout", hideCard);
  grid.addEventListener("keydown", moveFocus);
  $("#legend").addEventListener("click", (event) => {
    const button = under(event, "button");
    if (!button) return;
    filterRole(String(button.dataset.role), event.shiftKey);
    $(`#legend [data-role="${button.dataset.role}"]`).focus({ preventScroll: true });
  });
  on("layout", () => (drawSides(), buildGrid(), drawLegend(), paintGrid(), markHead()));
  on("filter", () => (drawLegend(), paintGrid()));
  on("theme", () => (drawLegend(), paintGrid(), isCardFixed() && fillCard($("#card"), view.head)));
  on("heads", () => {
    for (const [head, button] of cells) button.setAttribute("aria-label", labelOf(head));
    drawLegend();
    paintGrid();
    markHead();
    if (isCardFixed()) fillCard($("#card"), view.head);
  });
  let side = "";
  on("head", () => {
    const now = layerOf(view.head.layer).side;
    if (now !== side) ((side = now), emit("layout")); // other layers, perhaps more of them
    else markHead();
  });
}
