// In the notebook: an anywidget that carries what a page asks to the kernel, and what the kernel answers to the page.

// Pages in some frames ask one model. Returns how to leave them.
function serve(model, frames) {
  const mine = Math.random().toString(36).slice(2), // others may show the same notebook, and hear the same answers
    asked = new Map(),
    ports = new Set();
  let count = 0;
  function answer({ id, ...said }, buffers) {
    const question = asked.get(id);
    if (!asked.delete(id)) return;
    const bytes = buffers[0] && new Uint8Array(buffers[0].buffer || buffers[0], buffers[0].byteOffset, buffers[0].byteLength);
    question.port.postMessage({ ...said, id: question.id, bytes: bytes?.slice().buffer });
  }
  function meet(frame) {
    const { port1: port, port2 } = new MessageChannel();
    port.onmessage = async ({ data: { id, name, query } }) => {
      const question = `${mine}.${++count}`;
      asked.set(question, { port, id });
      try {
        await model.send({ id: question, name, query });
      } catch {
        port.postMessage({ gone: true });
      }
    };
    ports.add(port);
    frame.contentWindow?.postMessage({ clearhead: "kernel" }, "*", [port2]);
  }
  const arrive = ({ source, data }) => {
    const frame = data?.clearhead === "page" && frames().find((one) => one.contentWindow === source);
    if (frame) meet(frame);
  };
  const part = () => ports.forEach((port) => port.postMessage({ gone: true }));
  const meetAll = () => (part(), ports.clear(), frames().forEach(meet));
  model.on("msg:custom", answer);
  model.on("comm_live_update", meetAll); // the kernel began anew, or it is the same one again
  addEventListener("message", arrive);
  meetAll();
  return () => {
    removeEventListener("message", arrive);
    model.off("msg:custom", answer);
    model.off("comm_live_update", meetAll);
    part();
  };
}

// The pages that are there already, as the outputs of cells: they turn live where they stand.
function initialize({ model }) {
  const outputs = `iframe[data-clearhead="${model.get("token")}"]`;
  return serve(model, () => [.../** @type {NodeListOf<HTMLIFrameElement>} */ (document.querySelectorAll(outputs))]);
}

// A page of the widget's own, where somebody displays that.
function render({ model, el }) {
  const frame = Object.assign(document.createElement("iframe"), { title: model.get("title") });
  frame.style.cssText = "width: 100%; height: 640px; border: 0";
  frame.setAttribute("sandbox", "allow-scripts allow-downloads");
  frame.srcdoc = model.get("page");
  el.append(frame);
  followTheme(frame);
  return serve(model, () => [frame]);
}

export default { initialize, render };
