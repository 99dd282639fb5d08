// The data of the page: facts at once, heads decoded when they are asked for.
import { Fault, source } from "./source.js";

/** @typedef {import("./types").Weights} Weights */

const HELD = 256e6, // bytes of heads that a live page keeps decoded
  ROWS = 32e6; // bytes of single rows and columns that it keeps of one head

const damaged = (message) =>
  new Fault(
    "This file is damaged",
    message + ", so the numbers cannot be trusted and none are shown. Copy the file again, or save it anew.",
    'view.save("page.html")',
  );

/**
 * `count` values of `width` bytes, from byte planes to an array of `Kind`.
 * @template T
 * @param {Uint8Array} raw
 * @param {number} offset
 * @param {number} count
 * @param {number} width
 * @param {{ new (buffer: ArrayBuffer): T, BYTES_PER_ELEMENT: number }} Kind
 * @returns {T}
 */
export function joined(raw, offset, count, width, Kind) {
  const size = Kind.BYTES_PER_ELEMENT,
    out = new Uint8Array(count * size);
  for (let plane = 0; plane < width; plane++) {
    for (let i = 0, from = offset + plane * count; i < count; i++) out[i * size + plane] = raw[from + i];
  }
  return new Kind(out.buffer);
}

/** @template {Float32Array} T @param {T} values @returns {T} */
function finite(values) {
  if (!values.some(Number.isNaN)) return values;
  throw new Fault(
    "The attention of this head is not finite",
    "Weights or inputs of the model hold NaN or infinity, or its scores overflow, so no numbers are shown. Find where with torch.isfinite.",
  );
}

/** @param {Uint8Array | null} raw */
const floats = (raw) => finite(new Float32Array(raw ? raw.buffer : new ArrayBuffer(0)));

const VALUE = Float32Array.from({ length: 256 }, (_, i) => (i / 255) ** 2);

/**
 * The strong weights of one head, row by row.
 * @param {Uint8Array} raw
 * @param {number} n rows
 * @param {number} columns
 */
function unpackRows(raw, n, columns) {
  const keyWidth = columns <= 1 << 8 ? 1 : columns <= 1 << 16 ? 2 : 4,
    counts = joined(raw, 0, n, 2, Uint16Array);
  const start = new Uint32Array(n + 1);
  for (let i = 0; i < n; i++) start[i + 1] = start[i] + counts[i];
  const total = start[n];
  const keys = joined(raw, 2 * n, total, keyWidth, Uint32Array);
  for (let i = 0; i < n; i++) for (let p = start[i] + 1; p < start[i + 1]; p++) keys[p] += keys[p - 1];
  return { start, keys, values: raw.subarray(2 * n + keyWidth * total) };
}

