"""Records of blocks of other builds, of defaults, and of what is not known."""

from __future__ import annotations

import pytest
import torch

from explorer import load
from explorer.checkpoints import cards
from explorer.errors import LoadError
from explorer.facts import record as facts_module
from explorer.facts.record import facts
from explorer.meta_device import probe_lengths
from explorer.model.shapes import shapes
from tests.support.facts_records import drawn


@pytest.mark.slow
def test_the_shapes_are_those_of_a_forward_through_the_whole_model():
    """The run goes through no more blocks than differ; through all of them it finds the same."""
    model = load("Qwen/Qwen3-Next-80B-A3B-Instruct", weights=False)
    short = shapes(model)
    names = [row.value.key for row in model.support() if row.available and not row.value.derived]
    whole = model.record(
        torch.zeros(probe_lengths(model.hf), dtype=torch.long, device="meta"), names
    )
    assert len(model.layers) == 48 and len(short) > 40

    firsts = [block.layers[0] for block in model.anatomy.blocks]

    def told(value):
        return None if value is None else (value.shape, value.dtype)

    for row in model.support():
        where = [
            whole[row.value.key, layer]
            for layer in (row.layers or (None,))
            if (row.value.key, layer) in whole
        ]
        first = [
            told(short.get((row.host, row.name, at)))
            for at in ([None] if row.host == "model" else firsts)
            if at is None or at in row.layers
        ]
        assert not where or {told(value) for value in where} == set(first), row.name


@pytest.mark.parametrize(
    ("family", "block"),
    [
        (
            "falcon_h1",
            {
                "title": "Mamba-2 mixer beside Attention, then MLP",
                "hosts": {"ssd", "self_attn", "mlp"},
                "stages": [0, 0, 1],
                "mid": 1,
                "identity": (
                    "layers[i].input + mixer.attention_output + "
                    "self_attn.attention_output + mlp.mlp_output == layer_output"
                ),
                "norms": [
                    ("input_layernorm", False),
                    ("input_layernorm", True),
                    ("pre_ff_layernorm", False),
                ],
            },
        ),
        (
            "cohere",
            {
                "title": "Attention beside MLP",
                "hosts": {"self_attn", "mlp"},
                "stages": [0, 0],
                "mid": None,
                "identity": (
                    "layers[i].input + self_attn.attention_output + mlp.mlp_output == layer_output"
                ),
                "norms": [("input_layernorm", False), ("input_layernorm", False)],
            },
        ),
        (
            "mamba",
            {
                "title": "Mamba mixer",
                "hosts": {"selective_scan"},
                "stages": [0],
                "mid": None,
                "identity": "layers[i].input + mixer.attention_output == layer_output",
                "norms": [("norm", False)],
            },
        ),
        (
            "opt",
            {  # its MLP is part of the block's own forward
                "title": "Attention, then MLP",
                "hosts": {"self_attn", "mlp"},
                "stages": [0, 1],
                "mid": 1,
                "identity": (
                    "layers[i].input + self_attn.attention_output + mlp.mlp_output == layer_output"
                ),
                "norms": [("self_attn_layer_norm", False), ("final_layer_norm", False)],
            },
        ),
        (
            "zamba",
            {
                "title": "Mixer",
                "hosts": {"mixer"},
                "stages": [0],
                "mid": None,
                "identity": "layers[i].input + mixer.attention_output == layer_output",
                "norms": [("input_layernorm", False)],
            },
        ),
    ],
)
def test_blocks_of_other_builds_are_described_as_they_are(family, block):
    found = drawn(family)["blocks"][0]
    assert (
        found["title"] == block["title"]
        and found["identity"] == block["identity"]
        and found["mid"] == block["mid"]
    )
    assert set(found["hosts"]) == block["hosts"]
    assert [sub["stage"] for sub in found["sublayers"]] == block["stages"]
    assert [(sub["norm"]["module"], sub["norm"]["scaled"]) for sub in found["sublayers"]] == block[
        "norms"
    ]


def test_a_block_that_norms_its_stream_says_so_in_its_identity():
    found = drawn("openai-gpt")["blocks"][0]
    assert found["identity"] == (
        "layers[i].ln_2(layers[i].ln_1(layers[i].input + self_attn.attention_output) "
        "+ mlp.mlp_output) == layer_output"
    )
    assert [step["kind"] for step in found["stream"]] == ["add", "norm", "add", "norm"]
    assert found["sublayers"][1]["norm"]["on_stream"]


def test_a_model_whose_caches_are_not_known_says_why(monkeypatch):
    def unknown(model):
        raise ValueError("nobody asked")

    monkeypatch.setattr("explorer.accounting.counts.cache_sizes", unknown)
    found = facts("gpt2")
    assert found["caches"] == [] and found["caches_unknown"] == "nobody asked"


def test_default_sizes_come_without_weights():
    with pytest.raises(LoadError, match="weights=False.*specimen:apertus"):
        load("default:apertus")
    with pytest.raises(ValueError, match="did you mean 'apertus'"):
        load("default:apertu", weights=False)


def test_a_checkpoint_of_another_family_is_refused():
    with pytest.raises(ValueError, match="qwen3_next.*llama"):
        facts("llama", "Qwen/Qwen3-Next-80B-A3B-Instruct")
    with pytest.raises(cards.UnknownCheckpoint, match="did you mean"):
        facts("llama", "Qwen/Qwen3-Nxt-80B-A3B-Instruct")


def test_two_mixers_of_a_block_have_their_own_shapes():
    found = {
        (row["host"], row["name"]): row["shape"]["numbers"]
        for row in facts_module.anatomy(load("specimen:falcon_h1"))["values"]
    }
    model = load("specimen:falcon_h1")
    heads, mixer = model.layers[0].self_attn, model.layers[0].mixer
    assert found["model.layers[i].self_attn", "attention_queries"] == [
        "B",
        heads.num_heads,
        "S",
        heads.qk_head_dim,
    ]
    assert found["model.layers[i].mixer", "attention_queries"] == [
        "B",
        "S",
        mixer.heads,
        mixer.key_dim,
    ]


@pytest.mark.slow
def test_kinds_of_blocks_with_other_widths_have_their_own_numbers():
    model = load("specimen:gemma4_text")
    row = next(
        row for row in facts_module.anatomy(model)["values"] if row["name"] == "attention_keys"
    )
    found = {
        layer: other["numbers"][-1] for other in row["shape"]["others"] for layer in other["layers"]
    }
    run = model.record("In the beginning", values=["attention_keys"])
    for layer in row["layers"]:
        assert (
            found.get(layer, row["shape"]["numbers"][-1]) == run["attention_keys", layer].shape[-1]
        )
    assert set(found.values()) - {row["shape"]["numbers"][-1]}
