"""Signatures: what the inferred types of whole families say, and that they hold on models that were
not probed."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from builder.__main__ import main
from explorer import specimens
from explorer.meta_device import build_meta
from explorer.signature import NoSignature, recorded, signature
from explorer.signature.block_kinds import block_list, few_blocks
from explorer.signature.observation import observe
from explorer.signature.probes import Probes
from explorer.signature.probing import probe
from explorer.signature.resizable import ResizableModel
from explorer.signature.sizes import figures
from explorer.signature.text import text
from explorer.signature.types import Types
from explorer.specimens.small import small_config
from tests.support.models import shapes, specimen
from tests.support.signatures import FIRST, MORE, signed


@cache
def probed(family: str) -> tuple[Probes, Types]:
    module = shapes({**FIRST, **MORE}[family]).hf
    config, _, _ = few_blocks(module, block_list(module))
    probes = probe(ResizableModel(config, type(module)))
    return probes, Types.of(probes)


@pytest.mark.parametrize("family", [*FIRST, *MORE])
def test_every_axis_resolves(family):
    found = signed(family)["resolved"]
    assert (
        found["unresolved"] == []
        and found["resolved"] == found["axes"] > 300
        and 3 <= found["probes"] < 12
    )


@pytest.mark.parametrize("family", FIRST)
def test_types_hold_on_a_model_of_other_sizes_that_was_not_probed(family):
    """The specimen's sizes, which have nothing to do with those of the probes."""
    probes, types = probed(family)
    module = build_meta(specimens.config_of(family))
    config, _, _ = few_blocks(module, block_list(module))
    numbers = figures(config)
    sizes = {name: numbers[key] for name, key in probes.model.keys.items() if key in numbers} | {
        "B": 5,
        "S": 14,
        "Past": 14,
    }
    seen = observe(build_meta(config), 5, 14, products=True)
    common = types.by_site.keys() & seen.keys()
    assert len(common) > 0.9 * len(types.by_site)
    for site in common:
        assert [axis.value(sizes) for axis in types.by_site[site].axes] == list(seen[site].shape), (
            site
        )


@pytest.mark.parametrize("family", [*FIRST, *MORE])
def test_parameters_have_the_numbers_of_the_model(family):
    module = shapes({**FIRST, **MORE}[family]).hf
    checked = 0
    for block in signed(family)["blocks"]:
        for path in block["paths"]:
            for part in block["parameters"]:
                if part["type"]["numbers"] is not None:
                    assert (
                        list(getattr(module.get_submodule(path), part["name"]).shape)
                        == part["type"]["numbers"]
                    ), (path, part)
                    checked += 1
    assert checked > 3


@pytest.mark.parametrize("family", FIRST)
def test_values_have_the_rows_and_blocks_that_support_has(family):
    model = shapes(FIRST[family])
    rows: dict[str, set[int]] = {}
    for row in signed(family)["values"]:
        rows.setdefault(f"{row['host']}.{row['name']}", set()).update(row["layers"])
    from explorer.vocabulary import HOSTS

    wanted = {
        f"{HOSTS[row.host].path}.{row.name}": set() if row.host == "model" else set(row.layers)
        for row in model.support()
        if row.available
    }
    assert rows == wanted


def test_a_sliding_window_caps_what_is_kept():
    sliding, full = signed("gemma2")["cache"]
    assert sliding["tensors"][0]["after_prefill"]["dims"] == [
        "B",
        "KvHeads",
        "min(S, -1 + Window)",
        "HeadDim",
    ]
    assert sliding["tensors"][0]["after_prefill"]["numbers"] == ["B", 4, "min(S, 4095)", 256]
    assert full["tensors"][0]["after_prefill"]["dims"] == ["B", "KvHeads", "S", "HeadDim"]


