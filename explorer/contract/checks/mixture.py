"""Laws of a mixture of experts: the choice, the weights, the slots, and what editing them does."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.registry import invariant
from explorer.contract.residual_steps import added, constant, followed
from explorer.discovery.trace_graph import tensors
from explorer.model.edits import Edit, ablate_expert

HOST = "mlp"


@invariant(
    "choice",
    "expert_indices are the top-k of router_scores, each expert once per token.",
    HOST,
    needs=("router_scores", "expert_indices"),
    bfloat16=0.0,
)
def choice(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(HOST, "router_scores", "expert_indices"):
        scores, chosen = s.get(HOST, "router_scores", layer), s.get(HOST, "expert_indices", layer)
        best = scores.topk(chosen.shape[-1], dim=-1).values
        t.same(layer, scores.gather(-1, chosen).sort(-1, descending=True).values, best)
        t.holds(
            layer,
            (chosen.sort(-1).values.diff(dim=-1) > 0).all(),
            "an expert is chosen twice by a token",
        )


@invariant(
    "margin",
    "router_margin is the last chosen expert's score minus the best score not chosen, and never negative.",
    HOST,
    needs=("router_margin", "router_scores", "expert_indices"),
    bfloat16=0.0,
)
def margin(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(HOST, "router_margin", "router_scores", "expert_indices"):
        scores, chosen = s.get(HOST, "router_scores", layer), s.get(HOST, "expert_indices", layer)
        found = s.get(HOST, "router_margin", layer)
        rest = scores.scatter(-1, chosen, -torch.inf).max(-1).values
        t.same(layer, found, scores.gather(-1, chosen).min(-1).values - rest)
        t.holds(layer, (found >= 0).all(), "a margin is negative")


@invariant(
    "weights as scored",
    "router_scores are the family's own function of router_logits, plus one number per expert where it has a selection bias, struck out outside the best "
    "groups; expert_weights are the function's values for the chosen, renormalised where the family does, times the factor "
    "its forward multiplies with (one per expert where that is learned), and nought where what was chosen stands for no "
    "expert.",
    HOST,
    needs=("router_logits", "router_scores", "expert_indices", "expert_weights"),
    float32=1e-6,
    bfloat16=1e-2,
)
def weights(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(
        HOST, "router_logits", "router_scores", "expert_indices", "expert_weights"
    ):
        scoring = s.details(HOST, layer).scoring
        logits, scores = (
            s.get(HOST, "router_logits", layer).float(),
            s.get(HOST, "router_scores", layer).float(),
        )
        chosen = s.get(HOST, "expert_indices", layer)
        made = _FUNCTIONS[scoring.function](logits)
        kept = (
            torch.isfinite(scores) & (scores != 0)
            if scoring.masked
            else torch.ones_like(scores, dtype=torch.bool)
        )
        enough = kept.sum(-1) >= chosen.shape[-1]
        t.holds(
            layer,
            (kept.gather(-1, chosen).all(-1) | ~enough).all(),
            "an expert struck out was chosen, where enough were left",
        )
        bias = (
            constant(s, layer, scoring.bias).float()
            if scoring.bias
            else torch.zeros(scores.shape[-1])
        )
        t.near(layer, torch.where(kept, scores, 0), torch.where(kept, made + bias, 0))
        want = _FUNCTIONS[scoring.after](
            (made if scoring.bias or scoring.masked else scores).gather(-1, chosen)
        )
        if scoring.renormalised:
            want = want / want.sum(-1, keepdim=True)
        if s.details(HOST, layer).null_experts:
            want = want.masked_fill(
                chosen >= len(s.module(layer, s.details(HOST, layer).experts).down_proj), 0
            )
        found = s.get(HOST, "expert_weights", layer).float()
        if scoring.factor is not None:
            factor = (
                scoring.factor
                if isinstance(scoring.factor, float)
                else constant(s, layer, scoring.factor).float()[chosen]
            )
            t.near(layer, found, factor * want)


def _shared(s: ModelUnderTest) -> list[int]:
    """The blocks whose shared expert is a module."""
    return [
        layer
        for layer in s.layers(HOST, "shared_expert_output")
        if layer in s.layers("shared_experts", "mlp_output")
    ]


_FUNCTIONS = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "none": lambda x: x}


@invariant(
    "slots sum",
    "expert_outputs summed over the slots is routed_output.",
    HOST,
    needs=("expert_outputs", "routed_output"),
    float32=1e-6,
    bfloat16=1e-2,
)
def slots(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(HOST, "expert_outputs", "routed_output"):
        total = s.get(HOST, "expert_outputs", layer).sum(2)
        t.near(layer, total, s.get(HOST, "routed_output", layer))


@invariant(
    "routed plus shared",
    "routed_output, plus shared_expert_output where there is a shared expert, is mlp_output, through the norm and scale after it where the family has them.",
    HOST,
    needs=("routed_output",),
    float32=3e-5,
    bfloat16=1e-2,
    when=lambda s: any(followed(s, HOST, layer) for layer in s.layers(HOST, "routed_output")),
)
def parts(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(HOST, "routed_output"):
        total = s.get(HOST, "routed_output", layer)
        if layer in s.layers(HOST, "shared_expert_output"):
            shared_part = s.get(HOST, "shared_expert_output", layer)
            total = total * s.details(HOST, layer).routed_factor + shared_part
        if followed(s, HOST, layer):
            t.near(layer, added(s, HOST, layer, total), s.get(HOST, "mlp_output", layer))


@invariant(
    "shared expert's gate",
    "shared_expert_output is the shared expert's own output times one number per token, between nought and one where it is gated and one where not.",
    HOST,
    needs=("shared_expert_output",),
    float32=1e-5,
    bfloat16=2e-2,
    when=lambda s: bool(_shared(s)),
)
def shared(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in _shared(s):
        whole = s.get("shared_experts", "mlp_output", layer).double()
        found = s.get(HOST, "shared_expert_output", layer).double()
        gate = (whole * found).sum(-1, keepdim=True) / (whole * whole).sum(
            -1, keepdim=True
        )  # least squares
        t.near(layer, gate * whole, found)
        if s.details(HOST, layer).shared_gated:
            t.holds(layer, ((gate >= 0) & (gate <= 1)).all(), f"a gate is {gate.max().item():.3f}")
        else:
            t.near(layer, gate, torch.ones_like(gate))


def _runnable(s: ModelUnderTest) -> list[int]:
    """The blocks whose experts' matrices are had by the names transformers gives them, so that one can be run by hand."""

    def named(layer: int) -> bool:
        path = s.details(HOST, layer).experts
        return not path or hasattr(s.module(layer, path), "down_proj")

    return [
        layer
        for layer in s.layers(HOST, "routed_output", "expert_indices", "expert_weights")
        if named(layer)
    ]


