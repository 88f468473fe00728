"""Forwards that look at numbers are followed on the meta device, at any size."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from explorer import load
from explorer.discovery.discover import discover
from explorer.known_numbers import KnownNumbers
from explorer.meta_device import build_meta
from explorer.specimens.small import small_config


def test_what_follows_from_shapes_and_constants_is_known():
    with KnownNumbers():
        positions = torch.arange(6, device="meta").view(2, 3)
        assert (positions.max() + 1).item() == 6 and (positions >= 0).all()
        assert (positions > 2).nonzero().tolist() == [[1, 0], [1, 1], [1, 2]]
        masked = torch.empty(2, 3, 4, device="meta")[positions > 3]
        assert masked.shape == (2, 4) and masked.device.type == "meta"
        positions += 1
        assert positions[1].tolist() == [4, 5, 6]


def test_what_follows_from_weights_is_not():
    weights = torch.empty(3, device="meta")
    with KnownNumbers():
        with pytest.raises((NotImplementedError, RuntimeError)):
            weights.sum().item()
        with pytest.raises((NotImplementedError, RuntimeError)):
            (weights > 0).nonzero()
        known = torch.zeros(3, device="meta")
        view = known[1:]
        view.copy_(weights[1:])  # from here on neither is known
        with pytest.raises((NotImplementedError, RuntimeError)):
            known.sum().item()


@pytest.mark.parametrize(("dim", "shape"), [(-1, (4, 2)), (0, (2, 6))])
def test_a_choice_by_unknown_numbers_is_made_up(dim, shape):
    """Each row's indices differ and are indices of what is chosen from."""
    with KnownNumbers():
        _, chosen = torch.empty(4, 6, device="meta").topk(2, dim=dim)
        counts = torch.nn.functional.one_hot(chosen, 6).sum(dim).amax()
        rows = chosen.movedim(dim, -1).tolist()
        assert chosen.shape == shape and counts.item() == 1
    size = 6 if dim == -1 else 4
    assert all(len(set(row)) == 2 and max(row) < size for row in rows)


def test_a_released_size_is_followed():
    """Which experts run is a number, and the blocks are of 1.5 billion parameters each."""
    model = load("default:dbrx", weights=False)
    assert model.hf.num_parameters() > 10**9
    rows = model.support(0)
    assert rows["router_logits"].available and rows["attention_scores"].available
    assert model.sizes["hidden_size"] == model.hf.config.d_model


@pytest.mark.parametrize(
    "config",
    [
        lambda: LlamaConfig(
            hidden_size=768,
            num_hidden_layers=8,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        ),
        lambda: small_config(
            "qwen2", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
        lambda: small_config("dbrx"),
    ],
    ids=["dynamic rotary", "dynamic rotary, small", "experts by number"],
)
def test_a_forward_that_asks_for_numbers_is_followed_without_them(config):
    anatomy = discover(build_meta(config()))
    assert {sublayer.host for sublayer in anatomy.block(0).sublayers} == {"self_attn", "mlp"}
    assert anatomy.blocks_skippable
