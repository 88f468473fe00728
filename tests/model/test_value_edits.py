"""Standard values as they are changed: snapshots, edits, batches and gradients."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch.testing import assert_close

from explorer.model.errors import Unavailable
from tests.support.models import PROMPT, attention_of, ids, specimen

SHORT = "In the beginning"
LONG = "And God said, Let there be light: and there was light."


def last_line(error: BaseException) -> tuple[str, str]:
    """File and text of the line an error's traceback ends at."""
    end = traceback.extract_tb(error.__traceback__)[-1]
    return end.filename, end.line


# -- snapshots and edits -----------------------------------------------------------


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


def test_the_ids_written_are_the_ids_that_run(model):
    other = ids(model).clone()
    other[:, -1] = 5
    with model.trace(PROMPT):
        model.input_ids[:, -1] = 5
        logits = model.logits.save()
    with torch.no_grad():
        assert_close(logits, model.hf(other).logits)
    mask = torch.ones_like(other)
    mask[:, :2] = 0
    with model.trace(PROMPT):
        model.attention_mask[:, :2] = 0
        masked = model.logits.save()
    with torch.no_grad():
        assert_close(masked, model.hf(ids(model), attention_mask=mask).logits)


def test_the_models_own_values_are_written_where_they_stand(model):
    with model.trace(PROMPT):
        model.token_embeddings[:, 2] = 0
        stream = model.layers[0].layer_input.save()
    assert stream[0, 2].abs().max() == 0 and stream[0, 1].abs().max() > 0
    with model.trace(PROMPT):
        model.final_norm_output[:] = 0
        head = model.lm_head_output.save()
        model.logits[:] = 1
        out = model.output.logits.save()
        probs = model.next_token_probs.save()
    assert head.abs().max() == 0 and (out == 1).all()
    assert_close(probs, torch.full_like(probs, 1 / model.vocab_size))


@pytest.mark.parametrize(
    ("new", "description"), [(torch.zeros(3), r"\[3\]"), (0, "int"), (None, "NoneType")]
)
def test_a_value_of_another_shape_is_refused_where_it_is_written(model, new, description):
    with pytest.raises(
        ValueError,
        match=(
            r"layers\[1\]\.mlp\.router_logits is a tensor \[1, \d+, 12\]; "
            rf"it was given {description}"
        ),
    ) as caught:
        with model.trace(PROMPT):
            model.layers[1].mlp.router_logits = new
    assert last_line(caught.value) == (__file__, "model.layers[1].mlp.router_logits = new")


def test_a_computed_value_is_not_written(model):
    for host, name in (
        (model, "next_token_probs"),
        (model.layers[0].mlp, "router_margin"),
        (model.layers[0].linear_attn, "states"),
    ):
        with pytest.raises(Unavailable, match=f"{name} is computed"):
            with model.trace(PROMPT):
                setattr(host, name, torch.zeros(1))


# -- several prompts at once -------------------------------------------------------


def test_each_invoke_sees_its_rows_padding_included(any_model):
    layer = any_model.num_layers - 1
    attention, mlp = any_model.layers[layer].self_attn, any_model.layers[layer].mlp
    with torch.no_grad():
        with any_model.trace() as tracer:
            with tracer.invoke(SHORT):
                mask = any_model.attention_mask.save()
                queries = attention.attention_queries.save()
                short = mlp.mlp_output.save()
            with tracer.invoke(LONG):
                long = mlp.mlp_output.save()
            with tracer.invoke():
                both = mlp.mlp_output.save()
                logits = any_model.logits.save()
    lengths = [ids(any_model, text).shape[1] for text in (SHORT, LONG)]
    assert (
        short.shape[:2] == long.shape[:2] == (1, lengths[1])
        and both.shape[0] == logits.shape[0] == 2
    )
    assert mask.sum() == lengths[0] and queries.shape[0] == 1
    assert torch.equal(torch.cat([short, long]), both)
    alone = any_model.record(SHORT, ["mlp_output"])["mlp_output", layer]
    assert_close(short[:, -lengths[0] :], alone, rtol=1e-3, atol=1e-4)
    assert_close(
        long, any_model.record(LONG, ["mlp_output"])["mlp_output", layer], rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    "value", ["router_logits", "expert_weights", "expert_outputs", "routed_output", "mlp_output"]
)
def test_an_edit_in_one_invoke_leaves_the_other_alone(model, value):
    moe = model.layers[1].mlp
    with torch.no_grad():
        with model.trace() as tracer:
            with tracer.invoke(SHORT):
                getattr(moe, value)[:] = 0
                edited = moe.mlp_output.save()
            with tracer.invoke(LONG):
                left = moe.mlp_output.save()
        with model.trace() as tracer:
            with tracer.invoke(SHORT):
                clean = moe.mlp_output.save()
            with tracer.invoke(LONG):
                same = moe.mlp_output.save()
    assert torch.equal(left, same) and not torch.equal(edited, clean)


