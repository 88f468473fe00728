"""Loaded models that are compiled or pickled, and prompts that are bytes or numbers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from explorer.model.errors import PromptError
from tests.support.messages import refused, sentence
from tests.support.models import PROMPT, specimen


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("path", ["", "model", "model.layers.0", "model.layers.1.mlp"])
def test_a_compiled_model_is_read_uncompiled(path):
    model = copy.deepcopy(specimen("llama"))
    part = model.hf.get_submodule(path)
    part.compile()
    compiled = part._compiled_call_impl
    assert compiled is not None
    mine, plain = model.record(PROMPT), specimen("llama").record(PROMPT)
    for key, value in plain.values.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(mine[key], value), key
    with model.trace(PROMPT):
        logits = model.logits.save()
    assert torch.equal(logits, plain["logits"])
    assert part._compiled_call_impl is compiled


@pytest.mark.parametrize("keep", [pickle.dumps, copy.copy])
def test_a_model_is_not_pickled(keep):
    refused("not_pickled", lambda: keep(specimen("llama")))


def test_a_recording_is_pickled():
    run = specimen("llama").record(PROMPT, ["logits"])
    assert torch.equal(pickle.loads(pickle.dumps(run))["logits"], run["logits"])


@pytest.mark.parametrize("prompt", [b"x", bytearray(b"xy"), memoryview(b"x"), 5, 1.5, [b"x"]])
def test_bytes_and_numbers_are_no_prompt(prompt):
    model = specimen("llama")
    refused("no_prompt", lambda: model.record(prompt))
    with pytest.raises(PromptError, match=sentence("no_prompt")):
        with model.trace(prompt):
            model.logits.save()
