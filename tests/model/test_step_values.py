"""Values step by step, states over tokens, and the layouts of values."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.testing import assert_close

from explorer import vocabulary
from explorer.model.envoys import HOST_CLASSES
from explorer.model.errors import AlreadyPassed, PromptError, Unavailable
from explorer.recurrence.delta_rule import delta_rule_states
from tests.support.messages import sentence
from tests.support.models import MIXTURES, PROMPT, ids, prompt, specimen


def generated(model, steps: int, text: str = PROMPT) -> torch.Tensor:
    """The greedy continuation by plain forwards of ever longer prompts."""
    tokens = ids(model, text)
    for _ in range(steps):
        with torch.no_grad():
            following = model.hf(tokens).logits[:, -1].argmax(-1)
        tokens = torch.cat([tokens, following[:, None]], dim=1)
    return tokens


@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe_text"])
def test_each_step_gets_its_own_tensors(family):
    model = specimen(family)
    steps = 4
    tokens = generated(model, steps - 1)
    whole = model.record(
        tokens, ["layer_output", "attention_queries", "attention_probabilities", "mlp_output"]
    )
    start = ids(model).shape[1]
    layer = model.kinds.index("self_attn")
    attention, block = model.layers[layer].self_attn, model.layers[layer]
    with model.generate(PROMPT, max_new_tokens=steps, do_sample=False, eos_token_id=-1) as tracer:
        seen = [].save()
        for _ in tracer.iter[:]:
            seen.append(
                (
                    model.input_ids,
                    attention.attention_queries,
                    attention.attention_probabilities,
                    block.layer_output,
                )
            )
    assert len(seen) == steps
    for step, (tokens_in, queries, pattern, stream) in enumerate(seen):
        span = slice(0, start) if step == 0 else slice(start + step - 1, start + step)
        assert torch.equal(tokens_in, tokens[:, span])
        assert_close(queries, whole["attention_queries", layer][:, :, span], rtol=1e-4, atol=1e-4)
        assert_close(
            pattern,
            whole["attention_probabilities", layer][:, :, span, : span.stop],
            rtol=1e-4,
            atol=1e-4,
        )
        assert_close(stream, whole["layer_output", layer][:, span], rtol=1e-4, atol=1e-4)


def test_chosen_steps_get_theirs(model):
    tokens = generated(model, 3)
    start = ids(model).shape[1]
    for chosen in ([0, 2], [1], [2, 3]):
        with model.generate(PROMPT, max_new_tokens=4, do_sample=False, eos_token_id=-1) as tracer:
            seen = [].save()
            for _ in tracer.iter[chosen]:
                seen.append((model.input_ids, model.layers[1].mlp.expert_indices))
        for step, (tokens_in, indices) in zip(chosen, seen, strict=True):
            expected = (
                tokens[:, :start] if step == 0 else tokens[:, start + step - 1 : start + step]
            )
            assert torch.equal(tokens_in, expected) and indices.shape[1] == expected.shape[1]


@pytest.mark.parametrize("steps", [[0], [1], [0, 1, 2]])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("mlp_output", "router_logits"),
        ("routed_output", "expert_indices"),
        ("mlp_output", "expert_outputs"),
    ],
)
def test_a_step_never_returns_the_next_ones_tensor(model, steps, first, second):
    """The forward of this step has passed the second value; waiting would bring the next step's."""
    moe = model.layers[1].mlp
    with pytest.raises(AlreadyPassed, match=second):
        with model.generate(PROMPT, max_new_tokens=4, eos_token_id=-1) as tracer:
            for _ in tracer.iter[steps]:
                getattr(moe, first)
                getattr(moe, second)


def test_a_step_without_iteration_is_the_first_one(model):
    with pytest.raises(AlreadyPassed, match=r"linear_attn\.betas"):
        with model.generate(PROMPT, max_new_tokens=3, eos_token_id=-1):
            model.logits.save()
            model.layers[1].linear_attn.betas.save()
    with model.generate(PROMPT, max_new_tokens=3, eos_token_id=-1):
        betas = model.layers[1].linear_attn.betas.save()
    assert betas.shape[1] == ids(model).shape[1]


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize(
    "value", ["router_logits", "expert_weights", "routed_output", "shared_expert_output"]
)
def test_a_step_that_left_a_module_out_is_not_given_a_later_ones(model, value, skipped):
    """A step skips the mixture; the next step's visit must not be taken for this step's."""
    moe = model.layers[1].mlp
    with pytest.raises(AlreadyPassed, match=rf"{value} was never reached"):
        with model.generate(PROMPT, max_new_tokens=4, eos_token_id=-1) as tracer:
            for step in tracer.iter[:3]:
                if step == skipped:
                    moe.skip(model.layers[1].mlp_input * 0)
                    getattr(moe, value)


def test_after_a_skipped_step_the_later_ones_keep_their_numbers(model):
    moe = model.layers[1].mlp
    with model.generate(PROMPT, max_new_tokens=3, do_sample=False, eos_token_id=-1) as tracer:
        seen = [].save()
        for step in tracer.iter[:3]:
            if step == 1:
                moe.skip(model.layers[1].mlp_input * 0)
            else:
                entering = model.layers[1].mlp_input
                seen.append((entering, moe.router_logits, moe.routed_output))
    gate = model.hf.model.layers[1].mlp.gate
    assert len(seen) == 2
    for entering, logits, routed in seen:
        assert_close(torch.nn.functional.linear(entering, gate.weight), logits)
        assert routed.shape == entering.shape


