"""The block as text: down its stream, every value with its type. What the drawing shortens stands here in full."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from explorer.widgets.diagram.block import Block, Part, Record, attribute
from explorer.widgets.diagram.types import written
from explorer.widgets.palette import role_of

#: The way into the first block, and on from the last.
_BEFORE, _AFTER = ("token_embeddings",), ("final_norm_output", "lm_head_output", "logits")


def outline(block: Block) -> str:
    """HTML: a closed ``<details>`` with a list of what happens on the stream, and in each sublayer its values in the order of the forward."""
    items = [
        _item(block, "the embedding hands on", "model", _BEFORE),
        _item(block, "the stream enters", "layers", ["layer_input"]),
    ]
    for turn in block.turns():
        if turn.after and turn.after == block.mid:
            items.append(_item(block, "the stream between", "layers", ["layer_mid"]))
        items += [_reads(block, sub) for sub in turn.reads]
        if turn.kind != "add":
            items.append(
                f"<li>the stream is {_DONE[turn.kind]} <code>{escape(turn.description.lstrip('×+ '))}</code></li>"
            )
        items += [
            _item(block, f"⊕ {escape(sub['title'])} adds", sub["host"], [sub["output"]])
            for sub in turn.adds
        ]
    items.append(_item(block, "the stream leaves", "layers", ["layer_output"]))
    items.append(_item(block, "after the last block", "model", _AFTER))
    return (
        '<details class="bd-words"><summary>The block as text, with every type</summary>'
        f"<ol>{''.join(items)}</ol></details>"
    )


_DONE = {"scale": "multiplied with", "shift": "shifted by", "norm": "normed by"}


def _reads(block: Block, sub: Record) -> str:
    """A sublayer: what it reads the stream through, and its values."""
    norm, host = sub.get("norm"), attribute(sub["host"])
    through = f" through <code>{escape(norm['module'])}</code>" if norm and norm["module"] else ""
    given = block.parts("layers", [norm["value"]] if norm and norm.get("value") else [])
    given += block.parts("layers", ["mlp_input"] if sub["host"] == "mlp" else [])
    inside = [*given, *block.rest(sub, ())]
    role = role_of(sub["host"])
    title = f'<b class="role-{role}">{escape(sub["title"])}</b> <code>{escape(host)}</code> reads the stream{through}'
    return (
        f"<li>{title}<ul>{''.join(f'<li>{_typed(block, part)}</li>' for part in inside)}</ul></li>"
    )


def _item(block: Block, words: str, host: str, names: Iterable[str]) -> str:
    typed = [_typed(block, part) for part in block.parts(host, names)]
    return f"<li>{words} {', '.join(typed)}</li>" if typed else ""


def _typed(block: Block, part: Part) -> str:
    kind = block.type(part, with_dtype=True)
    name = part.name if part.host in ("model", "layers") else f"{part.host}.{part.name}"
    return (
        f'<code>{escape(name)}</code> <code class="bd-t" data-of="{escape(part.key)}" data-dtype="{escape(kind.dtype)}">'
        f"{escape(written(kind.names, kind.dtype))}</code>"
    )
