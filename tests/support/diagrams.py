"""Drawings of families' blocks, parsed, for the tests of the diagram."""

from __future__ import annotations

from functools import cache
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from explorer.widgets.diagram import block_svg
from tests.support.facts_records import drawn

#: Between them every kind of sublayer and every way a block puts them together.
FAMILIES = (
    "llama",
    "qwen3_moe",
    "qwen3_next",
    "cohere",
    "gpt_neox",
    "falcon_h1",
    "nemotron_h",
    "mamba",
    "recurrent_gemma",
    "lfm2",
    "kimi_linear",
    "gemma2",
    "olmo2",
    "openai-gpt",
    "gpt_oss",
    "zamba",
)


#: They as parameters of a test: all but a few are left out of a fast run.
EACH = [
    family if family in FAMILIES[:4] else pytest.param(family, marks=pytest.mark.slow)
    for family in FAMILIES
]


def values_in(svg: str) -> list[tuple[str, str]]:
    """``(host, name)`` of every value in a drawing, in drawing order."""
    return [
        (node.get("data-host", ""), name)
        for node in ElementTree.fromstring(svg).iter()
        if (name := node.get("data-value"))
    ]


@cache
def trees(family: str, layout: str) -> list[Element]:
    """Every drawing of a family, parsed."""
    record = drawn(family)
    return [
        ElementTree.fromstring(block_svg(record, shape, layout))
        for shape in range(len(record["blocks"]))
    ]


def pills(tree: Element) -> list[tuple[str, float, float, float, float]]:
    """Name, left, top, width and height of everything that can be pointed at."""
    found = []
    for node in tree.iter():
        if node.get("data-value"):
            rect = next(child for child in node if child.tag.endswith("rect"))
            found.append(
                (
                    f"{node.get('data-host')}.{node.get('data-value')}",
                    *(float(rect.get(key, "nan")) for key in ("x", "y", "width", "height")),
                )
            )
    return found
