"""The sizes of a model: parameters by part, cache and states.

Everything here works on the meta device, where a model of any released size builds in
a fraction of a second: shapes are real, numbers are not allocated.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from explorer.accounting.cache_formulas import cache_rows
from explorer.accounting.cache_probe import CacheProbe, cache_of, measure_cache, probe_cache
from explorer.accounting.parameter_roles import PARTS, Parts
from explorer.discovery.record_run import cached_run, record_run
from explorer.meta_device import build_meta

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What the active count says, for whoever prints it.
ACTIVE_CONVENTION = (
    "Active counts every parameter but the routed experts a token does not choose. "
    "The embedding matrix is counted whole, although a token reads one row of it; "
    "a matrix shared by embedding and head is counted once."
)

#: The cache probe of each model, for as long as the model exists.
_PROBES: WeakKeyDictionary[nn.Module, CacheProbe] = WeakKeyDictionary()


def parameters(model: Any) -> dict[str, Any]:
    """Count a model's parameters: ``{total, active, by_part: [{part, count, active, note?}]}``.

    ``model`` is a transformers model, on any device, or something that wraps one as
    ``_module``; it is run once on three tokens, for which modules mix tokens and how many
    experts a token chooses is seen there. `ACTIVE_CONVENTION` says what active means; it is
    None where that number shows neither in the run nor on a module nor in the configuration,
    and where there should be experts, or may be, that were not distinguished.
    Every parameter is in exactly one of `PARTS`.
    """
    model = getattr(model, "_module", model)
    try:
        seen = run(model)
    except (
        Exception
    ):  # whatever a foreign forward raises: counting goes without it, and parts become "other"
        seen = None
    parts = Parts(model, seen)
    count: dict[str, int] = dict.fromkeys(PARTS, 0)
    active: dict[str, Fraction | None] = dict.fromkeys(PARTS, Fraction(0))
    notes = {"mixer": ", ".join(parts.classes("mixer"))}
    for path, parameter in model.named_parameters():
        part = parts.part(path, parameter)
        used: Fraction | None = Fraction(parameter.numel())
        if part == "routed experts":
            experts, chosen = parts.routing(path)
            used = None if chosen is None else Fraction(parameter.numel() * chosen, experts)
            notes[part] = (
                f"{chosen} of {experts} for each token"
                if chosen
                else "how many a token chooses is not known"
            )
        count[part] += parameter.numel()
        before = active[part]
        active[part] = None if used is None or before is None else before + used
    if parts.tied and parts.embedding is not None:
        alone = count["embedding"] == parts.embedding.numel()
        notes["embedding"] = (
            f"{'' if alone else 'its token matrix '}also the head: one matrix, counted once"
        )
    rows = [
        {
            "part": part,
            "count": count[part],
            "active": None if (used := active[part]) is None else int(used),
            **({"note": notes[part]} if part in notes else {}),
        }
        for part in PARTS
        if count[part]
    ]
    uses = [row["active"] for row in rows]
    known = None not in uses and not parts.experts_missing
    return {
        "total": sum(row["count"] for row in rows),
        "active": sum(uses) if known else None,
        "by_part": rows,
    }


def run(model: PreTrainedModel) -> CacheProbe:
    """Return what a model keeps after a short prompt, see `explorer.accounting.cache_probe`.

    It is read off the record cached on the model, or else off that of a model built like it on the
    meta device in bfloat16. Where that does not run, a model with numbers runs itself.
    Raises what its forward raises.
    """
    if model not in _PROBES:
        _PROBES[model] = _probe(model)
    return _PROBES[model]


def _probe(model: PreTrainedModel) -> CacheProbe:
    meta = model.device.type == "meta"
    recorded = cached_run(model)
    if recorded is not None and recorded.model.dtype == torch.bfloat16:
        return cache_of(recorded)
    try:
        if meta and model.dtype == torch.bfloat16:
            return probe_cache(model)
        meta_model = build_meta(model.config)
        if type(meta_model) is type(model):
            return probe_cache(meta_model)
    except Exception:  # a foreign forward may raise anything
        if meta:
            raise
    return cache_of(record_run(model, operations=False))


def _has_own_cache(model: Any) -> bool:
    """Return whether a modeling file defines a cache, whose tensors no cache layer shows."""
    from transformers import DynamicCache

    defined_in = type(model).__module__
    return any(
        isinstance(one, type) and issubclass(one, DynamicCache) and one.__module__ == defined_in
        for one in vars(sys.modules[defined_in]).values()
    )


def cache_sizes(model: Any, dtype: torch.dtype | None = None) -> list[dict[str, Any]]:
    """Return what a call keeps between tokens, per sequence, by kind of block.

    ``model`` is a configuration or a model. Each row is ``{name, formula, numbers,
    generics: [{name, number, source}], layers, shape, dtype, per_token_bytes,
    fixed_bytes, tokens_at_most, note}``: ``formula`` over named sizes, ``numbers`` the
    same with this configuration's sizes; ``per_token_bytes`` for what grows with the
    sequence (at most ``tokens_at_most`` tokens where blocks slide), else ``fixed_bytes``.
    ``dtype`` is the model's or the configuration's unless given; states that are float32
    whatever the model's dtype stay so.
    Raises ValueError where a run does not show what is kept, or its formula is not known.
    """
    model = getattr(model, "_module", model)
    is_model = isinstance(model, nn.Module)
    config: Any = getattr(model, "config", model)
    if dtype is None:
        dtype = getattr(model, "dtype", None) or config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    config = config.get_text_config()
    try:
        seen = run(cast(Any, model)) if is_model else probe_cache(build_meta(model))
    except Exception as error:  # a foreign forward may raise anything
        message = str(error).partition("\n")[0]
        raise ValueError(
            f"what {config.model_type} keeps is not known: running it failed with {message}"
        ) from error
    if _has_own_cache(model):
        raise ValueError(
            f"what {config.model_type} keeps is not known: it has a cache class of its own"
        )
    if not seen.owners:
        raise ValueError(
            f"what {config.model_type} keeps is not known: it writes nothing to transformers' cache"
        )
    return cache_rows(config, seen, dtype or torch.bfloat16)


def cache_bytes(model: Any, tokens: int, batch: int = 1, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of all rows of `cache_sizes` after a prompt [batch tokens]."""
    total = 0
    for row in cache_sizes(model, dtype):
        if row["fixed_bytes"] is not None:
            total += row["fixed_bytes"]
        else:
            cached = tokens if row["tokens_at_most"] is None else min(tokens, row["tokens_at_most"])
            total += row["per_token_bytes"] * cached
    return total * batch


def measured_cache_bytes(model: PreTrainedModel, tokens: int, batch: int = 1) -> int:
    """Run a model on a prompt [batch tokens] and return the bytes of the tensors it keeps."""
    owners = measure_cache(model, tokens, batch).owners
    return sum(tensor.bytes for owner in owners for tensor in owner.tensors)
