"""A model's kinds of blocks as data: what each does to its residual stream, and its sublayers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from explorer import vocabulary
from explorer.discovery.anatomy import BlockAnatomy, HostAnatomy
from explorer.discovery.sublayer import Sublayer
from explorer.facts.schema import BlockRecord, HostRecord, NormRecord, StreamStep, SublayerRecord
from explorer.model.language_model import LanguageModel
from explorer.vocabulary.availability import most_informative


def blocks(model: LanguageModel, windows: Mapping[int, int]) -> list[BlockRecord]:
    """Return a record of each kind of block, in the order of the first blocks.

    Kinds whose records only differ in the numbers they scale the stream with are one.

    windows: how many tokens the attention of a block sees, by block that has a window.
    """
    kinds: dict[str, list[BlockRecord]] = {}
    for anatomy in model.anatomy.blocks:
        for block in _by_window(anatomy, windows):
            new = _block(model, block, windows.get(block.layers[0]))
            without_numbers = {
                **new,
                "layers": [],
                "stream": [
                    {**step, "by": isinstance(by := step.get("by"), str) and by}
                    for step in new["stream"]
                ],
            }
            kinds.setdefault(json.dumps(without_numbers, sort_keys=True), []).append(new)
    return sorted(map(_merged, kinds.values()), key=lambda block: block["layers"][0])


def _by_window(block: BlockAnatomy, windows: Mapping[int, int]) -> list[BlockAnatomy]:
    """Split a kind of block by the windows of its attention."""
    layers_by_window: dict[int | None, list[int]] = {}
    for layer in block.layers:
        layers_by_window.setdefault(windows.get(layer), []).append(layer)
    return [replace(block, layers=tuple(layers)) for layers in layers_by_window.values()]


def _merged(records: Sequence[BlockRecord]) -> BlockRecord:
    """Merge records of equal blocks, listing the numbers of all blocks where they differ."""
    by_layer = {layer: record for record in records for layer in record["layers"]}
    layers = sorted(by_layer)
    stream: list[StreamStep] = []
    for at, step in enumerate(records[0]["stream"]):
        numbers: list[Any] = [by_layer[layer]["stream"][at].get("by") for layer in layers]
        stream.append(step if len(set(numbers)) == 1 else {**step, "by": numbers})
    merged: BlockRecord = {**records[0], "layers": layers, "stream": stream}
    merged["identity"] = _identity(merged)
    return merged


def class_of(block: Any, host: HostAnatomy) -> str:
    """Return the class of a host's module, or of the block where the host has none."""
    return type(block._module.get_submodule(host.module)).__name__


def _block(model: LanguageModel, block: BlockAnatomy, window: int | None) -> BlockRecord:
    layer = model.layers[block.layers[0]]
    hosts: dict[str, HostRecord] = {}
    for host in block.hosts.values():
        if host.hook_points and host.name != "layers":
            hosts[host.name] = {
                "path": host.module,
                "class": class_of(layer, host),
                "sizes": host.sizes,
            }
    sublayers = [
        _sublayer(block, sub, window if sub.role == "attention" else None)
        for sub in block.sublayers
    ]
    return {
        "layers": list(block.layers),
        "class": type(layer._module).__name__,
        "title": _block_title(sublayers),
        "hosts": hosts,
        "sublayers": sublayers,
        "stream": [
            {"kind": step.kind} if step.kind == "add" else {"kind": step.kind, "by": step.by}
            for step in block.steps
        ],
        "mid": block.mid_step,
    }


def _identity(block: BlockRecord) -> str:
    """Return what a block adds to its stream as code, or which part of that is not served."""
    lacking = [
        vocabulary.HOSTS[sub["host"]].attribute
        for sub in block["sublayers"]
        if sub["output"] not in sub["values"]
    ]
    if lacking:
        return f"not stated: what {' and '.join(lacking)} adds is not served"
    stream, turn, own = "layers[i].input", 0, []
    for step in block["stream"]:
        if step["kind"] == "add":
            turn += 1
            added = [
                f"{vocabulary.HOSTS[sub['host']].attribute}.{sub['output']}"
                for sub in block["sublayers"]
                if sub["turn"] == turn
            ]
            stream = " + ".join([stream, *added])
            continue
        by = step.get("by")
        if isinstance(by, list):
            own.append(f"{'abcd'[len(own)]}[i]")
            by = own[-1]
        elif isinstance(by, str):
            by = f"layers[i].{by}"
        else:
            by = f"{by:g}"
        stream = (
            f"{by}({stream})"
            if step["kind"] == "norm"
            else f"({stream}) * {by}"
            if step["kind"] == "scale"
            else f"{stream} + {by}"
        )
    return f"{stream} == layer_output" + (
        f", {' and '.join(own)} numbers of each block's own" if own else ""
    )


def _block_title(sublayers: Sequence[SublayerRecord]) -> str:
    """Return the sublayers' titles, those that read the same stream joined by "beside"."""
    stages: dict[int | None, list[str]] = {}
    for sub in sublayers:
        stages.setdefault(sub["stage"], []).append(sub["title"])
    return ", then ".join(" beside ".join(titles) for titles in stages.values())


def summary(blocks: Sequence[BlockRecord], count: int) -> str:
    """Return a sentence on a model's ``count`` blocks."""
    kinds: dict[str, int] = {}
    for block in blocks:
        kinds[block["title"]] = kinds.get(block["title"], 0) + len(block["layers"])
    if len(kinds) == 1:
        return f"{count} blocks, each {next(iter(kinds))}."
    return (
        f"{count} blocks: {'; '.join(f'{number} of {title}' for title, number in kinds.items())}."
    )


