"""Notes as HTML: prose through Markdown, code coloured, output under it, everything escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from html import escape
from typing import Any
from xml.etree import ElementTree

from builder.notes.check_names import MARKUP, value_name

_SLUG = re.compile(r"[^a-z0-9]+")


def notes_html(
    blocks: Iterable[Any], link: Callable[[str], str | None] | None = None, shift: int = 1
) -> str:
    """HTML of the blocks that `builder.notes.run` read or ran.

    A standard value in the prose, as ``{value:name}`` or in backticks, becomes
    ``<code class="value" data-value="name">``, inside a link where ``link(name)`` gives an
    address. ``shift`` pushes headings down: with 1, ``##`` becomes ``<h3>``. HTML in the
    prose is shown, not interpreted; a link to anything but a page or a web address is dropped.
    """
    import markdown

    converter = markdown.Markdown(extensions=["tables", "sane_lists"])
    # Raw HTML goes through as text.
    converter.preprocessors.deregister("html_block")
    converter.inlinePatterns.deregister("html")
    converter.treeprocessors.register(_Finish(converter, link, shift), "bestiary", 15)
    places = _Places(converter)
    # After the step that normalises whitespace, which would take the converter's own marks out.
    converter.preprocessors.register(places, "bestiary", 20)
    parts = [
        MARKUP.sub(r"`\1`", block.text) if block.kind == "prose" else places.keep(_code(block))
        for block in blocks
    ]
    return converter.convert("\n\n".join(parts))


class _Places:
    """Lines that stand for finished HTML while the prose around them is converted."""

    def __init__(self, converter: Any) -> None:
        self.md = converter
        self.html: dict[str, str] = {}

    def keep(self, html: str) -> str:
        line = f"@@finished-html-{len(self.html)}@@"
        self.html[line] = html
        return line

    def run(self, lines: list[str]) -> list[str]:
        return [
            self.md.htmlStash.store(self.html[line]) if line in self.html else line
            for line in lines
        ]


def _code(block: Any) -> str:
    """One fenced block: coloured Python, or plain text, and what running it printed."""
    ran = ' data-executed="true"' if block.kind == "run" else ""
    html = f'<div class="highlight snippet"{ran}><pre><code>{_coloured(block.text, block.language)}</code></pre>'
    if block.output:
        html += f'<pre class="output" aria-label="output"><code>{escape(block.output)}</code></pre>'
    return f"{html}</div>"


def _coloured(text: str, language: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_by_name(language or "text")
    except ClassNotFound:
        return escape(text)
    return highlight(text, lexer, HtmlFormatter(nowrap=True)).rstrip("\n")


class _Finish:
    """Last touch on the tree: value names marked, headings shifted and named, links checked."""

    def __init__(
        self, converter: Any, link: Callable[[str], str | None] | None, shift: int
    ) -> None:
        self.md, self.link, self.shift = converter, link, shift
        self.used: dict[str, int] = {}

    def run(self, root: ElementTree.Element) -> None:
        parents = {child: parent for parent in root.iter() for child in parent}
        for element in list(root.iter()):
            if re.fullmatch(r"h[1-6]", element.tag):
                self._heading(element)
            elif element.tag == "a" and not _safe(element.get("href", "")):
                element.attrib.clear()
            elif element.tag == "code":
                self._value(element, parents[element])

    def _heading(self, element: ElementTree.Element) -> None:
        slug = _SLUG.sub("-", "".join(element.itertext()).lower()).strip("-") or "section"
        self.used[slug] = self.used.get(slug, 0) + 1
        again = f"-{self.used[slug]}" if self.used[slug] > 1 else ""
        element.tag = f"h{min(int(element.tag[1]) + self.shift, 6)}"
        element.set("id", f"note-{slug}{again}")

    def _value(self, element: ElementTree.Element, parent: ElementTree.Element) -> None:
        name = value_name((element.text or "").strip())
        if name is None or parent.tag in ("pre", "a"):
            return
        element.set("class", "value")
        element.set("data-value", name)
        address = self.link(name) if self.link else None
        if address:
            wrapper = ElementTree.Element("a", {"class": "value-link", "href": address})
            wrapper.tail, element.tail = element.tail, None
            parent[list(parent).index(element)] = wrapper
            wrapper.append(element)


def _safe(address: str) -> bool:
    """An address on the web, or one without a scheme: in the page or beside it."""
    return bool(re.fullmatch(r"https?://\S+|[^:\s]*", address))
