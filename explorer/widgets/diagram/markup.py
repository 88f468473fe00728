"""SVG elements as text."""

from __future__ import annotations

from html import escape

from explorer.widgets.diagram.geometry import number


def tag(name: str, *content: str, **attributes: str | float | None) -> str:
    """One SVG element.

    ``content`` is markup. Attributes are escaped, numbers written short; those that are None are
    left out. ``class_`` is class, and an underscore a hyphen.
    """
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{pairs}>{''.join(content)}</{name}>" if content else f"<{name}{pairs}/>"


def _attribute(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else number(value)


def classes(kind: str, role: str = "") -> str:
    return f"bd-{kind} role-{role}" if role else f"bd-{kind}"
