"""A model's kinds of blocks as data: what each does to its stream, and its sublayers, named and told in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from explorer import vocabulary
from explorer.discovery.sublayer import Sublayer
from explorer.discovery.anatomy import BlockAnatomy, HostAnatomy
from explorer.model.language_model import LanguageModel
from explorer.vocabulary.availability import most_informative


def blocks(model: LanguageModel, windows: Mapping[int, int]) -> list[dict[str, Any]]:
    """A record of each kind of block, in the order of their first ones; ``windows``: how many tokens attention sees, by block that has one.

    Kinds that a record tells apart by nothing but numbers they scale the stream with are one.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for block in (part for whole in model.anatomy.blocks for part in _by_window(whole, windows)):
        new = _block(model, block, windows.get(block.layers[0]))
        alike = new | {
            "layers": [],
            "stream": [
                step | {"by": isinstance(step.get("by"), str) and step["by"]}
                for step in new["stream"]
            ],
        }
        kinds.setdefault(json.dumps(alike, sort_keys=True), []).append(new)
    return sorted(
        (_merged(alike) for alike in kinds.values()), key=lambda block: block["layers"][0]
    )


def _by_window(block: BlockAnatomy, windows: Mapping[int, int]) -> list[BlockAnatomy]:
    """A kind of block for each window its attention has: what it runs is the same, what it sees is not."""
    found: dict[int | None, list[int]] = {}
    for layer in block.layers:
        found.setdefault(windows.get(layer), []).append(layer)
    return [replace(block, layers=tuple(layers)) for layers in found.values()]


def _merged(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Records of blocks that are alike as one; where their numbers differ, a list of them in the order of the blocks."""
    single = sorted(
        ((layer, block) for block in blocks for layer in block["layers"]), key=lambda one: one[0]
    )
    stream = []
    for place, step in enumerate(blocks[0]["stream"]):
        numbers = [block["stream"][place].get("by") for _, block in single]
        stream.append(step if len(set(numbers)) == 1 else step | {"by": numbers})
    merged = blocks[0] | {"layers": [layer for layer, _ in single], "stream": stream}
    return merged | {"identity": _identity(merged)}


def class_of(block: Any, host: HostAnatomy) -> str:
    """The class of a host's module; of the block itself where it has none."""
    return type(block._module.get_submodule(host.module)).__name__


def _block(model: LanguageModel, block: BlockAnatomy, window: int | None) -> dict[str, Any]:
    layer = model.layers[block.layers[0]]
    hosts = {}
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
        "title": _in_words(sublayers),
        "hosts": hosts,
        "sublayers": sublayers,
        # What the block does to its stream, in order, and after how much of that the stream is layer_mid.
        "stream": [
            {"kind": step.kind} if step.kind == "add" else {"kind": step.kind, "by": step.by}
            for step in block.steps
        ],
        "mid": block.mid_step,
    }


def _identity(block: Mapping[str, Any]) -> str:
    """What a block of the record adds to its stream, as code; in words where not all of it is served."""
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
        by = step["by"]
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


def _in_words(sublayers: Sequence[Mapping[str, Any]]) -> str:
    """The sublayers' titles: beside each other where they read the same stream, else one after the other."""
    stages: dict[int | None, list[str]] = {}
    for sub in sublayers:
        stages.setdefault(sub["stage"], []).append(sub["title"])
    return ", then ".join(" beside ".join(titles) for titles in stages.values())


def summary(blocks: Sequence[Mapping[str, Any]], count: int) -> str:
    """A model's blocks in a sentence."""
    kinds: dict[str, int] = {}
    for block in blocks:
        kinds[block["title"]] = kinds.get(block["title"], 0) + len(block["layers"])
    if len(kinds) == 1:
        return f"{count} blocks, each {next(iter(kinds))}."
    return (
        f"{count} blocks: {'; '.join(f'{number} of {title}' for title, number in kinds.items())}."
    )


def _sublayer(block: BlockAnatomy, sub: Sublayer, window: int | None) -> dict[str, Any]:
    host = block.hosts[sub.host]
    record: dict[str, Any] = {
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
    if sub.role == "recurrent":
        title, lines = vocabulary.MIXERS[sub.host].rule
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


def _norm(block: BlockAnatomy, sub: Sublayer) -> dict[str, Any] | None:
    """The norm a sublayer reads, and the value that is what it hands on to this one."""
    if sub.norm is None:
        return (
            {
                "module": sub.scaled_norm.rsplit(".", 1)[-1],
                "value": None,
                "on_stream": False,
                "scaled": True,
            }
            if sub.scaled_norm
            else None
        )
    first, second = block.main_sublayers
    value = (
        "attention_norm_output" if sub is first else "mlp_norm_output" if sub is second else None
    )
    name = sub.norm.rsplit(".", 1)[-1]
    # Where the stream itself goes through the norm just before, the sublayer reads the stream.
    behind = block.steps[sub.stage - 1] if sub.stage else None
    return {
        "module": name,
        "value": value,
        "on_stream": behind is not None and behind.kind == "norm" and behind.by == name,
        "scaled": False,
    }


def _note(sub: Sublayer, host: HostAnatomy) -> str | None:
    """What is not known of a sublayer whose inside is not followed, or which does not read the stream at one point."""
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
        return f"{_counted(sizes['key_heads'], 'key head')} × {sizes['key_dim']} · {_counted(sizes['heads'], 'value head')} × {sizes['value_dim']}"
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
    """What follows the sublayer's core until its result is added, by the names the model gives its modules."""
    after = list(host.details.modules_after)
    behind = host.details.output_steps
    after += [path.rsplit(".", 1)[-1] for path in behind.norms]
    after += ["× scale"] if behind.has_scale else []
    after += ["+ bias"] if behind.has_shift else []
    after += [] if behind.complete else ["…"]
    return [" → ".join(after)] if after else []


def _values(block: BlockAnatomy, host: HostAnatomy) -> list[str]:
    """The host's values in the order the forward passes them, derived ones behind their sources."""
    order = [value for name, value in block.order if name == host.name]
    for value in reversed(vocabulary.BY_HOST[host.name].values()):
        if value.derived and value.name not in host.missing and value.source in order:
            order.insert(order.index(value.source) + 1, value.name)
    return order
