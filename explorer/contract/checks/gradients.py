"""Invariants of gradients: they flow through what is served."""

from __future__ import annotations

from typing import Any

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest, ValueKey
from explorer.contract.registry import invariant

#: The part of the largest gradient that is rounding.
_ROUNDING = 1e-5


@invariant(
    "gradients flow",
    "A loss on the logits (and, for a state that leaves the call, on that state) has a gradient "
    "with respect to every floating-point value served, and derived values stay connected to what "
    "they are computed from.",
    *vocabulary.HOSTS,
    when=lambda subject: subject.native.differentiable,
    otherwise="transformers' own forward has no gradient here",
)
def gradients(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    served, grads = subject.once("gradients", lambda: _gradients(subject))
    for key, tensor in served.items():
        value, layer = key
        if value.host != host or value.fixed or not isinstance(tensor, torch.Tensor):
            continue
        if not tensor.is_floating_point():
            continue
        compare.about(value)
        if value.source is None:
            largest = max(float(grad.abs().max()) for grad in grads.values())
            _compare_gradient(subject, compare, key, grads.get(key), largest)
            continue
        source = served.get((vocabulary.BY_HOST[host][value.source], layer))
        # Where the model itself detaches the source, there is no gradient to pass on.
        detached = isinstance(source, torch.Tensor) and not source.requires_grad
        compare.holds(
            (layer, value.name),
            tensor.requires_grad is not detached,
            "it is detached from what it is computed from",
        )


def _compare_gradient(
    subject: ModelUnderTest,
    compare: Comparisons,
    key: ValueKey,
    grad: torch.Tensor | None,
    largest: float,
) -> None:
    """Compare the gradient of one value; ``largest``: the largest number in any gradient."""
    value, layer = key
    where = (layer, value.name)
    if subject.never_weighs(key):
        # A single weight that is divided by itself is one up to rounding.
        zero = grad is None or float(grad.abs().max()) <= _ROUNDING * largest
        compare.holds(where, zero, "a gradient reaches a value that enters no weight")
        return
    mixer = vocabulary.MIXERS.get(value.host)
    if mixer is not None and mixer.reset_gate and value.name == "state_input":
        return  # the first token of a text forgets it
    compare.holds(where, grad is not None, "no gradient reaches it")
    useful = grad is None or (bool(torch.isfinite(grad).all()) and bool(grad.any()))
    compare.holds(where, useful, "its gradient is zero or not finite")


def _gradients(subject: ModelUnderTest) -> tuple[dict[ValueKey, Any], dict[ValueKey, torch.Tensor]]:
    """Return every value served with gradients enabled, and the gradients that reach them."""
    served: dict[ValueKey, Any] = {}
    keys = subject.reading_order(derived=True)
    with torch.enable_grad(), subject.model.trace(subject.ids):
        for key in keys:
            served[key] = subject.read(key)
    sources = {
        key: tensor
        for key, tensor in served.items()
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not key[0].derived
    }
    loss = _weighted_sum(served[vocabulary.BY_HOST["model"]["logits"], None])
    for (value, _), tensor in sources.items():
        if value.name == "state_output":
            loss = loss + _weighted_sum(tensor)
    grads = torch.autograd.grad(loss, list(sources.values()), allow_unused=True)
    reached = {key: g for key, g in zip(sources, grads, strict=True) if g is not None}
    return served, reached


def _weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum with a weight per element, so that no symmetry makes a gradient vanish."""
    weights = torch.linspace(-1, 1, tensor.numel(), dtype=torch.float32, device=tensor.device).sin()
    return (tensor.float() * weights.view_as(tensor)).sum()


@invariant(
    "backward in a trace",
    "Inside `with loss.backward():` the .grad of the stream leaving each block is what autograd "
    "gives for it.",
    "layers",
    float32=1e-6,
    when=lambda subject: subject.native.differentiable,
    otherwise="transformers' own forward has no gradient here",
)
def backward(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    model = subject.model
    layers = range(model.num_layers)
    streams: dict[int, torch.Tensor] = {}
    in_trace: dict[int, torch.Tensor] = {}
    with torch.enable_grad(), model.trace(subject.ids):
        for layer in layers:
            streams[layer] = model.layers[layer].layer_output
        loss = _weighted_sum(model.logits)
        # nnsight replaces backward within a trace.
        with loss.backward(retain_graph=True):  # pyright: ignore[reportOptionalContextManager]
            for layer in reversed(layers):
                in_trace[layer] = streams[layer].grad.clone()  # pyright: ignore[reportOptionalMemberAccess]
        loss.save()  # pyright: ignore[reportAttributeAccessIssue]  # nnsight adds it
    grads = torch.autograd.grad(loss, list(streams.values()))
    subject.note_read("layers", "layer_output")
    for layer, grad in zip(streams, grads, strict=True):
        compare.close(layer, in_trace[layer], grad)
    subject.hf.zero_grad(set_to_none=True)  # backward leaves gradients on the parameters


INVARIANTS = (gradients, backward)
