"""Recordings: any values in any order from one forward, and edits in it."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from explorer.model.errors import NotRecorded, Unavailable
from explorer.vocabulary import UnknownValue
from tests.support.messages import refused, sentence
from tests.support.models import PROMPT, ids
from tests.support.recording_helpers import rec  # noqa: F401  fixtures


def test_everything_available_is_recorded_but_states_per_token(any_model):
    rec = any_model.record(PROMPT)
    wanted = {
        (row.value.key, layer)
        for row in any_model.support()
        if row.available and row.name not in ("state", "states")
        for layer in (row.layers if row.host != "model" else (None,))
    }
    assert set(rec.values) == wanted
    assert (
        rec.label == any_model.label
        and rec.weights == any_model.weights
        and rec.kinds == any_model.kinds
    )
    assert rec.num_layers == any_model.num_layers and rec.seconds > 0
    assert rec.bytes == sum(
        v.numel() * v.element_size() for v in rec.values.values() if isinstance(v, torch.Tensor)
    )


def test_the_requested_order_does_not_matter(any_model):
    full = any_model.record(PROMPT)
    names = [name for name in full.names if name != "state_attention"]
    for order in (names, names[::-1], sorted(names)):
        rec = any_model.record(PROMPT, order)
        for key, value in rec.values.items():
            assert value is full[key] or (
                torch.equal(value, full[key])
                if isinstance(value, torch.Tensor)
                else value == full[key]
            )


def test_a_recording_is_what_a_trace_reads(any_model):
    rec = any_model.record(PROMPT)
    layer = any_model.num_layers - 1
    with torch.no_grad():
        with any_model.trace(PROMPT):
            block = any_model.layers[layer]
            queries = block.self_attn.attention_queries.save()
            pattern = block.self_attn.attention_probabilities.save()
            addend = block.mlp.mlp_output.save()
            logits = any_model.logits.save()
    for name, value in (
        ("attention_queries", queries),
        ("attention_probabilities", pattern),
        ("mlp_output", addend),
    ):
        assert torch.equal(rec[name, layer], value)
    assert torch.equal(rec["logits"], logits)


def test_only_the_values_and_blocks_asked_for_are_kept(model):
    rec = model.record(PROMPT, ["router_logits", "logits"], layers=[2, -1])
    assert set(rec.names) == {"logits", "router_logits"} and rec.layers("router_logits") == (2, 3)
    assert model.record(PROMPT, "router_logits").layers("router_logits") == (0, 1, 2, 3)
    assert model.record(PROMPT, ["router_logits"], layers=1).layers("router_logits") == (1,)
    assert model.record(PROMPT, []).values == {}
    assert model.record(PROMPT, ["attention_queries"]).layers("attention_queries") == (0, 1, 2, 3)
    assert model.record(PROMPT, ["self_attn.attention_queries"]).layers("attention_queries") == (3,)


def test_names_of_the_shared_expert_are_its_own(model):
    rec = model.record(PROMPT, ["mlp_output", "shared_experts.mlp_output"])
    moe, shared = rec["mlp_output", 1], rec["shared_experts.mlp_output", 1]
    assert not torch.equal(moe, shared) and shared.shape == moe.shape
    assert "shared_experts.mlp_output" not in model.record(PROMPT, ["mlp_output"]).names


def test_tensors_are_detached_copies_on_the_cpu(any_model):
    rec = any_model.record(PROMPT)
    storages = {}
    for key in rec:
        value = rec[key]
        if isinstance(value, torch.Tensor):
            assert not value.requires_grad and value.device.type == "cpu"
            storages.setdefault(value.untyped_storage().data_ptr(), []).append(key)
    assert all(len(keys) == 1 for keys in storages.values())
    again = any_model.record(PROMPT, ["logits"])["logits"]
    rec["logits"].zero_()
    rec["layer_output", 0].zero_()
    assert torch.equal(any_model.record(PROMPT, ["logits"])["logits"], again)


def test_prompts_of_every_form_are_the_same_prompt(model):
    tokens = ids(model)
    expected = model.record(PROMPT, ["logits"])
    for form in (
        tokens,
        tokens[0],
        tokens[0].tolist(),
        tokens.tolist(),
        tokens.int(),
        tokens.numpy(),
    ):
        rec = model.record(form, ["logits"])
        assert torch.equal(rec["logits"], expected["logits"]) and torch.equal(rec.input_ids, tokens)
        assert rec.tokens == expected.tokens
    assert "".join(expected.tokens) == PROMPT and len(expected.tokens) == tokens.shape[1]


def test_a_batch_of_prompts_is_recorded_row_by_row(model):
    tokens = torch.stack([ids(model)[0], ids(model)[0].flip(0)])
    rec = model.record(tokens, ["router_logits", "attention_probabilities"])
    alone = model.record(tokens[1:], ["router_logits", "attention_probabilities"])
    assert rec["router_logits", 0].shape[0] == 2
    assert_close(rec["router_logits", 0][1:], alone["router_logits", 0], rtol=1e-4, atol=1e-5)
    assert_close(
        rec["attention_probabilities", 3][1:],
        alone["attention_probabilities", 3],
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "e\u0301\u0308 \u05e9\u05dc\u05d5\u05dd \u200f",
        "🜁🜂 \x00 \t",
        "a",
    ],
)
def test_any_text_is_a_prompt_and_its_tokens_say_it(model, text):
    rec = model.record(text, ["logits"])
    assert (
        rec["logits"].shape[1] == len(rec.tokens)
        and model.tokenizer.decode(rec.input_ids[0]) == text
    )


@pytest.mark.parametrize(
    ("prompt", "message", "named"),
    [
        ("", "empty_text", {}),
        ("  \n\t", "empty_text", {}),
        ([], "empty_ids", {}),
        ([[]], "empty_ids", {}),
        (torch.zeros(1, 0, dtype=torch.long), "empty_ids", {}),
        ([[1, 2], [3]], "no_prompt", {}),
        (["a", 3], "no_prompt", {}),
        ([0.5], "no_prompt", {}),
        (None, "no_prompt", {}),
        (torch.tensor(3), "no_prompt", {}),
        ([True], "no_prompt", {}),
        (torch.zeros(1, 1, 1, dtype=torch.long), "no_prompt", {}),
        (object(), "no_prompt", {}),
        ([2048], "ids_out_of_range", {"last": 2047}),
        ([-1], "ids_out_of_range", {"last": 2047}),
    ],
)
def test_what_is_no_prompt_is_refused_in_words(model, prompt, message, named):
    refused(message, lambda: model.record(prompt, ["logits"]), **named)


@pytest.mark.parametrize(
    ("values", "layers", "error", "description"),
    [
        (["router_logit"], None, UnknownValue, "router_logits"),
        (["moe.router_logits"], None, UnknownValue, "hosts are model"),
        (["logits"], [99], ValueError, "no block 99.*blocks 0 to 3"),
        (["logits"], [-5], ValueError, "no block -5"),
        (["attention_sinks"], None, Unavailable, "no sink logits"),
        (["decays"], [3], Unavailable, "softmax attention"),
        (["attention_scores"], [0, 1], Unavailable, "recurrent mixer"),
        (["mlp_neurons"], None, Unavailable, "mlp_neurons .*every expert"),
        (["state"], None, Unavailable, r"Recording\.state"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_the_run(
    model, values, layers, error, description
):
    with pytest.raises(error, match=description):
        model.record(PROMPT, values, layers)
    assert not model.taps.open


def test_keys_are_names_blocks_and_hosts(rec):
    assert torch.equal(rec["router_logits", -1], rec["router_logits", 3])
    assert torch.equal(rec["mlp.router_logits", 1], rec["router_logits", 1])
    assert torch.equal(rec["model.logits"], rec["logits"])
    assert ("self_attn.attention_queries", 3) in rec and (
        "self_attn.attention_queries",
        0,
    ) not in rec
    assert ("linear_attn.attention_queries", 0) in rec and (
        "linear_attn.attention_queries",
        3,
    ) not in rec
    assert (
        "logits" in rec
        and ("logits", 1) not in rec
        and "router_logits" not in rec
        and ("router_logits", 9) not in rec
    )
    assert (
        rec.layers("attention_scores") == (3,)
        and rec.layers("betas") == (0, 1, 2)
        and rec.layers("logits") == ()
    )


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("router_logits", sentence("recorded_on_blocks", name="router_logits", last=3)),
        (("logits", 1), sentence("recorded_on_model", name="logits")),
        (("router_logits", 9), sentence("block_not_recorded", block=9, last=3)),
        (("head_gate", 0), "recurrent mixer"),
        (
            ("linear_attn.attention_queries", 3),
            sentence("other_mixer", block=3, host="linear_attn", mixer="self_attn"),
        ),
        (("states", 0), sentence("not_asked_for", name="states")),
        (("mlp_activation", 1), "every expert"),
    ],
)
def test_a_value_that_a_recording_lacks_has_a_reason(rec, key, said):
    with pytest.raises(NotRecorded, match=said) as error:
        rec[key]
    assert str(error.value) == rec.why(*(key if isinstance(key, tuple) else (key,)))


def test_a_name_that_is_none_is_unknown_to_a_recording_too(rec):
    for ask in (lambda: rec["router_logit", 1], lambda: rec.why("router_logit", 1)):
        with pytest.raises(UnknownValue, match="router_logits"):
            ask()
