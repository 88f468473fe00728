"""The ``<block-diagram>`` element: strip, slider, drawings and card of a family, from its records.

What is written here is complete without JavaScript for the first block; the script in
``assets`` moves the slider, fills the card and exchanges the drawings, which wait in
templates. The data it needs is JSON inside the element.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from explorer.widgets.diagram.block import Block, Record, host_key, shapes
from explorer.widgets.diagram.outline import outline
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
    """What the script needs: ``{values, checkpoints: [{id, family, layers, shapes, types, values: [[index, shapes, types]]}]}``.

    Values are pooled over the checkpoints. A checkpoint adds which of its shapes have the value (None: it is on the model),
    and its type in each of them, as a number in ``types``; a type is ``[names, numbers, dtype]``.
    """
    pool: list[dict[str, Any]] = []
    index: dict[str, int] = {}
    checkpoints = []
    for record in records:
        rows, types, blocks = [], [], shapes(record)
        for row in record["values"]:
            static = {
                "host": host_key(row["host"]),
                "path": row["host"],
                **{key: row.get(key) for key in _STATIC},
            }
            key = json.dumps(static, sort_keys=True)
            if key not in index:
                index[key] = len(pool)
                pool.append(static)
            where = _where(row, blocks)
            kinds = [_type(row, blocks[shape]) for shape in (where or [0])]
            types += [
                kind for number, kind in enumerate(kinds) if kind not in (*types, *kinds[:number])
            ]
            rows.append([index[key], where, [types.index(kind) for kind in kinds]])
        checkpoints.append(
            {
                "id": record["checkpoint"],
                "family": record["family"],
                "layers": record["sizes"]["num_layers"],
                "shapes": [_shape(block) for block in blocks],
                "types": types,
                "values": rows,
            }
        )
    return {"values": pool, "checkpoints": checkpoints}


def _type(row: Record, block: Block) -> list[Any]:
    part = block.part(host_key(row["host"]), row["name"])
    kind = block.type(part, with_dtype=True)
    return [list(kind.names), list(kind.numbers), kind.dtype]


def _where(row: Record, blocks: Sequence[Block]) -> list[int] | None:
    if row["layers"] is None:
        return None
    have = set(row["layers"])
    return [number for number, block in enumerate(blocks) if block.first in have]


def _shape(block: Block) -> dict[str, Any]:
    return {
        "layers": list(block.facts["layers"]),
        "title": block.title(),
        "identity": block.facts["identity"],
        "roles": [sub["role"] for sub in block.sublayers],
        "windowed": any(sub.get("window") for sub in block.sublayers),
    }


def element(
    records: Sequence[Record],
    draw: Callable[[Record, int, str], str],
    *,
    card: bool = True,
    strip: bool = True,
) -> str:
    """HTML of the whole element; ``draw(record, shape, layout)`` gives one drawing."""
    first = records[0]
    data = json.dumps(card_data(records), separators=(",", ":"), ensure_ascii=False).replace(
        "<", "\\u003c"
    )
    parts = [
        "<block-diagram>",
        f'<script type="application/json" class="bd-data">{data}</script>',
        _strip(first) if strip else "",
        _slider(),
        '<div class="bd-main">',
        f'<div class="bd-stage" data-layer="0" data-shape="0">{_drawn(first, 0, draw)}</div>',
        _card() if card else "",
        "</div>",
        f'<p class="bd-identity"><span>identity</span> <code>{escape(shapes(first)[0].facts["identity"])}</code></p>',
        _legend(first),
        *_templates(records, draw),
        "</block-diagram>",
    ]
    return "".join(parts)


def _strip(record: Record) -> str:
    """``embed → layers × N → norm → head → logits``, each step but the blocks a part to point at."""
    have = {row["name"]: row for row in record["values"] if row["host"] == "model"}
    steps = []
    for word, name in _STRIP:
        if name is None:
            steps.append(
                f'<span role="listitem" class="bd-here role-stream"><b>{word} × <span class="bd-count">{record["sizes"]["num_layers"]}</span></b></span>'
            )
        elif name in have:
            steps.append(
                f'<span role="listitem"><button type="button" class="bd-step role-{role_of("model", name)}" data-value="{name}" data-host="model">'
                f"<b>{word}</b> <code>{name}</code></button></span>"
            )
    return f'<div class="bd-strip" role="list" aria-label="The way through the model">{"".join(steps)}</div>'


#: How types can be written: by the script's name for it, a word, and what it says to who cannot see what it does.
_NOTATIONS = (
    ("names", "names", "sizes by name"),
    ("numbers", "numbers", "this checkpoint's numbers"),
    ("call", "at B, S", "numbers at a batch size and a length"),
)


def _slider() -> str:
    buttons = "".join(
        f'<button type="button" data-notation="{name}" aria-pressed="{str(name == "names").lower()}" title="{said}">{word}</button>'
        for name, word, said in _NOTATIONS
    )
    return (
        '<div class="bd-slider"><label><span class="bd-which">block</span> <output>i = 0</output></label>'
        '<div class="bd-track"><div class="bd-ticks" aria-hidden="true"></div>'
        '<input type="range" min="0" max="0" value="0" step="1" aria-label="block"></div>'
        f'<div class="bd-tools"><div class="bd-notation" role="group" aria-label="how types are written">{buttons}'
        '<span class="bd-call" hidden><label>B <input type="number" name="B" min="1" max="9999" required value="1"></label>'
        '<label>S <input type="number" name="S" min="1" max="99999999" required value="4096"></label></span></div>'
        '<button type="button" class="bd-save" title="Save the drawing as an SVG file">save SVG</button></div></div>'
    )


def _card() -> str:
    return (
        '<aside class="bd-card" aria-label="The part pointed at"><p class="bd-hint">Every outlined name is a tensor you can read. '
        "Point at one to see how; click it, or press Enter on it, to keep its card.</p></aside>"
    )


def _legend(record: Record) -> str:
    roles = dict.fromkeys(sub["role"] for block in shapes(record) for sub in block.sublayers)
    words = {
        "attention": ROLES["attention"].label,
        "recurrent": "recurrent mixer",
        "convolution": "short convolution",
        "mixer": "mixer, not followed",
        "experts": "mixture of experts",
        "mlp": "dense MLP",
        "extra": "further part, not followed",
    }
    items = [
        f'<span role="listitem"><i class="bd-tick bd-tick-{role}"></i>{words[role]}</span>'
        for role in roles
        if role in words
    ]
    if any(sub.get("window") for block in shapes(record) for sub in block.sublayers):
        items.append(
            '<span role="listitem"><i class="bd-tick bd-tick-attention bd-window"></i>attention in a window</span>'
        )
    if "experts" in roles:
        items.append(
            '<span role="listitem">lit cells stand for the chosen experts, which differ by token</span>'
        )
    if usual := shapes(record)[0].usual_dtype:
        items.append(f'<span role="listitem">types without a dtype are {escape(usual)}</span>')
    items.append(
        '<span role="listitem"><i class="bd-swatch"></i>derived from other values, read-only</span>'
    )
    return f'<div class="bd-legend" role="list">{"".join(items)}</div>'


def _templates(records: Sequence[Record], draw: Callable[[Record, int, str], str]) -> list[str]:
    """Every drawing but the first, out of the page's way until it is asked for."""
    found = []
    for number, record in enumerate(records):
        for shape in range(len(shapes(record))):
            if (number, shape) != (0, 0):
                found.append(
                    f'<template data-drawing="{number}.{shape}">{_drawn(record, shape, draw)}</template>'
                )
    return found


def _drawn(record: Record, shape: int, draw: Callable[[Record, int, str], str]) -> str:
    """Both drawings of a block, and the block as text."""
    return (
        draw(record, shape, "wide") + draw(record, shape, "narrow") + outline(shapes(record)[shape])
    )