def test_recurrent_values_of_a_batch_are_each_invokes_own(hybrid):
    mix = hybrid.layers[0].linear_attn
    with hybrid.trace() as tracer:
        with tracer.invoke(SHORT):
            short, implied = mix.states.save(), mix.state_attention.save()
        with tracer.invoke(LONG):
            mix.attention_values[:, -1] = 0
            states = mix.states.save()
            final = mix.state_output.save()
        with tracer.invoke():
            everything = mix.state_output.save()
    assert short.shape[0] == states.shape[0] == implied.shape[0] == 1 and everything.shape[0] == 2
    assert_close(states[:, -1], final, rtol=1e-4, atol=1e-5)
    assert_close(torch.cat([short[:, -1], final]), everything, rtol=1e-4, atol=1e-5)


# -- gradients ---------------------------------------------------------------------


def test_gradients_flow_through_what_is_served(model):
    layer = model.kinds.index("self_attn")
    block, mix = model.layers[layer], model.layers[0].linear_attn
    with model.trace(PROMPT):
        seen = [].save()
        for host, names in (
            (
                mix,
                (
                    "conv_input",
                    "attention_queries",
                    "attention_keys",
                    "attention_values",
                    "decays",
                    "betas",
                    "attention_head_outputs",
                ),
            ),
            (block, ("layer_input", "attention_norm_output")),
            (
                block.self_attn,
                (
                    "attention_queries",
                    "attention_keys",
                    "attention_values",
                    "attention_scores",
                    "attention_probabilities",
                    "attention_head_outputs",
                    "head_gate",
                    "attention_premix",
                ),
            ),
            (block, ("layer_mid", "mlp_input")),
            (
                block.mlp,
                (
                    "router_logits",
                    "router_scores",
                    "expert_weights",
                    "expert_outputs",
                    "routed_output",
                    "mlp_output",
                ),
            ),
        ):
            for name in names:
                value = getattr(host, name)
                value.retain_grad()
                seen.append((name, value))
        model.logits.float().logsumexp(-1).sum().backward()
    for name, value in seen:
        assert (
            value.grad is not None
            and value.grad.shape == value.shape
            and torch.isfinite(value.grad).all()
        ), name
        assert value.grad.abs().sum() > 0, name
    model.hf.zero_grad()


def test_a_gradient_is_the_slope_of_an_edit(model):
    """The derivative of the loss by one entry of a head's output, against a step of that entry."""
    attention = attention_of(model)

    def loss(nudge: float) -> torch.Tensor:
        with torch.no_grad():
            with model.trace(PROMPT):
                attention.attention_head_outputs[0, 3, 1, 2] += nudge
                value = model.logits[0, -1].double().logsumexp(-1).save()
        return value

    with model.trace(PROMPT):
        heads = attention.attention_head_outputs
        with model.logits[0, -1].double().logsumexp(-1).backward():
            slope = heads.grad.save()
    numeric = (loss(0.05) - loss(-0.05)) / 0.1
    assert_close(slope[0, 3, 1, 2].double(), numeric.double(), rtol=0.02, atol=1e-7)
    model.hf.zero_grad()


def test_a_value_of_another_dtype_is_refused_in_words(model):
    with pytest.raises(ValueError, match="is of torch.float32; it was given torch.float64"):
        with model.trace(PROMPT):
            model.layers[0].mlp.router_logits = model.layers[0].mlp.router_logits.double()


def test_an_edit_of_what_is_computed_is_refused_and_not_lost(hybrid):
    """A derived value is a tensor like any other; a write into it raises an error."""
    reads = {
        "next_token_probs": lambda: hybrid.next_token_probs,
        "state_attention": lambda: hybrid.layers[0].linear_attn.state_attention,
        "router_margin": lambda: hybrid.layers[1].mlp.router_margin,
        "states": lambda: hybrid.layers[0].linear_attn.states,
    }
    for name, read in reads.items():
        with pytest.raises(Unavailable, match=f"{name} is computed from other values"):
            with torch.no_grad(), hybrid.trace(PROMPT):
                read().zero_()
        with torch.no_grad(), hybrid.trace(PROMPT):
            kept = read().clone().zero_().save()
        assert not kept.any()


@pytest.mark.parametrize("how", ["assigned", "in place"])
def test_an_expert_there_is_not_is_refused(hybrid, how):
    count = hybrid.layers[1].mlp.num_experts
    with pytest.raises(ValueError, match=f"experts 0 to {count - 1}; expert_indices were given"):
        with torch.no_grad(), hybrid.trace(PROMPT):
            chosen = hybrid.layers[1].mlp.expert_indices
            if how == "assigned":
                hybrid.layers[1].mlp.expert_indices = chosen + count
            else:
                chosen += count
