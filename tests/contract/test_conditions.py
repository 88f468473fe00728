"""Conditions on how a model is loaded, and values under packages with kernels of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from explorer import load
from explorer.model.support import CONDITIONS

#: Stand-ins for flash-linear-attention and causal-conv1d: kernels for tensors of some devices only.
FLA = """
DEVICES = {devices}

def chunk_gated_delta_rule(q, k, v, g=None, beta=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    if v.device.type not in DEVICES:
        raise RuntimeError(f"this kernel does not run on {{v.device.type}}")
    from explorer.recurrence import delta_rule as recurrence
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    outputs, state = recurrence.delta_rule(q, k, v, g, beta, state=initial_state)
    return outputs.to(v.dtype), state if output_final_state else None

fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
"""
CONV = """
def causal_conv1d_fn(x, weight, bias=None, activation=None):
    raise RuntimeError("this kernel runs on CUDA tensors alone")

def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None):
    raise RuntimeError("this kernel runs on CUDA tensors alone")
"""


def served(**options) -> set[str]:
    return {row.name for row in load("specimen:qwen3_next", **options).support() if row.available}


def test_conditions_are_what_another_way_of_loading_loses():
    everything = served()
    fused = served(attn_implementation="sdpa")
    loop = served(experts_implementation="eager")
    assert served(experts_implementation="batched_mm") == everything
    assert (everything - fused) | (everything - loop) == set(CONDITIONS)
    assert all('attn_implementation="eager"' in CONDITIONS[name] for name in everything - fused)
    assert all(
        'experts_implementation="grouped_mm"' in CONDITIONS[name] for name in everything - loop
    )


def beside(packages: dict[str, str], folder: Path, code: str) -> str:
    """What some code prints in a process of its own that finds these packages installed."""
    for name, text in packages.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


STATES = {
    "state_input",
    "state_output",
    "state",
    "states",
    "state_attention",
    "decays",
    "betas",
    "conv_input",
}


@pytest.mark.slow
def test_shapes_are_found_where_kernels_are_installed_that_run_on_a_gpu_alone(tmp_path):
    out = beside(
        {"fla": FLA.format(devices={"cuda"}), "causal_conv1d": CONV},
        tmp_path,
        """
import torch
import explorer
from explorer import load
model = load("specimen:qwen3_next", weights=False)
rows = [row for row in model.support() if row.host == "linear_attn" and row.available]
print(*[row.name for row in rows])
print(*[row.condition for row in rows if row.condition])
ids = torch.zeros(1, 7, dtype=torch.long)
states, logits = model.record(ids, ["states"], layers=[0]), model.record(ids, ["logits"])
print(*states["states", 0].shape[:2], *logits["logits"].shape[:2])
with model.trace(ids):
    state = model.layers[0].linear_attn.state_output.save()
print(state.device.type)
""",
    )
    names, conditions, shapes, device = out.splitlines()
    assert set(names.split()) >= STATES and not conditions
    assert shapes == "1 7 1 7" and device == "meta"


@pytest.mark.slow
def test_values_are_read_at_the_kernel_that_is_installed(tmp_path):
    out = beside(
        {"fla": FLA.format(devices={"cpu"})},
        tmp_path,
        """
import explorer
from explorer import load
from explorer.contract.checks import INVARIANTS
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.comparisons import Comparisons
subject = ModelUnderTest(load("specimen:qwen3_next"))
for invariant in INVARIANTS:
    if invariant.name in ("replay", "states", "implied attention", "decoding equals one forward"):
        compare = Comparisons(invariant.float32)
        invariant.run(subject, "linear_attn", compare)
        print(invariant.name, compare.passed or compare.detail, sep=": ")
""",
    )
    assert sorted(out.splitlines()) == [
        "decoding equals one forward: True",
        "implied attention: True",
        "replay: True",
        "states: True",
    ]