def test_a_loop_that_outruns_the_generation_keeps_what_it_saw(model):
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with model.generate(PROMPT, max_new_tokens=2, eos_token_id=-1) as tracer:
            seen = [].save()
            for _ in tracer.iter[:9]:
                seen.append(model.layers[1].mlp.router_logits)
    assert len(seen) == 2


def test_state_is_iterated_over_the_tokens(hybrid):
    mix = hybrid.layers[1].linear_attn
    with hybrid.trace(PROMPT) as tracer:
        seen = [].save()
        for _ in tracer.iter[:]:
            seen.append(mix.state)
    with hybrid.trace(PROMPT):
        final = mix.state_output.save()
    with hybrid.trace(PROMPT):
        states = mix.states.save()
    assert len(seen) == states.shape[1] == ids(hybrid).shape[1]
    assert_close(torch.stack(seen, 1), states)
    assert_close(states[:, -1], final, rtol=1e-4, atol=1e-5)
    with hybrid.trace(PROMPT) as tracer:
        few = [].save()
        for _ in tracer.iter[2:4]:
            few.append(mix.state)
    assert_close(torch.stack(few, 1), states[:, 2:4])


def test_the_recurrent_state_of_a_step_is_what_the_last_one_left(hybrid):
    mix = hybrid.layers[0].linear_attn
    with hybrid.generate(PROMPT, max_new_tokens=3, eos_token_id=-1) as tracer:
        seen = [].save()
        for _ in tracer.iter[:]:
            entering = mix.state_input
            seen.append((entering, mix.state_output))
    assert seen[0][0] is None
    assert torch.equal(seen[0][1], seen[1][0]) and torch.equal(seen[1][1], seen[2][0])
    with pytest.raises(Unavailable, match="fresh prompt"):
        with hybrid.generate(PROMPT, max_new_tokens=3, eos_token_id=-1) as tracer:
            for _ in tracer.iter[1:]:
                mix.state_attention


def test_a_value_the_call_does_not_make_is_not_none(hybrid):
    mix = hybrid.layers[0].linear_attn
    with pytest.raises(Unavailable, match="state_output.*does not make it"):
        with hybrid.trace(PROMPT, use_cache=False):
            mix.state_output.save()
    with hybrid.trace(PROMPT, use_cache=False):
        replayed = mix.states.save()
    assert_close(
        replayed[:, -1],
        hybrid.record(PROMPT, ["state_output"])["state_output", 0],
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("family", MIXTURES)
def test_the_margin_is_the_gap_at_the_cut(family):
    model = specimen(family)
    moe = model.layers[1].mlp
    with model.trace(prompt(family)):
        scores, margin = moe.router_scores.save(), moe.router_margin.save()
    ordered = scores.sort(dim=-1, descending=True).values
    assert_close(margin, ordered[..., moe.top_k - 1] - ordered[..., moe.top_k])
    assert (margin >= 0).all() and margin.shape == scores.shape[:2]


def test_states_are_the_replay_of_what_the_kernel_was_given(hybrid):
    mix = hybrid.layers[1].linear_attn
    with hybrid.trace(PROMPT):
        args = [
            getattr(mix, name)
            for name in (
                "attention_queries",
                "attention_keys",
                "attention_values",
                "decays",
                "betas",
            )
        ].save()
        states = mix.states.save()
        implied = mix.state_attention.save()
    assert_close(states, delta_rule_states(*args))
    outputs = hybrid.record(PROMPT, ["attention_head_outputs"])["attention_head_outputs", 1]
    assert_close(torch.einsum("bhqk,bkhd->bqhd", implied, args[2]), outputs, rtol=1e-4, atol=1e-5)
    assert implied.triu(1).abs().max() == 0


def test_values_have_the_axes_of_their_layouts(any_model):
    tokens = ids(any_model).expand(2, -1)
    rec = any_model.record(tokens)
    call = {"batch": 2, "seq": tokens.shape[1], "query": tokens.shape[1], "key": tokens.shape[1]}
    checked = 0
    for row in any_model.support():
        for layer in row.layers:
            name = f"{row.host}.{row.name}"
            if (name, layer) not in rec or rec[name, layer] is None:
                continue
            sizes = {
                **any_model.sizes,
                **any_model.anatomy.block(layer).hosts[row.host].sizes,
                **call,
            }
            assert tuple(rec[name, layer].shape) == tuple(sizes[axis] for axis in row.value.axes), (
                name
            )
            checked += 1
    assert checked > 40


def test_every_value_has_a_docstring_on_its_envoy():
    for host, values in vocabulary.BY_HOST.items():
        envoy = type(specimen("llama")) if host == "model" else HOST_CLASSES[host]
        for name, value in values.items():
            assert value.meaning in getattr(envoy, name).__doc__ and str(
                getattr(envoy, name)
            ).startswith(f"({name})")


@pytest.mark.parametrize(
    ("wrong", "message", "named"),
    [
        ([""], "empty_text", {}),
        ("a \udcff", "no_text", {}),
        (torch.tensor([[5000]]), "ids_out_of_range", {"last": 2047}),
        (torch.tensor([[-1, 3]]), "ids_out_of_range", {"last": 2047}),
    ],
)
def test_a_trace_keeps_the_rules_of_prompts(model, wrong, message, named):
    with pytest.raises(PromptError, match=sentence(message, **named)):
        with model.trace(wrong):
            model.logits.save()
