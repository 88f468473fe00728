"""The block as text: down its stream, every value with its type.

What the drawing shortens is written here in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from explorer.widgets.diagram.description import Block, Pill, Sublayer
from explorer.widgets.diagram.types import format_type

_STEPS = {"scale": "multiplied by", "shift": "shifted by", "norm": "normalised by"}


def outline(block: Block) -> str:
    """HTML: a closed ``<details>`` with a list of what happens on the stream, and in each sublayer
    its values in the order of the forward.
    """
    items = [
        _item("from the embedding", block.pills("model", "token_embeddings")),
        _item("the stream enters", block.pills("layers", "layer_input")),
    ]
    for segment in block.segments:
        if segment.is_mid:
            items.append(_item("the stream between", block.pills("layers", "layer_mid")))
        items += [_sublayer(sub) for sub in segment.reads]
        if segment.step.kind != "add":
            words, operand = _STEPS[segment.step.kind], escape(segment.step.operand)
            items.append(f"<li>the stream is {words} <code>{operand}</code></li>")
        items += [
            _item(f"⊕ {escape(sub.title)} adds", [sub.output]) for sub in segment.adds if sub.output
        ]
    after = block.pills("model", "final_norm_output", "lm_head_output", "logits")
    items.append(_item("the stream leaves", block.pills("layers", "layer_output")))
    items.append(_item("after the last block", after))
    return (
        '<details class="bd-words"><summary>The block as text, with every type</summary>'
        f"<ol>{''.join(items)}</ol></details>"
    )


def _sublayer(sub: Sublayer) -> str:
    """A sublayer: what it reads the stream through, and its values."""
    norm = sub.norm
    through = f" through <code>{escape(norm.module)}</code>" if norm and norm.module else ""
    inputs = [pill for pill in (norm and norm.output, sub.called_with) if pill]
    values = "".join(f"<li>{_typed(pill)}</li>" for pill in (*inputs, *sub.values))
    return (
        f'<li><b class="role-{sub.colour}">{escape(sub.title)}</b> <code>{escape(sub.host)}</code>'
        f" reads the stream{through}<ul>{values}</ul></li>"
    )


def _item(words: str, pills: Sequence[Pill]) -> str:
    return f"<li>{words} {', '.join(map(_typed, pills))}</li>" if pills else ""


def _typed(pill: Pill) -> str:
    name = pill.name if pill.host in ("model", "layers") else pill.key
    names, dtype = pill.full_type.names, pill.full_type.dtype
    return (
        f"<code>{escape(name)}</code>"
        f' <code class="bd-t" data-of="{escape(pill.key)}" data-dtype="{escape(dtype)}">'
        f"{escape(format_type(names, dtype))}</code>"
    )
