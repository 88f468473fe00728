"""The vocabulary: every name means one thing, and what is near a wrong one is offered."""

from __future__ import annotations

from itertools import combinations

import pytest

from explorer import vocabulary
from explorer.vocabulary import (
    BY_HOST,
    CALL_AXES,
    HOSTS,
    LAYOUTS,
    NAMES,
    VALUES,
    UnknownValue,
    key_of,
    lookup,
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.host}.{value.name}")
def test_a_value_is_found_by_its_full_name_alone(value):
    """Kinds of mixer that a block calls alike are all meant by that name: a block has one of
    them.
    """
    found = lookup(f"{value.host}.{value.name}")
    assert value in found and {HOSTS[one.host].attribute for one in found} <= {
        HOSTS[value.host].attribute,
        value.host,
    }
    assert all(one.name == value.name for one in found) and len({one.host for one in found}) == len(
        found
    )
    assert BY_HOST[value.host][value.name] is value


def test_a_bare_name_means_every_host_but_the_shared_expert_and_a_dense_branch():
    inner = {"shared_experts", "dense_mlp"}
    for name in NAMES:
        hosts = {value.host for value in lookup(name)}
        assert hosts == {value.host for value in VALUES if value.name == name} - inner
    assert [value.host for value in lookup("shared_experts.mlp_output")] == ["shared_experts"]


def test_two_values_of_one_block_are_never_kept_under_one_key():
    """Mixers may share names: of two on a block the second's values are kept with their host. No
    other hosts may.
    """
    for first, second in combinations(VALUES, 2):
        if first.key == second.key:
            assert HOSTS[first.host].mixer and HOSTS[second.host].mixer
            pair = (first.host, second.host)
            assert key_of(first, pair) != key_of(second, pair)


def test_what_is_computed_is_not_written():
    assert all(not value.written for value in VALUES if value.derived)


def test_axes_come_from_the_call_or_are_named_like_sizes():
    for layout in LAYOUTS.values():
        assert len(set(layout.axes)) == len(layout.axes)
        for axis in layout.axes:
            assert axis in CALL_AXES or axis.isidentifier()
    assert {value.layout for value in VALUES} <= set(LAYOUTS)


def test_a_value_is_printed_with_its_layout_and_whether_it_may_be_none():
    assert BY_HOST["mlp"]["router_logits"].typed == "RouterLogits [batch seq num_experts]"
    assert (
        BY_HOST["linear_attn"]["state_input"].typed
        == "State | None [batch heads key_dim value_dim]"
    )
    assert str(LAYOUTS["Pattern"]) == "Pattern [batch num_heads query key]"


def test_every_value_has_a_meaning_and_a_host():
    for value in VALUES:
        assert value.host in HOSTS
        assert len(value.meaning) > 10 and not value.meaning.endswith(".")


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("router_logit", "router_logits"),
        ("attention_probs", "attention_probabilities"),
        ("mlp.router_logts", "router_logits"),
        ("layer_outputs", "layer_output"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(wrong, near):
    with pytest.raises(UnknownValue) as error:
        lookup(wrong)
    assert near in str(error.value) and wrong in str(error.value)


def test_a_host_that_is_none_is_answered_with_the_hosts():
    with pytest.raises(UnknownValue, match="linear_attn.*self_attn"):
        lookup("moe.router_logits")


def test_a_value_of_another_host_is_unknown():
    with pytest.raises(UnknownValue):
        lookup("self_attn.router_logits")


def test_a_name_like_nothing_still_gets_a_sentence():
    with pytest.raises(UnknownValue, match="There is no value 'zzzz'"):
        lookup("zzzz")


def test_a_derived_value_says_what_it_comes_from():
    for value in vocabulary.VALUES:
        if value.derived:
            source = vocabulary.BY_HOST[value.host][value.source]
            assert not source.derived and not value.written and value.description
        else:
            assert not value.description and (
                value.written or value.optional
            )  # what a kernel only hands over is read alone
    for mixer in vocabulary.MIXERS.values():
        assert set(mixer.replayed) < set(vocabulary.BY_HOST[mixer.host])


def test_the_vocabulary_needs_no_torch():
    """It is read by pages and tools that never build a model."""
    import subprocess
    import sys

    code = "import sys, explorer.vocabulary; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=vocabulary.__file__.rsplit("/", 3)[0]
        ).returncode
        == 0
    )
