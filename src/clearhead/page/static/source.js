// Where numbers come from. Parts have names and are bytes; a file holds them, a live source makes them. Those of another
// of several pages begin with its number and a dot: 2.facts, 2.w.17.5.

export const FORMAT = 2;

// What keeps the page from showing numbers; said in a sentence, never half shown.
export class Fault extends Error {
  /** @param {string} title @param {string} message @param {string} call what to run, if something helps */
  constructor(title, message, call = "") {
    super(message);
    this.title = title;
    this.call = call;
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

export function checked(facts) {
  if (facts.format !== FORMAT)
    throw new Fault(
      "This file and its page do not match",
      `The numbers are in format ${facts.format}; this page reads format ${FORMAT}. Save it anew with one version of clearhead.`,
      ANEW,
    );
  if (facts.texts.length && facts.texts[0].tokens.length) return facts;
  throw new Fault("No text has been read yet", "Run the model on a text and every head appears here.", FIRST);
}

/** @type {import("./types").Source} The parts are script elements of this document. */
export const file = {
  live: false,
  async facts(page = "") {
    if (typeof DecompressionStream === "undefined")
      throw new Fault(
        "This browser is too old for this page",
        "It cannot unpack the numbers (DecompressionStream is missing). Chrome or Edge 80, Firefox 113, Safari 16.4 or newer can.",
      );
    const held = document.querySelector("#facts-data" + page.replace(/(\d+)\./, "-$1"));
    if (!held)
      throw new Fault(
        "There are no numbers in this file",
        "The page is here, but not the data that it draws. Save it anew.",
        ANEW,
      );
    let facts;
    try {
      facts = JSON.parse(held.textContent || "");
    } catch {
      throw new Fault(CUT, "It breaks off in its first part, " + AGAIN, ANEW);
    }
    checked(facts);
    const pages = document.querySelector("#pages-data");
    if (pages) Object.assign(facts, { pages: JSON.parse(pages.textContent || ""), page: parseInt(page) || 0 });
    const found = document.querySelectorAll("[data-blob]").length;
    if (!document.querySelector('meta[name="end"]'))
      throw new Fault(
        CUT,
        `It should hold ${facts.blobs} parts, but only ${Math.max(0, found - 1)} arrived whole, ${AGAIN}`,
        ANEW,
      );
    return facts;
  },
  async part(name) {
    const held = /** @type {HTMLElement | null} */ (document.querySelector(`[data-blob="${name}"]`));
    if (!held) return null;
    const expected = Number(held.dataset.bytes);
    try {
      const packed = Uint8Array.from(atob(held.textContent || ""), (c) => c.charCodeAt(0));
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
  },
};

/** @type {import("./types").Source} The parts are answers of the server that this page came from. */
const server = {
  live: true,
  async facts(page = "") {
    return checked(JSON.parse(new TextDecoder().decode((await server.part(page + "facts")) || undefined)));
  },
  async part(name, query = {}, signal = undefined) {
    let answer;
    try {
      answer = await fetch(`part/${name}?${new URLSearchParams(query)}`, { signal });
      if (answer.ok) return new Uint8Array(await answer.arrayBuffer());
      if (answer.status === 404) return null;
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Fault(
        "The server does not answer",
        "It was stopped, or this computer was asleep. Start it again; it then has a new address.",
        "clearhead serve recording/",
      );
    }
    throw new Fault("The server cannot answer", await answer.text());
  },
};

// Whether this page stands beside another, and which view it begins with: the page around both has the numbers.
/** @type {HTMLMetaElement | null} */
export const framed = document.querySelector('meta[name="source"][content="around"]');
const served = document.querySelector('meta[name="source"][content="live"]');
/** @type {import("./types").Source} */
export const source = { ...(served ? server : file) }; // in a notebook it becomes another, see kernel.js
