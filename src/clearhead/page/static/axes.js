// The matrix's axes: words where cells are large, positions where they are small, and where in the whole one is.
import { clamp, grouped, shown } from "./util.js";
import { colour, rgb, theme } from "./colour.js";
import { keyOf, keyText, layerOf, queryOf, queryText, view } from "./state.js";
import { across, down, frame, MARGIN, port, span, upright } from "./port.js";

/** @param {number} i @param {import("./types").Text} text */
const short = (i, text) => {
  const word = shown(text.tokens[i]);
  return word.length > 8 ? word.slice(0, 7) + "…" : word;
};

export function paintWords(context, { i0, i1, j0, j1 }) {
  const query = queryOf(),
    key = keyOf(),
    half = port.size / 2;
  context.textBaseline = "middle";
  for (let i = i0; i < i1; i++) {
    if (down(i) + half < MARGIN.top || down(i) + half > frame.height - MARGIN.bottom) continue;
    context.font = `${i === query ? "600 " : ""}11px ${colour("mono")}`;
    context.fillStyle = colour(i === query ? "query" : "ink2");
    context.textAlign = "right";
    context.fillText(short(i, queryText()), MARGIN.left - 6, down(i) + half);
  }
  for (let j = j0; j < j1; j++) {
    if (across(j) + half < MARGIN.left || across(j) + half > frame.width - MARGIN.right) continue;
    context.save();
    context.translate(across(j) + half, MARGIN.top - 6);
    if (upright()) context.rotate(-Math.PI / 2);
    context.font = `${j === key ? "600 " : ""}11px ${colour("mono")}`;
    context.fillStyle = colour(j === key ? "key" : "ink2");
    context.textAlign = upright() ? "left" : "center";
    context.fillText(short(j, keyText()), 0, upright() ? 0 : -5);
    context.restore();
  }
}

// Positions at round steps; the query and the key by word and position, with room made for them.
export function paintTicks(context, { i0, i1, j0, j1 }) {
  const least = 52 / port.size,
    power = 10 ** Math.floor(Math.log10(least)),
    half = port.size / 2;
  const step = Math.max(1, [1, 2, 5, 10].map((a) => a * power).find((a) => a >= least) || 1);
  const atQuery = clamp(down(queryOf()) + half, MARGIN.top + 6, frame.height - 18), // two lines of label
    atKey = across(keyOf()) + half;
  const [queryShown, keyShown] = [inside(queryOf(), i0, i1), inside(keyOf(), j0, j1)];
  const small = `10px ${colour("sans")}`,
    bold = `600 11px ${colour("mono")}`;
  context.textBaseline = "middle";
  context.strokeStyle = colour("line2");
  context.beginPath();
  context.font = small;
  context.fillStyle = colour("mute");
  for (let i = Math.ceil(i0 / step) * step; i < i1; i += step) {
    const y = down(i) + half;
    (context.moveTo(MARGIN.left - 4, y), context.lineTo(MARGIN.left, y));
    context.textAlign = "right";
    if (!queryShown || y < atQuery - 12 || y > atQuery + 22) context.fillText(grouped(i), MARGIN.left - 7, y);
  }
  const room = Math.max(26, 6 + context.measureText(grouped(j1)).width); // two numbers of that many digits, and a gap
  for (let j = Math.ceil(j0 / step) * step; j < j1; j += step) {
    const x = across(j) + half;
    (context.moveTo(x, MARGIN.top - 4), context.lineTo(x, MARGIN.top));
    context.textAlign = "center";
    if (!keyShown || Math.abs(x - atKey) > room) context.fillText(grouped(j), x, MARGIN.top - 11);
  }
  context.stroke();
  if (queryShown) {
    context.fillStyle = colour("query");
    context.textAlign = "right";
    context.fillText(grouped(queryOf()), MARGIN.left - 7, atQuery + 12);
    context.font = bold;
    context.fillText(short(queryOf(), queryText()), MARGIN.left - 6, atQuery);
  }
  if (!keyShown) return;
  context.fillStyle = colour("key");
  context.textAlign = "center";
  const x = clamp(atKey, 30, frame.width - 32);
  context.font = bold;
  context.fillText(short(keyOf(), keyText()), x, MARGIN.top - 24);
  context.font = small;
  context.fillText(grouped(keyOf()), x, MARGIN.top - 11);
}

const inside = (at, first, end) => at >= first && at < end;

// In the corner of the axes: where in the whole matrix the part on the canvas lies.
export function paintLocator(context) {
  const { thumb } = view.head,
    side = Math.min(MARGIN.left, MARGIN.top) - 14;
  if (!view.zoom || !thumb) return;
  const [rows, columns] = layerOf(view.head.layer).thumb,
    at = (x, n) => (x / n) * side,
    [left, top] = [MARGIN.left - side - 8, MARGIN.top - side - 8];
  for (let y = 0; y < rows; y++)
    for (let x = 0; x < columns; x++) {
      context.fillStyle = rgb(theme.weights[thumb[y * columns + x]]);
      const [width, height] = [side / columns, side / rows];
      context.fillRect(left + x * width, top + y * height, width + 0.5, height + 0.5);
    }
  context.lineWidth = 1;
  context.strokeStyle = colour("line2");
  context.strokeRect(left - 0.5, top - 0.5, side + 1, side + 1);
  const { i0, i1, j0, j1 } = span();
  context.lineWidth = 1.5;
  context.strokeStyle = colour("ink");
  context.strokeRect(
    left + at(j0, keyText().n),
    top + at(i0, queryText().n),
    Math.max(3, at(j1 - j0, keyText().n)),
    Math.max(3, at(i1 - i0, queryText().n)),
  );
}
