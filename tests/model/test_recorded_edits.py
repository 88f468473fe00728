"""Edits in a recording, replayed states, progress, cancelling and errors."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.testing import assert_close

from explorer import Edit, ablate_expert, load, zero_head
from explorer.checkpoints import cards
from explorer.model.errors import Cancelled, Unavailable
from explorer.vocabulary import UnknownValue
from tests.support.messages import refused, sentence
from tests.support.models import FAMILIES, PROMPT, ids, prompt, shapes, specimen
from tests.support.recording_helpers import rec  # noqa: F401  fixtures


def test_an_edit_is_made_in_the_forward_that_is_recorded(model):
    clean = model.record(PROMPT, ["mlp_output", "expert_indices", "expert_weights", "logits"])
    expert = int(clean["expert_indices", 1][0, 2, 0])
    rec = model.record(
        PROMPT, ["mlp_output", "expert_weights", "logits"], edits=[ablate_expert(1, expert)]
    )
    chose = (clean["expert_indices", 1] == expert).any(-1)
    assert torch.equal((rec["mlp_output", 1] - clean["mlp_output", 1]).abs().amax(-1) > 1e-6, chose)
    assert torch.equal(
        rec["expert_weights", 1],
        clean["expert_weights", 1].masked_fill(clean["expert_indices", 1] == expert, 0),
    )
    assert torch.equal(rec["mlp_output", 0], clean["mlp_output", 0]) and not torch.equal(
        rec["logits"], clean["logits"]
    )
    assert rec.edits == (f"expert {expert} of block 1 off",) and clean.edits == ()


@pytest.mark.parametrize("layer", [0, 3])
def test_a_zeroed_head_adds_nothing(model, layer):
    clean = model.record(PROMPT, ["attention_head_outputs", "logits"])
    rec = model.record(
        PROMPT,
        ["attention_head_outputs", "attention_output", "logits"],
        edits=[zero_head(layer, 2)],
    )
    heads = rec["attention_head_outputs", layer]
    assert heads[:, :, 2].abs().max() == 0
    assert torch.equal(heads[:, :, :2], clean["attention_head_outputs", layer][:, :, :2])
    assert not torch.equal(rec["logits"], clean["logits"])


def test_several_edits_at_one_place_are_made_one_after_the_other(model):
    add, double = (Edit("layer_output", 1, change) for change in (lambda x: x + 1, lambda x: x * 2))
    clean = model.record(PROMPT, ["layer_output"])["layer_output", 1]
    both = model.record(PROMPT, ["layer_output"], edits=[add, double])["layer_output", 1]
    other = model.record(PROMPT, ["layer_output"], edits=[double, add])["layer_output", 1]
    assert torch.equal(both, (clean + 1) * 2) and torch.equal(other, clean * 2 + 1)


def test_an_edit_equals_the_same_edit_in_a_trace(any_model):
    layer = any_model.num_layers - 1
    rec = any_model.record(
        PROMPT, ["logits"], edits=[Edit("attention_values", layer, lambda v: v.flip(-1))]
    )
    with torch.no_grad():
        with any_model.trace(PROMPT):
            attention = any_model.layers[layer].self_attn
            attention.attention_values = attention.attention_values.flip(-1)
            logits = any_model.logits.save()
    assert torch.equal(rec["logits"], logits)


def test_an_edit_may_write_into_what_it_gets(model):
    def change(weights):
        weights[:] = 0
        return weights

    rec = model.record(
        PROMPT, ["expert_weights", "routed_output"], edits=[Edit("expert_weights", 1, change)]
    )
    assert rec["routed_output", 1].abs().max() == 0
    assert model.record(PROMPT, ["expert_weights"])["expert_weights", 1].abs().max() > 0


def test_edits_reach_the_models_own_values_and_the_shared_expert(model):
    tokens = ids(model).clone()
    tokens[:, 0] = 9
    rec = model.record(
        PROMPT,
        ["logits"],
        edits=[Edit("input_ids", None, lambda x: torch.where(torch.arange(x.shape[1]) == 0, 9, x))],
    )
    assert torch.equal(rec["logits"], model.record(tokens, ["logits"])["logits"])
    rec = model.record(
        PROMPT,
        ["shared_expert_output"],
        edits=[Edit("shared_experts.mlp_output", 0, torch.zeros_like)],
    )
    assert (
        rec["shared_expert_output", 0].abs().max() == 0
        and rec["shared_expert_output", 1].abs().max() > 0
    )


@pytest.mark.parametrize(
    ("edit", "error", "said"),
    [
        (ablate_expert(99, 0), ValueError, "no block 99"),
        (ablate_expert(1, 12), ValueError, "experts 0 to 11, not 12"),
        (ablate_expert(1, -1), ValueError, "experts 0 to 11, not -1"),
        (zero_head(1, 10), ValueError, "heads 0 to 9, not 10"),
        (Edit("router_logts", 1, torch.zeros_like), UnknownValue, "router_logits"),
        (Edit("attention_scores", 0, torch.zeros_like), Unavailable, "recurrent mixer"),
        (Edit("router_margin", 1, torch.zeros_like), Unavailable, sentence("derived")),
        (Edit("router_logits", None, torch.zeros_like), Unavailable, sentence("edit_needs_block")),
        (Edit("logits", 2, torch.zeros_like), Unavailable, sentence("edit_needs_none")),
        (
            Edit("router_logits", 1, lambda x: x[:, :1]),
            ValueError,
            sentence("edit_other_shape", given=[1, 1, 12], wanted=[1, 10, 12]),
        ),
        (
            Edit("router_logits", 1, lambda x: None),
            ValueError,
            sentence("edit_other_shape", given="NoneType"),
        ),
        (
            Edit("state_input", 0, lambda x: x),
            Unavailable,
            sentence("nothing_to_edit", name="state_input"),
        ),
    ],
)
def test_an_edit_that_cannot_be_made_is_refused_and_leaves_the_model_usable(
    model, edit, error, said
):
    before = model.record(PROMPT, ["logits"])["logits"]
    with pytest.raises(error, match=said):
        model.record(PROMPT, ["logits"], edits=[edit])
    assert not model.taps.open
    assert torch.equal(model.record(PROMPT, ["logits"])["logits"], before)


def test_an_ablation_on_a_family_without_experts_is_unavailable():
    with pytest.raises(Unavailable, match="dense"):
        specimen("llama").record(PROMPT, ["logits"], edits=[ablate_expert(1, 0)])


def test_states_are_replayed_head_by_head(hybrid):
    rec = hybrid.record(
        PROMPT,
        [
            "states",
            "state_output",
            "attention_queries",
            "attention_keys",
            "attention_values",
            "decays",
            "betas",
        ],
    )
    mix = hybrid.layers[1].linear_attn
    seq = ids(hybrid).shape[1]
    assert rec["states", 1].shape == (1, seq, mix.heads, mix.key_dim, mix.value_dim)
    for head in (0, mix.heads - 1):
        replayed = list(rec.states(1, head))
        assert len(replayed) == seq
        assert_close(torch.stack(replayed, 1), rec["states", 1][:, :, head])
        assert_close(replayed[-1], rec["state_output", 1][:, head], rtol=1e-4, atol=1e-5)
        assert_close(rec.state(1, head, 3), rec["states", 1][:, 3, head])


@pytest.mark.slow
def test_a_replay_holds_one_state_at_a_time(hybrid):
    """Thousands of tokens of one head: the memory is that of the arguments, not of the states."""
    tokens = torch.arange(3000)[None] % hybrid.vocab_size
    rec = hybrid.record(
        tokens,
        [
            "attention_queries",
            "attention_keys",
            "attention_values",
            "decays",
            "betas",
            "state_output",
        ],
        layers=[0],
    )
    refs, most, last = [], 0, None
    for state in rec.states(0, 1):
        refs.append(weakref.ref(state))
        most = max(most, sum(ref() is not None for ref in refs[-50:]))
        last = state
    one = hybrid.layers[0].linear_attn
    assert len(refs) == 3000 and most <= 3 and sum(ref() is not None for ref in refs) <= 3
    assert last.untyped_storage().nbytes() == one.key_dim * one.value_dim * 4
    assert_close(last, rec["state_output", 0][:, 1], rtol=1e-3, atol=1e-4)


def test_a_replay_needs_what_the_kernel_was_given(hybrid):
    rec = hybrid.record(PROMPT, ["decays"])
    refused("not_asked_for", lambda: next(rec.states(0, 0)), name="linear_attn.attention_queries")
    whole = hybrid.record(PROMPT)
    refused("no_recurrence", lambda: whole.replay(3), block=3, mixer="self_attn")


def test_a_head_or_token_out_of_range_is_refused(hybrid):
    rec = hybrid.record(PROMPT, layers=[0])
    refused("no_head", lambda: next(rec.states(0, 99)), head=99)
    refused("no_token", lambda: rec.state(0, 0, 99), token=99, count=10)
    assert torch.equal(rec.state(0, 1, -1), rec.state(0, 1, 9))


def test_states_are_of_each_token_whatever_follows(hybrid):
    whole, part = (
        hybrid.record(ids(hybrid)[:, :length], ["states", "state_attention"]) for length in (10, 6)
    )
    assert_close(whole["states", 0][:, :6], part["states", 0], rtol=1e-4, atol=1e-5)
    assert_close(
        whole["state_attention", 0][:, :, :6, :6], part["state_attention", 0], rtol=1e-4, atol=1e-5
    )


def test_progress_is_reported_block_by_block(model):
    seen = []
    model.record(PROMPT, ["logits"], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_cancelled_run_stops_after_the_block_and_leaves_nothing_behind(model):
    seen = []
    with pytest.raises(Cancelled):
        model.record(
            PROMPT,
            ["logits"],
            progress=lambda done, _: seen.append(done),
            cancel=lambda: len(seen) == 2,
        )
    assert seen == [1, 2] and not model.taps.open
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.hf.modules())
    assert model.record(PROMPT, ["logits"])["logits"].shape[0] == 1


def test_an_error_in_progress_or_in_an_edit_leaves_nothing_behind(model):
    def fail(*_):
        raise ZeroDivisionError

    for options in (
        {"progress": fail},
        {"edits": [Edit("router_logits", 1, fail)]},
        {"cancel": fail},
    ):
        with pytest.raises(ZeroDivisionError):
            model.record(PROMPT, ["logits"], **options)
        assert not model.taps.open
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.hf.modules())
    assert torch.equal(
        model.record(PROMPT, ["logits"])["logits"], model.record(PROMPT, ["logits"])["logits"]
    )


def test_two_models_record_side_by_side_one_with_states_one_without():
    one, other = specimen("qwen3_next"), load("specimen:qwen3_next")
    with_states = one.record(PROMPT, ["states", "logits"])
    without = other.record(PROMPT, ["logits"])
    assert torch.equal(with_states["logits"], without["logits"]) and ("states", 0) not in without
    assert other.taps.hosts["linear_attn", 0].captured == {}


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [cards.family_checkpoints(family)[0] for family in FAMILIES])
def test_a_released_size_is_recorded_for_its_shapes(checkpoint):
    model = shapes(checkpoint)
    tokens = torch.arange(14).reshape(2, 7)
    rec = model.record(tokens)
    call = {"batch": 2, "seq": 7, "query": 7, "key": 7}
    seen = set()
    for row in model.support():
        for layer in row.layers:
            if (f"{row.host}.{row.name}", layer) not in rec:
                continue
            value = rec[f"{row.host}.{row.name}", layer]
            if value is None:
                assert row.value.optional
                continue
            sizes = {**model.sizes, **model.anatomy.block(layer).hosts[row.host].sizes, **call}
            assert value.device.type == "meta" and tuple(value.shape) == tuple(
                sizes[axis] for axis in row.value.axes
            ), row.name
            seen.add((row.host, row.name))
    assert seen >= {
        (row.host, row.name) for row in model.support() if row.available and row.host != "model"
    } - {("linear_attn", "state"), ("linear_attn", "states"), ("linear_attn", "state_input")}
    assert rec["logits"].shape == (2, 7, model.vocab_size) and rec["input_size"] == (2, 7)
    assert (
        torch.equal(rec.input_ids, tokens)
        and len(rec.tokens) == 7
        and rec.weights == "none: shapes only"
    )


def test_the_specimens_prompts_are_recorded(any_model):
    rec = any_model.record(prompt(any_model.family), ["next_token_probs"])
    assert_close(rec["next_token_probs"].sum(-1), torch.ones(1))


def test_a_recording_is_shown_in_one_line(model):
    shown = repr(model.record(PROMPT, ["router_logits"]))
    assert (
        "router_logits" in shown
        and "random, seed 0" in shown
        and "\n" not in shown
        and "tensor" not in shown
    )


@pytest.mark.parametrize(
    "text",
    ["\u05e9\u05dc\u05d5\u05dd", "e\u0301 a\u0308", "\U0001f600 joy", "<script>alert(1)</script>"],
)
def test_tokens_show_the_characters_of_the_prompt(model, text):
    """A character spread over several tokens is shown on each, with which part it is."""
    import re

    tokens = model.record(text, ["input_ids"]).tokens
    assert "\ufffd" not in "".join(tokens)
    whole = [
        re.sub(r" 1/\d$", "", token) for token in tokens if not re.search(r" [234]/[234]$", token)
    ]
    assert "".join(whole) == text
