"""The ``<block-diagram>`` element: strip, slider, drawings and card of a family, from its records.

The HTML is complete without JavaScript for the first block; the script in ``assets`` moves
the slider, fills the card and exchanges the drawings, which wait in templates. The data it
needs is JSON inside the element.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from explorer.widgets.diagram.describe import Record, attribute_of_path, describe
from explorer.widgets.diagram.description import Block
from explorer.widgets.diagram.outline import outline
from explorer.widgets.diagram.svg import draw
from explorer.widgets.palette import ROLES, role_of

#: What the strip names beside the blocks: a word and the value that is read there.
_STRIP = (
    ("embed", "token_embeddings"),
    ("layers", None),
    ("final norm", "final_norm_output"),
    ("head", "lm_head_output"),
    ("logits", "logits"),
)

#: Facts of a value that do not change between checkpoints of a family, as the card shows them.
_STATIC = ("name", "layout", "dims", "meaning", "read_at", "condition", "writable")


def card_data(records: Sequence[Record]) -> dict[str, Any]:
    """What the script needs: ``{values, checkpoints: [{id, family, layers, shapes, types, values:
    [[index, shapes, types]]}]}``.

    Values are pooled over the checkpoints. A checkpoint adds which of its shapes have the value
    (None: it is on the model), and its type in each of them, as a number in ``types``; a type is
    ``[names, numbers, dtype]``.
    """
    pool: dict[str, int] = {}
    checkpoints = [_checkpoint(record, describe(record), pool) for record in records]
    return {"values": [json.loads(value) for value in pool], "checkpoints": checkpoints}


def _checkpoint(record: Record, blocks: Sequence[Block], pool: dict[str, int]) -> dict[str, Any]:
    """One checkpoint's data; its values join the ``pool``, where each has a number."""
    rows: list[Any] = []
    types: dict[tuple[Any, ...], int] = {}
    for row in record["values"]:
        host = attribute_of_path(row["host"])
        static = {"host": host, "path": row["host"], **{key: row.get(key) for key in _STATIC}}
        value = pool.setdefault(json.dumps(static), len(pool))
        have = None if row["layers"] is None else set(row["layers"])
        shapes = [number for number, block in enumerate(blocks) if have and block.first in have]
        kinds = [blocks[shape].values[host, row["name"]].full_type for shape in shapes or [0]]
        numbers = [
            types.setdefault((kind.names, kind.numbers, kind.dtype), len(types)) for kind in kinds
        ]
        rows.append([value, None if have is None else shapes, numbers])
    return {
        "id": record["checkpoint"],
        "family": record["family"],
        "layers": record["sizes"]["num_layers"],
        "shapes": [_shape(block) for block in blocks],
        "types": list(types),
        "values": rows,
    }


def _shape(block: Block) -> dict[str, Any]:
    return {
        "layers": list(block.layers),
        "title": block.title,
        "identity": block.identity,
        "roles": [sub.role for sub in block.sublayers],
        "windowed": any(sub.windowed for sub in block.sublayers),
    }


def element(records: Sequence[Record], *, card: bool = True, strip: bool = True) -> str:
    """HTML of a family's ``<block-diagram>``: one record per checkpoint, the first is shown.

    ``card`` and ``strip`` leave out what a surface shows in its own way.
    """
    first = records[0]
    blocks = describe(first)
    data = json.dumps(card_data(records), separators=(",", ":"), ensure_ascii=False)
    data = data.replace("<", "\\u003c")
    return "".join(
        [
            "<block-diagram>",
            f'<script type="application/json" class="bd-data">{data}</script>',
            _strip(first) if strip else "",
            _slider(),
            '<div class="bd-main">',
            f'<div class="bd-stage" data-layer="0" data-shape="0">{_drawings(blocks[0])}</div>',
            _card() if card else "",
            "</div>",
            '<p class="bd-identity"><span>identity</span> ',
            f"<code>{escape(blocks[0].identity)}</code></p>",
            _legend(blocks),
            *_templates(records),
            "</block-diagram>",
        ]
    )


