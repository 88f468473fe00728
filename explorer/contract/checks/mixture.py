"""Invariants of a mixture of experts: choice, weights, slots, and what editing them does."""

from __future__ import annotations

import torch

from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.registry import invariant
from explorer.contract.residual_steps import addend_of, apply_step, constant, tail_known
from explorer.contract.single_experts import computable, expert_inputs, routed_from, slot_outputs
from explorer.discovery.details import RouterScoring
from explorer.model.edits import Edit, ablate_expert

HOST = "mlp"
DENSE_HOST = "dense_mlp"

#: Functions of router logits, by the names that `RouterScoring` has for them.
_FUNCTIONS = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "none": lambda x: x}


@invariant(
    "choice",
    "expert_indices are the top-k of router_scores, each expert at most once per token.",
    HOST,
    needs=("router_scores", "expert_indices"),
    bfloat16=0.0,
)
def choice(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.layers(HOST, "router_scores", "expert_indices"):
        scores = subject.get(HOST, "router_scores", layer)
        indices = subject.get(HOST, "expert_indices", layer)
        best = scores.topk(indices.shape[-1], dim=-1).values
        chosen = scores.gather(-1, indices).sort(-1, descending=True).values
        compare.equal(layer, chosen, best)
        distinct = (indices.sort(-1).values.diff(dim=-1) > 0).all()
        compare.holds(layer, distinct, "a token chooses an expert twice")


@invariant(
    "margin",
    "router_margin is the lowest score chosen minus the highest score not chosen, and never "
    "negative.",
    HOST,
    needs=("router_margin", "router_scores", "expert_indices"),
    bfloat16=0.0,
)
def margin(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.layers(HOST, "router_margin", "router_scores", "expert_indices"):
        scores = subject.get(HOST, "router_scores", layer)
        indices = subject.get(HOST, "expert_indices", layer)
        found = subject.get(HOST, "router_margin", layer)
        rejected = scores.scatter(-1, indices, -torch.inf).amax(-1)
        compare.equal(layer, found, scores.gather(-1, indices).amin(-1) - rejected)
        compare.holds(layer, (found >= 0).all(), "a margin is negative")


@invariant(
    "weights from scores",
    "router_scores are the family's function of router_logits, plus a selection bias per expert "
    "where there is one, masked outside the best groups; expert_weights are that function's values "
    "for the chosen experts, renormalised where the family does so, times its routed scaling "
    "factor (one per expert where it is learned), and zero for slots that select no expert.",
    HOST,
    needs=("router_logits", "router_scores", "expert_indices", "expert_weights"),
    float32=1e-6,
    bfloat16=1e-2,
)
def weights(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    names = ("router_logits", "router_scores", "expert_indices", "expert_weights")
    for layer in subject.layers(HOST, *names):
        details = subject.details(HOST, layer)
        scoring = details.scoring
        if scoring is None:
            continue
        logits = subject.get(HOST, "router_logits", layer).float()
        scores = subject.get(HOST, "router_scores", layer).float()
        indices = subject.get(HOST, "expert_indices", layer)
        values = _FUNCTIONS[scoring.function](logits)
        _compare_scores(subject, compare, layer, scoring, values, scores, indices)
        source = values if scoring.bias or scoring.masked else scores
        expected = _FUNCTIONS[scoring.after](source.gather(-1, indices))
        if scoring.renormalised:
            expected = expected / expected.sum(-1, keepdim=True)
        if details.null_experts:
            experts = subject.module(layer, details.experts)
            expected = expected.masked_fill(indices >= len(experts.down_proj), 0)
        found = subject.get(HOST, "expert_weights", layer).float()
        if isinstance(scoring.factor, str):
            expected = constant(subject, layer, scoring.factor).float()[indices] * expected
        elif scoring.factor is not None:
            expected = scoring.factor * expected
        if scoring.factor is not None:
            compare.close(layer, found, expected)


def _compare_scores(
    subject: ModelUnderTest,
    compare: Comparisons,
    layer: int,
    scoring: RouterScoring,
    values: torch.Tensor,
    scores: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """Compare router_scores with the scoring function's values, except the masked ones."""
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if scoring.masked:
        allowed = torch.isfinite(scores) & (scores != 0)
    enough = allowed.sum(-1) >= indices.shape[-1]
    compare.holds(
        layer,
        (allowed.gather(-1, indices).all(-1) | ~enough).all(),
        "a masked expert is chosen although enough others are left",
    )
    if scoring.bias:
        values = values + constant(subject, layer, scoring.bias).float()
    compare.close(layer, torch.where(allowed, scores, 0), torch.where(allowed, values, 0))


@invariant(
    "slots sum",
    "expert_outputs summed over the slots is routed_output, brought back to the stream's width "
    "where the experts work on another.",
    HOST,
    needs=("expert_outputs", "routed_output"),
    float32=1e-6,
    bfloat16=1e-2,
)
def slots(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.layers(HOST, "expert_outputs", "routed_output"):
        total = routed_from(subject, layer, subject.get(HOST, "expert_outputs", layer).sum(2))
        compare.close(layer, total, subject.get(HOST, "routed_output", layer))


def _known_tails(subject: ModelUnderTest) -> list[int]:
    """Return the blocks whose mixture is followed by norms and scales only, or by nothing."""
    layers = subject.layers(HOST, "routed_output")
    return [layer for layer in layers if tail_known(subject, HOST, layer)]


@invariant(
    "routed plus shared",
    "routed_output plus shared_expert_output, where there is a shared expert, is mlp_output; where "
    "norms and scales are between, or a dense MLP beside, with these, as the identity that the "
    "block states (`BlockAnatomy.mixture_sum`) has them.",
    HOST,
    needs=("routed_output",),
    float32=3e-5,
    bfloat16=1e-2,
    when=lambda subject: bool(_known_tails(subject)),
    otherwise="what follows the mixture is not known",
)
def parts(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in _known_tails(subject):
        total = subject.get(HOST, "routed_output", layer)
        for step in subject.details(HOST, layer).routed_steps:
            total = apply_step(subject, layer, step, total)
        if layer in subject.layers(HOST, "shared_expert_output"):
            total = total + subject.get(HOST, "shared_expert_output", layer)
        elif layer in subject.layers(DENSE_HOST, "mlp_output"):
            total = total + subject.get(DENSE_HOST, "mlp_output", layer)
        addend = addend_of(subject, HOST, layer, total)
        compare.close(layer, addend, subject.get(HOST, "mlp_output", layer))


def _shared_experts(subject: ModelUnderTest) -> list[int]:
    """Return the blocks whose shared expert is a module."""
    with_module = subject.layers("shared_experts", "mlp_output")
    return [layer for layer in subject.layers(HOST, "shared_expert_output") if layer in with_module]


@invariant(
    "shared expert's gate",
    "shared_expert_output is the shared expert's own output times one number per token, which is "
    "between zero and one where there is a gate and one elsewhere.",
    HOST,
    needs=("shared_expert_output",),
    float32=1e-5,
    bfloat16=2e-2,
    when=lambda subject: bool(_shared_experts(subject)),
    otherwise="the shared expert is no module",
)
def shared_gate(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in _shared_experts(subject):
        output = subject.get("shared_experts", "mlp_output", layer).double()
        found = subject.get(HOST, "shared_expert_output", layer).double()
        # The factor per token that fits best, by least squares.
        gate = (output * found).sum(-1, keepdim=True) / (output * output).sum(-1, keepdim=True)
        compare.close(layer, gate * output, found)
        if subject.details(HOST, layer).shared_gated:
            in_range = ((gate >= 0) & (gate <= 1)).all()
            compare.holds(layer, in_range, f"a gate is {gate.max().item():.3f}")
        else:
            compare.close(layer, gate, torch.ones_like(gate))


@invariant(
    "experts run separately",
    "Each slot of expert_outputs is its expert, run alone with its own weights, times the "
    "slot's weight (run on the token times that weight where the family weights the experts' "
    "input); routed_output is their sum, and the same holds after slots are rerouted.",
    HOST,
    needs=("routed_output", "expert_indices", "expert_weights"),
    float32=1e-5,
    bfloat16=2e-2,
    when=lambda subject: bool(computable(subject)),
    otherwise="an expert cannot be run alone with weights that are known",
)
def single_experts(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in computable(subject):
        inputs = expert_inputs(subject, layer)
        indices = subject.get(HOST, "expert_indices", layer).flatten(0, 1)
        expert_weights = subject.get(HOST, "expert_weights", layer).flatten(0, 1)
        has_slots = layer in subject.layers(HOST, "expert_outputs")
        expected = slot_outputs(subject, layer, inputs, indices, expert_weights)
        routed = subject.get(HOST, "routed_output", layer).flatten(0, 1)
        compare.close(layer, routed, routed_from(subject, layer, expected.sum(1)))
        if has_slots:
            outputs = subject.get(HOST, "expert_outputs", layer).flatten(0, 1)
            compare.close(layer, outputs, expected)

        # Every other token is sent to the experts after the first it chose, all different.
        count, top_k = subject.envoy(HOST, layer).num_experts, indices.shape[-1]
        other = indices.clone()
        other[::2] = (indices[::2, :1] + 1 + torch.arange(top_k)) % count
        names = ["mlp.routed_output", "mlp.expert_weights", *["mlp.expert_outputs"] * has_slots]
        edit = Edit("expert_indices", layer, lambda old, other=other: other.view_as(old))
        rerouted = subject.model.record(subject.ids, names, [layer], edits=[edit])
        expert_weights = rerouted["expert_weights", layer].flatten(0, 1)
        expected = slot_outputs(subject, layer, inputs, other, expert_weights)
        if has_slots:
            outputs = rerouted["expert_outputs", layer].flatten(0, 1)
            compare.close(layer, outputs, expected)
        total = routed_from(subject, layer, expected.sum(1))
        compare.close(layer, rerouted["routed_output", layer].flatten(0, 1), total)


@invariant(
    "ablating an expert",
    "Zeroing an expert's slots changes mlp_output for exactly the tokens that chose it (unless a "
    "convolution follows), by exactly those slots; for each expert.",
    HOST,
    needs=("expert_indices", "expert_weights", "expert_outputs", "routed_output"),
    float32=1e-5,
)
def ablation(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    names = ("expert_indices", "expert_weights", "expert_outputs", "routed_output")
    subject.note_read(HOST, *names, "mlp_output")
    for layer in subject.layers(HOST, *names):
        _ablate_each_expert(subject, compare, layer)
    layer = subject.layers(HOST, "expert_indices", "expert_weights")[0]
    expert = int(subject.get(HOST, "expert_indices", layer)[0, -1, 0])
    recorded = subject.model.record(subject.ids, ["logits"], edits=[ablate_expert(layer, expert)])
    with torch.no_grad(), subject.model.trace(subject.ids):
        mlp = subject.model.layers[layer].mlp
        indices, expert_weights = mlp.expert_indices, mlp.expert_weights
        expert_weights[indices == expert] = 0
        logits = subject.model.logits.save()
    compare.equal(layer, recorded["logits"], logits)
    unchanged = torch.equal(logits, subject.native.logits)
    compare.holds(layer, not unchanged, "ablating an expert does not change the logits")


def _ablate_each_expert(subject: ModelUnderTest, compare: Comparisons, layer: int) -> None:
    """Run one forward over a copy of the first row per expert, each copy without its own expert."""
    count = subject.envoy(HOST, layer).num_experts
    ids = subject.ids[:1].expand(count, -1).contiguous()
    names = ["mlp.expert_indices", "mlp.expert_outputs", "mlp.routed_output", "mlp.mlp_output"]
    clean = subject.model.record(ids, names, [layer])
    ablated = clean["expert_indices", layer] == torch.arange(count)[:, None, None]
    edit = Edit("expert_weights", layer, lambda weights: weights.masked_fill(ablated, 0))
    without = subject.model.record(ids, names, [layer], edits=[edit])
    changed = (without["mlp_output", layer] != clean["mlp_output", layer]).any(-1)
    used = (clean["expert_outputs", layer].abs().sum(-1) > 0) & ablated
    if not subject.details(HOST, layer).convolved_output:
        for expert in range(count):
            compare.equal(layer, changed[expert], used[expert].any(-1))
    remaining = clean["expert_outputs", layer].masked_fill(ablated[..., None], 0)
    total = routed_from(subject, layer, remaining.sum(2))
    compare.close(layer, without["routed_output", layer], total)
    compare.equal(layer, without["expert_outputs", layer], remaining)


INVARIANTS = (choice, margin, weights, slots, parts, shared_gate, single_experts, ablation)