// Everything a pane may ask about one head's weights.
/** @implements {Weights} */
class HeadWeights {
  /**
   * @param {import("./types").Trace} trace
   * @param {import("./types").Layer} layer the head's own: another may not be causal
   * @param {string} name
   * @param {ReturnType<typeof unpackRows>} strong
   */
  constructor(trace, layer, name, strong) {
    this.rows = trace.texts[layer.queries].n;
    this.columns = trace.texts[layer.keys].n;
    this.causal = layer.causal;
    this.floor = trace.threshold;
    this.exact = source.live;
    this.part = trace.part;
    this.name = name;
    this.strong = strong;
    this.d = this.scale = 0;
    /** @type {any} */
    this.q = null; // so is all that belongs to the vectors, where they are not here
    /** @type {any} */
    this.k = null;
    /** @type {any} */
    this.v = null;
    /** @type {any} */
    this.lse = null;
    /** @type {Uint8Array | null} */
    this.terms = null;
    /** @type {Map<string, Float32Array>} */
    this.lines = new Map(); // rows and columns that were asked for, the latest last
  }
  get nbytes() {
    const { q, k, v, strong } = this;
    return (q ? 4 * (q.length + k.length + v.length) : 0) + 5 * strong.keys.length;
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
    if (this.q) return this.computed(i, j);
    const line = this.lines.get("row" + i),
      other = line || this.lines.get("column" + j);
    return other ? other[line ? j : i] : this.stored(i, j);
  }
  computed(i, j) {
    const { d, q, k } = this;
    let score = 0;
    for (let x = 0, a = i * d, b = j * d; x < d; x++) score += q[a + x] * k[b + x];
    const weight = Math.exp(score * this.scale - this.lse[i]);
    return weight === weight ? weight : 0; // a row that attends to nothing has lse -inf
  }
  stored(i, j) {
    const { start, keys, values } = this.strong,
      at = this.place(i, j);
    return at < start[i + 1] && keys[at] === j ? VALUE[values[at]] : 0;
  }
  // Where the first strong key of a row lies that is no earlier than `j`.
  place(i, j) {
    const { start, keys } = this.strong;
    let low = start[i],
      high = start[i + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (keys[middle] < j) low = middle + 1;
      else high = middle;
    }
    return low;
  }
  row(i) {
    const known = this.lines.get("row" + i);
    if (known) return known;
    const out = new Float32Array(this.columns),
      { start, keys, values } = this.strong;
    if (this.q)
      for (let j = 0, end = this.causal ? i + 1 : this.columns; j < end; j++) out[j] = this.computed(i, j);
    else for (let p = start[i]; p < start[i + 1]; p++) out[keys[p]] = VALUE[values[p]];
    return out;
  }
  column(j) {
    const known = this.lines.get("column" + j);
    if (known) return known;
    const out = new Float32Array(this.rows);
    for (let i = this.causal ? j : 0; i < this.rows; i++) out[i] = this.at(i, j);
    return out;
  }
  // Every stored weight: visit(query, key, weight).
  each(visit) {
    const { start, keys, values } = this.strong;
    for (let i = 0; i < this.rows; i++)
      for (let p = start[i]; p < start[i + 1]; p++) visit(i, keys[p], VALUE[values[p]]);
  }
  // What `row` and `column` are about to be asked for. Null where they know it already.
  need(rows, columns) {
    if (!source.live || this.q) return null;
    const asked = [...rows.map((i) => ["row", i, "query"]), ...columns.map((j) => ["column", j, "key"])];
    const missing = asked.filter(([kind, i]) => !this.lines.has(kind + i));
    return missing.length ? Promise.all(missing.map((line) => this.fetch(line))).then(() => {}) : null;
  }
  async fetch([kind, i, what]) {
    const line = floats(await this.part(`${kind}.${this.name}`, { [what]: i }));
    this.lines.set(kind + i, line);
    while (this.lines.size * 4 * Math.max(this.rows, this.columns) > ROWS && this.lines.size > 4)
      this.lines.delete(this.lines.keys().next().value || "");
  }
  // The largest weight under each pixel: `side` × `side` weights of these queries and keys.
  picture(i0, i1, j0, j1, side, signal) {
    if (source.live && !(this.q && side === 1))
      return this.part(`tile.${this.name}`, { rows: `${i0}-${i1}`, keys: `${j0}-${j1}`, side, of: "max" }, signal)
        .then(floats);
    return this.q && side === 1 ? this.cells(i0, i1, j0, j1) : this.pooled(i0, i1, j0, j1, side);
  }
  cells(i0, i1, j0, j1) {
    const out = new Float32Array((i1 - i0) * (j1 - j0));
    for (let i = i0, at = 0; i < i1; i++)
      for (let j = j0; j < j1; j++, at++) if (this.sees(i, j)) out[at] = this.computed(i, j);
    return out;
  }
  pooled(i0, i1, j0, j1, side) {
    const { start, keys, values } = this.strong,
      width = Math.ceil((j1 - j0) / side);
    const out = new Float32Array(Math.ceil((i1 - i0) / side) * width);
    for (let i = i0; i < i1; i++) {
      const line = Math.floor((i - i0) / side) * width;
      for (let p = this.place(i, j0); p < start[i + 1] && keys[p] < j1; p++) {
        const at = line + Math.floor((keys[p] - j0) / side);
        if (VALUE[values[p]] > out[at]) out[at] = VALUE[values[p]];
      }
    }
    return out;
  }
}

