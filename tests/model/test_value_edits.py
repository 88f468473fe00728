"""Standard values as they are changed: snapshots, edits, batches and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tests.support.models import PROMPT, specimen


@pytest.mark.parametrize("value", ["layer_output", "mlp_output"])
def test_what_was_read_does_not_show_what_the_model_does_to_it_later(model, value):
    """Block 1 gets the tensor block 0 returned, and the engine returns the model's own tensors."""
    host = model.layers[0] if value == "layer_output" else model.layers[0].mlp
    clean = model.record(PROMPT, [value])[value, 0]
    with torch.no_grad():
        with model.trace(PROMPT):
            seen = getattr(host, value).save()
            native = (
                model.layers[1].input if value == "layer_output" else model.layers[0].mlp.output
            ).save()
            native.add_(1)
    assert torch.equal(seen, clean) and torch.equal(native, clean + 1)


def test_editing_a_copy_long_after_its_moment_changes_nothing(model):
    moe = model.layers[1].mlp
    clean = model.record(PROMPT, ["logits"])["logits"]
    with model.trace(PROMPT):
        early = moe.router_logits
        moe.routed_output.save()
        early[:] = 0
        logits = model.logits.save()
    assert_close(logits, clean)


@pytest.mark.parametrize("value", ["layer_output", "mlp_norm_output"])
def test_what_was_edited_is_not_shared_with_the_model_either(model, value):
    """Once the forward has moved on, neither side's changes show on the other."""
    with torch.no_grad():
        with model.trace(PROMPT):
            seen = getattr(model.layers[1], value)
            seen[:, 2] = 0
            seen.save()
            native = (
                model.layers[2].input if value == "layer_output" else model.layers[1].mlp.input
            ).save()
            seen[:] = 5
            native.add_(1)
    assert (seen == 5).all() and (native[:, 2] == 1).all() and not (native == 6).any()


def test_an_edit_in_place_counts_though_another_value_of_the_moment_was_read_after(hybrid):
    mix = hybrid.layers[0].linear_attn
    with hybrid.trace(PROMPT):
        betas = mix.betas
        mix.decays.exp()
        betas[:, 2] = 0
        mix.attention_keys.norm()
        states = mix.states.save()
    with hybrid.trace(PROMPT):
        mix.betas[:, 2] = 0
        same = mix.states.save()
    with hybrid.trace(PROMPT):
        clean = mix.states.save()
    assert torch.equal(states, same) and not torch.equal(states, clean)
    assert torch.equal(states[:, :2], clean[:, :2])


def test_two_edits_at_one_moment_both_count(model):
    moe = model.layers[1].mlp
    with model.trace(PROMPT):
        indices, weights = moe.expert_indices, moe.expert_weights
        weights[:] = 0
        weights[..., 0] = 1
        indices[:] = 3
        outputs = moe.expert_outputs.save()
        routed = moe.routed_output.save()
    assert outputs[:, :, 1:].abs().max() == 0
    assert_close(outputs[:, :, 0], routed)


def test_an_assigned_value_is_what_is_read_back_and_what_runs(model):
    mix = model.layers[0].linear_attn
    with model.trace(PROMPT):
        mix.attention_queries = mix.attention_queries * 0
        queries = mix.attention_queries.save()
        heads = mix.attention_head_outputs.save()
    assert queries.abs().max() == 0 and heads.abs().max() == 0


def test_writing_back_what_was_read_changes_nothing(any_model):
    clean = any_model.record(PROMPT, ["logits"])["logits"]
    layer = any_model.num_layers - 1
    for value in (
        "attention_queries",
        "attention_values",
        "attention_head_outputs",
        "attention_output",
        "mlp_output",
    ):
        host = (
            any_model.layers[layer].mlp
            if value == "mlp_output"
            else any_model.layers[layer].self_attn
        )
        with torch.no_grad():
            with any_model.trace(PROMPT):
                setattr(host, value, getattr(host, value))
                logits = any_model.logits.save()
        assert torch.equal(logits, clean), value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("host", "value", "position"),
    [
        ("self_attn", "attention_queries", (0, 2, 4)),
        ("self_attn", "attention_values", (0, 1, 4)),
        ("self_attn", "attention_head_outputs", (0, 4, 2)),
        ("self_attn", "attention_premix", (0, 4, 2)),
        ("mlp", "router_logits", (0, 4)),
        ("mlp", "expert_weights", (0, 4)),
        ("mlp", "expert_outputs", (0, 4, 1)),
        ("mlp", "routed_output", (0, 4)),
        ("mlp", "shared_expert_output", (0, 4)),
    ],
)
def test_an_edit_at_one_position_reaches_no_earlier_one_and_no_other_head(
    dtype, host, value, position
):
    model = specimen("qwen3_next", dtype)
    layer = model.kinds.index("self_attn")
    part = getattr(model.layers[layer], host)
    with torch.no_grad():
        with model.trace(PROMPT):
            clean = getattr(part, value).save()
            before = part.attention_output.save() if host == "self_attn" else part.mlp_output.save()
        with model.trace(PROMPT):
            getattr(part, value)[position] = 7
            edited = getattr(part, value).save()
            after = part.attention_output.save() if host == "self_attn" else part.mlp_output.save()
    changed = edited != clean
    inside = torch.zeros_like(changed)
    inside[position] = True
    assert not (changed & ~inside).any()
    # Tokens are multiplied in groups by expert: a group of another size may round differently.
    moved = (before - after).abs().amax(-1)[0].gt(1e-5).nonzero().flatten().tolist()
    if value == "attention_values":
        assert moved and min(moved) == 4  # later tokens look at it, earlier ones do not
    else:
        assert moved == [4]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_edit_of_a_repeated_key_head_is_one_value_heads_own(dtype):
    """Queries and keys of the delta rule are served per value head, where there are fewer too."""
    model = specimen("qwen3_5_moe_text", dtype)
    mix = model.layers[0].linear_attn
    assert mix.key_heads < mix.heads
    with torch.no_grad():
        with model.trace(PROMPT):
            clean = mix.attention_head_outputs.save()
        with model.trace(PROMPT):
            mix.attention_queries[:, 3, 1] = 0
            edited = mix.attention_head_outputs.save()
    assert (clean != edited).any(-1).nonzero().tolist() == [[0, 3, 1]]
