"""Why a value is not there, as data."""

from __future__ import annotations

import pytest

from explorer.vocabulary.availability import (
    Kind,
    Missing,
    absent,
    elsewhere,
    setting,
    telling,
    unfollowed,
)
from tests.support.models import specimen


def test_the_reason_that_says_most_is_told():
    by_rank = [
        unfollowed("it is not followed"),
        setting("another kernel runs"),
        absent("it has none"),
        elsewhere("no such part"),
    ]
    for rank, reason in enumerate(by_rank):
        assert telling(reversed(by_rank[rank:])) == reason.text
    assert telling([]) == "it is not on the blocks asked for"


def test_a_reason_reads_as_its_sentence():
    reason = absent("this block has one sublayer")
    assert (
        f"unavailable: {reason}." == "unavailable: this block has one sublayer."
        and str(reason) == reason.text
    )
    assert reason == Missing(Kind.ABSENT, "this block has one sublayer") != unfollowed(reason.text)


@pytest.mark.parametrize(
    "family, value, layer, kind",
    [
        ("llama", "router_logits", 0, Kind.ABSENT),
        ("llama", "self_attn.attention_sinks", 0, Kind.ABSENT),
        ("llama", "decays", 0, Kind.ELSEWHERE),
        ("nemotron_h", "mlp_output", 0, Kind.ELSEWHERE),
        ("olmo2", "attention_norm_output", 0, Kind.ABSENT),
        ("gptj", "layer_mid", 0, Kind.ABSENT),
    ],
)
def test_the_kind_of_a_reason_comes_from_finding(family, value, layer, kind):
    assert specimen(family).support(layer)[value].reasons[layer].kind is kind


def test_another_experts_implementation_is_advised_only_where_there_is_one():
    reason = specimen("dbrx").support(0)["expert_outputs"].reasons[0]
    assert (
        "one after another" in reason.text
        and "load" not in reason.text
        and reason.kind is Kind.UNFOLLOWED
    )
