// The products behind a number of q, and behind what a head adds to the layer's output: as many as are in the file.
import { joined } from "./data.js";

const IN = 7, // place, x W + b, the place it is turned with, x W + b there, cos, sin, b
  OUT = 5; // place, what this head adds, what the others add, b, their sum

const UNKNOWN = "this page does not hold the layer’s matrices";

// `count` numbers, each a head of `width` floats and its products: index, factor, weight.
function numbersAt(floats, at, count, width, products, names) {
  return Array.from({ length: count }, (_, c) => {
    const own = floats.subarray(at + c * (width + 3 * products)),
      told = Array.from({ length: products }, (_, m) => own.subarray(width + 3 * m, width + 3 * m + 3));
    const named = Object.fromEntries(names.map((name, i) => [name, own[i]]));
    return { ...named, products: told.map(([index, factor, weight]) => ({ index, factor, weight })) };
  });
}

class Terms {
  constructor(raw, n) {
    const end = raw.indexOf(10);
    Object.assign(this, JSON.parse(new TextDecoder().decode(raw.subarray(0, end))));
    this.floats = joined(raw, end + 1, (raw.length - end - 1) / 4, 4, Float32Array);
    let at = 0;
    this.starts = {};
    for (const name of this.project.of || []) {
      this.starts[name] = at;
      at += n * this.project.places[name] * (IN + 3 * this.project.products);
    }
    this.starts.out = at;
  }
  // The numbers of q, k or v of a token; null where they are not known.
  of(name, token) {
    if (!this.project.of?.includes(name)) return null;
    const { places, products } = this.project,
      size = places[name] * (IN + 3 * products);
    const names = ["place", "product", "partner", "its", "cos", "sin", "bias"];
    return numbersAt(this.floats, this.starts[name] + token * size, places[name], IN, products, names);
  }
  // The numbers of the layer's output at a token; null where they are not known.
  out(token) {
    const { places, products } = this.output;
    if (!places) return null;
    const size = places * (OUT + 3 * products),
      names = ["place", "added", "others", "bias", "total"];
    return numbersAt(this.floats, this.starts.out + token * size, places, OUT, products, names);
  }
}

const none = { project: { why: UNKNOWN }, output: { why: UNKNOWN }, of: () => null, out: () => null };
const known = new WeakMap();

export function termsOf(weights) {
  if (!weights.terms) return none;
  if (!known.has(weights)) known.set(weights, new Terms(weights.terms, weights.n));
  return known.get(weights);
}
