"""A norm is found by what it does, whatever operations it is written in."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.llama import modeling_llama

from tests.support.models import specimen
from tests.support.tiny import tiny

IDS = torch.tensor([[5, 77, 300, 41]])
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class _Norm(torch.nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), eps


class ByRoot(_Norm):
    def forward(self, x):
        return self.weight * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class ByPower(_Norm):
    def forward(self, x):
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + self.eps) ** -0.5)


class ByReciprocal(_Norm):
    def forward(self, x):
        return self.weight * x * (1 / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps))


class ByDeviation(_Norm):
    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)


class ByFunction(_Norm):
    def forward(self, x):
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class ByLayerNorm(_Norm):
    def forward(self, x):
        return functional.layer_norm(x, (x.shape[-1],), self.weight)


class Around(_Norm):
    """A norm inside another module, which scales what it makes."""

    def __init__(self, width, eps=1e-6):
        super().__init__(width, eps)
        self.inner = ByPower(width, eps)

    def forward(self, x):
        return self.inner(x) * (1 + self.weight)


class Root(_Norm):
    """No norm: nothing is divided by the root."""

    def forward(self, x):
        return self.weight * x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def _with(norm, monkeypatch):
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", norm)
    return tiny("llama", **SIZES)


@pytest.mark.parametrize(
    "norm", [ByRoot, ByPower, ByReciprocal, ByDeviation, ByFunction, ByLayerNorm, Around]
)
def test_a_norm_is_served_in_whatever_operations_it_is_written(norm, monkeypatch):
    model = _with(norm, monkeypatch)
    run = model.record(IDS, ["layer_input", "attention_norm_output", "mlp_norm_output"])
    normed = model.hf.model.layers[0].input_layernorm(run["layer_input", 0]).detach()
    assert torch.equal(run["attention_norm_output", 0], normed)
    assert ("mlp_norm_output", 0) in run and model.anatomy.norm == "model.norm"


def test_a_module_that_multiplies_with_a_root_is_no_norm(monkeypatch):
    assert not _with(Root, monkeypatch).support()["attention_norm_output"].available


def test_the_norm_of_a_released_family_that_raises_to_a_power_is_served():
    model = specimen("gemma4_text")
    names = ["layer_input", "attention_norm_output"]
    run = model.record(IDS, names)
    for layer in range(model.num_layers):
        norm = model.hf.model.layers[layer].input_layernorm
        assert torch.equal(run[names[1], layer], norm(run[names[0], layer]).detach())
