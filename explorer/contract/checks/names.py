"""Laws about names: what they resolve to, and the sizes that hang on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest, attempt
from explorer.contract.registry import invariant
from explorer.discovery.trace_graph import tensors

#: Which part of a mixture an alias stands for.
_PARTS = {"router": "router", "experts": "experts", "shared_experts": "shared"}

#: The mixer of each kind of block that a configuration lists by a name of its own.
_MIXERS = {
    "linear_attention": vocabulary.RECURRENT,
    "full_attention": ("self_attn",),
    "sliding_attention": ("self_attn",),
    "chunked_attention": ("self_attn",),
    "conv": ("short_conv",),
    "mamba": ("ssd", "selective_scan"),
}


@invariant(
    "names",
    "Each standard name leads to one module of the transformers model: the embedding and the head it names itself, its blocks in order, "
    "the norm run between the last block and the head, and in a block the modules discovery found, mixers of the kind the configuration lists.",
    *vocabulary.HOSTS,
    shapes=True,
)
def names_resolve(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    if host == "model":
        _frame(s, t)
        return
    listed = getattr(s.model.config.get_text_config(), "layer_types", None) or []
    for layer in s.layers(host):
        envoy = s.envoy(host, layer)
        if s.part(host, layer):
            t.holds(
                layer,
                not hasattr(envoy, "_module"),
                f"{vocabulary.HOSTS[host].path} is part of its block and leads to a module",
            )
            continue
        native = s.module(layer, s.model.anatomy.block(layer).hosts[host].module)
        t.holds(
            layer,
            envoy._module is native,
            f"{vocabulary.HOSTS[host].path} is a {type(envoy._module).__name__}, not the {type(native).__name__}",
        )
        if (
            vocabulary.HOSTS[host].mixer
            and host != "mixer"
            and layer < len(listed)
            and listed[layer] in _MIXERS
        ):
            t.holds(
                layer,
                host in _MIXERS[listed[layer]],
                f"its mixer is {host}, and the configuration says {listed[layer]}",
            )
        for name, path in _parts(s, layer).items() if host == "mlp" else ():
            t.holds(
                layer,
                getattr(envoy, name)._module is s.module(layer, path),
                f"mlp.{name} is not {path}",
            )


def _parts(s: ModelUnderTest, layer: int) -> dict[str, str]:
    """The aliases of a mixture's parts and the modules they stand for, where they are modules of their own."""
    details = s.details("mlp", layer)
    return {name: path for name, trait in _PARTS.items() if (path := getattr(details, trait))}


def _frame(s: ModelUnderTest, t: Comparisons) -> None:
    blocks = s.hf.get_submodule(s.model.anatomy.backbone.blocks)
    t.holds(
        "embed_tokens",
        s.model.embed_tokens._module is s.hf.get_input_embeddings(),
        "it is not the input embedding",
    )
    t.holds(
        "lm_head",
        s.model.lm_head._module is s.hf.get_output_embeddings(),
        "it is not the output embedding",
    )
    t.holds(
        "layers",
        [layer._module for layer in s.model.layers] == list(blocks),
        "they are not the model's blocks in order",
    )
    t.same("num_layers", s.model.num_layers, len(blocks))
    t.same("vocab_size", s.model.vocab_size, s.hf.get_output_embeddings().weight.shape[0])
    if s.model.anatomy.embedding_fits:
        t.same("hidden_size", s.model.hidden_size, s.hf.get_output_embeddings().weight.shape[1])
    if s.model.anatomy.norm is None:
        return
    last, norm, head = blocks[-1], s.model.norm._module, s.hf.get_output_embeddings()
    with _called(last, norm, head, turns={norm: s.model.anatomy.norm_turn}) as calls:
        s.model.record(
            s.ids, ["logits"]
        )  # which runs on shapes alone where a kernel's package would not
    if not {last, norm, head} <= set(calls):
        t.holds(
            "norm",
            False,
            "the forward does not call it as often as was found, beside the last block and the head",
        )
        return
    left, (entered, handed), (read, _) = calls[last][1], calls[norm], calls[head]
    t.holds("norm", _handed(left, entered), "it is not called with what the last block returns")
    if s.model.anatomy.head_reads_norm:
        t.holds("norm", _handed(handed, read), "the head is not called with what it returns")