def _alone(s: ModelUnderTest, layer: int, expert: int, x: torch.Tensor) -> torch.Tensor:
    """One expert of a block run by hand on x [tokens hidden_size], however the block has its experts."""
    details = s.details(HOST, layer)
    if details.experts:
        return expert_alone(s.module(layer, details.experts), expert, x)
    first, second, act = (
        s.module(layer, path) for path in details.expert_tables or details.expert_stacks
    )
    if details.expert_tables:  # one neuron: a row in, a row out
        return act(x @ first.weight[expert, :, None]) * second.weight[expert]
    inner = F.linear(x, first.weight[expert])
    if inner.shape[-1] != second.weight.shape[-1]:
        gate, up = inner.chunk(2, dim=-1)
        return F.linear(act(gate) * up, second.weight[expert])
    return F.linear(act(inner), second.weight[expert])


def expert_alone(experts: torch.nn.Module, expert: int, x: torch.Tensor) -> torch.Tensor:
    """One expert run by hand on x [tokens hidden_size] with its own weights, as transformers stores them."""
    if expert >= len(experts.down_proj):  # what stands for doing nothing
        return torch.zeros_like(x)
    if not hasattr(
        experts, "has_gate"
    ):  # a class of the family's own, which takes no part in choosing an implementation
        gate, up = (x @ experts.gate_up_proj[expert]).chunk(2, dim=-1)
        return (up * experts.act_fn(gate)) @ experts.down_proj[expert]
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    inner = _linear(
        experts,
        x,
        first[expert],
        "gate_up_proj_bias" if experts.has_gate else "up_proj_bias",
        expert,
    )
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return _linear(experts, inner, experts.down_proj[expert], "down_proj_bias", expert)


def _linear(
    experts: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: str, expert: int
) -> torch.Tensor:
    weight = weight.T if experts.is_transposed else weight
    return F.linear(x, weight, getattr(experts, bias)[expert] if experts.has_bias else None)


def _entering(s: ModelUnderTest, layer: int) -> torch.Tensor:
    """What every expert is to run on [tokens hidden_size], by a hook of torch's own: on the MLP where its experts are called with copies."""
    seen: list[torch.Tensor] = []
    details = s.details(HOST, layer)
    own = details.experts and not details.runs_all_experts
    called = s.module(layer, details.experts) if own else s.envoy(HOST, layer)._module
    hook = called.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(next(tensors((args, kwargs))).detach().clone()),
        with_kwargs=True,
    )
    try:
        s.forward(s.ids)
    finally:
        hook.remove()
    return seen[0].flatten(0, -2)


