"""Why a value is not there, as data."""

from __future__ import annotations

import pytest

from explorer.vocabulary.availability import (
    ReasonKind,
    Unavailability,
    most_informative,
    needs_setting,
    not_in_block,
    not_present,
    not_traced,
)
from tests.support.models import specimen


def test_the_most_informative_reason_is_given():
    by_rank = [
        not_traced("it is not followed"),
        needs_setting("another kernel runs"),
        not_present("it has none"),
        not_in_block("no such part"),
    ]
    for rank, reason in enumerate(by_rank):
        assert most_informative(reversed(by_rank[rank:])) == reason.text
    assert most_informative([]) not in {reason.text for reason in by_rank}


def test_a_reason_reads_as_its_sentence():
    reason = not_present("this block has one sublayer")
    assert f"unavailable: {reason}." == f"unavailable: {reason.text}."
    assert (
        reason
        == Unavailability(ReasonKind.NOT_PRESENT, "this block has one sublayer")
        != not_traced(reason.text)
    )


@pytest.mark.parametrize(
    ("family", "value", "layer", "kind"),
    [
        ("llama", "router_logits", 0, ReasonKind.NOT_PRESENT),
        ("llama", "self_attn.attention_sinks", 0, ReasonKind.NOT_PRESENT),
        ("llama", "decays", 0, ReasonKind.NOT_IN_BLOCK),
        ("nemotron_h", "mlp_output", 0, ReasonKind.NOT_IN_BLOCK),
        ("olmo2", "attention_norm_output", 0, ReasonKind.NOT_PRESENT),
        ("gptj", "layer_mid", 0, ReasonKind.NOT_PRESENT),
    ],
)
def test_the_kind_of_a_reason_comes_from_finding(family, value, layer, kind):
    assert specimen(family).support(layer)[value].reasons[layer].kind is kind


def test_another_experts_implementation_is_advised_only_where_there_is_one():
    reason = specimen("dbrx").support(0)["expert_outputs"].reasons[0]
    assert (
        "one after another" in reason.text
        and "load" not in reason.text
        and reason.kind is ReasonKind.NOT_TRACED
    )