@contextmanager
def _called(
    *modules: torch.nn.Module,
    copied: bool = False,
    turns: Mapping[torch.nn.Module, int | None] = MappingProxyType({}),
) -> Iterator[dict[torch.nn.Module, tuple[list, list]]]:
    """What each of ``modules`` is called with and returns, as tensors, by hooks of torch's own; those called once, or with
    a number in ``turns`` as often as makes that call the last. ``copied``: as it returned it."""
    calls: dict[torch.nn.Module, tuple[list, list]] = {}
    counts: Counter[torch.nn.Module] = Counter()

    def returns(module: torch.nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        counts[module] += 1
        # Some forwards write into what they were handed.
        calls[module] = (
            list(tensors((args, kwargs))),
            [tensor.clone() for tensor in tensors(output)] if copied else list(tensors(output)),
        )

    handles = [
        module.register_forward_hook(returns, with_kwargs=True) for module in dict.fromkeys(modules)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
        for module, count in counts.items():
            if count != (turns.get(module) or 0) + 1:
                del calls[module]


def _handed(given: list[torch.Tensor], got: list[torch.Tensor]) -> bool:
    """Whether the first tensor one module returned is, itself or through a view, the first another was called with."""
    if not given or not got:
        return False
    whole = [tensor if tensor._base is None else tensor._base for tensor in (given[0], got[0])]
    return whole[0] is whole[1]


@invariant(
    "a block adds what its parts return",
    "By torch's own hooks: a block returns the stream it is called with plus what the modules return that discovery says make its addends.",
    "layers",
    when=lambda s: any(_adders(s, layer) for layer in range(s.model.num_layers)),
)
def adds(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    parts = {
        layer: [s.module(layer, ""), *found]
        for layer in range(s.model.num_layers)
        if (found := _adders(s, layer))
    }
    with _called(
        *(module for modules in parts.values() for module in modules), copied=True
    ) as calls:
        s.forward(s.ids)
    for layer, modules in parts.items():
        if not set(modules) <= set(calls):
            t.holds(layer, False, "the forward does not call the block and its parts once each")
            continue
        block, *adders = (calls[module] for module in modules)
        stream = block[0][0]
        t.near(
            layer,
            stream + sum(call[1][0].view_as(stream) for call in adders),
            block[1][0],
            4 * torch.finfo(s.dtype).eps,
        )


def _adders(s: ModelUnderTest, layer: int) -> list[torch.nn.Module]:
    """The modules that return what a block adds; empty where an addend is made by no module."""
    hook_points = [
        s.model.anatomy.block(layer).hosts[sub.host].hook_points.get(sub.output, [None])[0]
        for sub in s.model.anatomy.block(layer).sublayers
    ]
    if any(step.kind != "add" for step in s.model.anatomy.block(layer).steps):
        return []
    if any(
        place is None or place.operation or place.side == "input" or place.element not in (None, 0)
        for place in hook_points
    ):
        return []
    return [s.module(layer, place.module) for place in hook_points]


@invariant(
    "a mixture's parts",
    "By torch's own hooks on the modules the names lead to: the experts are called with expert numbers the router returns (or with every token for every expert), and the MLP returns "
    "what they return, plus the shared expert's result times one number per token where there is one.",
    "mlp",
    needs=("routed_output",),
    when=lambda s: bool(_modular(s)),
)
def mixes(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    parts = {}
    for layer in _modular(s):
        mlp = s.envoy(host, layer)
        parts[layer] = {
            "mlp": mlp._module,
            **{name: getattr(mlp, name)._module for name in _parts(s, layer)},
        }
    with _called(
        *(module for modules in parts.values() for module in modules.values()), copied=True
    ) as calls:
        s.forward(s.ids)
    for layer, modules in parts.items():
        silent = [name for name, module in modules.items() if module not in calls]
        t.holds(layer, not silent, f"the forward does not call once: {', '.join(silent)}")
        if not silent:
            _mixes(s, t, layer, {name: calls[module] for name, module in modules.items()})


def _modular(s: ModelUnderTest) -> list[int]:
    """The blocks whose mixture is a module, and its experts another."""
    return [
        layer
        for layer in s.layers("mlp", "routed_output")
        if not s.part("mlp", layer) and s.details("mlp", layer).experts
    ]


def _mixes(
    s: ModelUnderTest, t: Comparisons, layer: int, calls: dict[str, tuple[list, list]]
) -> None:
    numbers = next((x for x in calls["experts"][0] if not x.is_floating_point()), None)
    routed = calls["experts"][1][0].double().flatten(0, -2)
    if s.details("mlp", layer).runs_all_experts:
        routed = routed.unflatten(0, (s.envoy("mlp", layer).num_experts, -1)).sum(0)
    elif numbers is None:
        t.holds(layer, False, "what stands for the experts is not called with expert numbers")
        return
    if "router" in calls and numbers is not None:  # else the MLP routes itself
        returned = any(torch.equal(tensor, numbers) for tensor in calls["router"][1])
        t.holds(layer, returned, "the experts are not called with numbers the router returns")
    details = s.details("mlp", layer)
    behind = details.output_steps
    if behind.steps or not behind.complete or details.routed_factor != 1.0:
        return  # what the MLP returns is no plain sum; the sum is proven by value
    whole = calls["mlp"][1][0].double().flatten(0, -2)
    rest = whole - routed
    if "shared_experts" in calls:
        shared = calls["shared_experts"][1][0].double().flatten(0, -2)
        if shared.shape != rest.shape:
            t.holds(layer, False, "what stands for the shared expert does not return a stream")
            return
        rest = rest - shared * (
            (shared * rest).sum(-1, keepdim=True) / (shared * shared).sum(-1, keepdim=True)
        )  # least squares
    t.near(layer, whole - rest, whole, 8 * torch.finfo(s.dtype).eps)


@invariant(
    "sizes",
    "Every axis of every value has a size of its name on the value's host, a positive number that cannot be set.",
    *vocabulary.HOSTS,
    shapes=True,
)
def sizes_answer(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    rows = [row for row in s.rows if row.host == host and row.available]
    axes = {axis for row in rows for axis in row.value.axes if axis not in vocabulary.CALL_AXES}
    for layer in s.layers(host):
        envoy = s.envoy(host, layer)
        for axis in sorted(axes):
            if not any(
                axis in row.value.axes and (layer is None or layer in row.layers) for row in rows
            ):
                continue
            size = getattr(envoy, axis, None)
            t.holds(layer, isinstance(size, int) and size > 0, f"{axis} is {size!r}")
            t.holds(
                layer,
                isinstance(attempt(lambda: setattr(envoy, axis, 1)), AttributeError)
                and getattr(envoy, axis) == size,
                f"{axis} could be set",
            )


@invariant(
    "printout",
    "print(model) shows under each host, on every block, the values it serves there with their layouts, and no others.",
    "model",
    shapes=True,
)
def printout_lists(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    shown = _printed(repr(s.model))
    for name, place in vocabulary.HOSTS.items():
        rows = [row for row in s.rows if row.host == name and row.available]
        for layer in [None] if name == "model" else range(s.model.num_layers):
            want = {
                f"({row.name}) -> {row.value.typed}"
                for row in rows
                if layer is None or layer in row.layers
            }
            if layer is not None and not s.model.anatomy.block(layer).hosts[name].hook_points:
                continue  # another kind of mixer may go by the same name
            parts = [] if layer is None else ["layers", layer, *place.path.split(".")[2:]]
            if layer is not None and name == "shared_experts" and s.part("mlp", layer):
                parts = [
                    "layers",
                    layer,
                    *s.model.anatomy.block(layer).hosts[name].module.split("."),
                ]
            part = layer is not None and s.model.anatomy.block(layer).hosts[name].part
            if part:  # shown on the block, of whose forward it is a part
                parts.pop()
                want = {line.replace("(", f"({place.attribute}.", 1) for line in want}
            found = {line.partition(": ")[0] for labels, line in shown if _leads(labels, parts)}
            found = {
                line
                for line in found
                if (
                    line.startswith(f"({place.attribute}.")
                    if part
                    else "." not in line.partition(")")[0]
                )
            }
            t.holds(
                (layer, name), found == want, f"it differs in {', '.join(sorted(found ^ want))}"
            )


def _printed(text: str) -> list[tuple[list[str], str]]:
    """The lines of a printed model that show a value, each with the names of the modules it stands in."""
    found, labels = [], []
    for line in text.splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        del labels[max(depth, 0) :]
        name, arrow, _ = line.strip().partition(") -> ")
        if arrow:
            found.append((list(labels), line.strip()))
        elif line.strip().startswith("("):
            labels.append(line.strip()[1:].partition(")")[0])
    return found


def _leads(labels: list[str], parts: list[str | int]) -> bool:
    """Whether names as printed (``router/gate``, ``0-2``) are those of a path."""
    return len(labels) == len(parts) and all(
        int(label.split("-")[0]) <= part <= int(label.split("-")[-1])
        if isinstance(part, int)
        else part in label.split("/")
        for label, part in zip(labels, parts, strict=True)
    )
