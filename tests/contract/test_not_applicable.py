"""The third outcome: an invariant that says nothing of a model, with the reason."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from explorer import load
from explorer.contract import check
from explorer.contract.checks import INVARIANTS
from explorer.discovery.discover import discover
from explorer.meta_device import build_meta
from explorer.model.language_model import LanguageModel
from explorer.specimens import bpe, weights
from explorer.specimens.small import small_config


def of_options(family: str, **options) -> LanguageModel:
    """A family's small model with other options of its configuration, filled at random."""
    config = small_config(family, dtype="float32", **options)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    weights.fill(module, 0, 0.08, 0.3)
    anatomy = discover(build_meta(config))
    return LanguageModel(module, bpe.load_tokenizer(512), anatomy, family, "random, seed 0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("deepseek_v3", {}),
        ("gpt_oss", {}),
    ],
)
def test_a_single_weight_that_is_always_one_fails_nothing(family, options):
    report = check(of_options(family, num_experts_per_tok=1, **options))
    assert not report.failures, report.failures


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mamba", "minimax"])
def test_what_does_not_apply_says_why_and_is_counted_apart(family):
    report = check(load(f"specimen:{family}"))
    assert not report.failures and report.not_applicable
    assert all(one.reason.strip() for one in report.not_applicable)
    left_out = {(one.name, one.host) for one in report.not_applicable}
    assert not left_out & {(one.name, one.host) for one in report.checks}
    assert len(left_out) == len(report.not_applicable)
    assert report.to_json()["not_applicable"][0].keys() == {"name", "host", "reason"}


def test_every_condition_says_why_it_does_not_hold():
    assert [one.name for one in INVARIANTS if bool(one.when) != bool(one.otherwise)] == []


def test_a_model_without_weights_has_no_numbers():
    report = check(load("specimen:llama", weights=False))
    reasons = {one.reason for one in report.not_applicable}
    assert "a model without weights has no numbers to compare" in reasons
