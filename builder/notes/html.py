"""Notes as sections of HTML: prose through Markdown, code highlighted with its output under it,
everything escaped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape

from markdown_it.token import Token
from markupsafe import Markup

from builder.notes.check_names import VALUE_MARKUP, value_name
from builder.notes.read import Block, markdown
from explorer.widgets.diagram.describe import attribute_of_path

#: Returns the address of a standard value's row, None where the page has none.
Link = Callable[[str], str | None]

#: Headings of this level and above begin a section; deeper ones stay inside it, one level further
#: down.
_SECTION_LEVEL = 2

_NOT_IN_SLUG = re.compile(r"[^a-z0-9]+")
_SAFE_ADDRESS = re.compile(r"https?://\S+|[^:\s]*")


@dataclass(frozen=True)
class Section:
    """A heading as Markdown, its anchor, and the HTML under it; the part before the first
    heading has neither.
    """

    anchor: str
    title: str
    body: Markup


def sections(blocks: Iterable[Block], link: Link = lambda name: None) -> list[Section]:
    """Return notes, as read or as executed, as sections cut at the headings.

    A standard value in the prose, as ``{value:name}`` or in backticks, becomes ``<code
    class="value" data-value="name">``, inside a link where ``link(name)`` gives an address. HTML in
    the prose is shown as text; a link to anything but a page or a web address loses its address.
    """
    found, parts = [], []
    anchor = title = ""
    slugs: Counter[str] = Counter()

    def finish() -> None:
        body = "".join(parts)
        parts.clear()
        if anchor or body.strip():
            found.append(Section(anchor, title, Markup(body)))

    for block in blocks:
        if block.kind != "prose":
            parts.append(_code_html(block))
            continue
        tokens = markdown().parse(VALUE_MARKUP.sub(r"`\1`", block.text))
        start = 0
        for index, token in enumerate(tokens):
            if token.type == "heading_open":
                heading = tokens[index + 1]
                own = _anchor(heading, slugs)
                if int(token.tag[1]) <= _SECTION_LEVEL:
                    parts.append(_render(tokens[start:index]))
                    finish()
                    anchor, title, start = own, heading.content, index + 3
                else:
                    token.tag = tokens[index + 2].tag = f"h{min(int(token.tag[1]) + 1, 6)}"
                    token.attrSet("id", own)
            elif token.type == "inline":
                _finish_inline(token.children or [], link)
        parts.append(_render(tokens[start:]))
    finish()
    return found


def value_anchor(host: str, name: str) -> str:
    """Return the id of a value's row on a family page: ``value-mlp-router_logits``."""
    return f"value-{attribute_of_path(host)}-{name}"


def _render(tokens: list[Token]) -> str:
    return markdown().renderer.render(tokens, markdown().options, {})


def _anchor(heading: Token, slugs: Counter[str]) -> str:
    """Return an id from a heading's text, numbered where the same text came before."""
    text = "".join(child.content for child in heading.children or ())
    slug = _NOT_IN_SLUG.sub("-", text.lower()).strip("-") or "section"
    slugs[slug] += 1
    return f"note-{slug}-{slugs[slug]}" if slugs[slug] > 1 else f"note-{slug}"


def _finish_inline(children: list[Token], link: Link) -> None:
    """Mark the values among inline tokens and remove addresses that are not safe, in place."""
    links = 0
    for child in children:
        if child.type in ("link_open", "link_close"):
            links += child.nesting
        for attribute in ("href", "src"):
            if not _SAFE_ADDRESS.fullmatch(str(child.attrs.get(attribute, ""))):
                child.attrs = {}
        if (
            child.type == "code_inline"
            and not links
            and (name := value_name(child.content.strip()))
        ):
            child.type, child.content = "html_inline", _value_html(name, link(name))


def _value_html(name: str, address: str | None) -> str:
    code = Markup('<code class="value" data-value="{0}">{0}</code>').format(name)
    return (
        Markup('<a class="value-link" href="{}">{}</a>').format(address, code) if address else code
    )


def _code_html(block: Block) -> str:
    """Return one fenced block: highlighted Python, or plain text, and what running it printed."""
    executed = ' data-executed="true"' if block.kind == "run" else ""
    code = _highlighted(block.text, block.language)
    html = f'<div class="highlight snippet"{executed}><pre><code>{code}</code></pre>'
    if block.output:
        html += f'<pre class="output" aria-label="output"><code>{escape(block.output)}</code></pre>'
    return f"{html}</div>\n"


def _highlighted(text: str, language: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_by_name(language or "text")
    except ClassNotFound:
        return escape(text)
    return highlight(text, lexer, HtmlFormatter(nowrap=True)).rstrip("\n")
