// diagramCard: the card beside a block diagram, and how types and block numbers are written.
//
// A classic script, like block-diagram.js, which needs it loaded first.
globalThis.diagramCard ??= (() => {
  "use strict";

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  // Block numbers in words: 0-2, 4-6, … with at most `most` runs.
  function ranges(layers, most = 6) {
    const runs = [];
    for (const layer of layers) {
      const last = runs[runs.length - 1];
      if (last && last[1] === layer - 1) last[1] = layer;
      else runs.push([layer, layer]);
    }
    const texts = runs.slice(0, most).map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`));
    return texts.join(", ") + (runs.length > most ? ", …" : "");
  }

  // A type as text; where it takes more letters than `room`, … replaces the longest axes, as diagram/types.py does it.
  function formatType(axes, dtype, room = Infinity) {
    const shown = axes.map(String);
    for (;;) {
      const text = `${dtype || ""}[${shown.join(", ")}]`;
      const longest = shown.reduce((best, axis, at) => (axis.length > shown[best].length ? at : best), 0);
      if (text.length <= room || !shown.length || shown[longest].length < 2) return text;
      shown[longest] = "…";
    }
  }

  // The card while nothing is pointed at: the block.
  function blockCard(layer, shape) {
    return [
      make("h3", "", `Block ${layer}`),
      make("p", "bd-meaning", shape.title),
      make("p", "bd-hint", `Blocks of this shape: ${ranges(shape.layers)}`),
      make("p", "bd-hint", "Every outlined name is a tensor you can read. Point at one to see how; click it, or press Enter on it, to pin its card."),
    ];
  }

  // The card of a value on block `layer`, which is of the shape `shape`; `unpin` is there when the card is pinned.
  function valueCard({ value, layer, shape, shapes, expression, numbers, unpin }) {
    const title = make("h3", "", value.name);
    if (value.shapes !== null && !value.shapes.includes(shape)) {
      const others = value.shapes.map((index) => ranges(shapes[index].layers)).join("; ");
      return [title, make("p", "bd-absent", `Block ${layer} has no ${value.host}.${value.name}. Blocks that have it: ${others || "none"}.`)];
    }
    const code = make("code", "bd-expression");
    for (const step of expression.split(/(?=\.)/)) code.append(make("wbr"), step);
    const meaning = make("p", "bd-meaning", `${value.meaning[0].toUpperCase()}${value.meaning.slice(1)}.`);
    const list = make("dl");
    const entry = (term, text, isCode) => {
      if (!text) return;
      const detail = make("dd");
      detail.append(isCode ? make("code", "", text) : text);
      list.append(make("dt", "", term), detail);
    };
    const [names, , dtype] = value.type;
    entry("layout", `${value.layout} [${value.dims.join(" ")}]`, true);
    entry("type", formatType(names, dtype), true);
    entry("here", formatType(numbers), true);
    entry("read at", value.read_at);
    entry("edits", value.writable ? "assignment and in place" : "none: read-only");
    const rows = [title, code, meaning, list];
    if (value.condition) rows.push(make("p", "bd-condition", `⚠\uFE0E ${value.condition}`));
    if (unpin) {
      const button = make("button", "bd-unpin", "Unpin (Esc)");
      button.type = "button";
      button.addEventListener("click", unpin);
      rows.push(button);
    }
    return rows;
  }

  return { make, formatType, blockCard, valueCard };
})();
