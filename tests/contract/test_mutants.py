"""Mutants: what stands near a value in the forward is told from the value by the contract."""

from __future__ import annotations

import pytest
import torch

from builder.__main__ import main
from explorer.contract import mutation
from explorer.contract.mutants import mutants_of
from tests.support.models import specimen


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "mamba2"])
def test_no_mutant_of_a_value_survives_the_contract(family):
    report = mutation.mutate(specimen(family))
    assert len(report.outcomes) > 50 and report.same > 0
    assert not report.survivors, [one.mutant.description for one in report.survivors]


def test_mutants_are_the_neighbours_with_the_same_axes():
    mutants = mutants_of(specimen("gpt_oss"))
    read_at = {
        (one.key, one.point.module.rpartition(".")[2], one.point.side)
        for one in mutants
        if one.point is not None and one.layer == 0
    }
    # A norm's input for its output, another addend, another block's own.
    assert ("layers.attention_norm_output", "0", "input") in read_at
    assert ("self_attn.attention_output", "mlp", "output") in read_at
    assert any(
        one.key == "self_attn.attention_sinks" and ".layers.0." not in one.point.module
        for one in mutants
        if one.point is not None and one.layer == 0
    )
    # Values that are integers have no neighbours among numbers.
    assert all(
        one.point.description != "argument hidden_states of the block"
        for one in mutants
        if one.name == "expert_indices"
    )


@pytest.mark.parametrize(
    ("family", "without", "value"),
    [
        ("llama", "norm output is the next input", "layers.mlp_norm_output"),
        ("llama", "activation", "mlp.mlp_activation"),
        ("mamba2", "convolution", "ssd.conv_input"),
    ],
)
def test_mutants_survive_a_contract_that_lacks_an_invariant(monkeypatch, family, without, value):
    fewer = tuple(one for one in mutation.INVARIANTS if one.name != without)
    monkeypatch.setattr(mutation, "INVARIANTS", fewer)
    survivors = {one.mutant.key for one in mutation.mutate(specimen(family)).survivors}
    assert value in survivors


def test_a_model_is_as_before_when_its_mutants_were_made():
    model = specimen("llama")
    ids = torch.tensor([[1, 2, 3]])
    before = model.record(ids, ["logits"])["logits"]
    mutation.mutate(model)
    with torch.no_grad(), model.trace(ids):
        logits = model.logits.save()
    assert torch.equal(logits, before)


def test_the_command_prints_shares_by_value_and_by_invariant(capsys):
    assert main(["mutate", "mamba2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("mamba2: ") and "(100.0%)" in printed
    assert "ssd.conv_input" in printed and "by invariant:" in printed and "convolution " in printed
