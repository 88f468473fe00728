"""The vocabulary: every name means one thing, and what is near a wrong one is offered."""

from __future__ import annotations

from itertools import combinations

import pytest

from explorer import vocabulary
from explorer.vocabulary import BY_HOST, CALL_AXES, HOSTS, LAYOUTS, NAMES, VALUES, UnknownValue, lookup


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.host}.{value.name}")
def test_a_value_is_found_by_its_full_name_alone(value):
    assert lookup(f"{value.host}.{value.name}") == (value,)
    assert BY_HOST[value.host][value.name] is value


def test_a_bare_name_means_every_host_but_the_shared_expert():
    for name in NAMES:
        hosts = {value.host for value in lookup(name)}
        assert hosts == {value.host for value in VALUES if value.name == name} - {"shared_experts"}
    assert [value.host for value in lookup("shared_experts.mlp_output")] == ["shared_experts"]


def test_two_values_of_one_block_are_never_kept_under_one_key():
    """A block has one mixer, so the two attention hosts may share names; no other two hosts may."""
    for first, second in combinations(VALUES, 2):
        if first.key == second.key:
            assert {first.host, second.host} == {"self_attn", "linear_attn"}


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
    assert BY_HOST["linear_attn"]["state_input"].typed == "State | None [batch heads key_dim value_dim]"
    assert str(LAYOUTS["Pattern"]) == "Pattern [batch num_heads query key]"


def test_every_value_says_what_it_means_and_hangs_on_a_host():
    for value in VALUES:
        assert value.host in HOSTS
        assert len(value.meaning) > 10 and not value.meaning.endswith(".")


@pytest.mark.parametrize(("wrong", "near"), [
    ("router_logit", "router_logits"),
    ("attention_probs", "attention_probabilities"),
    ("mlp.router_logts", "router_logits"),
    ("layer_outputs", "layer_output"),
])
def test_a_misspelt_name_is_answered_with_the_nearest(wrong, near):
    with pytest.raises(UnknownValue) as error:
        lookup(wrong)
    assert near in str(error.value) and wrong in str(error.value)


def test_a_host_that_is_none_is_answered_with_the_hosts():
    with pytest.raises(UnknownValue, match="linear_attn.*self_attn"):
        lookup("moe.router_logits")


def test_a_value_asked_of_the_wrong_host_is_unknown_there():
    with pytest.raises(UnknownValue):
        lookup("self_attn.router_logits")


def test_a_name_like_nothing_still_gets_a_sentence():
    with pytest.raises(UnknownValue, match="There is no value 'zzzz'"):
        lookup("zzzz")


def test_a_derived_value_says_what_it_comes_from():
    for value in vocabulary.VALUES:
        if value.derived:
            source = vocabulary.BY_HOST[value.host][value.source]
            assert not source.derived and not value.written and value.says
        else:
            assert value.written and not value.says
    assert set(vocabulary.REPLAYED) < set(vocabulary.BY_HOST["linear_attn"])


def test_the_vocabulary_needs_no_torch():
    """It is read by pages and tools that never build a model."""
    import subprocess
    import sys

    code = "import sys, explorer.vocabulary; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=vocabulary.__file__.rsplit("/", 2)[0]).returncode == 0
