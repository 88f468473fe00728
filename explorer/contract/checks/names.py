"""Invariants of names: the modules they lead to, their sizes, and the printout."""

from __future__ import annotations

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest, attempt
from explorer.contract.module_calls import Call, module_calls
from explorer.contract.registry import invariant

#: The hosts that a configuration's name for a type of block allows as its mixer.
_MIXERS_BY_TYPE: dict[str, list[str]] = {}
for _kind in vocabulary.MIXERS.values():
    for _type in _kind.layer_types:
        _MIXERS_BY_TYPE.setdefault(_type, []).append(_kind.host)


@invariant(
    "names",
    "Each standard name leads to one module of the transformers model: the embedding and the head "
    "that it names itself, its blocks in order, the norm that runs between the last block and the "
    "head, and within a block the modules that discovery found, with a mixer of the type that the "
    "configuration lists.",
    *vocabulary.HOSTS,
    shapes=True,
)
def names_resolve(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    if host == "model":
        _backbone_names(subject, compare)
        return
    listed = getattr(subject.model.config.get_text_config(), "layer_types", None) or []
    has_type = vocabulary.HOSTS[host].mixer and host != "mixer"
    path = vocabulary.HOSTS[host].path
    for layer in subject.layers(host):
        envoy = subject.envoy(host, layer)
        if subject.is_part(host, layer):
            compare.holds(
                layer,
                not hasattr(envoy, "_module"),
                f"{path} has no module of its own and leads to one",
            )
            continue
        module = subject.module(layer, subject.host(host, layer).module)
        compare.holds(
            layer,
            envoy._module is module,
            f"{path} is a {type(envoy._module).__name__}, not the {type(module).__name__}",
        )
        if has_type and layer < len(listed) and listed[layer] in _MIXERS_BY_TYPE:
            compare.holds(
                layer,
                host in _MIXERS_BY_TYPE[listed[layer]],
                f"its mixer is {host}, but the configuration lists {listed[layer]}",
            )
        for name, part in _mixture_modules(subject, layer).items() if host == "mlp" else ():
            compare.holds(
                layer,
                getattr(envoy, name)._module is subject.module(layer, part),
                f"mlp.{name} is not {part}",
            )


def _mixture_modules(subject: ModelUnderTest, layer: int) -> dict[str, str]:
    """Return the aliases of a mixture's parts with the paths of their modules."""
    details = subject.details("mlp", layer)
    paths = {"router": details.router, "experts": details.experts, "shared_experts": details.shared}
    return {alias: path for alias, path in paths.items() if path}


def _backbone_names(subject: ModelUnderTest, compare: Comparisons) -> None:
    model, hf = subject.model, subject.hf
    blocks = hf.get_submodule(model.anatomy.backbone.blocks)
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    compare.holds(
        "embed_tokens", model.embed_tokens._module is embedding, "it is not the input embedding"
    )
    compare.holds("lm_head", model.lm_head._module is head, "it is not the output embedding")
    compare.holds(
        "layers",
        [layer._module for layer in model.layers] == list(blocks),
        "they are not the model's blocks in order",
    )
    compare.equal("num_layers", model.num_layers, len(blocks))
    compare.equal("vocab_size", model.vocab_size, head.weight.shape[0])
    if model.anatomy.embedding_fits:
        compare.equal("hidden_size", model.hidden_size, head.weight.shape[1])
    if model.anatomy.norm is not None:
        _final_norm(subject, compare, blocks[-1], model.norm._module, head)


def _final_norm(
    subject: ModelUnderTest,
    compare: Comparisons,
    last_block: torch.nn.Module,
    norm: torch.nn.Module,
    head: torch.nn.Module,
) -> None:
    """Compare what the last block, the final norm and the head pass to each other in a forward."""
    anatomy = subject.model.anatomy
    with module_calls((last_block, norm, head), calls_before={norm: anatomy.norm_call}) as calls:
        # Recording also runs where a kernel's package has no implementation for the device.
        subject.model.record(subject.ids, ["logits"])
    if not {last_block, norm, head} <= set(calls):
        compare.holds(
            "norm",
            False,
            "the forward does not call it, the last block and the head as often as discovery found",
        )
        return
    _, from_block = calls[last_block]
    into_norm, from_norm = calls[norm]
    into_head, _ = calls[head]
    compare.holds(
        "norm",
        _same_first(from_block, into_norm),
        "it is not called with what the last block returns",
    )
    if anatomy.head_reads_norm:
        compare.holds(
            "norm", _same_first(from_norm, into_head), "the head is not called with what it returns"
        )


def _same_first(returned: list[torch.Tensor], taken: list[torch.Tensor]) -> bool:
    """Return whether the first tensors are the same, or views of the same tensor."""
    if not returned or not taken:
        return False
    one, other = (t if t._base is None else t._base for t in (returned[0], taken[0]))
    return one is other


@invariant(
    "sizes",
    "Every axis of every value has a size of its name on the value's host, a positive integer that "
    "cannot be set.",
    *vocabulary.HOSTS,
    shapes=True,
)
def sizes(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    rows = [row for row in subject.support if row.host == host and row.available]
    axes = {axis for row in rows for axis in row.value.axes if axis not in vocabulary.CALL_AXES}
    for layer in subject.layers(host):
        envoy = subject.envoy(host, layer)
        served = [row for row in rows if layer is None or layer in row.layers]
        for axis in sorted(axes):
            if not any(axis in row.value.axes for row in served):
                continue
            size = getattr(envoy, axis, None)
            compare.holds(layer, isinstance(size, int) and size > 0, f"{axis} is {size!r}")
            error = attempt(lambda envoy=envoy, axis=axis: setattr(envoy, axis, 1))
            compare.holds(
                layer,
                isinstance(error, AttributeError) and getattr(envoy, axis) == size,
                f"{axis} could be set",
            )


@invariant(
    "printout",
    "print(model) lists under each host, on every block, the values it serves there with their "
    "layouts, and no others.",
    "model",
    shapes=True,
)
def printout(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    printed = _printed_values(repr(subject.model))
    for name in vocabulary.HOSTS:
        for layer in [None] if name == "model" else range(subject.model.num_layers):
            if layer is not None and not subject.host(name, layer).hook_points:
                continue  # another kind of mixer may have the same name
            found, expected = _listed(subject, printed, name, layer)
            compare.holds(
                (layer, name),
                found == expected,
                f"it differs in {', '.join(sorted(found ^ expected))}",
            )


def _listed(
    subject: ModelUnderTest, printed: list[tuple[list[str], str]], host: str, layer: int | None
) -> tuple[set[str], set[str]]:
    """Return the lines that the printout shows of a host on a block, and those it should show."""
    expected = {
        f"({row.name}) -> {row.value.typed}"
        for row in subject.support
        if row.host == host and row.available and (layer is None or layer in row.layers)
    }
    path: list[str | int] = []
    if layer is not None:
        path = ["layers", layer, *vocabulary.HOSTS[host].path.split(".")[2:]]
        if host == "shared_experts" and subject.is_part("mlp", layer):
            path = ["layers", layer, *subject.host(host, layer).module.split(".")]
    prefix = ""
    if layer is not None and subject.is_part(host, layer):  # it is listed under its block
        path.pop()
        prefix = f"{vocabulary.HOSTS[host].attribute}."
        expected = {line.replace("(", f"({prefix}", 1) for line in expected}
    lines = {line.partition(": ")[0] for labels, line in printed if _leads_to(labels, path)}
    if prefix:
        return {line for line in lines if line.startswith(f"({prefix}")}, expected
    return {line for line in lines if "." not in line.partition(")")[0]}, expected


def _printed_values(text: str) -> list[tuple[list[str], str]]:
    """Return the lines that show a value, each with the labels of the modules around it."""
    lines: list[tuple[list[str], str]] = []
    labels: list[str] = []
    for line in text.splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        del labels[max(depth, 0) :]
        if ") -> " in line:
            lines.append((list(labels), line.strip()))
        elif line.strip().startswith("("):
            labels.append(line.strip()[1:].partition(")")[0])
    return lines


def _leads_to(labels: list[str], path: list[str | int]) -> bool:
    """Return whether labels as printed (``router/gate``, ``0-2``) are those of a path."""
    return len(labels) == len(path) and all(
        int(label.split("-")[0]) <= part <= int(label.split("-")[-1])
        if isinstance(part, int)
        else part in label.split("/")
        for label, part in zip(labels, path, strict=True)
    )


@invariant(
    "a block adds what its parts return",
    "By torch's own hooks: a block returns the stream it is called with plus what is returned by "
    "the modules that discovery takes for the sources of its addends.",
    "layers",
    when=lambda subject: any(
        _addend_modules(subject, layer) for layer in range(subject.model.num_layers)
    ),
    otherwise="no addend of a block is what a module returns",
)
def blocks_add(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    modules = {
        layer: [subject.module(layer, ""), *adders]
        for layer in range(subject.model.num_layers)
        if (adders := _addend_modules(subject, layer))
    }
    every = [module for listed in modules.values() for module in listed]
    with module_calls(every, copied=True) as calls:
        subject.native.forward(subject.ids)
    for layer, listed in modules.items():
        if not set(listed) <= set(calls):
            compare.holds(layer, False, "the forward does not call the block and its parts once")
            continue
        (taken, returned), *parts = (calls[module] for module in listed)
        stream = taken[0]
        added = sum(addends[0].view_as(stream) for _, addends in parts)
        compare.close(layer, stream + added, returned[0], 4 * torch.finfo(subject.dtype).eps)


def _addend_modules(subject: ModelUnderTest, layer: int) -> list[torch.nn.Module]:
    """Return the modules that return a block's addends; none unless each is added as returned."""
    block = subject.block(layer)
    if any(step.kind != "add" for step in block.steps):
        return []
    modules = []
    for sublayer in block.sublayers:
        points = block.hosts[sublayer.host].hook_points.get(sublayer.output)
        if not points:
            return []
        point = points[0]
        if point.operation or point.side == "input" or point.element not in (None, 0):
            return []
        modules.append(subject.module(layer, point.module))
    return modules


@invariant(
    "a mixture's parts",
    "By torch's own hooks on the modules that the names lead to: the experts are called with the "
    "expert indices that the router returns (or with every token for every expert), and the MLP "
    "returns what they return, plus the shared expert's output times one number per token where "
    "there is a shared expert.",
    "mlp",
    needs=("routed_output",),
    when=lambda subject: bool(_modular_mixtures(subject)),
    otherwise="the parts of its mixtures are no modules",
)
def mixture_parts(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    modules = {}
    for layer in _modular_mixtures(subject):
        mlp = subject.envoy(host, layer)
        parts = {name: getattr(mlp, name)._module for name in _mixture_modules(subject, layer)}
        modules[layer] = {"mlp": mlp._module, **parts}
    every = [module for named in modules.values() for module in named.values()]
    with module_calls(every, copied=True) as calls:
        subject.native.forward(subject.ids)
    for layer, named in modules.items():
        missing = [name for name, module in named.items() if module not in calls]
        compare.holds(layer, not missing, f"the forward does not call once: {', '.join(missing)}")
        if not missing:
            own_calls = {name: calls[module] for name, module in named.items()}
            _compare_mixture(subject, compare, layer, own_calls)


def _modular_mixtures(subject: ModelUnderTest) -> list[int]:
    """Return the blocks whose mixture is a module that has its experts in another."""
    return [
        layer
        for layer in subject.layers("mlp", "routed_output")
        if not subject.is_part("mlp", layer) and subject.details("mlp", layer).experts
    ]


def _compare_mixture(
    subject: ModelUnderTest, compare: Comparisons, layer: int, calls: dict[str, Call]
) -> None:
    details = subject.details("mlp", layer)
    taken, returned = calls["experts"]
    indices = next((tensor for tensor in taken if not tensor.is_floating_point()), None)
    routed = returned[0].double().flatten(0, -2)
    if details.runs_all_experts:
        routed = routed.unflatten(0, (subject.envoy("mlp", layer).num_experts, -1)).sum(0)
    elif indices is None:
        compare.holds(layer, False, "the experts are not called with expert indices")
        return
    if "router" in calls and indices is not None:  # otherwise the MLP does the routing itself
        compare.holds(
            layer,
            any(torch.equal(tensor, indices) for tensor in calls["router"][1]),
            "the experts are not called with indices that the router returns",
        )
    after = details.output_steps
    output = calls["mlp"][1][0].double().flatten(0, -2)
    scaled = subject.host("mlp", layer).hook_points["expert_weights"][0].scale != 1
    between = scaled or details.routed_projection or details.routed_steps
    if after.steps or not after.complete or between:
        return  # the MLP returns no plain sum; invariants of the values compare it
    rest = output - routed
    if "shared_experts" in calls:
        shared = calls["shared_experts"][1][0].double().flatten(0, -2)
        if shared.shape != rest.shape:
            compare.holds(layer, False, "the shared expert does not return a stream")
            return
        # The factor per token that fits best, by least squares.
        gate = (shared * rest).sum(-1, keepdim=True) / (shared * shared).sum(-1, keepdim=True)
        rest = rest - shared * gate
    compare.close(layer, output - rest, output, 8 * torch.finfo(subject.dtype).eps)


INVARIANTS = (names_resolve, blocks_add, mixture_parts, sizes, printout)
