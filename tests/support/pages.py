"""Reading pages in tests: their text, and the contrast of what a browser shows."""

from __future__ import annotations

from html.parser import HTMLParser

#: Text whose contrast on what lies under it is too low: ``[text, colour, ground, ratio]`` of each.
CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
  const over = (top, under) => top.slice(0, 3).map((c, i) => c * top[3] + under[i] * (1 - top[3]));
  const linear = (v) => (v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  const light = (c) => { const [r, g, b] = c.map((v) => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b; };
  const ground = (node) => { const layers = [];
    for (let at = node; at; at = at.parentElement)
      layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]); };
  const low = [];
  for (const node of document.querySelectorAll('article *, .md-header *, .md-sidebar *')) {
    const own = [...node.childNodes]
      .some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue;
    const style = getComputedStyle(node), svg = node.closest('svg'), under = ground(svg || node);
    const colour = rgba(svg ? style.fill : style.color), seen = over(colour, under);
    const [a, b] = [light(seen), light(under)].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) low.push([
      node.textContent.trim().slice(0, 30), node.className.baseVal ?? node.className,
      seen.map(Math.round), under.map(Math.round), ratio.toFixed(2)]);
  }
  return low;
}"""


class Text(HTMLParser):
    """The text of a page, without scripts and tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.quiet = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.quiet += tag in ("script", "template")

    def handle_endtag(self, tag: str) -> None:
        self.quiet -= tag in ("script", "template")

    def handle_data(self, data: str) -> None:
        if not self.quiet:
            self.parts.append(data)

    def __str__(self) -> str:
        return " ".join("".join(self.parts).split())