def _strip(record: Record) -> str:
    """``embed → layers × N → norm → head → logits``; each but the blocks can be pointed at."""
    have = {row["name"] for row in record["values"] if row["host"] == "model"}
    count = f'<span class="bd-count">{record["sizes"]["num_layers"]}</span>'
    steps = []
    for word, name in _STRIP:
        if name is None:
            steps.append(
                f'<span role="listitem" class="bd-here role-stream"><b>{word} × {count}</b></span>'
            )
        elif name in have:
            steps.append(
                '<span role="listitem">'
                f'<button type="button" class="bd-step role-{role_of("model", name)}"'
                f' data-value="{name}" data-host="model">'
                f"<b>{word}</b> <code>{name}</code></button></span>"
            )
    return (
        '<div class="bd-strip" role="list" aria-label="The way through the model">'
        f"{''.join(steps)}</div>"
    )


#: Notations of types: the script's name, the button's word and its tooltip.
_NOTATIONS = (
    ("names", "names", "sizes by name"),
    ("numbers", "numbers", "this checkpoint's numbers"),
    ("call", "at B, S", "numbers at a batch size and a length"),
)


def _slider() -> str:
    notations = "".join(
        f'<button type="button" data-notation="{name}" title="{tip}"'
        f' aria-pressed="{str(name == "names").lower()}">{word}</button>'
        for name, word, tip in _NOTATIONS
    )
    sizes = "".join(
        f'<label>{name} <input type="number" name="{name}" min="1" max="{most}"'
        f' required value="{value}"></label>'
        for name, most, value in (("B", 9999, 1), ("S", 99999999, 4096))
    )
    return (
        '<div class="bd-slider"><label><span class="bd-which">block</span>'
        " <output>i = 0</output></label>"
        '<div class="bd-track"><div class="bd-ticks" aria-hidden="true"></div>'
        '<input type="range" min="0" max="0" value="0" step="1" aria-label="block"></div>'
        '<div class="bd-tools">'
        '<div class="bd-notation" role="group" aria-label="how types are written">'
        f'{notations}<span class="bd-call" hidden>{sizes}</span></div>'
        '<button type="button" class="bd-save" title="Save the drawing as an SVG file">'
        "save SVG</button></div></div>"
    )


def _card() -> str:
    return (
        '<aside class="bd-card" aria-label="The value pointed at"><p class="bd-hint">'
        "Every outlined name is a tensor you can read. Point at one to see how; "
        "click it, or press Enter on it, to pin its card.</p></aside>"
    )


#: What the legend calls the roles of sublayers.
_ROLE_WORDS = {
    "attention": ROLES["attention"].label,
    "recurrent": "recurrent mixer",
    "convolution": "short convolution",
    "mixer": "mixer, not traced",
    "experts": "mixture of experts",
    "mlp": "dense MLP",
    "extra": "further part, not traced",
}


def _legend(blocks: Sequence[Block]) -> str:
    sublayers = [sub for block in blocks for sub in block.sublayers]
    roles = [role for role in dict.fromkeys(sub.role for sub in sublayers) if role in _ROLE_WORDS]
    items = [f'<i class="bd-tick bd-tick-{role}"></i>{_ROLE_WORDS[role]}' for role in roles]
    if any(sub.windowed for sub in sublayers):
        items.append(
            '<i class="bd-tick bd-tick-attention bd-window"></i>attention in a sliding window'
        )
    if "experts" in roles:
        items.append("lit cells are the chosen experts, which differ by token")
    if usual := blocks[0].usual_dtype:
        items.append(f"types without a dtype are {escape(usual)}")
    items.append('<i class="bd-swatch"></i>derived from other values, read-only')
    spans = "".join(f'<span role="listitem">{item}</span>' for item in items)
    return f'<div class="bd-legend" role="list">{spans}</div>'


def _templates(records: Sequence[Record]) -> list[str]:
    """Every drawing but the first, hidden until it is selected."""
    return [
        f'<template data-drawing="{number}.{shape}">{_drawings(block)}</template>'
        for number, record in enumerate(records)
        for shape, block in enumerate(describe(record))
        if (number, shape) != (0, 0)
    ]


def _drawings(block: Block) -> str:
    """Both drawings of a block, and the block as text."""
    return draw(block, "wide") + draw(block, "narrow") + outline(block)
