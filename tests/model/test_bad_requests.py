"""What cannot be recorded, edited or read back raises an error that says what can be."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from explorer import ablate_expert, load, zero_head
from explorer.model.edits import Edit
from explorer.model.errors import NotRecorded, PromptError
from explorer.vocabulary import UnknownValue
from tests.support.models import PROMPT, ids, specimen

SOURCE = "qwen3_5_moe_text"


@pytest.fixture(scope="module")
def model():
    return specimen(SOURCE)


@pytest.fixture(scope="module")
def rec(model):
    return model.record(PROMPT)


def answered(error: type, description: str, ask) -> None:
    with pytest.raises(error) as caught:
        ask()
    message = str(caught.value)
    assert description in message and "\n" not in message and len(message) < 300, message


@pytest.mark.parametrize(
    ("prompt", "description"),
    [
        (None, "A prompt is a text"),
        ([1.5], "A prompt is a text"),
        ([[1, 2], [3]], "A prompt is a text"),
        (b"abc", "A prompt is a text"),
        ([-1], "Token ids of this model run from 0 to"),
        ([10**9], "Token ids of this model run from 0 to"),
        (torch.zeros(0, 3, dtype=torch.long), "The prompt is empty"),
        ([[]], "The prompt is empty"),
        (torch.tensor([1, 2]).to_sparse(), "dense tensor"),
        (torch.zeros(1, 3, dtype=torch.long, device="meta"), "meta device, which keeps no numbers"),
        ({"input_ids": [1]}, 'give its ["input_ids"]'),
    ],
)
def test_a_prompt_that_is_none(model, prompt, description):
    answered(PromptError, description, lambda: model.record(prompt, values=["logits"]))


def test_what_a_tokenizer_returns_is_not_yet_a_prompt(model):
    answered(
        PromptError,
        'give its ["input_ids"]',
        lambda: model.record(model.tokenizer(PROMPT), values=["logits"]),
    )
    given = model.tokenizer(PROMPT)["input_ids"]
    assert torch.equal(
        model.record(given, values=["logits"])["logits"],
        model.record(PROMPT, values=["logits"])["logits"],
    )


def test_shapes_alone_run_on_a_model_without_weights():
    shapes = load(f"specimen:{SOURCE}", weights=False)
    assert shapes.record(torch.zeros(1, 3, dtype=torch.long, device="meta"), ["logits"])[
        "logits"
    ].shape[:2] == (1, 3)


@pytest.mark.parametrize("values", [3, [None], [b"logits"], ["logits", 4], object()])
def test_values_that_are_no_names(model, values):
    answered(
        ValueError, "values is a list of value names", lambda: model.record(PROMPT, values=values)
    )


@pytest.mark.parametrize("layers", ["0", [0.5], [None], True, slice(0, 2), [[0]], ["a"]])
def test_layers_that_are_no_numbers(model, layers):
    answered(
        ValueError,
        "layers is a list of block numbers (blocks 0 to 3)",
        lambda: model.record(PROMPT, values=["decays"], layers=layers),
    )


def test_no_layers_at_all(model):
    answered(
        ValueError, "layers is empty", lambda: model.record(PROMPT, values=["decays"], layers=[])
    )


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
    answered(
        ValueError,
        "unavailable",
        lambda: model.record(PROMPT, values=(name for name in ["decays"]), layers=[3]),
    )


@pytest.mark.parametrize(
    ("edits", "description"),
    [
        (zero_head(0, 1), "edits is a list of edits"),
        (None, "edits is a list of edits"),
        ({}, "edits is a list of edits"),
        (["x"], "An edit is an Edit"),
        ([lambda x: x], "An edit is an Edit"),
        ([Edit("layer_input", 0, 3)], "An edit is an Edit"),
        ([Edit("layer_input", "0", lambda x: x)], "on a block given by its number"),
    ],
)
def test_edits_that_are_none(model, edits, description):
    answered(ValueError, description, lambda: model.record(PROMPT, values=["logits"], edits=edits))


@pytest.mark.parametrize("make", [zero_head, ablate_expert])
@pytest.mark.parametrize("index", ["a", 1.0, None])
def test_a_head_or_expert_that_is_no_number(make, index):
    answered(ValueError, "given by its number", lambda: make(0, index))


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
    answered(NotRecorded, 'with a block for a value of one: rec["decays", 0]', lambda: rec[key])
    assert key not in rec


def test_a_recording_is_walked_through_by_name_and_block(rec):
    assert list(rec) == list(rec.values) and all(key in rec for key in rec)
    answered(UnknownValue, "nearest are decays", lambda: rec.layers("decay"))
    assert rec.why("decays", 0) == "decays was recorded."


@pytest.mark.parametrize("layer", [9, -5, "0", None, 0.5])
def test_a_block_that_a_recording_has_not(rec, layer):
    said = f"There is no block {layer!r}: this recording has blocks 0 to 3."
    for ask in (
        rec.recurrent,
        rec.addends,
        rec.replay,
        rec.state_norms,
        lambda layer: rec.state(layer, 0, 0),
        lambda layer: list(rec.states(layer, 0)),
    ):
        answered(NotRecorded, said, lambda ask=ask: ask(layer))


def test_blocks_counted_from_the_end(rec):
    assert rec.addends(-1) == rec.addends(3) and rec.recurrent(-4) == "linear_attn"
    assert torch.equal(rec.state_norms(-4), rec.state_norms(0))


@pytest.mark.parametrize(
    ("head", "token", "description"),
    [
        ("a", 0, "A head is given by its number"),
        (0, "a", "A token is given by its number"),
        (0, 0.5, "A token is given by its number"),
        (99, 0, "head 99"),
        (0, 99, "token 99"),
    ],
)
def test_a_state_of_no_head_or_token(rec, head, token, description):
    answered(ValueError, description, lambda: rec.state(0, head, token))


def test_a_long_wrong_thing_is_cut_in_the_sentence(model):
    answered(ValueError, "…", lambda: model.record(PROMPT, values=[list(range(1000))]))
    assert re.search(r"blocks 0 to 3", model.record(ids(model), ["logits"]).why("decays"))
