// The products behind a number of q, and behind what a head adds to the layer's output: as many as are in the file.
import { joined } from "./data.js";

const IN = 7, // place, x W + b, the place it is turned with, x W + b there, cos, sin, b
  OUT = 5; // place, what this head adds, what the others add, b, their sum

const UNKNOWN = "this page does not hold the layer’s matrices";

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
  /** @param {Uint8Array} raw @param {number} n */
  constructor(raw, n) {
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
      at += n * this.project.places[name] * (IN + 3 * this.project.products);
    }
    this.starts.out = at;
  }
  /** @param {string} name @param {number} token */
  of(name, token) {
    if (!this.project.of?.includes(name)) return [];
    const { places, products } = this.project,
      size = places[name] * (IN + 3 * products);
    const names = ["place", "product", "partner", "its", "cos", "sin", "bias"];
    return numbersAt(this.floats, this.starts[name] + token * size, places[name], IN, products, names);
  }
  /** @param {number} token */
  out(token) {
    const { places, products } = this.output;
    if (!places) return [];
    const size = places * (OUT + 3 * products),
      names = ["place", "added", "others", "bias", "total"];
    return numbersAt(this.floats, this.starts.out + token * size, places, OUT, products, names);
  }
}

/** @type {import("./types").Terms} */
const none = {
  project: /** @type {any} */ ({ why: UNKNOWN }),
  output: /** @type {any} */ ({ why: UNKNOWN }),
  of: () => [],
  out: () => [],
};
/** @type {WeakMap<import("./types").Weights, import("./types").Terms>} */
const known = new WeakMap();

/** @param {import("./types").Weights} weights @returns {import("./types").Terms} */
export function termsOf(weights) {
  if (!weights.terms) return none;
  const terms = known.get(weights) || new TermsOfHead(weights.terms, weights.n);
  known.set(weights, terms);
  return terms;
}
