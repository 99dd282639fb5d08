// A strip beside a scrolled text: where the tinted tokens, the query and the key are.
import { $, canvasOf, clamp, sized } from "./util.js";
import { colour, rgb, theme, tone } from "./colour.js";
import { keyOf, otherKind, queryOf, view } from "./state.js";
import { topOf } from "./flow.js";

/** @param {number[]} tinted @param {Float32Array} weights */
export function drawRuler(tinted, weights) {
  const strip = canvasOf("#ruler"),
    box = $("#text"),
    height = box.clientHeight,
    all = box.scrollHeight;
  strip.style.display = all > height + 2 ? "block" : "none";
  if (strip.style.display === "none") return;
  const context = sized(strip, 14, height),
    at = (kind, i) => (topOf(kind, i) / all) * height;
  context.fillStyle = colour("cell");
  context.fillRect(3, 0, 8, height);
  for (const i of [...tinted].sort((a, b) => weights[a] - weights[b])) {
    context.fillStyle = rgb(theme.weights[clamp(tone(view.scale, weights[i]) + 30, 0, 255)]);
    context.fillRect(3, at(otherKind(), i), 8, 2);
  }
  for (const name of /** @type {const} */ (["key", "query"])) {
    context.fillStyle = colour(name);
    context.fillRect(0, at(name, name === "key" ? keyOf() : queryOf()) - 1, 14, 3);
  }
  context.strokeStyle = colour("mute");
  context.strokeRect(1.5, (box.scrollTop / all) * height + 0.5, 11, (height / all) * height - 1);
}

export function startRuler() {
  const text = $("#text");
  $("#ruler").addEventListener(
    "click",
    (event) =>
      (text.scrollTop = (event.offsetY / text.clientHeight) * text.scrollHeight - text.clientHeight / 2),
  );
}
