// <block-diagram>: the slider, the drawings and the card of one family.
//
// The element's HTML is written by Python and is complete for the first block; this
// script moves the slider, exchanges the drawings and fills the card. It has no
// imports and no exports: it runs as a classic script, from a file too, and as a module.
// diagram-card.js must be loaded before it; saving needs drawing-file.js beside it.
//
//   element.layer, element.layers, element.checkpoint     what is drawn
//   element.select(name, host), element.pinned            the pinned value; select(null) unpins it
//   element.notation = "names" | "numbers" | "call"        how types are written
//   element.call = {B: 1, S: 512}                         the batch size and length that "call" writes
//   element.svg()                                         the drawing in view, as a file's text
//   element.setMarks({addends: {mlp_output: 0.8}, experts: [3, 17]})   live marks; null clears them
//   "block-change" {layer, shape, checkpoint}             the slider is on another block
//   "part-select" {name, host, layer, expression, pinned} a value was pinned or unpinned
(() => {
  "use strict";
  if (typeof customElements === "undefined" || customElements.get("block-diagram")) return;

  const HALF_TICK = 8; // half the width of the slider's thumb, see block-diagram.css
  const HALF_LINE = 60; // of the window, in pixels: too low to read anything in

  const { make, formatType, valueCard, blockCard } = diagramCard;

  const outOfView = ({ top, bottom }) => bottom < HALF_LINE || top > innerHeight - HALF_LINE;

  class BlockDiagram extends HTMLElement {
    #data = null;
    #drawings = new Map();
    #layer = 0;
    #number = 0;
    #drawn = "0.0";
    #pinned = null;
    #shown = null;
    #marks = null;
    #notation = "names";
    #call = { B: 1, S: 4096 };
    #leaving = null; // aborts the listeners on the document
    #scrolled = false; // since the pointer last moved: what has come under it is not meant

    connectedCallback() {
      if (!this.#data) {
        const source = this.querySelector(".bd-data");
        if (!source) return;
        this.#data = JSON.parse(source.textContent);
        this.#drawings.set("0.0", [...this.#stage.children]);
        for (const template of this.querySelectorAll("template[data-drawing]")) {
          this.#drawings.set(template.dataset.drawing, template);
        }
        this.#listen();
        this.classList.add("bd-live");
      }
      // One listener per element on the document, dropped when the element goes.
      this.#leaving = new AbortController();
      document.addEventListener("checkpoint-change", (event) => { this.checkpoint = event.detail.id; }, { signal: this.#leaving.signal });
      this.#drawTicks();
      this.#redraw(true);
    }

    disconnectedCallback() {
      if (this.#leaving) this.#leaving.abort();
    }

    get layers() { return this.#here ? this.#here.layers : 0; }
    get layer() { return this.#layer; }
    set layer(value) {
      const layer = Math.min(Math.max(Math.round(Number(value)) || 0, 0), this.layers - 1);
      if (layer === this.#layer) return;
      this.#layer = layer;
      this.#redraw();
    }

    get checkpoint() { return this.#here ? this.#here.id : null; }
    set checkpoint(id) {
      const number = this.#data ? this.#data.checkpoints.findIndex((one) => one.id === id) : -1;
      if (number < 0 || number === this.#number) return;
      this.#number = number;
      this.#layer = Math.min(this.#layer, this.layers - 1);
      this.#drawTicks();
      this.#redraw(true);
    }

    get pinned() { return this.#pinned && { ...this.#pinned }; }

    select(name, host) {
      const value = name ? this.#find(name, host) : null;
      this.#pin(value ? { name: value.name, host: value.host } : null);
    }

    // addends: by name, 0 to 1 of the largest, drawn as line weight; experts: lit cells.
    setMarks(marks) {
      this.#marks = marks;
      this.#drawMarks();
    }

    get notation() { return this.#notation; }
    set notation(value) {
      const buttons = [...this.querySelectorAll("[data-notation]")];
      if (!buttons.some((button) => button.dataset.notation === value)) return;
      this.#notation = value;
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.notation === value));
      const call = this.querySelector(".bd-call");
      if (call) call.hidden = value !== "call";
      this.#write();
    }

    get call() { return { ...this.#call }; }
    set call(sizes) {
      for (const input of this.querySelectorAll(".bd-call input")) {
        const size = Math.floor(Number(sizes[input.name]));
        if (size >= 1) this.#call[input.name] = input.value = Math.min(size, Number(input.max));
      }
      this.#write();
    }

    svg() {
      const drawing = [...this.#stage.querySelectorAll("svg")].find((svg) => svg.getClientRects().length);
      if (!drawing) return null;
      const ground = getComputedStyle(this).getPropertyValue("--role-ground").trim();
      return drawingFile(drawing, `${this.checkpoint}, ${drawing.getAttribute("aria-label")}`, ground);
    }

    get #here() { return this.#data && this.#data.checkpoints[this.#number]; }
    get #stage() { return this.querySelector(".bd-stage"); }
    get #slider() { return this.querySelector("input[type=range]"); }
    get #shape() { return this.#here.shapes.findIndex((shape) => shape.layers.includes(this.#layer)); }

    #listen() {
      const part = (event) => event.target.closest && event.target.closest("[data-value]");
      this.addEventListener("pointermove", (event) => { if (event.movementX || event.movementY) this.#scrolled = false; });
      this.addEventListener("pointerover", (event) => { const at = part(event); if (at && !this.#scrolled) this.#show(at.dataset); });
      this.addEventListener("pointerout", (event) => {
        const to = event.relatedTarget;
        if (part(event) && !(to && to.closest && this.contains(to) && to.closest("[data-value]"))) this.#show(this.#pinned);
      });
      this.addEventListener("focusin", (event) => { const at = part(event); if (at) this.#show(at.dataset); });
      this.addEventListener("click", (event) => { const at = part(event); if (at) this.#toggle(at.dataset); });
      this.addEventListener("keydown", (event) => {
        const at = part(event);
        if (event.key === "Escape") this.#pin(null);
        else if (at && at.tagName !== "BUTTON" && (event.key === "Enter" || event.key === " ")) {
          event.preventDefault();
          this.#toggle(at.dataset);
        }
      });
      this.#slider.addEventListener("input", () => { this.layer = this.#slider.value; });
      for (const button of this.querySelectorAll("[data-notation]")) {
        button.addEventListener("click", () => { this.notation = button.dataset.notation; });
      }
      for (const input of this.querySelectorAll(".bd-call input")) {
        input.addEventListener("input", () => { if (input.checkValidity() && input.value) this.call = { [input.name]: input.value }; });
        input.addEventListener("change", () => { input.value = this.#call[input.name]; });
      }
      const save = this.querySelector(".bd-save");
      if (save) save.addEventListener("click", () => this.#save());
      const cut = (event) => event.target.closest && event.target.closest(".bd-cut");
      for (const type of ["pointerover", "focusin"]) this.addEventListener(type, (event) => { const at = cut(event); if (at) this.#unfold(at, true); });
      for (const type of ["pointerout", "focusout"]) {
        this.addEventListener(type, (event) => { const at = cut(event); if (at && !at.contains(event.relatedTarget)) this.#unfold(at, false); });
      }
    }

    #toggle({ value, host }) {
      const same = this.#pinned && this.#pinned.name === value && this.#pinned.host === host;
      this.#pin(same ? null : { name: value, host });
      // On a narrow page the card lies below a drawing that may be longer than the window.
      const card = same ? null : this.querySelector(".bd-card");
      if (!card || !outOfView(card.getBoundingClientRect())) return;
      this.#scrolled = true;
      card.scrollIntoView({ block: "nearest" });
    }

    // Back from the card to the value it is about.
    #unpin() {
      const { name, host } = this.#pinned;
      this.#pin(null);
      for (const at of this.querySelectorAll(`[data-value="${name}"][data-host="${host}"]`)) if (at.getClientRects().length) at.focus();
    }

    #pin(part) {
      const before = this.#pinned;
      if (!part && !before) return;
      this.#pinned = part;
      this.#show(part);
      const { name, host } = part || before;
      const value = this.#find(name, host);
      const expression = value ? this.#expression(value) : null;
      this.#emit("part-select", { name, host, layer: this.#layer, pinned: Boolean(part), expression });
    }

    #emit(type, detail) {
      this.dispatchEvent(new CustomEvent(type, { bubbles: true, composed: true, detail }));
    }

    // A value of this checkpoint, with its type and the shapes that have it: this block's own, where it has one.
    #find(name, host) {
      let onOthers = null;
      for (const [index, shapes, types] of this.#here.values) {
        const value = this.#data.values[index];
        if (value.name !== name || (host && value.host !== host)) continue;
        const own = shapes === null ? 0 : shapes.indexOf(this.#shape);
        const found = { ...value, shapes, type: this.#here.types[types[Math.max(own, 0)]] };
        if (own >= 0) return found;
        onOthers = onOthers || found;
      }
      return onOthers;
    }

    #expression(value) {
      return `${value.path.replace("[i]", `[${this.#layer}]`)}.${value.name}`;
    }

    // Everything that follows from layer and checkpoint, in one go.
    #redraw(all = false) {
      const shape = this.#shape;
      const here = this.#here.shapes[shape];
      const key = `${this.#number}.${shape}`;
      const stage = this.#stage;
      if (key !== this.#drawn) {
        const before = stage.querySelector(".bd-words");
        stage.replaceChildren(...this.#drawing(key));
        const words = stage.querySelector(".bd-words");
        if (before && words) words.open = before.open;
      }
      if (key !== this.#drawn || all) this.#write();
      this.#drawn = key;
      stage.dataset.layer = this.#layer;
      stage.dataset.shape = shape;
      const slider = this.#slider;
      slider.value = this.#layer;
      slider.setAttribute("aria-valuetext", `block ${this.#layer} of ${this.layers}: ${here.title}`);
      this.querySelector("output").textContent = `i = ${this.#layer}`;
      this.querySelector(".bd-which").textContent = here.title;
      this.querySelector(".bd-identity code").textContent = here.identity.replaceAll("layers[i]", `layers[${this.#layer}]`);
      const count = this.querySelector(".bd-count");
      if (count) count.textContent = this.layers;
      for (const tick of this.querySelectorAll(".bd-ticks > i")) tick.classList.toggle("here", Number(tick.dataset.layer) === this.#layer);
      for (const svg of stage.querySelectorAll("svg")) svg.setAttribute("aria-label", `Block ${this.#layer}: ${here.title}`);
      this.#show(this.#pinned);
      this.#drawMarks();
      if (!all || this.#number) this.#emit("block-change", { layer: this.#layer, shape, checkpoint: this.#here.id });
    }

    #drawing(key) {
      const stored = this.#drawings.get(key);
      if (Array.isArray(stored)) return stored;
      const nodes = [...stored.content.cloneNode(true).children];
      this.#drawings.set(key, nodes);
      return nodes;
    }

    // The axes of a value's type in the notation that is on.
    #axes(type) {
      if (this.#notation === "names") return type[0];
      if (this.#notation === "numbers") return type[1];
      return type[1].map((axis) => axis.replace(/\b[BS]\b/g, (name) => this.#call[name]));
    }

    #typeOf(span) {
      const [host, name] = span.dataset.of.split(" ")[0].split(".");
      return this.#find(name, host).type;
    }

    // Every type of the drawings and the text; where there is too little room for one, it can be unfolded.
    #write() {
      for (const span of this.#stage.querySelectorAll(".bd-t")) {
        const axes = this.#axes(this.#typeOf(span));
        span.dataset.full = formatType(axes, span.dataset.dtype);
        span.textContent = formatType(axes, span.dataset.dtype, Number(span.dataset.room) || Infinity);
      }
      for (const line of this.#stage.querySelectorAll(".bd-type")) {
        const cut = [...line.querySelectorAll(".bd-t")].some((span) => span.textContent !== span.dataset.full);
        line.classList.toggle("bd-cut", cut);
        for (const [name, value] of [["tabindex", "0"], ["role", "img"], ["aria-label", this.#full(line)]]) {
          if (cut) line.setAttribute(name, value);
          else line.removeAttribute(name);
        }
        for (const tip of line.querySelectorAll("title")) tip.remove(); // unfolding takes its place
      }
    }

    #full(line) {
      return [...line.childNodes].map((node) => (node.dataset ? node.dataset.full || "" : node.textContent)).join("").trim();
    }

    #unfold(line, open) {
      for (const span of line.querySelectorAll(".bd-t")) {
        // The same node: a browser loses sight of a pointer whose text is exchanged under it.
        span.firstChild.data = open ? span.dataset.full : formatType(this.#axes(this.#typeOf(span)), span.dataset.dtype, Number(span.dataset.room) || Infinity);
      }
      line.classList.toggle("bd-open", open);
      line.removeAttribute("transform");
      if (!open) return;
      const { x, width } = line.getBBox(), edge = line.ownerSVGElement.viewBox.baseVal.width;
      if (x + width > edge) line.setAttribute("transform", `translate(${edge - x - width} 0)`);
    }

    #save() {
      const text = this.svg();
      if (!text) return;
      const link = make("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
      link.download = `${this.#here.family}-block-${this.#layer}.svg`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    }

    #drawTicks() {
      const { layers, shapes } = this.#here;
      const slider = this.#slider;
      slider.max = layers - 1;
      // One sign for the mixer; a second for the MLP, where blocks differ in it.
      const lasts = new Set(shapes.map((shape) => shape.roles[shape.roles.length - 1]));
      const ticks = [];
      shapes.forEach((shape, index) => {
        const roles = lasts.size > 1 ? [shape.roles[0], shape.roles[shape.roles.length - 1]] : [shape.roles[0]];
        for (const layer of shape.layers) {
          const tick = make("i", roles.length > 1 ? "bd-at double" : "bd-at");
          tick.dataset.layer = layer;
          tick.dataset.shape = index;
          const share = layers > 1 ? layer / (layers - 1) : 0;
          tick.style.left = `calc(${HALF_TICK}px + (100% - ${2 * HALF_TICK}px) * ${share.toFixed(5)})`;
          tick.append(...roles.map((role) => make("i", `bd-tick bd-tick-${role}${shape.windowed && role === "attention" ? " bd-window" : ""}`)));
          ticks.push(tick);
        }
      });
      const track = this.querySelector(".bd-ticks");
      track.style.setProperty("--pitch", `${(100 / layers).toFixed(3)}cqw`);
      track.replaceChildren(...ticks);
    }

    #drawMarks() {
      const marks = this.#marks;
      for (const edge of this.#stage.querySelectorAll("[data-addend]")) {
        const share = marks && marks.addends ? marks.addends[edge.dataset.addend] : undefined;
        edge.style.strokeWidth = share === undefined ? "" : `${1 + 6 * Math.min(Math.max(share, 0), 1)}px`;
      }
      for (const field of this.#stage.querySelectorAll(".bd-cells")) {
        field.dataset.drawn ??= field.dataset.lit;
        field.dataset.lit = marks && marks.experts ? marks.experts.join(" ") : field.dataset.drawn;
        const [columns, pitch, left, top, side] = ["columns", "pitch", "left", "top", "side"].map((name) => Number(field.dataset[name]));
        const at = (start, step) => (start + step * pitch).toFixed(2);
        const square = (cell) => `M${at(left, cell % columns)} ${at(top, Math.floor(cell / columns))}h${side}v${side}h${-side}z`;
        field.querySelector(".bd-lit").setAttribute("d", field.dataset.lit.split(" ").filter(Boolean).map(Number).map(square).join(""));
      }
    }

    #show(part) {
      const name = part ? part.name || part.value : null;
      const host = part ? part.host : null;
      for (const at of this.querySelectorAll("[data-value]")) {
        const is = (one) => Boolean(one) && at.dataset.value === one.name && at.dataset.host === one.host;
        at.classList.toggle("pinned", is(this.#pinned));
        at.classList.toggle("shown", is({ name, host }));
        if (at.tagName !== "SCRIPT") at.setAttribute("aria-pressed", String(is(this.#pinned)));
      }
      const key = name ? `${host}.${name}.${this.#layer}.${this.#number}.${Boolean(this.#pinned)}` : null;
      if (key !== null && key === this.#shown) return;
      this.#shown = key;
      const card = this.querySelector(".bd-card");
      if (!card) return;
      const value = name ? this.#find(name, host) : null;
      card.replaceChildren(...(value ? this.#card(value) : blockCard(this.#layer, this.#here.shapes[this.#shape])));
    }

    #card(value) {
      const pinned = Boolean(this.#pinned) && this.#pinned.name === value.name && this.#pinned.host === value.host;
      return valueCard({
        value, layer: this.#layer, shape: this.#shape, shapes: this.#here.shapes,
        expression: this.#expression(value),
        numbers: this.#notation === "call" ? this.#axes(value.type) : value.type[1],
        unpin: pinned ? () => this.#unpin() : null,
      });
    }
  }

  customElements.define("block-diagram", BlockDiagram);
})();