export class Trace {
  /** @param {any} facts @param {string} prefix of the names of its parts */
  constructor(facts, prefix = "") {
    Object.assign(this, facts, { prefix });
    /** @type {import("./types").Source["part"]} */
    this.part = (name, query, signal) => source.part(prefix + name, query, signal);
    this.texts = facts.texts.map((text) => ({ ...text, n: text.tokens.length }));
    this.layers = facts.layers;
    this.reading = facts.reading || 0; // layers that a live page has still to hear of
    this.heard = 0;
    this.n = Math.max(...this.texts.map((text) => text.n));
    this.heads = facts.heads.map((told) => headOf(told, facts.scores));
    this.byName = new Map(this.heads.map((head) => [head.layer + "." + head.head, head]));
    this.byLayer = new Map(facts.layers.map((layer) => [layer.layer, layer]));
    /** @type {Map<string, HeadWeights>} */
    this.open = new Map(); // the latest last
    /** @type {Map<string, Promise<HeadWeights>>} */
    this.coming = new Map();
  }
  find(layer, head) {
    return this.byName.get(layer + "." + head);
  }
  // The same heads from another source: their weights are decoded anew.
  renew({ threshold, notes, exact }) {
    Object.assign(this, { threshold, notes, exact });
    this.open.clear();
    this.coming.clear();
  }
  async readThumbs() {
    const raw = (await this.part("thumbs")) || new Uint8Array(0);
    let at = 0;
    for (const layer of this.layers) at = this.setThumbs(layer, raw, at);
    if (at !== raw.length) throw damaged("Its thumbnails do not fit its heads");
  }
  setThumbs(layer, raw, at) {
    const size = layer.thumb[0] * layer.thumb[1];
    for (let h = 0; h < layer.heads; h++, at += size)
      this.find(layer.layer, h).thumb = raw.subarray(at, at + size);
    return at;
  }
  // What has become known of heads that were not read yet. Whether there was anything new.
  async hear() {
    const raw = await this.part("heads", { have: this.heard });
    const { reading, news, failed } = JSON.parse(new TextDecoder().decode(raw || undefined));
    if (failed) throw new Fault("The heads of this model cannot be read", failed);
    this.reading = reading;
    this.heard += news.length;
    this.scores = [...new Set([...this.scores, ...news.flatMap((one) => one.scores)])];
    for (const { layer, scores, heads, thumbs } of news) {
      Object.assign(this.byLayer.get(layer.layer), layer);
      for (const told of heads) Object.assign(this.find(told[0], told[1]), headOf(told, scores));
      this.setThumbs(
        layer,
        Uint8Array.from(atob(thumbs), (c) => c.charCodeAt(0)),
        0,
      );
      for (const [name, weights] of this.open)
        if (name.startsWith(layer.layer + ".")) weights.strong = await this.strong(name);
    }
    return news.length > 0;
  }
  async weights({ layer, head }) {
    const name = layer + "." + head;
    if (!this.open.has(name) && !this.coming.has(name))
      this.coming.set(
        name,
        this.decode(layer, head, name).finally(() => this.coming.delete(name)),
      );
    const weights = this.open.get(name) || /** @type {HeadWeights} */ (await this.coming.get(name));
    this.open.delete(name);
    this.open.set(name, weights);
    if (source.live) this.forget();
    return weights;
  }
  forget() {
    let held = [...this.open.values()].reduce((sum, weights) => sum + weights.nbytes, 0);
    for (const [name, weights] of this.open) {
      if (held <= HELD || this.open.size === 1) return;
      this.open.delete(name);
      held -= weights.nbytes;
    }
  }
  async strong(name) {
    const raw = await this.part("w." + name);
    if (!raw) throw damaged(`The weights of layer ${name.replace(".", ", head ")} are missing`);
    const { queries, keys } = this.byLayer.get(Number(name.split(".")[0]));
    return unpackRows(raw, this.texts[queries].n, this.texts[keys].n);
  }
  async decode(layer, head, name) {
    const own = this.byLayer.get(layer),
      { d, scale, groups, heads } = own;
    const group = Math.floor(head / (heads / groups));
    const [strong, query, shared] = await Promise.all([
      this.strong(name),
      d ? this.part("q." + name) : null,
      d ? this.part(`kv.${layer}.${group}`) : null,
    ]);
    const weights = new HeadWeights(/** @type {any} */ (this), own, name, strong);
    if (!query || !shared) return weights;
    const mine = joined(query, 0, query.length / 4, 4, Float32Array);
    const theirs = joined(shared, 0, shared.length / 4, 4, Float32Array);
    const [queries, keys] = [weights.rows * d, weights.columns * d];
    return weights.setVectors({
      d,
      scale,
      q: mine.subarray(0, queries),
      lse: finite(mine.subarray(queries)),
      k: theirs.subarray(0, keys),
      v: theirs.subarray(keys),
      terms: source.live ? null : await this.part("p." + name),
    });
  }
}

function headOf([layer, head, role, scores, baselines, entropy, distance], names) {
  const named = (values) => Object.fromEntries(names.map((name, i) => [name, values[i]]));
  return { layer, head, role, scores: named(scores), baselines: named(baselines), entropy, distance };
}
