"""The specimens: reproducible, small, and the trained one better than chance."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from explorer import load, specimens
from explorer.specimens import bpe, building
from explorer.specimens.recipes import FAMILIES, recipe
from explorer.specimens.training import metrics, tokenizer
from tests.support.specimen_helpers import (
    BY_HAND,
    TRAINED,
    built,  # noqa: F401  fixtures
)

ALL_TRAINED = ("qwen3_next", "gpt_oss")


RANDOM = tuple(family for family in FAMILIES if family not in ALL_TRAINED)


#: Whose forward, called as it is, counts padding among the positions, or lets it into its state.
PADDING_COUNTS = ("gpt2", "recurrent_gemma")


MOST_BYTES = 4_000_000


MOST_ENTRIES = 2048


SENTENCE = "And the king said unto his servants, Go ye into the city, and bring the man unto me."


TEXTS = [
    "In the beginning God created the heaven and the earth.",
    "The Eiffel Tower is in the city of",
    "  two  spaces,\ttabs\r\nand lines\n\n",
    "👩🏽‍🚀 emoji 🇫🇷",
    "שלום עולם, مرحبا بالعالم",
    "e\u0301 a\u0308 \u0928\u093f combining",
    "<script>alert('&amp;')</script>",
    "\x00\x7f\ufeff\u202e",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_build_has_the_same_weights(built, family):
    again = specimens.build(family).model.state_dict()
    first = built[family].model.state_dict()
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_building_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    specimens.build("llama")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_specimen_says_what_it_is(built, family):
    specimen = built[family]
    assert specimen.weights == ("trained" if family in ALL_TRAINED else "random, seed 0")
    assert bool(specimen.measured) == (family in ALL_TRAINED)
    assert specimen.config.model_type == family
    assert type(specimen.model).__name__ == recipe(family).architecture
    assert specimen.config._attn_implementation == "eager"
    assert not specimen.model.training
    assert specimen.config.num_hidden_layers <= 4
    assert getattr(specimen.config, "max_position_embeddings", 2048) >= 2048
    assert all(p.dtype == torch.float32 for p in specimen.model.parameters())


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in PADDING_COUNTS])
def test_a_prompt_runs_and_padding_goes_left(built, family):
    specimen = built[family]
    batch = specimen.tokenizer(
        [specimen.prompt, "Let there be light"], return_tensors="pt", padding=True
    )
    assert batch["attention_mask"][1, 0] == 0 and batch["attention_mask"][:, -1].all()
    with torch.no_grad():
        padded = specimen.model(**batch).logits[1, -1]
        alone = specimen.model(
            **specimen.tokenizer("Let there be light", return_tensors="pt")
        ).logits[0, -1]
    torch.testing.assert_close(padded, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_the_same_model_rounded(built, family):
    rounded = specimens.build(family, dtype=torch.bfloat16)
    exact = dict(built[family].model.named_parameters())
    assert all(
        torch.equal(p, exact[name].to(p.dtype)) for name, p in rounded.model.named_parameters()
    )
    for name, buffer in rounded.model.named_buffers():
        if name.endswith("inv_freq"):
            assert torch.equal(buffer, built[family].model.get_buffer(name))
    with torch.no_grad():
        ids = rounded.tokenizer(rounded.prompt, return_tensors="pt")["input_ids"]
        logits = rounded.model(
            ids
        ).logits  # some return them in float32, and have rounded them before
        assert torch.equal(logits.bfloat16().to(logits.dtype), logits)


@pytest.mark.parametrize("family", ["xglm", "minimax", "openai-gpt", "deepseek_v3", "gemma2"])
def test_a_rounded_specimen_is_what_a_folder_of_its_dtype_loads_as(family, tmp_path):
    built = specimens.build(family, dtype=torch.bfloat16)
    built.model.save_pretrained(tmp_path)
    built.tokenizer.save_pretrained(tmp_path)
    folder, model = (
        load(source, dtype=torch.bfloat16) for source in (tmp_path, f"specimen:{family}")
    )
    for named in ("named_parameters", "named_buffers"):
        found, wanted = (dict(getattr(one.hf, named)()) for one in (model, folder))
        assert {name: one.dtype for name, one in found.items()} == {
            name: one.dtype for name, one in wanted.items()
        }
    logits = [one.record(built.prompt, values=["logits"])["logits"] for one in (model, folder)]
    assert logits[0].isfinite().all() and torch.equal(*logits)


def tensor_sizes(config) -> dict[str, int]:
    """The axis lengths by which layouts are told apart, of modules the family has."""
    names = ["vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += (
        ["intermediate_size"]
        if config.model_type == "llama"
        else ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
    )
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        names += [
            "shared_expert_intermediate_size",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
        ]
    return {name: getattr(config, name) for name in names}


@pytest.mark.parametrize("family", BY_HAND)
def test_sizes_distinguish_the_axes(family):
    sizes = tensor_sizes(specimens.config_of(family))
    twice = [size for size, times in Counter(sizes.values()).items() if times > 1]
    assert not twice, f"equal sizes {twice} in {sizes}"
    assert not {7, 11, 13} & set(sizes.values())


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_hybrids_have_blocks_of_both_kinds(family):
    config = specimens.config_of(family)
    assert Counter(config.layer_types) == {"linear_attention": 3, "full_attention": 1}
    assert config.linear_num_value_heads == 2 * config.linear_num_key_heads
    assert config.linear_key_head_dim != config.linear_value_head_dim


@pytest.mark.parametrize("family", RANDOM)
def test_no_random_parameter_is_constant(built, family):
    for name, parameter in built[family].model.named_parameters():
        assert parameter.unique().numel() > 1, name


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe_text"])
def test_every_expert_is_chosen_by_some_token(built, family):
    ids = torch.arange(1, 1025).view(8, 128)
    with torch.no_grad():
        routers = built[family].model(ids, output_router_logits=True).router_logits
    top_k = built[family].config.num_experts_per_tok
    for layer, logits in enumerate(routers):
        assert logits.topk(top_k, dim=-1).indices.unique().numel() == logits.shape[-1], (
            f"block {layer}"
        )


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_exactly(built, text):
    tokenizer = built["llama"].tokenizer
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer)


def test_the_vocabulary_is_small_and_fits_every_specimen(built):
    tokenizer = built["llama"].tokenizer
    assert len(tokenizer) <= MOST_ENTRIES
    assert tokenizer.bos_token is None
    assert tokenizer.eos_token == tokenizer.pad_token == bpe.END
    for specimen in built.values():
        assert specimen.config.vocab_size == len(tokenizer)
        assert (
            specimen.config.eos_token_id == specimen.config.pad_token_id == tokenizer.eos_token_id
        )


def test_the_tokenizer_learns_the_same_entries_again():
    texts = ["the cat and the hat, the rat and the bat"] * 3
    first, again = (tokenizer.train_tokenizer(texts, 270).get_vocab() for _ in range(2))
    assert first == again and len(first) == 270


def test_the_weights_file_is_small():
    assert recipe(TRAINED).weights.stat().st_size <= MOST_BYTES


def next_token_loss(model, ids) -> float:
    with torch.no_grad():
        return metrics.next_token_losses(model, ids).mean().item()


def test_the_trained_one_reads_better_than_it_did_untrained(built):
    ids = built[TRAINED].tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    before = next_token_loss(building.untrained(TRAINED).eval(), ids)
    assert next_token_loss(built[TRAINED].model, ids) < before - 2.0


@pytest.mark.slow
def test_the_committed_figures_are_of_the_committed_weights(built):
    specimen = built[TRAINED]
    segments = metrics.random_segments(specimen.config.vocab_size, recipe(TRAINED).seed)
    with torch.no_grad():
        found = metrics.repetition_metrics(specimen.model, segments)
    stated = specimen.measured["repetition"]["random"]
    assert found == pytest.approx(stated, abs=0.02)
    assert sum(p.numel() for p in specimen.model.parameters()) == specimen.measured["parameters"]


def test_the_trained_one_copies_and_routes_by_token(built):
    measured = built[TRAINED].measured
    assert measured["text"]["loss_nats_per_token"] < measured["text"]["unigram_nats_per_token"] - 1
    assert measured["router"]["mean_ratio"] >= 3
    assert measured["repetition"]["text"]["lower_by"] >= 1
    assert measured["repetition"]["random"]["lower_by"] >= 1
    for kind in ("previous_token", "induction_target"):
        assert set(measured["heads"][kind]) == {"self_attn", "linear_attn", "even_share"}
