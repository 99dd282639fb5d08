// The header: what was run, and what is kept of it against the dense matrices.
import { $, bytes, clamp, el, grouped, plural } from "./util.js";
import { source } from "./source.js";
import { view } from "./state.js";
import { drawPages } from "./pages.js";

const LIVE = "Python computes what this page asks for: every weight is exact.";
const fact = (hide, ...parts) => el("span", { class: hide }, ...parts);

function memory(trace) {
  const most = Math.max(trace.nbytes, trace.denseNbytes, 1);
  const share = (x) => clamp((100 * x) / most, 0.8, 100) + "%";
  const bars = el("i", { style: `--kept:${share(trace.nbytes)};--dense:${share(trace.denseNbytes)}` });
  const smaller =
    trace.denseNbytes < trace.nbytes ? " For a text this short the dense matrices are the smaller." : "";
  const title =
    "What the run keeps (q, k, v and one number a row) against every attention matrix as dense float32." +
    smaller;
  const words = el(
    "span",
    {},
    el("b", {}, bytes(trace.nbytes)),
    " kept",
    el("span", { class: "mute not-small" }, ` · ${bytes(trace.denseNbytes)} if dense`),
  );
  return el("span", { class: "memory num", title }, bars, words);
}

// How many tokens, or patches; of each text, where there are two.
/** @param {import("./types").Trace} trace */
const counted = ({ texts }) =>
  texts.flatMap(({ n, name, image }, i) => [
    (i ? " + " : "") + (name ? name + " " : ""),
    el("b", {}, image ? `${image.rows} × ${image.columns}` : grouped(n)),
    i < texts.length - 1 ? "" : image ? " patches" : n === 1 ? " token" : " tokens",
  ]);

export function drawHeader() {
  const { trace } = view;
  document.title = `clearhead: ${trace.name}`;
  const parts = [
    el("b", {}, trace.name),
    fact("num not-small", ...counted(trace)),
    fact("num not-medium", `${plural(trace.layers.length, "layer")} × ${plural(Math.max(...trace.layers.map((l) => l.heads)), "head")}`),
    trace.texts.length > 1 || trace.layers.every((layer) => layer.causal)
      ? ""
      : fact("not-medium", "reads both ways"),
    memory(trace),
    source.live ? el("span", { class: "mute", title: LIVE }, "live") : "",
  ];
  $("#facts").replaceChildren(...parts);
  drawPages();
}
