"""Writes that are refused or shared among invokes, and gradients."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch.testing import assert_close

from explorer.model.errors import Unavailable
from tests.support.messages import sentence
from tests.support.models import PROMPT, attention_of, ids

SHORT = "In the beginning"


LONG = "And God said, Let there be light: and there was light."


def last_line(error: BaseException) -> tuple[str, str]:
    """File and text of the line an error's traceback ends at."""
    end = traceback.extract_tb(error.__traceback__)[-1]
    return end.filename, end.line


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


def test_the_models_own_values_are_written_in_place(model):
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
    ("new", "given"), [(torch.zeros(3), "[3]"), (0, "int"), (None, "NoneType")]
)
def test_a_value_of_another_shape_is_refused_where_it_is_written(model, new, given):
    said = sentence("other_shape", expression="model.layers[1].mlp.router_logits", given=given)
    with pytest.raises(ValueError, match=said) as caught:
        with model.trace(PROMPT):
            model.layers[1].mlp.router_logits = new
    assert last_line(caught.value) == (__file__, "model.layers[1].mlp.router_logits = new")


def test_a_computed_value_is_not_written(model):
    for host, path, name in (
        (model, "model", "next_token_probs"),
        (model.layers[0].mlp, "model.layers[0].mlp", "router_margin"),
        (model.layers[0].linear_attn, "model.layers[0].linear_attn", "states"),
    ):
        with pytest.raises(Unavailable, match=sentence("derived", expression=f"{path}.{name}")):
            with model.trace(PROMPT):
                setattr(host, name, torch.zeros(1))


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
    said = sentence("other_dtype", wanted=torch.float32, given=torch.float64)
    with pytest.raises(ValueError, match=said):
        with model.trace(PROMPT):
            model.layers[0].mlp.router_logits = model.layers[0].mlp.router_logits.double()


def test_an_edit_of_what_is_computed_is_refused_and_not_lost(hybrid):
    """A derived value is a tensor like any other; a write into it raises an error."""
    mixer = hybrid.layers[0].linear_attn
    reads = {
        "model.next_token_probs": lambda: hybrid.next_token_probs,
        "model.layers[0].linear_attn.state_attention": lambda: mixer.state_attention,
        "model.layers[1].mlp.router_margin": lambda: hybrid.layers[1].mlp.router_margin,
        "model.layers[0].linear_attn.states": lambda: mixer.states,
    }
    for name, read in reads.items():
        with pytest.raises(Unavailable, match=sentence("written_into_derived", expression=name)):
            with torch.no_grad(), hybrid.trace(PROMPT):
                read().zero_()
        with torch.no_grad(), hybrid.trace(PROMPT):
            kept = read().clone().zero_().save()
        assert not kept.any()


@pytest.mark.parametrize("how", ["assigned", "in place"])
def test_an_expert_there_is_not_is_refused(hybrid, how):
    count = hybrid.layers[1].mlp.num_experts
    with pytest.raises(ValueError, match=sentence("experts_out_of_range", last=count - 1)):
        with torch.no_grad(), hybrid.trace(PROMPT):
            chosen = hybrid.layers[1].mlp.expert_indices
            if how == "assigned":
                hybrid.layers[1].mlp.expert_indices = chosen + count
            else:
                chosen += count
