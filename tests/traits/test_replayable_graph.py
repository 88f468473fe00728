"""Traits that options take away, values run again, and the catalogue."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from explorer import load
from explorer.discovery.discover import discover
from explorer.meta_device import build_meta
from explorer.model.language_model import LanguageModel
from explorer.specimens import bpe, config_of
from explorer.specimens.small import small_config
from explorer.traits import catalogue, traits
from explorer.traits.probe import ModelProbe
from explorer.traits.replayable_graph import NoNumbers, recorded
from tests.support.traits_helpers import found


def of(family: str, **changes) -> dict[str, str]:
    """The traits of a small model with other figures."""
    model = build_meta(small_config(family, **changes))
    return found(LanguageModel(model, bpe.load_tokenizer(100), discover(model), family, "none"))


FULL = ["full_attention"] * 3


@pytest.mark.slow
def test_a_window_that_no_block_uses_is_no_trait():
    assert "sliding_window" not in of(
        "qwen3", use_sliding_window=False, sliding_window=6, num_hidden_layers=3, layer_types=FULL
    )
    assert "the last 7 tokens" in of("mistral", sliding_window=7)["sliding_window"]
    some = of(
        "gemma2",
        sliding_window=9,
        num_hidden_layers=3,
        layer_types=["sliding_attention", *FULL[1:]],
    )
    assert (
        "block 0 of 3, " in some["sliding_window"]
        and "last 9 tokens" in some["sliding_window"]
        and "2 of 3 blocks" in some["mixed_window"]
    )


def test_a_multiplier_of_one_and_a_group_of_one_are_no_traits():
    plain = of(
        "granite",
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_scaling=1.0,
        attention_multiplier=16**-0.5,
    )
    assert not {
        "embedding_multiplier",
        "residual_multiplier",
        "logits_multiplier",
        "attention_multiplier",
    } & set(plain)
    one = of("deepseek_v3", n_group=1, topk_group=1, routed_scaling_factor=1.0)
    assert not {"expert_groups", "routed_factor"} & set(one) and "selection_bias" in one


@pytest.mark.slow
def test_activations_are_recognised_by_their_values():
    names = {
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "quick_gelu": "quick_gelu",
        "relu": "relu",
        "relu2": "relu_squared",
        "tanh": "other",
    }
    for name, trait in names.items():
        assert {one for one in of("llama", hidden_act=name) if one.startswith("activation")} == {
            f"activation_{trait}"
        }


@pytest.mark.slow
def test_heads_and_biases_are_counted_on_the_model():
    assert "grouped_query" not in of("llama", num_attention_heads=4, num_key_value_heads=4)
    assert "multi_query" in of("llama", num_attention_heads=4, num_key_value_heads=1)
    biased = of("llama", attention_bias=True, mlp_bias=True)
    assert {"output_bias", "mlp_bias"} <= set(biased) and biased["qkv_bias"].startswith(
        "q_proj, k_proj and v_proj "
    )
    assert "tied_head" in of("llama", tie_word_embeddings=True) and "tied_head" not in of(
        "llama", tie_word_embeddings=False
    )


class Odd(torch.nn.Module):
    """Views written in place, a result of several tensors, a constant and a narrow dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:, :2] = x[:, 2:4] * 3
        left, right = (y + torch.arange(x.shape[1], device=x.device, dtype=torch.bfloat16)).chunk(
            2, -1
        )
        left.add_(right.mean())
        return torch.cat((right, left), -1) / torch.tensor(4.0)


def test_a_piece_run_again_gives_what_the_model_gives():
    module, results = Odd(), []
    x = torch.empty(2, 4, device="meta", dtype=torch.bfloat16)
    graph = recorded(module, lambda: results.append(module(x)))
    numbers = torch.randn(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def unknown(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type != "meta"
        return tensor

    assert_close(
        graph.replay(id(results[0]), {id(x): numbers}, unknown),
        module(numbers).double(),
        rtol=1e-12,
        atol=1e-12,
    )


def test_unknown_numbers_are_not_made_up():
    probe = ModelProbe(load("specimen:llama", weights=False))
    large = torch.nn.Parameter(torch.empty(2048, 2048, device="meta"))
    for tensor in (large, torch.empty(3, device="meta")):
        with pytest.raises(NoNumbers):
            probe.numbers(tensor)


@pytest.mark.slow
def test_buffers_rebuilt_are_the_ones_a_loaded_model_has():
    for family in ("llama", "gptj", "gemma3_text", "recurrent_gemma", "mpt", "gpt_neo"):
        real = load(f"specimen:{family}")
        buffers, own = ModelProbe(real).buffers, dict(real.hf.named_buffers())
        for name in own:
            if not any(
                f".{layer}." in name for layer in range(buffers.depth, 9)
            ):  # deeper ones are not needed
                made = buffers.rebuilt(name)
                assert made is not None and torch.allclose(
                    made.double(), own[name].double(), rtol=1e-3
                ), (family, name)


def test_every_trait_is_described_in_one_line_and_has_a_group():
    names = [entry.name for entry in catalogue.ENTRIES]
    assert len(set(names)) == len(names) == len(catalogue.BY_NAME)
    assert len({entry.label for entry in catalogue.ENTRIES}) == len(names)
    for entry in catalogue.ENTRIES:
        assert (
            entry.group in catalogue.GROUPS
            and entry.meaning
            and "\n" not in entry.meaning
            and not entry.meaning.endswith(".")
        )
    assert catalogue.group_of("hybrid") == "mixer" and catalogue.group_of("unheard of") == ""


def test_traits_come_in_the_catalogues_order_with_its_words():
    order = [entry.name for entry in catalogue.ENTRIES]
    made = traits(load("specimen:gemma2", weights=False))
    names = [trait["name"] for trait in made]
    assert names == sorted(names, key=order.index)
    for trait in made:
        entry = catalogue.BY_NAME[trait["name"]]
        assert (trait["label"], trait["meaning"]) == (entry.label, entry.meaning)
        assert list(trait) == ["name", "label", "meaning", "evidence"]
    window = next(trait["evidence"] for trait in made if trait["name"] == "sliding_window")
    assert f"the last {config_of('gemma2').sliding_window} tokens" in window