def test_a_size_that_follows_from_others_is_told_apart_from_them():
    """The rotary width of latent attention is one size under two keys of the configuration."""
    probes, _ = probed("deepseek_v3")
    dependent = {name: str(expression) for name, expression in probes.dependent.items()}
    assert dependent.pop("HeadDim") == "RopeDim"
    # Latent attention has as many heads of keys as of queries, and no tensor shows them.
    assert dependent in ({}, {"KvHeads": "Heads"})
    (attention,) = [
        one for one in signed("deepseek_v3")["blocks"] if one["class"] == "DeepseekV3Attention"
    ]
    bound = {sub["name"]: sub["arguments"] for sub in attention["submodules"]}
    assert bound["kv_a_proj_with_mqa"] == ["Hidden", "RopeDim + Latent"] and bound["kv_b_proj"] == [
        "Latent",
        "Heads * NopeDim + Heads * VDim",
    ]


@pytest.mark.parametrize("family", FIRST)
def test_every_axis_that_is_more_than_a_name_is_listed_with_its_number(family):
    found = signed(family)
    names = {row["name"]: row["number"] for row in found["generics"]} | {
        name: name for name in found["variables"]
    }
    types = [row["type"] for row in found["values"]] + [
        part["type"] for one in found["blocks"] for part in one["parameters"] + one["buffers"]
    ]
    seen = set()
    for one in types:
        for axis, number in zip(one["dims"], one["numbers"] or (), strict=False):
            assert axis.isdigit() or {**found["axes"], **names}[axis] == number, axis
            seen.add(axis)
    assert not found["axes"].keys() & names.keys() and seen - names.keys()
    bound = {
        text for one in found["blocks"] for sub in one["submodules"] for text in sub["arguments"]
    }
    assert all(text.isdigit() or text in names or text in found["axes"] for text in bound)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("google/gemma-2-2b", "google/gemma-2-27b"),
        ("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.5-397B-A17B"),
        ("openai-community/gpt2", "openai-community/gpt2-xl"),
    ],
)
def test_types_of_another_checkpoint_are_those_of_its_own_probes(first, second):
    """Types that were inferred for one checkpoint and hold for the next are taken; the result is as
    if they had not been."""
    model, known = shapes(second), []
    fresh = signature(model)
    signature(shapes(first), known)
    taken = signature(model, known)
    assert (
        len(known) == 1
        and taken["resolved"].pop("looks") == 1
        and fresh["resolved"].pop("looks") is None
    )
    assert taken == fresh


@pytest.mark.slow
def test_types_are_not_taken_where_a_figure_is_missing():
    """Of the two, one has queries that are projected down first."""
    known = []
    signature(shapes("deepseek-ai/DeepSeek-V3"), known)
    assert (
        signature(shapes("moonshotai/Moonlight-16B-A3B"), known)["resolved"]["looks"] is None
        and len(known) == 2
    )


def small(**changes) -> torch.nn.Module:
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return build_meta(LlamaConfig(**sizes | changes))


def test_only_what_holds_is_taken_from_another_model():
    """Where no more than sizes differ; not where a flag does, by which a matrix is shared or biases
    are tensors of their own, nor where figures that follow do not."""
    known = []
    first, wider = (
        signature(small(), known),
        signature(small(hidden_size=96, vocab_size=120), known),
    )
    assert len(known) == 1, "taken"
    assert first["costs"]["parameters"]["number"] == sum(
        one.numel() for one in small().parameters()
    )
    assert wider["costs"]["parameters"]["by_part"][0]["number"] == 96 * 120
    assert (first["resolved"]["looks"], wider["resolved"]["looks"]) == (None, 1)
    signature(small(tie_word_embeddings=False), known)
    assert len(known) == 2, "not taken"
    biased = signature(small(attention_bias=True), known)
    assert len(known) == 3, "not taken"
    assert biased["costs"]["parameters"]["number"] == sum(
        one.numel() for one in small(attention_bias=True).parameters()
    )
    assert [
        "bias" in [part["name"] for part in one["parameters"]]
        for one in biased["blocks"]
        if one["class"] == "Linear"
    ].count(True) == 1


