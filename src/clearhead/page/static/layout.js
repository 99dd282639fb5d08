// Sizes of the columns (PAGE, 'Layout'); everything else is left to CSS.
import { clamp } from "./util.js";
import { layersShown, view } from "./state.js";

export const sizes = { cell: 20, row: 20, group: 0, small: false };
export const GUTTER = 22;

export function layOut() {
  const body = document.body.classList,
    root = document.documentElement.style;
  const [width, height] = [innerWidth, innerHeight];
  const small = (sizes.small = width < 1000 || height < 700);
  body.toggle("small", small);
  body.toggle("short", height < 700); // the legend has no room for words
  body.toggle("medium", !small && width < 1280);
  body.toggle("columns", view.mode === "columns");
  document.body.dataset.tab = view.tab;
  if (small) view.wide = false; // a tab shows the matrix there
  body.toggle("wide-matrix", view.wide);
  body.toggle("sheet", view.sheet);
  const head = small ? 36 : 44;
  const atlas = atlasWidth(width, height, head, small);
  root.setProperty("--atlas", atlas + "px");
  const lower = lowerHeight(height, body.contains("medium"));
  root.setProperty("--lower", lower + "px");
  const rest = width - atlas;
  const side =
    view.mode === "columns"
      ? rest * 0.5
      : clamp(height - head - lower - 56, 290, rest * (rest < 860 ? 0.4 : 0.46));
  root.setProperty("--side", Math.round(side) + "px");
}

// A few tokens leave room for a derivation in which every number is written out.
function lowerHeight(height, medium) {
  if (view.trace.n <= 12 && view.trace.layers.some(({ d }) => d && d <= 4)) return Math.round(height * 0.53);
  return clamp(Math.round(height * 0.405), medium ? 308 : 362, 400);
}

function atlasWidth(width, height, head, small) {
  const layers = layersShown(),
    rows = layers.length,
    columns = Math.max(...layers.map(({ heads }) => heads)),
    { groups } = layers.find(({ heads }) => heads === columns) || layers[0];
  sizes.group = columns % groups === 0 && columns > groups && groups > 1 ? columns / groups : 0;
  const gaps = sizes.group ? (groups - 1) * 4 : 0;
  const pad = small ? 20 : 30;
  const room = height - head - (height < 700 ? 70 : columns > 20 ? 122 : 170) - 14;
  const row = clamp(Math.floor((2 * room) / rows) / 2, 9, small ? 20 : 26);
  const most = width * (small ? 0.34 : columns > 24 ? 0.44 : 0.36);
  const atlas = Math.round(
    clamp(GUTTER + columns * Math.max(row, 11) + gaps + pad, small ? 216 : width < 1280 ? 228 : 264, most),
  );
  const fits = Math.floor((atlas - GUTTER - pad - gaps) / columns);
  sizes.cell = Math.max(9, Math.min(fits, 26, Math.round(Math.max(row, 11) * 1.12)));
  sizes.row = Math.max(9, Math.min(row, sizes.cell + 1));
  return atlas;
}
