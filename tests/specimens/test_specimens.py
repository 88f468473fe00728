"""The specimens: built alike every time, readable, small, and the trained one better than
chance.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter

import pytest
import torch

from explorer import specimens
from explorer.specimens import bpe, building, recipes, weights
from explorer.specimens.recipes import FAMILIES, recipe
from explorer.specimens.small import small_config
from explorer.specimens.training import batches, corpus, heads, measure, start, train

TRAINED = "qwen3_next"
ALL_TRAINED = ("qwen3_next", "gpt_oss")
RANDOM = tuple(family for family in FAMILIES if family not in ALL_TRAINED)

#: Whose sizes were chosen by hand, all of them apart; the others' are made by rules and told apart
#: by what finding knows.
BY_HAND = ("llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")

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


@pytest.fixture(scope="module")
def built():
    torch.set_num_threads(1)
    return {family: specimens.build(family) for family in FAMILIES}


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
        torch.equal(p, exact[name].bfloat16()) for name, p in rounded.model.named_parameters()
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
def test_sizes_tell_the_axes_apart(family):
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
def test_random_numbers_are_degenerate_nowhere(built, family):
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
    first, again = (bpe.train_tokenizer(texts, 270).get_vocab() for _ in range(2))
    assert first == again and len(first) == 270


def test_the_weights_file_is_small():
    assert recipe(TRAINED).weights.stat().st_size <= MOST_BYTES


def next_token_loss(model, ids) -> float:
    with torch.no_grad():
        return measure.next_token_losses(model, ids).mean().item()


def test_the_trained_one_reads_better_than_it_did_untrained(built):
    ids = built[TRAINED].tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    before = next_token_loss(building.untrained(TRAINED).eval(), ids)
    assert next_token_loss(built[TRAINED].model, ids) < before - 2.0


def test_the_committed_figures_are_of_the_committed_weights(built):
    specimen = built[TRAINED]
    segments = measure.random_segments(specimen.config.vocab_size, recipe(TRAINED).seed)
    with torch.no_grad():
        found = measure.repetition_figures(specimen.model, segments)
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


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("qwen3next", "qwen3_next"),
        ("lama", "llama"),
        ("mamba3", "mamba"),
        ("qwen3_5_mo", "qwen3_5_moe_text"),
    ],
)
def test_an_unknown_family_names_the_nearest(asked, nearest):
    with pytest.raises(specimens.UnknownFamily, match=f"did you mean '{nearest}'"):
        specimens.build(asked)


def test_a_family_like_no_other_lists_what_there_is():
    with pytest.raises(specimens.UnknownFamily) as caught:
        specimens.config_of("zzz")
    assert all(family in str(caught.value) for family in FAMILIES)


def test_a_model_that_is_no_decoder_is_refused_with_the_reason():
    with pytest.raises(
        specimens.UnknownFamily, match="'bart', which is the decoder half of an encoder-decoder"
    ):
        specimens.build("bart")


def test_a_family_without_a_file_is_made_by_the_rules():
    specimen = specimens.build("mamba2")
    assert specimen.weights == "random, seed 0" and specimen.prompt
    assert type(specimen.model).__name__ == recipe("mamba2").architecture == "Mamba2ForCausalLM"


def test_a_file_may_say_only_what_is_different(monkeypatch, tmp_path):
    (tmp_path / "mistral.json").write_text('{"config": {"hidden_size": 48}}')
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)
    recipe.cache_clear()
    config = specimens.config_of("mistral")
    recipe.cache_clear()
    assert (
        config.hidden_size == 48
        and config.num_attention_heads == small_config("mistral").num_attention_heads
    )


def with_weights(monkeypatch, path) -> None:
    changed = dataclasses.replace(recipe(TRAINED), weights=path)
    monkeypatch.setattr(building, "recipe", lambda family: changed)


@pytest.mark.parametrize("kept_bytes", [0, 5, 1000, 1_000_000])
def test_a_truncated_weights_file_is_one_sentence(monkeypatch, tmp_path, kept_bytes):
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(recipe(TRAINED).weights.read_bytes()[:kept_bytes])
    with_weights(monkeypatch, cut)
    with pytest.raises(
        specimens.SpecimenError, match="cut.safetensors is damaged or cut short"
    ) as caught:
        specimens.build(TRAINED)
    assert "\n" not in str(caught.value)


def test_a_missing_weights_file_is_one_sentence(monkeypatch, tmp_path):
    with_weights(monkeypatch, tmp_path / "gone.safetensors")
    with pytest.raises(specimens.SpecimenError, match="gone.safetensors is missing"):
        specimens.build(TRAINED)


def test_weights_of_another_model_are_refused(built, tmp_path):
    path = tmp_path / "other.safetensors"
    weights.save(built["llama"].model, path)
    with pytest.raises(specimens.SpecimenError, match="is of another model"):
        weights.load(built["qwen3_moe"].model, path)


def test_missing_measurements_are_said(monkeypatch, tmp_path):
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)
    with pytest.raises(
        specimens.SpecimenError, match="measured.json of a trained specimen are missing"
    ):
        specimens.build(TRAINED)


def test_training_without_the_text_is_one_sentence_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(corpus, "COMMAND", "no-such-bible")
    for program in (train.main, lambda _: bpe.main()):
        assert program([]) == 2
        assert "'no-such-bible', which is not on PATH" in capsys.readouterr().err


def test_verses_become_chapters_and_some_are_held_out():
    lines = ["Ge1:1 One.", "Ge1:2 Two.", "Ge2:1 Three."]
    assert corpus.chapters(lines) == ["One. Two.", "Three."]
    kept, held_out = corpus.split([str(i) for i in range(40)])
    assert held_out == ["10", "30"] and len(kept) == 38


def test_two_short_trainings_agree_and_learn(monkeypatch):
    monkeypatch.setattr(train, "ROWS", 2)
    stream = torch.arange(1, 40).repeat(20)
    models = [building.untrained(TRAINED) for _ in range(2)]
    notes = [train.run(model, recipe(TRAINED), stream, steps=3, threads=1) for model in models]
    assert notes[0]["tokens"] == 2 * (train.COPYING.length + 2 * train.READING.length)
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    untouched = building.untrained(TRAINED).state_dict()
    assert not torch.equal(
        first["model.layers.0.mlp.gate.weight"], untouched["model.layers.0.mlp.gate.weight"]
    )


def test_sequences_repeat_what_they_say_they_repeat():
    sampler = batches.Sampler(torch.arange(1, 1000), 2048, seed=3)
    diet = batches.Diet(length=160, text=0.0, text_twice=0.0, segment=(8, 72))
    ids, counted = sampler.batch(1, diet)
    size = int((~counted[0]).sum()) - 1
    assert torch.equal(ids[0, size:], ids[0, :-size])
    twice, _ = sampler.batch(1, dataclasses.replace(diet, text_twice=1.0))
    assert twice.unique().numel() <= 160 - 8
    text, counted = sampler.batch(4, dataclasses.replace(diet, text=1.0))
    assert counted.all() and (text.diff(dim=1) == 1).all()


def test_mutual_information_against_known_values():
    letters = torch.tensor([0, 1, 2, 3] * 250)
    assert measure.mutual_information(letters, letters) == pytest.approx(math.log(4))
    assert measure.mutual_information(letters, letters // 2) == pytest.approx(math.log(2))
    assert measure.mutual_information(letters, torch.zeros_like(letters)) == pytest.approx(
        0, abs=1e-9
    )


def test_an_even_router_has_the_least_balance_loss():
    even = torch.eye(4).repeat(5, 1) * 9
    assert train.balance_loss(even, top_k=1).item() == pytest.approx(1.0)
    assert train.balance_loss(even[:1].repeat(20, 1), top_k=1).item() > 3


def test_implied_attention_times_values_is_what_the_mixer_mixes(built):
    model = built[TRAINED].model
    mixer, seen = model.model.layers[0].linear_attn, {}
    hidden = torch.randn(
        2, 90, model.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    handle = mixer.norm.register_forward_pre_hook(lambda _, args: seen.update(mixed=args[0]))
    with torch.no_grad():
        mixer(hidden)
        matrix = heads.implied_attention(mixer, hidden)
        fused = mixer.fix_query_key_value_ordering(
            mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden)
        )[:3]
        mixed = mixer.conv1d(torch.cat([part.flatten(2) for part in fused], -1).transpose(1, 2))[
            ..., :90
        ]
    handle.remove()
    values = (
        torch.nn.functional.silu(mixed)
        .transpose(1, 2)[..., 2 * mixer.key_dim :]
        .unflatten(-1, (mixer.num_v_heads, -1))
    )
    expected = seen["mixed"].view(2, 90, mixer.num_v_heads, -1)
    torch.testing.assert_close(
        (matrix @ values.transpose(1, 2)).transpose(1, 2), expected, atol=1e-4, rtol=1e-4
    )


def test_the_starting_point_lets_a_query_meet_the_key_after_its_own_token():
    model = building.untrained(TRAINED)
    start.place(model, recipe(TRAINED).std)
    mixer = model.model.layers[0].linear_attn
    taps = mixer.conv1d.weight[:, 0]
    assert taps[: mixer.key_dim].mean(0).argmax() == 3
    assert taps[mixer.key_dim : 2 * mixer.key_dim].mean(0).argmax() == 2
    assert torch.equal(
        model.lm_head.weight * (start.EMBEDDING_STD / recipe(TRAINED).std),
        model.model.embed_tokens.weight,
    )


def test_recipes_are_plain_files_with_a_prompt():
    for family in BY_HAND:
        data = json.loads((recipes.FOLDER / f"{family}.json").read_text(encoding="utf-8"))
        assert data["prompt"] and data["config"]["model_type"] == family