@pytest.mark.slow
def test_types_are_held_to_the_whole_model():
    """What shows with more blocks alone: a table with columns for each of them, and a stream that
    goes on in another dtype."""
    model = shapes("default:gemma4_text")
    found = signature(model)
    table = next(
        one for one in found["blocks"] if "embed_tokens_per_layer" in " ".join(one["paths"])
    )
    assert "HiddenSizePerLayerInput * Layers" in str(
        found["axes"]
    ) or "Layers * HiddenSizePerLayerInput" in str(found["axes"])
    assert (
        model.hf.model.embed_tokens_per_layer.weight.shape[1] in found["axes"].values()
        and table["parameters"]
    )
    assert found["costs"]["parameters"]["number"] == sum(
        one.numel() for one in model.hf.parameters()
    )
    mixed = {
        row["name"]: row["type"]["dtype"] for row in signature(shapes("default:mamba2"))["values"]
    }
    assert mixed["layer_input"] == "bfloat16|float32" and mixed["layer_output"] == "float32"


@pytest.mark.slow
def test_what_a_cache_does_not_hold_is_no_zero():
    """A state that a family keeps in a way of its own is not left out of what is kept: nothing is
    said of it."""
    for family in ("rwkv", "minimax"):
        assert "not known" in signature(specimen(family))["costs"]["cache"]["unknown"]


def test_a_signature_is_plain_json():
    found = signed("qwen3_next")
    assert json.loads(json.dumps(found)) == found


def test_a_class_whose_forward_looks_at_numbers_is_run_with_some():
    """How often its loop over experts multiplies is up to the tokens' choice, and keeps no size
    from changing."""
    found = signature(build_meta(small_config("dbrx")))
    assert found["resolved"]["resolved"] == found["resolved"]["axes"] > 100
    assert found["resolved"]["fixed"] == found["resolved"]["unresolved"] == []
    assert "6 * Hidden * TopK * Inner * Layers" in found["costs"]["flops"]["formula"]


def test_what_has_no_list_of_blocks_is_refused_in_a_sentence():
    from torch import nn

    with pytest.raises(NoSignature, match="Linear has no signature here"):
        signature(nn.Linear(2, 2))
    assert "has no signature here" in recorded(nn.Linear(2, 2))["unknown"]


def test_inspect_prints_symbols_and_numbers(capsys):
    assert main(["inspect", "llama"]) == 0
    symbols = capsys.readouterr().out
    assert (
        "param weight: bf16[Vocab, Hidden]" in symbols
        and "forward(input_ids: i64[B, S]) -> logits: bf16[B, S, Vocab]" in symbols
    )
    assert "keys: bf16[B, KvHeads, S, HeadDim], then bf16[B, KvHeads, 1 + Past, HeadDim]" in symbols
    assert main(["inspect", "llama", "--block", "LlamaMLP", "--numbers"]) == 0
    assert capsys.readouterr().out == (
        "LlamaMLP  (blocks 0–29)\n"
        "  sub gate_proj: Linear<Hidden, Inner>\n"
        "  sub up_proj: Linear<Hidden, Inner>\n"
        "  sub down_proj: Linear<Inner, Hidden>\n"
        "  sub act_fn: SiLUActivation\n"
        "  fn forward(x: bf16[B, S, 576]) -> bf16[B, S, 576]\n"
        "  fn decode(x: bf16[B, 1, 576]) -> bf16[B, 1, 576]\n"
        "  value mlp_activation: bf16[B, S, 1536]\n"
        "  value mlp_neurons: bf16[B, S, 1536]\n"
        "  value mlp_output: bf16[B, S, 576]\n"
    )


def test_the_whole_text_names_what_is_unresolved():
    found = dict(
        signed("llama"),
        resolved={
            "axes": 3,
            "resolved": 2,
            "probes": 7,
            "fixed": [],
            "unresolved": [{"at": "x.weight", "axis": 0, "number": 7}],
        },
    )
    assert text(found).endswith(
        "2 of 3 axes resolved in 7 probes\n  not resolved: axis 0 of x.weight, 7"
    )


@pytest.mark.parametrize(
    ("words", "description"),
    [
        (["inspect", "lama"], "lama"),
        (["inspect", "/nowhere"], "nothing at /nowhere"),
        (["inspect", "llama", "--block", "LlamaMlp"], "it has LlamaForCausalLM, LlamaModel"),
    ],
)
def test_bad_words_get_one_sentence_and_exit_2(words, description, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(words) == 2
    err = capsys.readouterr().err
    assert description in err and err.count("\n") == 1 and "Traceback" not in err
