// A browser starts no Worker for a page that was opened from a file. There the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = Object.assign(document.createElement("iframe"), { hidden: true });
      this.frame.addEventListener("said", (event) => {
        this.dispatchEvent(new MessageEvent("message", { data: event.detail }));
      });
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve));
      const answer = 'postMessage = (data) => frameElement.dispatchEvent(new CustomEvent("said", { detail: data }))';
      this.frame.srcdoc = `<script>${answer}</script><script src="${url}"></script>`;
      document.body.append(this.frame);
    }
    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
