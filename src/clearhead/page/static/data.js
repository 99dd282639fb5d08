// The data of the page: facts at once, heads decoded when they are asked for.
import { $ } from "./util.js";

export const FORMAT = 1;

// What keeps the page from showing numbers; said in a sentence, never half shown.
export class Fault extends Error {
  constructor(title, message, call = "") {
    super(message);
    this.title = title;
    this.call = call; // what to run, if something helps
  }
}

const FIRST = [
  'model, tokenizer = clearhead.zoo.load("smollm2")',
  'view = clearhead.look(model, tokenizer, "The cat sat on the mat.")',
  'view.save("page.html")',
].join("\n");
const ANEW = 'view.save("page.html")';

const CUT = "This file is cut short";
const AGAIN = "so the numbers cannot be trusted and none are shown. Copy the file again, or save it anew.";

export function readFacts() {
  if (typeof DecompressionStream === "undefined") {
    throw new Fault(
      "This browser is too old for this page",
      "It cannot unpack the numbers (DecompressionStream is missing). Chrome or Edge 80, Firefox 113, Safari 16.4 or newer can.",
    );
  }
  const source = $("#facts-data");
  if (!source)
    throw new Fault(
      "There are no numbers in this file",
      "The page is here, but not the data that it draws. Save it anew.",
      ANEW,
    );
  let facts;
  try {
    facts = JSON.parse(source.textContent);
  } catch {
    throw new Fault(CUT, "It breaks off in its first part, " + AGAIN, ANEW);
  }
  if (facts.format !== FORMAT) {
    throw new Fault(
      "This file and its page do not match",
      `The numbers are in format ${facts.format}; this page reads format ${FORMAT}. Save it anew with one version of clearhead.`,
      ANEW,
    );
  }
  if (!facts.tokens.length)
    throw new Fault(
      "No text has been read yet",
      "Run the model on a text and every head appears here.",
      FIRST,
    );
  const found = document.querySelectorAll("[data-blob]").length;
  if (!$('meta[name="end"]')) {
    throw new Fault(
      CUT,
      `It should hold ${facts.blobs} parts, but only ${Math.max(0, found - 1)} arrived whole, ${AGAIN}`,
      ANEW,
    );
  }
  return facts;
}

