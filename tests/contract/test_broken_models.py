"""Models broken on purpose: the invariants that must fail do."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from builder.__main__ import main
from builder.commands import check as command
from explorer import load
from explorer.checkpoints import load as loading
from explorer.contract import check
from explorer.contract.checks import INVARIANTS, order
from explorer.contract.comparisons import Comparisons, difference
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.report import Check, Report
from explorer.discovery.hook_point import get_element
from explorer.engine.nnsight_api import STATE
from explorer.model.host_values import HostValues
from explorer.model.printout import printout
from explorer.model.served_values import ServedValues

BOTH = ("", " (bfloat16)")


def failing(report: Report) -> set[tuple[str, str]]:
    """The failed checks as (name, last part of the host)."""
    return {(each.name, each.host.rpartition(".")[2]) for each in report.failures}


def checked(model, name: str, host: str) -> Comparisons:
    """The comparisons that one invariant makes on one host of a model."""
    invariant = next(each for each in INVARIANTS if each.name == name)
    subject = ModelUnderTest(model)
    in_float32 = subject.dtype == torch.float32
    compare = Comparisons(invariant.float32 if in_float32 else invariant.bfloat16 or 0.0)
    invariant.run(subject, host, compare)
    return compare


def failing_on(model, host: str) -> set[str]:
    """The invariants that fail on one host of a model, in its dtype."""
    subject = ModelUnderTest(model)
    return {
        each.name
        for each in INVARIANTS
        if host in each.hosts
        and (subject.dtype == torch.float32 or each.bfloat16 is not None)
        and subject.has(host)
        and each.reason_against(subject, host) is None
        and not checked(model, each.name, host).passed
    }


def test_a_block_that_adds_half_its_addend():
    def halved(block, hidden_states, **kwargs):
        mixed, _ = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **kwargs)
        middle = hidden_states + mixed
        return middle + 0.5 * block.mlp(block.post_attention_layernorm(middle))

    model = load("specimen:llama")
    state = model.hf.model.layers[1].__dict__[STATE]
    state.body = state.original = halved
    assert not checked(model, "a block adds what its parts return", "layers").passed
    addends = checked(model, "addends", "layers")
    assert not addends.passed and "block 1" in addends.detail and "tolerance" in addends.detail


@pytest.mark.slow
def test_a_place_at_another_argument(monkeypatch):
    def swapped(model):
        anatomy = discover(model)
        for block in anatomy.blocks:
            hook_points = block.hosts["self_attn"].hook_points
            (keys,), (values,) = hook_points["attention_keys"], hook_points["attention_values"]
            hook_points["attention_keys"] = (replace(keys, element=values.element),)
            hook_points["attention_values"] = (replace(values, element=keys.element),)
        return anatomy

    discover = loading.discover
    monkeypatch.setattr(loading, "discover", swapped)
    broken = {
        ("scores are scaled products", "self_attn"),
        ("probabilities mix values", "self_attn"),
    }
    assert failing(check(load("specimen:qwen3_moe"))) == {
        (name + mark, host) for name, host in broken for mark in BOTH
    }


def test_a_place_in_another_module(monkeypatch):
    def moved(model):
        anatomy = discover(model)
        for block in anatomy.blocks:
            # The norm of the whole block stands in for that of its MLP.
            hook_points = block.hosts["layers"].hook_points
            hook_points["mlp_input"] = hook_points["layer_mid"]
        return anatomy

    discover = loading.discover
    monkeypatch.setattr(loading, "discover", moved)
    for dtype in (torch.float32, torch.bfloat16):
        model = load("specimen:llama", dtype=dtype)
        assert not checked(model, "norm output is the next input", "layers").passed


def test_a_tap_whose_writes_do_not_land():
    model = load("specimen:llama")
    exchange = model.taps._exchange_by_name

    def without_what_changed(*args):
        exchange(*args)

    model.taps._exchange_by_name = without_what_changed
    for name in (
        "writes reach the model",
        "edits are position-exact",
        "zero a head",
        "gradients flow",
    ):
        assert not checked(model, name, "self_attn").passed, name
    assert not checked(model, "layer_mid is the stream", "layers").passed


@pytest.mark.slow
def test_a_router_that_weighs_otherwise_than_it_scores():
    model = load("specimen:qwen3_moe")
    gate = model.hf.model.layers[2].mlp.gate
    gate.register_forward_hook(
        lambda module, args, output: (output[0], output[1] * 1.01, output[2])
    )
    report = check(model)
    assert failing(report) == {("weights from scores", "mlp")}
    assert "block 2" in report.failures[0].detail and report.failures[0].worst == pytest.approx(
        0.01, rel=0.1
    )


@pytest.mark.slow
def test_decays_and_write_strengths_mistaken_for_each_other(monkeypatch):
    def swapped(model):
        anatomy = discover(model)
        for block in anatomy.blocks:
            hook_points = block.hosts["linear_attn"].hook_points
            if hook_points:
                hook_points["decays"], hook_points["betas"] = (
                    hook_points["betas"],
                    hook_points["decays"],
                )
        return anatomy

    discover = loading.discover
    monkeypatch.setattr(loading, "discover", swapped)
    both = ("replay", "states", "implied attention", "decays")
    once = ("replays follow edits", "states are causal", "decoding equals one forward")
    for dtype, wrong in ((torch.float32, {*both, *once}), (torch.bfloat16, {*both})):
        model = load("specimen:qwen3_5_moe_text", dtype=dtype)
        assert failing_on(model, "linear_attn") == wrong


@pytest.mark.slow
def test_a_read_that_waits_for_the_next_step(monkeypatch):
    monkeypatch.setattr(HostValues, "_has_passed", lambda self, mediator, location: False)
    model = load("specimen:llama")
    assert failing(check(model)) == {
        ("late reads are refused", host) for host in ("model", "layers[i]", "self_attn", "mlp")
    }
    assert order.WRONG_STEP in order.late_reads(ModelUnderTest(model)).values()


def test_values_that_are_not_snapshots(monkeypatch):
    def aliased(self, name, address):
        return get_element(self.raw, address.hook_point) if self.native else self.raw[name]

    model = load("specimen:llama")
    model.hf.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output.mul_(0.5)
    )
    monkeypatch.setattr(ServedValues, "copy_of", aliased)
    assert not checked(model, "snapshots", "mlp").passed


@pytest.mark.slow
def test_an_invariant_that_raises_is_one_failed_check(monkeypatch):
    model = load("specimen:llama")

    def steer(*args, **kwargs):
        raise RuntimeError("the wheel came off")

    monkeypatch.setattr(model, "steer", steer)
    (failed,) = check(model).failures
    assert failed.name == "steer" and "RuntimeError: the wheel" in failed.detail


def test_a_final_norm_that_is_another_module():
    model = load("specimen:llama")
    assert checked(model, "names", "model").passed
    model.__dict__["norm"] = model.layers[2].input_layernorm
    comparisons = checked(model, "names", "model")
    assert not comparisons.passed and "norm: " in comparisons.detail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alias", "other", "words"),
    [
        ("router", "experts", "indices that the router"),
        ("shared_experts", "act_fn", "stream"),
        ("experts", "shared_experts", "expert indices"),
    ],
)
def test_a_part_of_a_mixture_that_is_another_module(alias, other, words):
    model = load("specimen:qwen3_next")
    assert checked(model, "a mixture's parts", "mlp").passed
    mlp = model.layers[1].mlp
    mlp.__dict__[alias] = mlp.experts.act_fn if other == "act_fn" else getattr(mlp, other)
    comparisons = checked(model, "a mixture's parts", "mlp")
    assert not comparisons.passed and words in comparisons.detail


def test_a_printout_that_shows_a_value_under_the_wrong_host(monkeypatch):
    model = load("specimen:qwen3_next")
    assert checked(model, "printout", "model").passed
    shown = printout(model)
    line = next(line for line in shown.splitlines() if "(attention_scores) ->" in line)
    other = next(line for line in shown.splitlines() if "(decays) ->" in line)
    monkeypatch.setattr(
        "explorer.model.language_model.printout",
        lambda model: shown.replace(line + "\n", "").replace(other, f"{other}\n{line}"),
    )
    comparisons = checked(model, "printout", "model")
    assert {failure.partition(":")[0] for failure in comparisons.failures} == {
        "block 3, self_attn",
        *(f"block {layer}, linear_attn" for layer in range(3)),
    }


def test_nothing_to_compare_is_not_listed():
    subject = ModelUnderTest(load("specimen:llama"))
    against = {each.name: each.reason_against(subject, each.hosts[0]) for each in INVARIANTS}
    assert against["stream passes between blocks"] is None and against["a mixture's parts"]


def test_differences_are_relative_and_see_through_masks():
    lowest = torch.finfo(torch.float32).min
    a = torch.tensor([lowest, -torch.inf, 2.0, 4.0])
    assert difference(a, a) == 0
    assert difference(torch.tensor([lowest, -torch.inf, 2.5, 4.0]), a) == pytest.approx(0.125)
    assert not difference(torch.tensor([torch.nan]), torch.tensor([1.0])) <= 1


def test_comparisons_report_the_first_failure():
    comparisons = Comparisons(tolerance=0.1)
    comparisons.close(0, torch.ones(2), torch.ones(2))
    assert comparisons.passed and re.match(r"1 \w+ on block 0; .*0\.1", comparisons.detail)
    comparisons.close((2, "betas"), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
    comparisons.close(3, torch.ones(2), torch.ones(3))
    comparisons.equal(None, torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not comparisons.passed and comparisons.worst == 1.0
    assert (
        comparisons.detail
        == "2 of 4 comparisons failed; the first: block 2, betas: relative error 1, tolerance 0.1"
    )
    assert not Comparisons().passed  # nothing compared proves nothing


@pytest.mark.slow
def test_the_table_of_a_family(capsys):
    assert command.check_families(["llama"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama: ") and "0 failed" in out and "model.layers[i].self_attn" in out
    assert re.search(r"\n\d+ passed, 0 failed, \d+ not applicable$", out.rstrip())


def test_failures_come_first_and_say_what_was_to_hold():
    good = Check("names", "model", "Names are names.", True, "3 comparisons")
    bad = Check(
        "addends",
        "model.layers[i]",
        "Things add up.",
        False,
        "1 of 2 failed; first block 1: " + "words " * 30,
        0.5,
    )
    lines = command.table("llama", Report.of([good, bad]), 100).splitlines()
    assert lines[0] == "llama: 1 passed, 1 failed, 0 not applicable"
    assert lines[1].startswith("FAILED  addends") and lines[-1].startswith("passed  names")
    assert "Things add up." in "\n".join(lines) and max(map(len, lines)) <= 100


def test_a_failure_is_the_exit_code(monkeypatch, capsys):
    report = Report.of([Check("names", "model", "Names are names.", False, "1 of 1 failed", None)])
    monkeypatch.setattr(command, "_report", lambda family: report)
    assert command.check_families(["llama"], as_json=True) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["failed"] == 1 and data["families"]["llama"] == report.to_json()


def test_an_unknown_family_is_one_sentence(capsys):
    assert main(["check", "lama"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "llama" in err


def test_a_damaged_specimen_leaves_the_others_checked(monkeypatch, capsys):
    def proven(family):
        if family == "llama":
            raise ValueError("llama.safetensors is damaged.")
        return Report.of([Check("names", "model", "Names are names.", True, "1 comparison", None)])

    monkeypatch.setattr(command, "_report", proven)
    assert command.check_families(["llama", "qwen3_moe"]) == 1
    out, err = capsys.readouterr()
    assert "qwen3_moe: 1 passed" in out and "llama.safetensors" in err
