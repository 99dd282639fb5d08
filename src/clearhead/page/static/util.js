// Small things that every pane uses.

/** @param {string} selector @returns {HTMLElement} of the page itself: it is there */
export const $ = (selector) => /** @type {HTMLElement} */ (document.querySelector(selector));
/** @param {string} selector @returns {HTMLElement[]} */
export const $$ = (selector) => [
  .../** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(selector)),
];
/** @param {Event} event @param {string} selector @returns {HTMLElement | null} where it happened, or what is around */
export const under = (event, selector) =>
  /** @type {HTMLElement | null} */ (/** @type {Element} */ (event.target).closest(selector));
/** @param {string} selector */
export const inputOf = (selector) => /** @type {HTMLInputElement} */ ($(selector));
/** @param {string} selector */
export const canvasOf = (selector) => /** @type {HTMLCanvasElement} */ ($(selector));
/** @param {HTMLCanvasElement} canvas */
export const drawingOn = (canvas) => /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
/** @param {number} x @param {number} low @param {number} high */
export const clamp = (x, low, high) => Math.max(low, Math.min(high, x));

/**
 * An element; text never becomes markup: strings are appended as text.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, unknown>} attributes null and false: left out
 * @param {(Node | string | null | undefined)[]} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("aria-"))
      made.setAttribute(name, String(value)); // "true" and "false" are words there
    else if (value == null || value === false) continue;
    else if (name === "style")
      made.style.cssText = String(value); // a served page allows no style attribute
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child != null) made.append(child);
  return made;
}

/** @type {WeakMap<Element, string>} */
const waiting = new WeakMap(); // markup of elements that are not on the page yet
/** @type {WeakMap<Element, { shape: string, places: Node[] }>} */
const written = new WeakMap(); // of those that are: markup without its words and lines, and these as nodes

// An element for `fill`, with markup (never a token's) inside.
/** @param {HTMLElement} element @param {string} markup */
export function holding(element, markup) {
  waiting.set(element, markup);
  return element;
}

const DRAWN = ["aria-label", "d", "x1", "x2"]; // attributes that follow the numbers

// Where only words and lines differ from what was written before, nothing is parsed, and only these are laid out.
/** @param {Element} element @param {string} markup */
function write(element, markup) {
  /** @type {string[]} */
  const words = [],
    keep = (_, before, value) => (words.push(value), before);
  const shape = markup.replace(/( (?:aria-label|d|x1|x2)=)("[^"]*")/g, keep).replace(/(>)([^<]+)/g, keep),
    known = written.get(element);
  if (known?.shape !== shape || markup.includes("&")) {
    element.innerHTML = markup;
    return written.set(element, { shape, places: placesIn(element) });
  }
  words.forEach((word, i) => {
    const place = known.places[i],
      now = word[0] === '"' ? word.slice(1, -1) : word;
    if (place.nodeValue !== now) place.nodeValue = now;
  });
}

/** @param {Element} element @returns {any[]} */
function placesIn(element) {
  const drawn = [...element.querySelectorAll("[aria-label], [d], [x1]")].flatMap((one) => DRAWN.map((name) => one.getAttributeNode(name))),
    walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT),
    places = /** @type {any[]} */ (drawn.filter(Boolean));
  while (walk.nextNode()) places.push(walk.currentNode);
  return places;
}

// Make the children of an element like others, in place: what stays the same is not laid out anew.
/** @param {Element} parent @param {(Node | string)[]} children */
export function fill(parent, ...children) {
  const fresh = document.createDocumentFragment();
  fresh.append(...children);
  becomeAlike(parent, fresh);
}

/** @param {any} old @param {any} fresh */
function becomeAlike(old, fresh) {
  const markup = waiting.get(fresh);
  if (markup != null) return write(old, markup);
  let now = old.firstChild;
  for (const node of [...fresh.childNodes]) {
    const next = now?.nextSibling;
    if (now?.nodeName !== node.nodeName) {
      for (const part of [node, ...(node.querySelectorAll?.("*") || [])]) if (waiting.has(part)) becomeAlike(part, part);
      now ? now.replaceWith(node) : old.append(node);
    } else if (node.nodeType !== Node.TEXT_NODE) (takeAttributes(now, node), becomeAlike(now, node));
    else if (now.data !== node.data) now.data = node.data;
    now = next;
  }
  for (let next; now; now = next) ((next = now.nextSibling), now.remove());
}

/** @param {HTMLElement} old @param {HTMLElement} fresh */
function takeAttributes(old, fresh) {
  const names = fresh.getAttributeNames();
  for (const name of names)
    if (old.getAttribute(name) !== fresh.getAttribute(name))
      if (name === "style") old.style.cssText = fresh.style.cssText; // a served page allows no style attribute
      else old.setAttribute(name, String(fresh.getAttribute(name)));
  if (old.attributes.length > names.length)
    for (const name of old.getAttributeNames()) if (!names.includes(name)) old.removeAttribute(name);
}

export const CONTINUED = "\ufffd"; // a token that holds further bytes of the character begun before it

const INVISIBLE = /\p{Default_Ignorable_Code_Point}/u; // no width, or a direction
/** @param {string} token */
export const isInvisible = (token) => INVISIBLE.test(token) && [...token].every((c) => !c.trim() || INVISIBLE.test(c));
const codeOf = (c) => "U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");