async function blob(name) {
  const source = $(`[data-blob="${name}"]`);
  if (!source) return null;
  const expected = Number(source.dataset.bytes);
  try {
    const packed = Uint8Array.from(atob(source.textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const raw = new Uint8Array(await new Response(stream).arrayBuffer());
    if (raw.length === expected) return raw;
  } catch {
    // not base64 or not gzip: the fault below says so
  }
  throw new Fault(
    "This file is damaged",
    `Part ${name} should unpack to ${expected} bytes and does not, ${AGAIN}`,
    ANEW,
  );
}

// `count` values of `width` bytes, from byte planes to an array of `Kind`.
export function joined(raw, offset, count, width, Kind) {
  const out = new Uint8Array(count * Kind.BYTES_PER_ELEMENT);
  for (let plane = 0; plane < width; plane++) {
    for (let i = 0, from = offset + plane * count; i < count; i++)
      out[i * Kind.BYTES_PER_ELEMENT + plane] = raw[from + i];
  }
  return new Kind(out.buffer);
}

const VALUE = Float32Array.from({ length: 256 }, (_, i) => (i / 255) ** 2);

// The strong weights of one head, row by row.
function unpackRows(raw, n, keyWidth) {
  const counts = joined(raw, 0, n, 2, Uint16Array);
  const start = new Uint32Array(n + 1);
  for (let i = 0; i < n; i++) start[i + 1] = start[i] + counts[i];
  const total = start[n];
  const keys = joined(raw, 2 * n, total, keyWidth, Uint32Array);
  for (let i = 0; i < n; i++) for (let p = start[i] + 1; p < start[i + 1]; p++) keys[p] += keys[p - 1];
  return { start, keys, values: raw.subarray(2 * n + keyWidth * total) };
}

// Everything a pane may ask about one head's weights.
class HeadWeights {
  // causal: of the head's own layer; another layer's may differ.
  constructor({ tokens, threshold }, { causal }, rows) {
    Object.assign(this, { n: tokens.length, causal, floor: threshold, exact: false, ...rows });
  }
  // q, k, lse: the exact weight is exp(scale q·k - lse).
  setVectors(vectors) {
    Object.assign(this, vectors, { exact: true });
    return this;
  }
  sees(i, j) {
    return !this.causal || j <= i;
  }
  at(i, j) {
    if (!this.sees(i, j)) return 0;
    if (this.exact) return this.computed(i, j);
    let low = this.start[i],
      high = this.start[i + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.keys[middle] < j) low = middle + 1;
      else high = middle;
    }
    return low < this.start[i + 1] && this.keys[low] === j ? VALUE[this.values[low]] : 0;
  }
  computed(i, j) {
    const { d, q, k } = this;
    let score = 0;
    for (let x = 0, a = i * d, b = j * d; x < d; x++) score += q[a + x] * k[b + x];
    const weight = Math.exp(score * this.scale - this.lse[i]);
    return weight === weight ? weight : 0; // a row that attends to nothing has lse -inf
  }
  row(i) {
    const out = new Float32Array(this.n);
    if (this.exact)
      for (let j = 0, end = this.causal ? i + 1 : this.n; j < end; j++) out[j] = this.computed(i, j);
    else for (let p = this.start[i]; p < this.start[i + 1]; p++) out[this.keys[p]] = VALUE[this.values[p]];
    return out;
  }
  column(j) {
    const out = new Float32Array(this.n);
    for (let i = this.causal ? j : 0; i < this.n; i++) out[i] = this.at(i, j);
    return out;
  }
  // Every stored weight: visit(query, key, weight).
  each(visit) {
    for (let i = 0; i < this.n; i++)
      for (let p = this.start[i]; p < this.start[i + 1]; p++) visit(i, this.keys[p], VALUE[this.values[p]]);
  }
}

export class Trace {
  constructor(facts) {
    Object.assign(this, facts);
    this.n = facts.tokens.length;
    this.heads = facts.heads.map(([layer, head, role, scores, baselines, entropy, distance]) => {
      const named = (values) => Object.fromEntries(facts.scores.map((name, i) => [name, values[i]]));
      return { layer, head, role, scores: named(scores), baselines: named(baselines), entropy, distance };
    });
    this.byName = new Map(this.heads.map((head) => [head.layer + "." + head.head, head]));
    this.byLayer = new Map(facts.layers.map((layer) => [layer.layer, layer]));
    this.width = Math.max(...facts.layers.map((layer) => layer.heads));
    this.open = new Map();
  }
  find(layer, head) {
    return this.byName.get(layer + "." + head);
  }
  async readThumbs() {
    const raw = await blob("thumbs");
    const size = this.thumb[0] * this.thumb[1];
    let at = 0;
    for (const layer of this.layers) {
      for (let h = 0; h < layer.heads; h++, at += size)
        this.find(layer.layer, h).thumb = raw.subarray(at, at + size);
    }
    if (!raw || at !== raw.length)
      throw new Fault("This file is damaged", "Its thumbnails do not fit its heads, " + AGAIN);
  }
  async weights({ layer, head }) {
    const name = layer + "." + head;
    if (!this.open.has(name)) this.open.set(name, await this.decode(layer, head, name));
    return this.open.get(name);
  }
  async decode(layer, head, name) {
    const raw = await blob("w." + name);
    if (!raw)
      throw new Fault(
        "This file is damaged",
        `The weights of layer ${layer}, head ${head} are missing, ${AGAIN}`,
      );
    const own = this.byLayer.get(layer);
    const weights = new HeadWeights(this, own, unpackRows(raw, this.n, this.keyWidth));
    const query = await blob("q." + name);
    if (!query) return weights;
    const { d, scale, groups, heads } = own;
    const shared = await blob(`kv.${layer}.${Math.floor(head / (heads / groups))}`);
    const mine = joined(query, 0, query.length / 4, 4, Float32Array);
    const theirs = joined(shared, 0, shared.length / 4, 4, Float32Array);
    const size = this.n * d;
    return weights.setVectors({
      d,
      scale,
      q: mine.subarray(0, size),
      lse: mine.subarray(size),
      k: theirs.subarray(0, size),
      v: theirs.subarray(size),
      terms: await blob("p." + name),
    });
  }
}