def _by_hand(
    s: ModelUnderTest, layer: int, x: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Each slot's weighted output [tokens top_k hidden_size] for tokens x [tokens hidden_size]; of a weighted token where copies are weighted."""
    spread = s.details(HOST, layer).runs_all_experts
    out = torch.empty(*chosen.shape, x.shape[-1], dtype=x.dtype)
    with torch.no_grad():
        for expert in chosen.unique().tolist():
            tokens, slot = torch.where(chosen == expert)
            factor = weight[tokens, slot, None].to(x.dtype)
            out[tokens, slot] = (
                _alone(s, layer, expert, x[tokens] * factor)
                if spread
                else _alone(s, layer, expert, x[tokens]) * factor
            )
    return out


@invariant(
    "experts by hand",
    "Each slot of expert_outputs is its expert, run alone with its own weights, times the slot's weight (run on the token "
    "times that weight, where the family weights what it runs experts on); routed_output is their sum, and rerouting slots "
    "gives what a hand computation gives.",
    HOST,
    needs=("routed_output", "expert_indices", "expert_weights"),
    float32=1e-5,
    bfloat16=2e-2,
    when=lambda s: bool(_runnable(s)),
)
def rerouted(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in _runnable(s):
        x = _entering(s, layer)
        chosen, weight = (
            s.get(HOST, name, layer).flatten(0, 1) for name in ("expert_indices", "expert_weights")
        )
        slots, by_hand = (
            layer in s.layers(HOST, "expert_outputs"),
            _by_hand(s, layer, x, chosen, weight),
        )
        t.near(layer, s.get(HOST, "routed_output", layer).flatten(0, 1), by_hand.sum(1))
        if slots:
            t.near(layer, s.get(HOST, "expert_outputs", layer).flatten(0, 1), by_hand)

        count, top = s.envoy(HOST, layer).num_experts, chosen.shape[-1]
        # Other experts for every other token: the ones after those it chose, all different.
        moved = chosen.clone()
        moved[::2] = (chosen[::2, :1] + 1 + torch.arange(top)) % count
        again = s.model.record(
            s.ids,
            [*["mlp.expert_outputs"] * slots, "mlp.routed_output", "mlp.expert_weights"],
            [layer],
            edits=[Edit("expert_indices", layer, lambda old: moved.view_as(old))],
        )
        want = _by_hand(s, layer, x, moved, again["expert_weights", layer].flatten(0, 1))
        if slots:
            t.near(layer, again["expert_outputs", layer].flatten(0, 1), want)
        t.near(layer, again["routed_output", layer].flatten(0, 1), want.sum(1))


@invariant(
    "ablating an expert",
    "Zeroing an expert's slots changes mlp_output for exactly the tokens that chose it (where no convolution is behind it), "
    "by exactly those slots; each expert in turn.",
    HOST,
    needs=("expert_indices", "expert_weights", "expert_outputs", "routed_output"),
    float32=1e-5,
)
def ablated(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    s.looks(
        HOST, "expert_indices", "expert_weights", "expert_outputs", "routed_output", "mlp_output"
    )
    for layer in s.layers(
        HOST, "expert_indices", "expert_weights", "expert_outputs", "routed_output"
    ):
        _each_expert(s, t, layer)
    layer = s.layers(HOST, "expert_indices", "expert_weights")[0]
    chosen = s.get(HOST, "expert_indices", layer)
    expert = int(chosen[0, -1, 0])
    edited = s.model.record(s.ids, ["logits"], edits=[ablate_expert(layer, expert)])
    with torch.no_grad(), s.model.trace(s.ids):
        indices, weights = (
            s.model.layers[layer].mlp.expert_indices,
            s.model.layers[layer].mlp.expert_weights,
        )
        weights[indices == expert] = 0
        logits = s.model.logits.save()
    t.same(layer, edited["logits"], logits)
    t.holds(layer, not torch.equal(logits, s.plain), "ablating an expert does not move the logits")


def _each_expert(s: ModelUnderTest, t: Comparisons, layer: int) -> None:
    """One forward over a copy of the first row per expert, each copy without its own expert."""
    count = s.envoy(HOST, layer).num_experts
    ids = s.ids[:1].expand(count, -1).contiguous()
    names = ["mlp.expert_indices", "mlp.expert_outputs", "mlp.routed_output", "mlp.mlp_output"]
    clean = s.model.record(ids, names, [layer])
    chosen = clean["expert_indices", layer]
    gone = chosen == torch.arange(count)[:, None, None]
    edit = Edit("expert_weights", layer, lambda weights: weights.masked_fill(gone, 0))
    without = s.model.record(ids, names, [layer], edits=[edit])
    touched = (without["mlp_output", layer] != clean["mlp_output", layer]).any(-1)
    used = (clean["expert_outputs", layer].abs().sum(-1) > 0) & gone
    for expert in range(count) if not s.details(HOST, layer).convolved_output else ():
        t.same(layer, touched[expert], used[expert].any(-1))
    left = clean["expert_outputs", layer].masked_fill(gone[..., None], 0)
    t.near(layer, without["routed_output", layer], left.sum(2))
    t.same(layer, without["expert_outputs", layer], left)
