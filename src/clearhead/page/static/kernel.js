// A page in a notebook: light or dark as the notebook is, and with the kernel's numbers while there is a kernel. What
// stands around its frame speaks first, see `outside`.
import { checked, Fault, file, framed, source } from "./source.js";
import { setTheme } from "./colour.js";
import { emit, view } from "./state.js";

const AT_ONCE = 2; // questions: what is no longer wanted when its turn comes is not asked

/** @param {MessagePort} port @returns {import("./types").Source} The parts are answers of whoever is behind it. */
function partsBehind(port, live = true) {
  const asked = new Map();
  /** @type {any[]} */
  let waiting = [];
  let count = 0;
  function askMore() {
    waiting = waiting.filter(({ signal }) => !signal?.aborted);
    for (const one of waiting.splice(0, AT_ONCE - asked.size)) {
      asked.set(++count, one);
      port.postMessage({ id: count, name: one.name, query: one.query });
    }
  }
  port.addEventListener("message", ({ data: { id, error, title = "The kernel cannot answer", bytes } }) => {
    const one = asked.get(id);
    if (!asked.delete(id)) return;
    if (error) one.fail(new Fault(title, error));
    else one.done(bytes ? new Uint8Array(bytes) : null);
    askMore();
  });
  /** @type {import("./types").Source["part"]} */
  const part = (name, query = {}, signal = undefined) =>
    new Promise((done, fail) => {
      signal?.addEventListener("abort", () => fail(signal.reason));
      waiting.push({ name, query: Object.fromEntries(new URLSearchParams(query)), signal, done, fail });
      askMore();
    });
  const facts = async (page = "") =>
    checked(JSON.parse(new TextDecoder().decode((await part(page + "facts")) || undefined)));
  return { live, facts, part };
}

/** @type {boolean | null} */
let dark = null; // what the notebook is; null where there is none
/** @param {boolean} system whether the system is dark: it decides where there is no notebook */
export const darkHere = (system) => dark ?? system;

/** @param {boolean} wanted */
function follow(wanted) {
  dark = wanted;
  if (view.theme !== "auto" || !view.trace) return; // chosen on the page, or the page will begin with it
  setTheme(dark);
  emit("theme");
}

/**
 * Listen to what is around this page, if there is something: a notebook, or the page that shows it beside another.
 * @param {Promise<void>} started
 * @param {() => Promise<void>} renew shows the numbers of the source that there is now
 * @param {() => void} begin now it may
 */
export function startKernel(started, renew, begin) {
  if (!framed) begin();
  if (window.parent === window || source.live) return;
  /** @type {MessagePort | null} */
  let latest = null;
  async function change(from) {
    Object.assign(source, from);
    await renew();
  }
  async function meet(port, live) {
    if (framed) {
      Object.assign(source, partsBehind(port, live));
      port.start();
      return begin();
    }
    latest?.close();
    latest = port;
    port.addEventListener("message", ({ data }) => {
      if (!data.gone || port !== latest) return;
      latest = null;
      if (source.live) change(file);
    });
    port.start();
    const kernel = partsBehind(port);
    await kernel.facts(); // where no kernel answers, the page stays what it is
    await started;
    if (port === latest) await change(kernel);
  }
  addEventListener("message", ({ source: sender, data, ports }) => {
    if (sender !== window.parent || !data) return;
    if (data.clearhead === "theme") follow(Boolean(data.dark));
    if (data.clearhead === "kernel" && ports[0]) meet(ports[0], data.live);
  });
  window.parent.postMessage({ clearhead: "page" }, "*");
}
