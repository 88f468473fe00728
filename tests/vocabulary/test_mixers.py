"""Every kind of mixer is complete: what its record names is there, in every room that reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from explorer.contract.checks import INVARIANTS
from explorer.traits.catalogue import BY_NAME
from explorer.vocabulary import BY_HOST, HOSTS, LAYOUTS, MIXERS, RecordWhen, register, resolve
from explorer.widgets.palette import ROLES, role_of

KINDS = pytest.mark.parametrize("kind", MIXERS.values(), ids=list(MIXERS))
RECURRENCES = pytest.mark.parametrize(
    "kind",
    [kind for kind in MIXERS.values() if kind.recurrent],
    ids=[host for host, kind in MIXERS.items() if kind.recurrent],
)


@KINDS
def test_what_a_record_names_is_there(kind):
    for entry_point in (kind.finder, kind.kernel_values, kind.steps, kind.implied_attention):
        assert entry_point is None or callable(resolve(entry_point))
    host, values = HOSTS[kind.host], BY_HOST[kind.host]
    assert host.mixer and host.recurrent == kind.recurrent
    assert role_of(kind.host) == kind.role in ROLES
    assert all(value.host == kind.host and value.layout in LAYOUTS for value in kind.values)
    assert "attention_output" in values
    assert values["attention_output"].recorded is RecordWhen.NEEDED
    assert {*kind.replayed} <= set(values)
    assert kind.trait is None or kind.trait in BY_NAME
    assert "conv_input" not in values or {*kind.conv_feeds} <= set(values)


@RECURRENCES
def test_a_recurrence_can_be_found_replayed_and_shown(kind):
    values = BY_HOST[kind.host]
    assert kind.finder and kind.kernel_values and kind.steps and kind.implied_attention
    assert kind.title and kind.trait and kind.rule and all(kind.rule)
    assert kind.replayed[-1] == "state_input"
    assert {"attention_head_outputs", "state_output", "state_attention"} <= set(values)
    assert all(values[name].recorded is RecordWhen.NEEDED for name in kind.replayed)
    shown = kind.state_view
    assert shown is not None and shown.retained in kind.replayed
    assert shown.written is None or values[shown.written].low == 0
    assert kind.reset_gate is None or kind.reset_gate in kind.replayed


@RECURRENCES
def test_the_contract_holds_a_recurrence_to_its_replay(kind):
    checked = {invariant.name for invariant in INVARIANTS if kind.host in invariant.hosts}
    wanted = {"replay", "replays follow edits", "implied attention", "writes reach the model"}
    assert wanted <= checked


def test_kernels_of_equal_arguments_are_distinguished():
    kernels = [kind.kernel for kind in MIXERS.values() if kind.kernel is not None]
    assert len({(frozenset(kernel.takes), kernel.dims) for kernel in kernels}) == len(kernels)


def test_a_kind_is_registered_once():
    with pytest.raises(ValueError, match="already"):
        register(MIXERS["ssd"])


@pytest.mark.slow
def test_a_new_kind_is_found_recorded_replayed_and_checked_by_the_contract():
    """The toy kind of the guide, in a process of its own: it is registered before other imports."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.leaky_mixer"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["mixers"] == [["leaky_sum"]] * 3
    assert result["failed"] == []
    assert {"replay", "implied attention", "decays", "decoding equals one forward"} <= set(
        result["checked"]
    )
