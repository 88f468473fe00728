"""Facts: everything that a page shows of one checkpoint of a family, as one plain record.

Shapes, hook points, the printout and the counts come from the model at its released size
on the meta device; what is *proven* comes from the contract, run on the specimen.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import date
from importlib.metadata import version
from typing import Any

import torch

from explorer import __version__, vocabulary
from explorer.accounting import counts as accounting
from explorer.checkpoints import cards
from explorer.checkpoints.load import DEFAULT, SPECIMEN, load
from explorer.contract import verified
from explorer.facts.blocks import blocks, class_of, summary
from explorer.facts.schema import (
    AnatomyRecord,
    CacheRecord,
    ExtentsOfBlocks,
    FactsRecord,
    ValueRecord,
    ValueShape,
)
from explorer.model.language_model import LanguageModel
from explorer.model.printout import folded
from explorer.model.shapes import shapes
from explorer.model.support import Row
from explorer.signature import Known, recorded
from explorer.specimens import small
from explorer.traits import traits
from explorer.vocabulary.formatting import CALL

#: The version of the record's form: raised where readers of the last one would fail.
SCHEMA = 2


def facts(
    family: str,
    checkpoint: str | None = None,
    contract: Mapping[str, Any] | None = None,
    specimen: Mapping[str, Any] | None = None,
    known: Known | None = None,
) -> FactsRecord:
    """Return the record of a checkpoint, of the first of `checkpoints` where none is given.

    contract: the contract's report as JSON. specimen: what the contract ran on. known: the types of
    the family's other checkpoints, to start from and to add to.

    Raises UnknownCheckpoint, LoadError where the model's forward cannot be traced, and ValueError
    where the checkpoint is of another family.
    """
    checkpoint = checkpoint or checkpoints(family)[0]
    released = checkpoint not in (f"{DEFAULT}{family}", f"{SPECIMEN}{family}")
    if released and cards.card(checkpoint).family != family:
        raise ValueError(
            f"{checkpoint} is of the family {cards.card(checkpoint).family}, not {family}."
        )
    # A small model has numbers, on which also a forward runs that looks at them.
    model = load(checkpoint, weights=checkpoint == f"{SPECIMEN}{family}")
    report = dict(contract) if contract is not None else {"checks": [], "passed": 0, "failed": 0}
    caches = _caches(model)
    drawn = anatomy(model, verified(report["checks"]), _windows(caches))
    return {
        "schema": SCHEMA,
        "family": family,
        "checkpoint": checkpoint,
        "released": released,
        "architecture": type(model.hf).__name__,
        "title": cards.card(checkpoint).title if released else _name(type(model.hf).__name__),
        "summary": summary(drawn["blocks"], model.num_layers),
        "versions": _versions(),
        "parameters": {**accounting.parameters(model), "convention": accounting.ACTIVE_CONVENTION},
        "size_notes": model.size_notes,
        **caches,
        "config": config_of(model) | ({"dtype": cards.card(checkpoint).dtype} if released else {}),
        **drawn,
        "printout": "\n".join(folded(repr(model).splitlines())),
        "traits": traits(model),
        # Which values a check compared is in the values themselves, as ``verified``.
        "contract": {
            **report,
            "checks": [
                {key: value for key, value in check.items() if key != "values"}
                for check in report["checks"]
            ],
        },
        "provenance": {
            "generated": date.today().isoformat(),
            "specimen": dict(specimen or {}),
            "sources": _sources(family, checkpoint, released),
        },
        "signature": recorded(model, known),
    }


def _windows(caches: Mapping[str, Any]) -> dict[int, int]:
    """Return the windows of blocks that slide: a cache holds all of one but the newest token."""
    return {
        layer: row["tokens_at_most"] + 1
        for row in caches["caches"]
        if row["tokens_at_most"]
        for layer in row["layers"]
    }


def _versions() -> dict[str, str]:
    libraries = ("transformers", "torch", "nnsight")
    return {
        "bestiary": __version__,
        **{name: version(name).partition("+")[0] for name in libraries},
    }


def _sources(family: str, checkpoint: str, released: bool) -> dict[str, str]:
    """Return where each kind of fact in a record comes from."""
    size = "its released" if released else "that"
    return {
        "config": _origin(family, checkpoint),
        "shapes, places, printout, counts": (
            f"the model at {size} size on the meta device, run once"
        ),
        "contract": "a small model of the family, run",
        "meanings and notes": "authored; the notes' code is executed at every build",
    }


def checkpoints(family: str) -> list[str]:
    """Return the checkpoints of a family with records: those with cards, else its default."""
    return cards.family_checkpoints(family) or [f"{DEFAULT}{family}"]


def _origin(family: str, checkpoint: str) -> str:
    """Return where the figures of a record come from."""
    if checkpoint == f"{SPECIMEN}{family}":
        return (
            "the small model made here, as the default of transformers' configuration class "
            "does not run; no checkpoint of these sizes was released"
        )
    if checkpoint != f"{DEFAULT}{family}":
        return "the checkpoint's card, a file of configuration figures"
    changed = small.rules()["defaults"].get(family, {})
    but = f", with {', '.join(changed)} set so that it builds" if changed else ""
    return f"the default of transformers' configuration class{but}; it is no released checkpoint"


def _name(architecture: str) -> str:
    """Return the family's name in a class's name: "Apertus" of ``"ApertusForCausalLM"``."""
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", architecture) or architecture


def _caches(model: LanguageModel) -> CacheRecord:
    """Return what a call keeps between tokens, or why that is unknown."""
    try:
        return {"caches": accounting.cache_sizes(model)}
    except ValueError as error:
        return {"caches": [], "caches_unknown": str(error)}


def anatomy(
    model: LanguageModel, proven: Collection[str] = (), windows: Mapping[int, int] | None = None
) -> AnatomyRecord:
    """Return the part of a loaded model's record that a diagram is drawn from.

    Shapes are those of one forward of this model, at its own size.

    proven: the values, as ``host.name``, that the contract has verified. windows: how many tokens
    the attention of a block sees, by block that has a window.
    """
    found = shapes(model)
    return {
        "sizes": model.sizes,
        "blocks": blocks(model, windows or {}),
        "values": [
            _value(model, row, found, f"{row.host}.{row.name}" in proven)
            for row in model.support()
            if row.available
        ],
    }


def _value(
    model: LanguageModel,
    row: Row,
    found: Mapping[tuple[str, str, int | None], torch.Tensor],
    verified: bool,
) -> ValueRecord:
    value = row.value
    layer = None if row.host == "model" else row.layers[0]
    first = None if layer is None else model.anatomy.block(layer).hosts[row.host]
    # A value that the run does not have is of the dtype of the kernel's state.
    name = row.name if (row.host, row.name, layer) in found else "state_output"
    there = [
        found[key]
        for at in ([None] if layer is None else row.layers[:2])
        if (key := (row.host, name, at)) in found
    ]
    dtypes = dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in there)
    return {
        "host": vocabulary.HOSTS[row.host].path,
        "name": value.name,
        "layout": row.shown.layout,
        "dims": list(row.shown.axes),
        "meaning": value.meaning,
        "read_at": row.read_at,
        "writable": row.writable,
        "layers": None if row.host == "model" else list(row.layers),
        "condition": row.condition,
        "optional": value.optional,
        "shape": _shape(model, row, found),
        "dtype": "|".join(dtypes) or None,
        "class": type(model.hf).__name__
        if first is None
        else class_of(model.layers[row.layers[0]], first),
        "verified": verified,
    }


def _shape(
    model: LanguageModel, row: Row, found: Mapping[tuple[str, str, int | None], torch.Tensor]
) -> ValueShape:
    """Return the axes of a value."""
    widths = (
        model.top if row.host == "model" else model.anatomy.block(row.layers[0]).hosts[row.host]
    ).details.own_widths
    symbols = [
        "width" if axis == "hidden_size" and row.name in widths else axis for axis in row.value.axes
    ]
    if row.host == "model":
        return {
            "symbols": symbols,
            "numbers": _extents(row.value, found.get((row.host, row.name, None)), model.sizes),
        }
    kinds: dict[int, list[int | str]] = {}
    for block in model.anatomy.blocks:
        if block.layers[0] in row.layers:
            sizes = {**model.sizes, **block.hosts[row.host].sizes}
            kinds[block.layers[0]] = _extents(
                row.value, found.get((row.host, row.name, block.layers[0])), sizes
            )
    first = kinds[row.layers[0]]
    others: list[ExtentsOfBlocks] = [
        {"layers": list(model.anatomy.block(layer).layers), "numbers": numbers}
        for layer, numbers in kinds.items()
        if numbers != first
    ]
    shape: ValueShape = {"symbols": symbols, "numbers": first}
    if others:
        shape["others"] = others
    return shape


def _extents(
    value: vocabulary.Value, tensor: torch.Tensor | None, sizes: Mapping[str, int]
) -> list[int | str]:
    """Return a length for each axis, as the run had it; a letter where the call decides it.

    A value that the run does not have, as one state per token, has the lengths of the host's sizes.
    """
    if tensor is None:
        return [CALL.get(axis) or sizes[axis] for axis in value.axes]
    return [CALL.get(axis) or extent for axis, extent in zip(value.axes, tensor.shape, strict=True)]


def config_of(model: LanguageModel) -> dict[str, Any]:
    """Return the configuration's figures: those that few models have, and some that all have."""
    from transformers import PreTrainedConfig

    config = model.config.get_text_config()
    usual = set(PreTrainedConfig().to_dict())
    written = {
        key: value
        for key, value in config.to_dict().items()
        if key not in usual and value is not None
    }
    return {
        "architectures": type(model.hf).__name__,
        "model_type": config.model_type,
        **written,
        "tie_word_embeddings": getattr(
            config, "tie_word_embeddings", getattr(model.config, "tie_word_embeddings", False)
        ),
        "dtype": str(model.hf.dtype).removeprefix("torch."),
    }
