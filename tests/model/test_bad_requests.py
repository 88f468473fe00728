"""What cannot be recorded, edited or read back raises an error that says what can be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from explorer import ablate_expert, load, zero_head
from explorer.model.edits import Edit
from explorer.vocabulary.availability import most_informative
from tests.support.messages import refused
from tests.support.models import PROMPT, ids, specimen

SOURCE = "qwen3_5_moe_text"


@pytest.fixture(scope="module")
def model():
    return specimen(SOURCE)


@pytest.fixture(scope="module")
def rec(model):
    return model.record(PROMPT)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "no_prompt"),
        ([1.5], "no_prompt"),
        ([[1, 2], [3]], "no_prompt"),
        (b"abc", "no_prompt"),
        ([-1], "ids_out_of_range"),
        ([10**9], "ids_out_of_range"),
        (torch.zeros(0, 3, dtype=torch.long), "empty_ids"),
        ([[]], "empty_ids"),
        (torch.tensor([1, 2]).to_sparse(), "sparse_ids"),
        (torch.zeros(1, 3, dtype=torch.long, device="meta"), "meta_ids"),
        ({"attention_mask": [[1, 1]]}, "no_prompt"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "mask_of_another_shape"),
        ({"input_ids": [[1, 2]], "attention_mask": "no"}, "mask_of_another_shape"),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, "no_mask"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 7]]}, "no_mask"),
        (["one", ""], "empty_text"),
        (["one", 2], "no_prompt"),
    ],
)
def test_a_prompt_that_is_none(model, prompt, message):
    refused(message, lambda: model.record(prompt, values=["logits"]))


def test_what_a_tokenizer_returns_is_a_prompt(model):
    plain = model.record(PROMPT, values=["logits"])
    for given in (model.tokenizer(PROMPT), model.tokenizer(PROMPT)["input_ids"], [PROMPT]):
        assert torch.equal(model.record(given, values=["logits"])["logits"], plain["logits"])
    assert plain.attention_mask is None


def test_an_edit_that_chooses_an_expert_there_is_not(model):
    for change in (lambda t: t * 0 + 9999, lambda t: t - 1_000):
        edit = Edit("expert_indices", 0, change)
        with pytest.raises(ValueError, match="There are experts 0 to"):
            model.record(PROMPT, values=["logits"], edits=[edit])


@pytest.mark.parametrize(
    ("family", "name"),
    [("gpt_oss", "head_gate"), ("qwen3_next", "attention_sinks"), ("llama", "skip")],
)
def test_the_reason_in_a_recording_is_the_one_that_says_most(family, name):
    model = specimen(family)
    rec = model.record(PROMPT)
    for layer in range(model.num_layers):
        if (name, layer) not in rec:
            reasons = [
                row.reasons[layer]
                for row in model.support()
                if row.name == name and layer in row.reasons
            ]
            assert rec.why(name, layer) == most_informative(reasons)
    assert any((name, layer) not in rec for layer in range(model.num_layers))


def test_shapes_alone_run_on_a_model_without_weights():
    shapes = load(f"specimen:{SOURCE}", weights=False)
    assert shapes.record(torch.zeros(1, 3, dtype=torch.long, device="meta"), ["logits"])[
        "logits"
    ].shape[:2] == (1, 3)


@pytest.mark.parametrize("values", [3, [None], [b"logits"], ["logits", 4], object()])
def test_values_that_are_no_names(model, values):
    refused("no_value_names", lambda: model.record(PROMPT, values=values))


@pytest.mark.parametrize("layers", ["0", [0.5], [None], True, slice(0, 2), [[0]], ["a"]])
def test_layers_that_are_no_numbers(model, layers):
    ask = lambda: model.record(PROMPT, values=["decays"], layers=layers)  # noqa: E731
    refused("no_block_numbers", ask, last=3)


def test_no_layers_at_all(model):
    refused("no_blocks_asked", lambda: model.record(PROMPT, values=["decays"], layers=[]))


@pytest.mark.parametrize(
    "layers",
    [
        1,
        -3,
        np.int64(1),
        torch.tensor(1),
        [np.int64(1)],
        torch.tensor([1]),
        (i for i in [1]),
        range(1, 2),
    ],
)
def test_numbers_of_every_kind_are_numbers(model, layers):
    rec = model.record(PROMPT, values=(name for name in ["decays"]), layers=layers)
    assert rec.layers("decays") == (1,) and torch.equal(
        rec["decays", np.int64(1)], rec["decays", -3]
    )


def test_names_from_a_generator_are_checked_like_any(model):
    named = (name for name in ["decays"])
    refused("not_on_blocks", lambda: model.record(PROMPT, named, layers=[3]), name="decays")


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (zero_head(0, 1), "no_edits"),
        (None, "no_edits"),
        ({}, "no_edits"),
        (["x"], "no_edit"),
        ([lambda x: x], "no_edit"),
        ([Edit("layer_input", 0, 3)], "no_edit"),
        ([Edit("layer_input", "0", lambda x: x)], "edit_without_block"),
    ],
)
def test_edits_that_are_none(model, edits, message):
    refused(message, lambda: model.record(PROMPT, values=["logits"], edits=edits))


@pytest.mark.parametrize("make", [zero_head, ablate_expert])
@pytest.mark.parametrize("index", ["a", 1.0, None])
def test_a_head_or_expert_that_is_no_number(make, index):
    refused("edit_by_number", lambda: make(0, index), given=repr(index))


@pytest.mark.parametrize(
    "key",
    [
        3,
        None,
        (),
        ("decays", "0"),
        ("decays", 0.0),
        ("decays", 0, 1),
        ("decays", slice(0, 2)),
        (0, "decays"),
        ("decays", True),
    ],
)
def test_a_recording_asked_for_what_is_no_value(rec, key):
    refused("no_recording_key", lambda: rec[key], given=repr(key))
    assert key not in rec


def test_a_recording_is_walked_through_by_name_and_block(rec):
    assert list(rec) == list(rec.values) and all(key in rec for key in rec)
    error = refused("no_value", lambda: rec.layers("decay"), name="decay")
    assert "decays" in str(error)
    assert "decays" in rec.why("decays", 0) and ("decays", 0) not in rec.missing


@pytest.mark.parametrize("layer", [9, -5, "0", None, 0.5])
def test_a_block_that_a_recording_has_not(rec, layer):
    for ask in (
        rec.recurrent,
        rec.addends,
        rec.replay,
        rec.state_norms,
        lambda layer: rec.state(layer, 0, 0),
        lambda layer: list(rec.states(layer, 0)),
    ):
        refused("block_not_recorded", lambda ask=ask: ask(layer), block=repr(layer), last=3)


def test_blocks_counted_from_the_end(rec):
    assert rec.addends(-1) == rec.addends(3) and rec.recurrent(-4) == "linear_attn"
    assert torch.equal(rec.state_norms(-4), rec.state_norms(0))


@pytest.mark.parametrize(
    ("head", "token", "message", "named"),
    [
        ("a", 0, "by_number", {"what": "head", "given": "'a'"}),
        (0, "a", "by_number", {"what": "token", "given": "'a'"}),
        (0, 0.5, "by_number", {"what": "token", "given": "0.5"}),
        (99, 0, "no_head", {"head": 99}),
        (0, 99, "no_token", {"token": 99}),
    ],
)
def test_a_state_of_no_head_or_token(rec, head, token, message, named):
    refused(message, lambda: rec.state(0, head, token), **named)


def test_a_long_wrong_thing_is_cut_in_the_sentence(model):
    error = refused("no_value_names", lambda: model.record(PROMPT, values=[list(range(1000))]))
    assert "…" in str(error)
    assert "blocks 0 to 3" in model.record(ids(model), ["logits"]).why("decays")
