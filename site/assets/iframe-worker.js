// A browser starts no Worker from a file, so in a page opened from a file the search
// runs in a hidden frame that answers to the same three methods.
if (location.protocol === "file:") {
  window.IFrameWorker = class IFrameWorker extends EventTarget {
    #frame = document.createElement("iframe");
    #ready;

    constructor(address) {
      super();
      this.#frame.hidden = true;
      this.#frame.setAttribute("aria-hidden", "true");
      const attach = () => document.body.append(this.#frame);
      this.#ready = new Promise((resolve, reject) => {
        const begin = () => {
          attach();
          const inside = this.#frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = this.#frame.contentDocument.createElement("script");
          script.src = String(address);
          script.onload = () => resolve(inside);
          script.onerror = reject;
          this.#frame.contentDocument.head.append(script);
        };
        if (document.body) begin();
        else document.addEventListener("DOMContentLoaded", begin, { once: true });
      });
    }

    postMessage(data) {
      this.#ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
