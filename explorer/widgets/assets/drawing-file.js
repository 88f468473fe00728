// drawingFile(svg, title, ground): a drawing of the page as the text of a self-contained SVG file.
//
// Its styles are written into it as they are computed now. A classic script, like block-diagram.js.
globalThis.drawingFile ??= (() => {
  "use strict";

  // The properties of a drawing that a file without style sheets needs, and their default values.
  const SHAPE = {
    fill: "rgb(0, 0, 0)", "fill-opacity": "1", stroke: "none", "stroke-width": "1px", "stroke-opacity": "1", "stroke-dasharray": "none",
    "stroke-linecap": "butt", width: "auto", height: "auto", rx: "auto",
  };
  const TEXT = { fill: SHAPE.fill, "font-family": "", "font-size": "", "font-weight": "400", "text-anchor": "start", "white-space": "normal" };

  return (drawing, title, ground) => {
    const copy = drawing.cloneNode(true);
    const from = drawing.querySelectorAll("*"), to = copy.querySelectorAll("*");
    from.forEach((node, at) => {
      const style = getComputedStyle(node);
      for (const [name, usual] of Object.entries(node instanceof SVGTextContentElement ? TEXT : SHAPE)) {
        const value = style.getPropertyValue(name);
        if (value && value !== usual) to[at].setAttribute(name, value.replace(/^([\d.]+)px$/, "$1"));
      }
    });
    for (const node of [copy, ...to]) {
      for (const name of node.getAttributeNames()) if (/^(class|style|tabindex|role|aria-.*|data-.*)$/.test(name)) node.removeAttribute(name);
    }
    const { width, height } = drawing.viewBox.baseVal;
    const element = (name, attributes, text = "") => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      made.textContent = text;
      return made;
    };
    for (const [name, value] of [["xmlns", "http://www.w3.org/2000/svg"], ["width", width], ["height", height]]) copy.setAttribute(name, value);
    copy.prepend(element("title", {}, title), element("rect", { width, height, fill: ground }));
    return new XMLSerializer().serializeToString(copy);
  };
})();
