"""Parts found by structure, what stays open where a run shows nothing, runs without a trace."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from explorer.accounting import counts as accounting
from explorer.accounting.cache_probe import measure_cache, probe_cache
from explorer.meta_device import build_meta
from explorer.specimens.small import small_config
from tests.support.configs import small


class Odd(nn.Module):
    """A made-up model that runs, under names that say nothing."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three, self.four = (
                nn.LayerNorm(8),
                nn.Module(),
                nn.Module(),
                nn.Linear(8, 8, bias=False),
            )
            self.two.within = Odd.Keeps()
            self.two.out = nn.Linear(8, 8, bias=False)
            self.three.pile, self.three.pick, self.three.always = (
                Odd.Pile(),
                nn.Linear(8, 5, bias=False),
                nn.Linear(8, 8),
            )

        def forward(self, x, cache):
            x = x + self.two.out(self.two.within(self.one(x), cache))
            chosen = self.three.pick(x).topk(3).indices
            return (
                x + self.three.pile(x, chosen.flatten(0, 1)) + self.three.always(x) + self.four(x)
            )

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x, cache):
            keys, values = (
                part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.a, self.b)
            )
            cache.update(keys, values, 0)
            return x

    class Pile(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.zeros(5, *size)) for size in ((8, 6), (6, 8)))

        def forward(self, x, chosen):
            return x

    def __init__(self):
        super().__init__()
        self.table, self.pieces, self.last = (
            nn.Embedding(11, 8),
            nn.ModuleList([Odd.Block()]),
            nn.Linear(8, 11, bias=False),
        )
        self.config = AutoConfig.for_model(
            "llama",
            num_hidden_layers=1,
            vocab_size=11,
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=2,
            pad_token_id=0,
        )
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def forward(self, input_ids, cache, use_cache):
        return self.last(self.pieces[0](self.table(input_ids), cache))

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.last


def test_parts_do_not_go_by_names():
    counted = accounting.parameters(Odd())
    assert {row["part"]: (row["count"], row["active"]) for row in counted["by_part"]} == {
        "embedding": (88, 88),
        "head": (88, 88),
        "attention": (192, 192),
        "router": (40, 40),
        "routed experts": (5 * 96, 3 * 96),
        "shared expert": (72, 72),
        "dense mlp": (64, 64),
        "norms": (16, 16),
    }


def test_undetected_experts_leave_the_active_count_unknown():
    """Tokens are sent to something here that is built unlike any experts known."""
    model = Odd()
    model.pieces[0].three.pile.up, model.pieces[0].three.pile.down = (
        nn.Parameter(torch.zeros(30, 8)) for _ in range(2)
    )
    counted = accounting.parameters(model)
    assert counted["active"] is None and counted["total"] == sum(
        p.numel() for p in model.parameters()
    )
    assert "routed experts" not in [row["part"] for row in counted["by_part"]]


def test_without_a_run_parts_are_not_guessed():
    class Stuck(Odd):
        def forward(self, input_ids, cache, use_cache):
            raise RuntimeError("no")

    counted = accounting.parameters(Stuck())
    assert {row["part"]: row["count"] for row in counted["by_part"]} == {
        "embedding": 88,
        "head": 88,
        "router": 40,
        "routed experts": 480,
        "shared expert": 72,
        "norms": 16,
        "other": 192 + 64,
    }
    assert counted["active"] is None  # nor does anything say how many a token chooses


def test_a_run_leaves_the_model_as_it_was():
    model = build_meta(small_config("recurrent_gemma"))
    padding = model.config.pad_token_id
    blocks = [
        block.temporal_block
        for block in model.model.layers
        if hasattr(block.temporal_block, "rg_lru")
    ]
    seen = probe_cache(model)
    assert [one.shape[1:] for one in seen.owners[0].tensors] == [
        (64, 3),
        (64,),
    ] and padding is not None
    assert all(
        block.conv1d_state is None and block.rg_lru.recurrent_states is None for block in blocks
    )
    assert model.config.pad_token_id == padding
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


REPEATING = (
    "gemma2",
    "deepseek_v3",
    "nemotron_h",
    "falcon_h1",
    "recurrent_gemma",
    "gemma3n_text",
    "dory",
)


@pytest.mark.parametrize("family", REPEATING)
def test_blocks_of_equal_structure_run_once_with_equal_results(family):
    """A deeper model, where blocks repeat: those of gemma3n_text need earlier ones, and dory goes
    round in loops.
    """
    deep = {"gemma2": 8, "deepseek_v3": 8, "falcon_h1": 5, "recurrent_gemma": 9}
    model = build_meta(
        small_config(family, **({"num_hidden_layers": deep[family]} if family in deep else {}))
    )
    run = probe_cache(model)
    batch = run.owners[0].tensors[0].shape[0]
    whole = measure_cache(model, run.tokens, batch)
    assert (run.owners, run.slots) == (whole.owners, whole.slots)
    assert len(run.owners) >= len({owner.layer for owner in run.owners}) > 1


def test_a_block_left_out_is_not_run():
    model = build_meta(small_config("mixtral", num_hidden_layers=6))
    ran = []
    for layer, block in enumerate(model.model.layers):
        block.mlp.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
    assert [owner.layer for owner in probe_cache(model).owners] == list(range(6)) and len(ran) < 6
    ran.clear()
    measure_cache(model, 3)
    assert ran == list(range(6)) and all(
        "forward" not in vars(block) for block in model.model.layers
    )


def test_a_real_model_is_counted_without_being_run():
    model = build_meta(small_config("gpt2")).to_empty(device="cpu")
    model.forward = None  # a run of it would fail
    assert accounting.parameters(model)["active"] == sum(p.numel() for p in model.parameters())


def test_build_meta():
    config = small("qwen3_next")
    before = json.dumps(config.to_dict(), default=str)
    model = build_meta(config, dtype=torch.float32, experts_implementation="eager")
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float32)}
    assert not model.training
    assert (
        model.config._attn_implementation == "eager"
        and model.config._experts_implementation == "eager"
    )
    assert json.dumps(config.to_dict(), default=str) == before
    with pytest.raises(ValueError, match="t5"):
        build_meta(AutoConfig.for_model("t5"))
