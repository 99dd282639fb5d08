// In the notebook: tell the page in a frame whether the notebook around it is dark, now and when that changes.

/** @param {HTMLIFrameElement} frame */
function followTheme(frame) {
  // The first colour that is there behind the frame.
  function dark() {
    for (let at = frame.parentElement; at; at = at.parentElement) {
      const [r, g, b, a = 1] = (getComputedStyle(at).backgroundColor.match(/[\d.]+/g) || []).map(Number);
      if (a > 0.5) return 0.3 * r + 0.59 * g + 0.11 * b < 128;
    }
    return null;
  }
  function tell() {
    const is = dark();
    if (is != null) frame.contentWindow?.postMessage({ clearhead: "theme", dark: is }, "*");
  }
  const change = new MutationObserver(() => (tell(), setTimeout(tell, 400))); // colours may fade into one another
  for (const part of [document.documentElement, document.body]) change.observe(part, { attributes: true });
  frame.addEventListener("load", tell);
  addEventListener("message", ({ source }) => source === frame.contentWindow && tell());
  tell();
}