def _sublayer(block: BlockAnatomy, sub: Sublayer, window: int | None) -> SublayerRecord:
    host = block.hosts[sub.host]
    record: SublayerRecord = {
        "role": sub.role,
        "title": _title(sub.role, host) if window is None else "Sliding-window attention",
        "window": window,
        "host": sub.host,
        "norm": _norm(block, sub),
        "summary": _summary(sub.role, host)
        + (f" · the last {window} tokens" if window is not None else ""),
        "values": _values(block, host),
        "output": sub.output,
        "stage": sub.stage,
        "turn": sub.add_number,
        "steps": _steps(host),
        "note": _note(sub, host),
        "router": None,
        "experts": None,
        "shared": None,
    }
    if sub.role == "recurrent" and (rule := vocabulary.MIXERS[sub.host].rule) is not None:
        title, lines = rule
        record["rule"] = {"title": title, "lines": list(lines)}
    if sub.role == "experts" and host.details.scoring is not None:
        scoring = host.details.scoring
        text = f"{scoring.words} → {host.sizes['top_k']} of {host.sizes['num_experts']}"
        record["router"] = {
            "module": host.details.router.rsplit(".", 1)[-1],
            "text": text + (", renormalised" if scoring.renormalised else ""),
        }
        record["experts"] = {
            "count": host.sizes["num_experts"],
            "chosen": host.sizes["top_k"],
            "width": host.sizes.get("intermediate_size"),
        }
        if host.details.shared:
            record["shared"] = {
                "module": host.details.shared.rsplit(".", 1)[-1],
                "gate": "gate per token" if host.details.shared_gated else None,
            }
    return record


def _norm(block: BlockAnatomy, sub: Sublayer) -> NormRecord | None:
    """Return the norm that a sublayer reads, None where it reads none."""
    if sub.norm is None:
        if not sub.scaled_norm:
            return None
        name = sub.scaled_norm.rsplit(".", 1)[-1]
        return {"module": name, "value": None, "on_stream": False, "scaled": True}
    first, second = block.main_sublayers
    value = (
        "attention_norm_output" if sub is first else "mlp_norm_output" if sub is second else None
    )
    name = sub.norm.rsplit(".", 1)[-1]
    # Where the stream itself passes the norm just before, the sublayer reads the stream.
    last = block.steps[sub.stage - 1] if sub.stage else None
    return {
        "module": name,
        "value": value,
        "on_stream": last is not None and last.kind == "norm" and last.by == name,
        "scaled": False,
    }


def _note(sub: Sublayer, host: HostAnatomy) -> str | None:
    """Return what is unknown of a sublayer; None where it is traced."""
    if sub.stage is None:
        return "reads the stream at several points"
    return (
        most_informative(host.missing.values())
        if set(host.hook_points) <= {sub.output} and host.missing
        else None
    )


def _title(role: str, host: HostAnatomy) -> str:
    if title := vocabulary.HOSTS[host.name].title:
        return title
    if role == "attention":
        return (
            "Gated attention"
            if {"head_gate", "head_scale"} & set(host.hook_points)
            else "Attention"
        )
    return "Mixture of experts" if role == "experts" else "MLP"


def _summary(role: str, host: HostAnatomy) -> str:
    sizes = host.sizes
    if "value_dim" in sizes:
        keys, values = (
            _counted(sizes["key_heads"], "key head"),
            _counted(sizes["heads"], "value head"),
        )
        return f"{keys} × {sizes['key_dim']} · {values} × {sizes['value_dim']}"
    if "channels" in sizes:
        state = f" · a state of {sizes['key_dim']} each" if "key_dim" in sizes else ""
        return f"{sizes['channels']} channels{state}"
    if (
        role == "attention"
        and "num_heads" in sizes
        and "num_kv_heads" in sizes
        and "head_dim" in sizes
    ):
        heads, shared = _counted(sizes["num_heads"], "query head"), sizes["num_kv_heads"]
        return (
            f"{heads} over {_counted(shared, 'key/value head')} × {sizes['head_dim']}"
            if shared < sizes["num_heads"]
            else f"{heads} × {sizes['head_dim']}"
        )
    if role == "experts" and host.details.scoring is not None:
        scoring = host.details.scoring
        words = [
            f"{scoring.words} → {sizes['top_k']} of {sizes['num_experts']}"
            + (", renormalised" if scoring.renormalised else "")
        ]
        if host.details.shared:
            words.append("gated shared expert" if host.details.shared_gated else "shared expert")
        return " · ".join(words)
    return f"{sizes['intermediate_size']} wide" if "intermediate_size" in sizes else ""


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _steps(host: HostAnatomy) -> list[str]:
    """Return what follows the sublayer's core until its result is added, by the modules' names."""
    after = list(host.details.modules_after)
    steps = host.details.output_steps
    after += [path.rsplit(".", 1)[-1] for path in steps.norms]
    after += ["× scale"] if steps.has_scale else []
    after += ["+ bias"] if steps.has_shift else []
    after += [] if steps.complete else ["…"]
    return [" → ".join(after)] if after else []


def _values(block: BlockAnatomy, host: HostAnatomy) -> list[str]:
    """Return the host's values in the order of the forward, derived ones after their sources."""
    order = [value for name, value in block.order if name == host.name]
    for value in reversed(vocabulary.BY_HOST[host.name].values()):
        if value.derived and value.name not in host.missing and value.source in order:
            order.insert(order.index(value.source) + 1, value.name)
    return order