// A token as one printable word: spaces, newlines, empty pieces and what has no shape are made visible.
/** @param {string} token */
export function shown(token) {
  if (token === "") return "∅";
  if (token === CONTINUED) return "┊";
  if (isInvisible(token)) return [...token].filter((c) => INVISIBLE.test(c)).slice(0, 3).map(codeOf).join(" ");
  const visible = (s) =>
    s
      .replace(/\r?\n/g, "⏎")
      .replace(/\t/g, "⇥")
      .replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029]/g, "�");
  if (token.trim()) return visible(token.trim());
  return /^ {4,}$/.test(token) ? `␣×${token.length}` : visible(token).replace(/\s/g, "␣");
}

/** @param {number} n */
export const grouped = (n) => String(n).replace(/\B(?=(\d{3})+$)/g, "\u202f");

/** @param {number} n */
export function bytes(n) {
  if (n >= 1e9) return (n / 1e9).toFixed(n >= 1e10 ? 0 : 1) + " GB";
  if (n >= 1e6) return (n / 1e6).toFixed(n >= 1e8 ? 0 : 1) + " MB";
  return n >= 1e3 ? Math.round(n / 1e3) + " kB" : n + " B";
}

// A share; "exact" is false for 8-bit weights, whose error above 10% is up to 0.4 points.
/** @param {number} x */
export function percent(x, exact = true, digits = 1) {
  if (x >= 0.9995) return "100%";
  if (x >= 0.0995) return (100 * x).toFixed(exact ? digits : 0) + "%";
  if (x >= 0.001) return (100 * x).toFixed(exact ? digits : 1) + "%";
  return x > 0 ? "<0.1%" : "0%";
}

/** @param {number | null | undefined} x */
export const whole = (x) => (x == null ? "–" : Math.round(100 * x) + "%");
/** @param {number} n @param {string} one */
export const plural = (n, one) => `${grouped(n)} ${one}${n === 1 ? "" : "s"}`;

// A drawing returns what is left to do once all have drawn: to measure is to have everything laid out, best once.
/** @typedef {() => (() => void) | void} Drawing */
/** @type {Set<Drawing>} */
let drawings = new Set();

// The same, once, before the browser paints: what follows the pointer need not follow each of its steps.
/** @param {Drawing} draw */
export const soon = (draw) => () => {
  if (!drawings.size)
    requestAnimationFrame(() => {
      const all = [...drawings];
      drawings.clear();
      for (const rest of all.map((one) => one())) rest?.();
    });
  drawings.add(draw);
};
/** @param {Drawing} draw */
export const atOnce = (draw) => () => draw()?.();

// A canvas sized in CSS pixels, its context scaled to the screen's.
/** @param {HTMLCanvasElement} canvas @param {number} width @param {number} height */
export function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const context = drawingOn(canvas);
  context.scale(ratio, ratio);
  return context;
}
