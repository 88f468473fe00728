"""What is read of an attention does not depend on its implementation, the pattern apart."""

from __future__ import annotations

from functools import cache

import pytest
from torch.testing import assert_close

from explorer import load
from explorer.discovery.discover import discover
from explorer.meta_device import build_meta
from explorer.specimens.small import small_config
from explorer.vocabulary.availability import ReasonKind
from tests.support.models import PROMPT, specimen

#: What only an attention that computes its probabilities as a tensor has.
PATTERN = {"attention_scores", "attention_probabilities"}

#: Of values without weights, what every attention in these has.
ARGUMENTS = {
    f"attention_{name}"
    for name in ("queries", "keys", "values", "head_outputs", "premix", "output")
}


@cache
def fused(family: str):
    return load(f"specimen:{family}", attn_implementation="sdpa")


@pytest.mark.parametrize(
    "family",
    [
        "falcon",  # calls torch's kernel in its own forward
        "gpt_bigcode",  # one head of keys and values
        "zamba2",  # an attention that feeds a mixer
        pytest.param("zamba", marks=pytest.mark.slow),
        pytest.param("llama", marks=pytest.mark.slow),
    ],
)
def test_a_fused_attention_lacks_the_pattern_alone(family):
    """Hosts, values and their numbers are the same."""
    eager, other = specimen(family), fused(family)
    assert other.mixers == eager.mixers
    for row, same in zip(other.support(), eager.support(), strict=True):
        if row.name in PATTERN and same.available:
            assert not row.available
            kinds = {reason.kind for reason in row.reasons.values()}
            assert ReasonKind.NEEDS_SETTING in kinds and "eager" in str(row.condition)
        else:
            assert row.available == same.available
            assert {**row.reasons} == {**same.reasons}
    names = sorted({row.name for row in other.support() if row.host == "self_attn"} - PATTERN)
    names = [name for name in names if other.support()[name].available]
    a, b = other.record(PROMPT, names), eager.record(PROMPT, names)
    assert a.values.keys() == b.values.keys()
    for key, tensor in a.values.items():
        assert_close(tensor, b[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{}, {"new_decoder_architecture": True, "num_kv_heads": 2}, {"alibi": True}],
    ids=["one head of keys", "grouped heads", "bias by position"],
)
def test_a_kernel_called_in_the_forward_has_its_arguments_served(changes):
    """As in eager, keys and values are those before they are repeated."""
    config = small_config("falcon", **changes)
    of = {
        name: discover(build_meta(config, attn_implementation=name)).block(0).hosts["self_attn"]
        for name in ("eager", "sdpa")
    }
    assert of["sdpa"].hook_points.keys() == of["eager"].hook_points.keys() - PATTERN
    assert of["sdpa"].hook_points.keys() >= ARGUMENTS
    assert of["sdpa"].sizes == of["eager"].sizes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_flex_attention_is_followed_in_shapes(family):
    """It runs on no meta device, and says of the pattern that it needs another implementation."""
    config = small_config(family)
    of = {
        name: discover(build_meta(config, attn_implementation=name))
        for name in ("eager", "flex_attention")
    }
    eager, flex = (of[name].block(0).hosts["self_attn"] for name in of)
    assert flex.hook_points.keys() == eager.hook_points.keys() - PATTERN >= ARGUMENTS
    assert {flex.missing[name].kind for name in PATTERN} == {ReasonKind.NEEDS_SETTING}
    assert of["flex_attention"].blocks_skippable == of["eager"].blocks_skippable
