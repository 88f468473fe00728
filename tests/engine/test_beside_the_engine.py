"""The engine's own API beside standard values, and what an error leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from explorer.engine.nnsight_api import STATE, State, nnsight
from explorer.engine.observers import ModelBusy
from explorer.model.errors import AlreadyPassed
from tests.support.models import PROMPT, attention_of, ids, shapes, specimen

SHORT = "In the beginning"


# -- the engine's own API beside ours ------------------------------------------------


@pytest.mark.slow
def test_module_inputs_and_outputs_agree_with_the_values(any_model):
    layer = any_model.num_layers - 1
    block = any_model.layers[layer]
    with any_model.trace(PROMPT):
        entering, read = block.input.save(), block.layer_input.save()
        normed, same = block.input_layernorm.output.save(), block.attention_norm_output.save()
        premix = block.self_attn.attention_premix.save()
        given = block.self_attn.o_proj.input.save()
        mlp, own = block.mlp.output.save(), block.mlp.mlp_output.save()
        head, logits = any_model.lm_head.output.save(), any_model.logits.save()
    assert (
        torch.equal(entering, read)
        and torch.equal(normed, same)
        and torch.equal(premix.flatten(2), given)
    )
    assert torch.equal(mlp, own) and torch.equal(head, logits)


def test_an_edit_by_either_name_is_seen_by_the_other(model):
    with model.trace(PROMPT):
        model.layers[1].layer_output[:] = 0
        native = model.layers[1].output.save()
        following = model.layers[2].input.save()
    assert native.abs().max() == 0 and following.abs().max() == 0
    with model.trace(PROMPT):
        model.layers[1].output[:] = 0
        read = model.layers[1].layer_output.save()
    assert read.abs().max() == 0


def test_source_opened_for_the_first_time_in_the_same_trace_loses_nothing():
    model = specimen("qwen3_moe")
    moe, attention = model.layers[2].mlp, model.layers[2].self_attn
    with model.trace(PROMPT):
        operation = attention.source.attention_interface_1
        pattern = attention.attention_probabilities.save()
        mixed = operation.output[0].save()
        premix = attention.attention_premix.save()
        moe.experts.source.__repr__()
        slots = moe.expert_outputs.save()
    assert torch.equal(mixed.flatten(2), premix.flatten(2)) and slots.shape[2] == moe.top_k
    with model.trace(PROMPT):
        again = attention.attention_probabilities.save()
        after = attention.source.attention_interface_1.output[0].save()
    assert torch.equal(pattern, again) and torch.equal(mixed, after)


def test_an_operation_drilled_into_and_a_value_inside_it_are_both_served(model):
    attention = attention_of(model)
    with model.trace(PROMPT):
        attention.attention_queries.save()
        inner = attention.source.attention_interface_1.source
        scores = attention.attention_scores.save()
        softmax = inner.nn_functional_softmax_0.output.save()
        pattern = attention.attention_probabilities.save()
    assert torch.equal(pattern, softmax.to(pattern.dtype))
    assert_close(scores.softmax(-1), softmax)
    with model.trace(PROMPT):
        inner = attention.source.attention_interface_1.source
        attention.attention_scores[:, 0, 4, :4] = -torch.inf
        softmax = inner.nn_functional_softmax_0.output.save()
    assert softmax[0, 0, 4, 4] == 1


def test_a_skipped_module_returns_its_input(model):
    with model.trace(PROMPT):
        model.layers[1].mlp.skip(model.layers[1].mlp_input * 0)
        addend = model.layers[1].mlp.mlp_output.save()
        stream = [model.layers[1].layer_output, model.layers[2].layer_input].save()
        logits = model.layers[2].mlp.router_logits.save()
    assert (
        addend.abs().max() == 0
        and logits.shape[-1] == model.layers[2].mlp.num_experts
        and torch.equal(*stream)
    )
    with pytest.raises(AlreadyPassed, match="router_logits was never reached"):
        with model.trace(PROMPT):
            model.layers[1].mlp.skip(model.layers[1].mlp_input * 0)
            model.layers[1].mlp.router_logits.save()


def test_a_stopped_trace_keeps_what_it_read_and_closes_the_taps(model):
    with model.trace(PROMPT) as tracer:
        logits = model.layers[1].mlp.router_logits.save()
        tracer.stop()
    assert logits.shape[-1] == model.layers[1].mlp.num_experts
    assert not model.taps.open
    assert torch.equal(model.record(PROMPT, ["router_logits"])["router_logits", 1], logits)


def test_the_engines_module_cache_works_beside_values(model):
    with model.trace(PROMPT) as tracer:
        cache = tracer.cache(modules=[model.layers[1], model.layers[1].mlp])
        pattern = attention_of(model).attention_probabilities.save()
        logits = model.logits.save()
    rec = model.record(PROMPT, ["layer_output", "mlp_output", "attention_probabilities", "logits"])
    assert torch.equal(cache[model.layers[1].path].output, rec["layer_output", 1])
    assert torch.equal(cache[model.layers[1].mlp.path].output, rec["mlp_output", 1])
    assert torch.equal(pattern, rec["attention_probabilities", 3]) and torch.equal(
        logits, rec["logits"]
    )


def test_a_stored_edit_uses_values_and_leaves_the_original_alone(model):
    with model.edit() as (_, edited):
        edited.layers[1].mlp.expert_weights[:] = 0
    with edited.trace(PROMPT):
        routed = edited.layers[1].mlp.routed_output.save()
    with model.trace(PROMPT):
        untouched = model.layers[1].mlp.routed_output.save()
    with edited.trace(PROMPT):
        both = edited.layers[1].mlp.expert_weights.save()
    assert routed.abs().max() == 0 and untouched.abs().max() > 0 and both.abs().max() == 0


def test_a_session_passes_values_from_one_trace_to_the_next(model):
    moe = model.layers[1].mlp
    with model.session():
        with model.trace(SHORT):
            logits = moe.router_logits
        with model.trace(SHORT):
            moe.router_logits = logits.flip(-1)
            indices = moe.expert_indices.save()
    first = model.record(SHORT, ["router_logits"])["router_logits", 1]
    assert torch.equal(indices, first.flip(-1).topk(moe.top_k).indices)


def test_a_barrier_passes_a_value_from_one_prompt_to_another(model):
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(SHORT):
            stream = model.layers[0].layer_output[:, -1:]
            barrier()
        with tracer.invoke(SHORT):
            barrier()
            model.layers[0].layer_output[:, :1] = stream
            given = model.layers[1].layer_input.save()
    assert_close(given[:, 0], model.record(SHORT, ["layer_output"])["layer_output", 0][:, -1])


def test_a_module_called_on_the_side_takes_no_visit(model):
    with model.trace(PROMPT):
        on_the_side = model.layers[1].mlp(model.layers[0].layer_output)
        logits = model.layers[1].mlp.router_logits.save()
        kept = on_the_side.save()
    rec = model.record(PROMPT, ["router_logits", "mlp_output"])
    assert torch.equal(logits, rec["router_logits", 1]) and kept.shape == rec["mlp_output", 1].shape


def test_a_scan_gives_shapes():
    model = specimen("llama")
    with model.scan(PROMPT):
        shapes = {}.save()
        shapes["queries"] = tuple(model.layers[1].self_attn.attention_queries.shape)
        shapes["pattern"] = tuple(model.layers[1].self_attn.attention_probabilities.shape)
        shapes["logits"] = tuple(model.logits.shape)
    seq = ids(model).shape[1]
    assert shapes == {
        "queries": (1, 10, seq, 12),
        "pattern": (1, 10, seq, seq),
        "logits": (1, seq, model.vocab_size),
    }


@pytest.mark.parametrize(
    "model",
    [lambda: specimen("qwen3_next", torch.bfloat16), lambda: shapes("specimen:qwen3_5_moe_text")],
)
def test_a_scan_gives_shapes_of_state_and_experts_too(model):
    model = model()
    with model.scan("a b c d"):
        seen = {}.save()
        seen["states"] = tuple(model.layers[0].linear_attn.states.shape)
        seen["slots"] = tuple(model.layers[1].mlp.expert_outputs.shape)
    mix, moe = model.layers[0].linear_attn, model.layers[1].mlp
    seq = ids(model, "a b c d").shape[1]
    assert seen["states"] == (1, seq, mix.heads, mix.key_dim, mix.value_dim)
    assert seen["slots"] == (1, seq, moe.top_k, model.hidden_size)


def test_plain_python_works_in_a_block(model):
    """Loops, functions, comprehensions and values chosen at run time."""

    def strongest(logits):
        return logits.argmax(-1)

    with model.trace(PROMPT):
        chosen = [
            strongest(model.layers[i].mlp.router_logits) for i in range(model.num_layers)
        ].save()
        tokens = {"ids": model.next_token_probs.argmax(-1)}.save()
    assert len(chosen) == model.num_layers and tokens["ids"].shape == (1,)


# -- errors leave the model usable -----------------------------------------------------


def raise_in_a_block(model):
    with model.trace(PROMPT):
        model.layers[1].mlp.router_logits.save()
        raise KeyError("mine")


def raise_in_the_model(model):
    with model.trace(PROMPT):
        model.layers[1].mlp.experts.input = torch.zeros(3, 3)
        model.logits.save()


def raise_out_of_order(model):
    with model.trace(PROMPT):
        model.layers[1].mlp.mlp_output.save()
        model.layers[1].mlp.router_logits.save()


@pytest.mark.parametrize("failing", [raise_in_a_block, raise_in_the_model, raise_out_of_order])
def test_an_error_in_a_trace_leaves_the_model_as_it_was(model, failing):
    before = specimen_state(model)
    assert all(kind is State for _, _, kind, *_ in before)
    with torch.no_grad():
        clean = model.hf(ids(model)).logits
    with pytest.raises(Exception) as caught:  # noqa: PT011  of several kinds
        failing(model)
    assert not isinstance(caught.value, nnsight.tracing.tracer.ExitTracingException)
    assert specimen_state(model) == before and not model.taps.open
    with torch.no_grad():
        assert torch.equal(model.hf(ids(model)).logits, clean)
    assert torch.equal(model.record(PROMPT, ["logits"])["logits"], clean)


def specimen_state(model) -> list:
    """Everything of the modules a tap could have left behind."""
    return [
        (
            name,
            type(module.__dict__["forward"]),
            type(module.__dict__[STATE]),
            module.__dict__[STATE].body,
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
        )
        for name, module in model.hf.named_modules()
        if STATE in module.__dict__
    ]


def test_a_second_run_in_the_middle_of_a_trace_is_refused(model):
    for inner in (lambda: model.record(SHORT, ["logits"]), lambda: traced(model)):
        with pytest.raises(ModelBusy):
            with model.trace(PROMPT):
                model.layers[1].layer_output.save()
                inner()
        assert not model.taps.open
    assert model.record(SHORT, ["logits"])["logits"].shape[0] == 1


def traced(model):
    with model.trace(SHORT):
        model.logits.save()


def test_another_model_may_run_in_the_middle_of_a_trace(model):
    other = specimen("llama")
    with model.trace(PROMPT):
        stream = model.layers[1].layer_output.save()
        rec = [other.record(PROMPT, ["logits"])].save()
        following = model.layers[2].layer_input.save()
    assert rec[0]["logits"].shape[-1] == other.vocab_size
    assert torch.equal(stream, following)


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="prompt is empty"):
        with model.trace(""):
            model.logits.save()
