"""The templates' environment: filters and functions that every template may use."""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from builder.notes.html import value_anchor
from builder.pages import figures
from builder.pages.costs import unbroken_terms
from builder.pages.printout import printout_html
from builder.pages.signature import class_html, type_html
from explorer.widgets.diagram.describe import attribute_of_path
from explorer.widgets.palette import role_of

#: Characters of a list of configuration values that are shown in full, and entries shown of a
#: longer one.
_LIST_WIDTH, _LIST_ENTRIES = 90, 8


@cache
def environment() -> Environment:
    """Return the templates' environment, which escapes everything that is not marked as HTML."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        count=figures.count,
        thousands=figures.thousands,
        size=figures.size,
        ranges=figures.layer_ranges,
        printout=printout_html,
        attribute_of_path=attribute_of_path,
        config_value=config_value,
        yaml_string=yaml_string,
        type=type_html,
        class_type=class_html,
        unbroken_terms=unbroken_terms,
    )
    made.globals.update(role_of=role_of, anchor=value_anchor)
    return made


def config_value(value: Any) -> str:
    """Return a configuration value as text."""
    if isinstance(value, list | tuple):
        items = [config_value(item) for item in value]
        text = ", ".join(items)
        if len(text) <= _LIST_WIDTH:
            return text
        return f"{', '.join(items[:_LIST_ENTRIES])}, … ({len(items)} entries)"
    if isinstance(value, dict):
        return ", ".join(f"{key} {config_value(item)}" for key, item in value.items())
    return str(value)


def yaml_string(text: str) -> Markup:
    """Return a string as a YAML scalar on one line, its HTML escaped: the theme copies it into
    its pages as it is.
    """
    escaped = escape(" ".join(text.split()), quote=False).replace("\\", "\\\\").replace('"', '\\"')
    return Markup(f'"{escaped}"')
