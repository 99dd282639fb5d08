// The products behind a number of q, and behind what a head adds to the layer's output: as many as are in the file.
import { joined } from "./data.js";
import { source } from "./source.js";

const IN = 7, // place, x W + b, the place it is turned with, x W + b there, cos, sin, b
  OUT = 5; // place, what this head adds, what the others add, b, their sum

/**
 * `count` numbers, each a head of `width` floats and its products: index, factor, weight.
 * @returns {any[]}
 */
function numbersAt(floats, at, count, width, products, names) {
  return Array.from({ length: count }, (_, c) => {
    const own = floats.subarray(at + c * (width + 3 * products)),
      told = Array.from({ length: products }, (_, m) => own.subarray(width + 3 * m, width + 3 * m + 3));
    const named = Object.fromEntries(names.map((name, i) => [name, own[i]]));
    return { ...named, products: told.map(([index, factor, weight]) => ({ index, factor, weight })) };
  });
}

class TermsOfHead {
  /** @param {Uint8Array} raw @param {number} queries @param {number} keys how many of each; of one pair alone, 1 */
  constructor(raw, queries, keys) {
    this.queries = queries;
    this.keys = keys;
    const end = raw.indexOf(10),
      { project, output } = JSON.parse(new TextDecoder().decode(raw.subarray(0, end)));
    /** @type {import("./types").ProjectFacts} */
    this.project = project;
    /** @type {import("./types").OutputFacts} */
    this.output = output;
    this.floats = joined(raw, end + 1, (raw.length - end - 1) / 4, 4, Float32Array);
    let at = 0;
    /** @type {Record<string, number>} */
    this.starts = {};
    for (const name of this.project.of || []) {
      this.starts[name] = at;
      at += this.count(name) * this.project.places[name] * (IN + 3 * this.project.products);
    }
    this.starts.out = at;
  }
  /** @param {string} name */
  count(name) {
    return name === "q" ? this.queries : this.keys;
  }
  /** @param {string} name @param {number} token */
  of(name, token) {
    if (!this.project.of?.includes(name)) return [];
    const { places, products } = this.project,
      size = places[name] * (IN + 3 * products);
    const names = ["place", "product", "partner", "its", "cos", "sin", "bias"];
    return numbersAt(
      this.floats,
      this.starts[name] + (token % this.count(name)) * size,
      places[name],
      IN,
      products,
      names,
    );
  }
  /** @param {number} token */
  out(token) {
    const { places, products } = this.output;
    if (!places) return [];
    const size = places * (OUT + 3 * products),
      names = ["place", "added", "others", "bias", "total"];
    return numbersAt(this.floats, this.starts.out + (token % this.queries) * size, places, OUT, products, names);
  }
}

/** @param {string} why @returns {any} */
const unknown = (why) => ({ project: { why }, output: { why }, of: () => [], out: () => [] });
const none = unknown("this page does not hold the layer’s matrices"),
  waiting = unknown("it is being computed");
const QUIET = 100, // milliseconds that a pair is looked at before its products are asked for
  KEPT = 500; // pairs
/** @type {WeakMap<import("./types").Weights, Map<string, import("./types").Terms>>} */
const known = new WeakMap();
let timer = 0;

/**
 * What is known of the layer's matrices; a live page asks for one pair at a time, and says when it has come.
 * @param {import("./types").Weights} weights
 * @param {number} query
 * @param {number} key
 * @param {() => void} come
 * @returns {import("./types").Terms}
 */
export function termsOf(weights, query, key, come) {
  const pair = weights.terms ? "all" : `${query}.${key}`,
    held = known.get(weights) || new Map();
  known.set(weights, held);
  if (weights.terms && !held.has(pair)) held.set(pair, new TermsOfHead(weights.terms, weights.rows, weights.columns));
  if (held.has(pair)) return held.get(pair);
  if (!source.live || !weights.q) return none;
  clearTimeout(timer);
  timer = setTimeout(async () => {
    if (held.size > KEPT) held.clear();
    const raw = await weights.part("p." + weights.name, { query, key });
    held.set(pair, raw ? new TermsOfHead(raw, 1, 1) : none);
    come();
  }, QUIET);
  return waiting;
}
