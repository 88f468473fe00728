"""Laws about gradients: they flow through what is served."""

from __future__ import annotations

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import Key, ModelUnderTest
from explorer.contract.registry import invariant

HOSTS = tuple(vocabulary.HOSTS)


@invariant(
    "gradients flow",
    "A loss on the logits (and, for a state leaving the call, on that state) has a gradient with respect to every floating-point value served, "
    "and derived values are not cut off from what they come from.",
    *HOSTS,
    when=lambda s: s.differentiable,
)
def flow(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    served, grads = _grads(s)
    for key, value in served.items():
        if (
            key[0].host != host
            or not isinstance(value, torch.Tensor)
            or not value.is_floating_point()
        ):
            continue
        where = (key[1], key[0].name)
        t.of(key[0])
        if key[0].fixed:
            continue
        if key[0].derived:
            source = served.get((vocabulary.BY_HOST[host][key[0].source], key[1]))
            # Where the model itself cut that off, there is nothing to hand on.
            cut = isinstance(source, torch.Tensor) and not source.requires_grad
            t.holds(where, value.requires_grad is not cut, "it is cut off from what it comes from")
            continue
        grad = grads.get(key)
        if s.indifferent(key):
            t.holds(
                where, grad is None or not grad.any(), "a gradient reaches what goes into no weight"
            )
            continue
        if key[0].host == "gated_recurrence" and key[0].name == "state_input":
            continue  # a text's first token forgets it
        t.holds(where, grad is not None, "no gradient reaches it")
        t.holds(
            where,
            grad is None or (bool(torch.isfinite(grad).all()) and bool(grad.any())),
            "its gradient is zero or not finite",
        )


def _grads(s: ModelUnderTest) -> tuple[dict[Key, object], dict[Key, torch.Tensor]]:
    if "grads" not in s.memo:
        served: dict[Key, object] = {}
        keys = s.order(derived=True)
        with torch.enable_grad(), s.model.trace(s.ids):
            for key in keys:
                served[key] = s.read(key)
        wanted = {
            k: v
            for k, v in served.items()
            if isinstance(v, torch.Tensor) and v.requires_grad and not k[0].derived
        }
        logits = next(v for k, v in served.items() if k[0].name == "logits")
        loss = _weighed(logits)
        for key, value in wanted.items():
            if key[0].name == "state_output":
                loss = loss + _weighed(value)
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        s.memo["grads"] = (
            served,
            {k: g for k, g in zip(wanted, found, strict=True) if g is not None},
        )
    return s.memo["grads"]


def _weighed(value: torch.Tensor) -> torch.Tensor:
    """A sum in which no two numbers weigh the same, so that no symmetry makes a gradient vanish."""
    weights = torch.linspace(-1, 1, value.numel(), dtype=torch.float32, device=value.device).sin()
    return (value.float() * weights.view_as(value)).sum()


@invariant(
    "backward in a trace",
    "Inside `with loss.backward():` the .grad of the stream leaving each block is what autograd gives for it.",
    "layers",
    float32=1e-6,
    when=lambda s: s.differentiable,
)
def backward(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    last = s.model.num_layers - 1
    streams: dict[int, torch.Tensor] = {}
    told: dict[int, torch.Tensor] = {}
    with torch.enable_grad(), s.model.trace(s.ids):
        for layer in range(last + 1):
            streams[layer] = s.model.layers[layer].layer_output
        loss = _weighed(s.model.logits)
        with loss.backward(retain_graph=True):
            for layer in range(last, -1, -1):
                told[layer] = streams[layer].grad.clone()
        loss.save()
    found = torch.autograd.grad(loss, list(streams.values()))
    s.looks("layers", "layer_output")
    for layer, grad in zip(streams, found, strict=True):
        t.near(layer, told[layer], grad)
    s.hf.zero_grad(set_to_none=True)  # backward leaves the parameters theirs
