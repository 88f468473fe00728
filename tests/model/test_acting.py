"""Skipping, steering, the lens, and a model that is left as it was."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch.testing import assert_close

from explorer import load
from explorer.checkpoints.load import load_specimen
from explorer.engine.nnsight_api import STATE, State
from explorer.model.errors import OutsideTrace
from explorer.specimens import variants
from tests.support.models import PROMPT, ids, shapes, specimen


@pytest.mark.slow
def test_skipping_several_blocks_leaves_them_out(any_model):
    end = any_model.num_layers - 1
    with any_model.trace(PROMPT):
        entering = any_model.layers[0].layer_output.save()
    with any_model.trace(PROMPT):
        any_model.skip_layers(1, end)
        out = any_model.layers[end].layer_output.save()
        logits = any_model.logits.save()
    assert torch.equal(out, entering)
    assert_close(any_model.project_on_vocab(entering), logits)
    stream = torch.randn_like(entering)
    with any_model.trace(PROMPT):
        any_model.skip_layers(-1, -1, skip_with=stream)
        logits = any_model.logits.save()
    assert_close(any_model.project_on_vocab(stream), logits)


def test_skipping_is_refused_for_blocks_that_are_not_or_run_backwards(model):
    for start, end, description in (
        (2, 1, "skips upwards"),
        (0, 9, "no block 9"),
        (-9, 0, "no block -9"),
    ):
        with pytest.raises(ValueError, match=description):
            with model.trace(PROMPT):
                model.skip_layers(start, end)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steering_adds_at_the_chosen_places_alone(dtype):
    model = specimen("qwen3_next", dtype)
    vector = torch.linspace(-2, 2, model.hidden_size)
    tokens = ids(model).repeat(2, 1)
    clean = model.record(tokens, ["layer_output"])
    for positions, touched in (
        (None, range(10)),
        (-1, [9]),
        (3, [3]),
        (slice(2, 5), [2, 3, 4]),
        ([0, 7], [0, 7]),
    ):
        for row in (None, 1):
            with torch.no_grad():
                with model.trace(tokens):
                    model.steer(1, vector, factor=0.5, positions=positions, batch_index=row)
                    stream = model.layers[1].layer_output.save()
                    following = model.layers[2].layer_input.save()
            expected = clean["layer_output", 1].clone()
            for position in touched:
                for index in (0, 1) if row is None else (row,):
                    expected[index, position] += (0.5 * vector).to(dtype)
            assert torch.equal(stream, expected) and torch.equal(following, stream)


def test_steering_several_blocks_and_no_block(model):
    vector = torch.ones(model.hidden_size)
    with model.trace(PROMPT):
        model.steer([2, 0], vector)
        logits = model.logits.save()
    with model.trace(PROMPT):
        model.steer([0], vector)
        model.steer([2], vector)
        same = model.logits.save()
    with model.trace(PROMPT):
        model.steer([], vector)
        untouched = model.logits.save()
    assert torch.equal(logits, same) and not torch.equal(logits, untouched)
    assert_close(untouched, model.record(PROMPT, ["logits"])["logits"])


def test_steering_is_refused_with_a_sentence(model):
    vector = torch.ones(model.hidden_size)
    with pytest.raises(ValueError, match=r"88 wide.*\[3\]"):
        with model.trace(PROMPT):
            model.steer(1, torch.ones(3))
    with pytest.raises(ValueError, match="no block 99"):
        with model.trace(PROMPT):
            model.steer(99, vector)
    for wrong, description in (
        ({"positions": 1000}, "position 1000"),
        ({"positions": [0, -1000]}, "position -1000"),
        ({"batch_index": 3}, "row 3.*0 to 0"),
        ({"positions": 0.5}, "position 0.5"),
        ({"positions": ["a"]}, "position 'a'"),
        ({"positions": True}, "position True"),
        ({"batch_index": "0"}, "row '0'"),
    ):
        with pytest.raises(ValueError, match=description):
            with model.trace(PROMPT):
                model.steer(1, vector, **wrong)
    for layers in (1.5, "1", [1, 2.0]):
        with pytest.raises(ValueError, match="There is no block"):
            with model.trace(PROMPT):
                model.steer(layers, vector)
    with pytest.raises(ValueError, match="There is no block 1.5"):
        with model.trace(PROMPT):
            model.skip_layers(1.5, 2)
    with pytest.raises(ValueError, match="wide"):
        with model.trace(PROMPT):
            model.steer(1, 3)
    with pytest.raises(OutsideTrace):
        model.steer(1, vector)


@pytest.mark.parametrize("k", [-1, 0, 1.5, "3", 10**9])
def test_a_number_of_tokens_that_is_none(model, k):
    with pytest.raises(ValueError, match="k is a number of tokens"):
        model.top_tokens(torch.ones(model.hidden_size), k)


def test_the_lens_on_the_last_block_is_the_model(any_model):
    rec = any_model.record(PROMPT, ["layer_output", "logits"])
    with torch.no_grad():
        assert_close(any_model.project_on_vocab(rec["layer_output", -1]), rec["logits"])
    with any_model.trace(PROMPT):
        inside = any_model.project_on_vocab(any_model.layers[-1].layer_output).save()
        logits = any_model.logits.save()
    assert_close(inside, logits)


def test_top_tokens_are_the_likeliest_and_nest_like_the_input(model):
    rec = model.record(PROMPT, ["layer_output", "next_token_probs"])
    best = model.top_tokens(rec["layer_output", 3][0, -1], 4)
    probs = rec["next_token_probs"][0]
    assert [round(p, 5) for _, p in best] == [round(float(p), 5) for p in probs.topk(4).values]
    assert [t for t, _ in best] == [
        model.tokenizer.decode([i]) for i in probs.topk(4).indices.tolist()
    ]
    nested = model.top_tokens(rec["layer_output", 3], 2)
    assert len(nested) == 1 and len(nested[0]) == 10 and nested[0][-1] == best[:2]


def test_a_plain_forward_is_transformers_own(any_model):
    from explorer.specimens import build

    native = build(any_model.family).model
    with torch.no_grad():
        plain, ours = native(ids(any_model)).logits, any_model.hf(ids(any_model)).logits
        traced = any_model.record(PROMPT, ["logits"])["logits"]
    assert torch.equal(plain, ours) and torch.equal(plain, traced)


def test_recording_and_tracing_leave_no_hook_and_no_forward_behind(any_model):
    def state():
        return [
            (
                name,
                len(m._forward_hooks),
                len(m._forward_pre_hooks),
                type(m.__dict__[STATE]),
                m.__dict__[STATE].body,
            )
            for name, m in any_model.hf.named_modules()
            if STATE in m.__dict__
        ]

    before = state()
    any_model.record(PROMPT)
    with any_model.trace(PROMPT):
        any_model.layers[0].self_attn if any_model.kinds[0] == "self_attn" else any_model.layers[
            0
        ].linear_attn
        any_model.logits.save()
    assert state() == before and not any_model.taps.open
    assert all((hooks, pre, kind) == (0, 0, State) for _, hooks, pre, kind, _ in before)


def test_generation_without_a_block_is_the_engines(model):
    tokens = model.generate(PROMPT, max_new_tokens=3, do_sample=False, eos_token_id=-1)
    native = model.hf.generate(ids(model), max_new_tokens=3, do_sample=False, eos_token_id=-1)
    assert torch.equal(tokens, native)


def test_a_model_is_freed_though_its_tracer_and_its_values_live():
    def run():
        model = load("specimen:llama")
        with torch.no_grad():
            with model.trace(PROMPT) as tracer:
                scores = model.layers[1].self_attn.attention_scores.save()
        model.record(PROMPT)
        return weakref.ref(model.hf), tracer, scores

    gone, tracer, scores = run()
    gc.collect()
    assert gone() is None and tracer is not None and scores.shape[0] == 1


def test_the_kind_of_the_numbers_is_stated():
    assert (
        specimen("llama").weights == "random, seed 0"
        and specimen("qwen3_next").weights == "trained"
    )
    assert shapes("Qwen/Qwen3-30B-A3B").weights == "none: shapes only"


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoint", ["specimen:qwen3_next", "HuggingFaceTB/SmolLM2-135M-Instruct"]
)
def test_a_model_without_weights_is_traced_for_its_shapes(checkpoint):
    model = shapes(checkpoint)
    layer = model.kinds.index("self_attn")
    with model.trace(torch.zeros(2, 7, dtype=torch.long)):
        pattern = model.layers[layer].self_attn.attention_probabilities.save()
        logits = model.logits.save()
    assert pattern.shape == (2, model.num_heads, 7, 7) and pattern.device.type == "meta"
    assert logits.shape == (2, 7, model.vocab_size) and logits.dtype == torch.bfloat16
    with model.trace("a prompt of words"):
        stream = model.layers[-1].layer_output.save()
    assert stream.shape[-1] == model.hidden_size


def test_a_model_without_weights_does_not_generate():
    model = shapes("HuggingFaceTB/SmolLM2-135M-Instruct")
    with pytest.raises(ValueError, match="without weights"):
        with model.generate("a prompt", max_new_tokens=2):
            model.logits.save()
    with pytest.raises(ValueError, match="without weights"):
        model.generate("a prompt", max_new_tokens=2)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_copy_has_weights_of_its_own(family):
    one = load(f"specimen:{family}")
    before = one.record(
        PROMPT, values=["logits", "layer_output"]
    )  # once looked at, a model carries the engine's hooks
    other = copy.deepcopy(one)
    assert torch.equal(
        other.record(PROMPT, values=["layer_output"])["layer_output", 1], before["layer_output", 1]
    )
    with torch.no_grad():
        for parameter in other.hf.parameters():
            parameter.mul_(1.1)
    assert torch.equal(one.record(PROMPT, values=["logits"])["logits"], before["logits"])
    changed = other.record(PROMPT, values=["logits"])["logits"]
    assert not torch.equal(changed, before["logits"])
    assert_close(other.hf(**other.tokenizer(PROMPT, return_tensors="pt")).logits, changed)


def test_a_copy_of_the_native_model_is_plain():
    model = specimen("llama")
    other = copy.deepcopy(model.hf)
    with torch.no_grad():
        assert torch.equal(other(ids(model)).logits, model.hf(ids(model)).logits)


@pytest.mark.parametrize(
    ("host", "name", "description"),
    [
        ("mlp", "expert_weihgts", "expert_weights"),
        ("", "mlp_output", r"model\.layers\[i\]\.mlp"),
        ("linear_attn", "attention_probabilities", r"model\.layers\[i\]\.self_attn"),
    ],
)
def test_a_value_that_is_not_there_cannot_be_written(model, host, name, description):
    envoy = model.layers[0].get(host) if host else model.layers[0]
    with pytest.raises(AttributeError, match=description):
        setattr(envoy, name, torch.zeros(1))
    assert name not in envoy.__dict__


def test_other_attributes_may_be_set(model):
    model.layers[0].remark = "mine"
    assert model.layers[0].remark == "mine"
    del model.layers[0].remark


@pytest.mark.parametrize("family", ["granitemoe", "granitemoeshared", "granitemoehybrid"])
def test_the_lens_runs_no_router_so_none_is_asked_for_its_logits(family):
    model = load_specimen(variants.build(family, {"output_router_logits": True}))
    rec = model.record("And God said", ["layer_output", "logits"])
    assert_close(model.project_on_vocab(rec["layer_output", -1]), rec["logits"])
