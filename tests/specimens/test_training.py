"""What a specimen may be asked for, damaged files, and how specimens are trained."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from explorer import specimens
from explorer.specimens import building, recipes, weights
from explorer.specimens.recipes import FAMILIES, recipe
from explorer.specimens.small import small_config
from explorer.specimens.training import (
    batches,
    corpus,
    head_metrics,
    initial_weights,
    metrics,
    tokenizer,
    train,
)
from tests.support.specimen_helpers import (
    BY_HAND,
    TRAINED,
    built,  # noqa: F401  fixtures
)


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


def test_a_family_with_no_similar_name_lists_the_known_ones():
    with pytest.raises(specimens.UnknownFamily) as caught:
        specimens.config_of("zzz")
    assert all(family in str(caught.value) for family in FAMILIES)


def test_a_model_that_is_no_decoder_is_refused_with_the_reason():
    with pytest.raises(specimens.UnknownFamily, match="'bart', .*encoder-decoder"):
        specimens.build("bart")


def test_a_family_without_a_file_is_made_by_the_rules():
    specimen = specimens.build("mamba2")
    assert specimen.weights == "random, seed 0" and specimen.prompt
    assert type(specimen.model).__name__ == recipe("mamba2").architecture == "Mamba2ForCausalLM"


def test_a_recipe_may_hold_only_differences_from_the_defaults(monkeypatch, tmp_path):
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


@pytest.mark.parametrize("size", [0, 5, 1000, 1_000_000])
def test_a_truncated_weights_file_is_one_sentence(monkeypatch, tmp_path, size):
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(recipe(TRAINED).weights.read_bytes()[:size])
    with_weights(monkeypatch, cut)
    with pytest.raises(specimens.SpecimenError, match="cut.safetensors .*damaged") as caught:
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


def test_missing_measurements_are_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)
    with pytest.raises(specimens.SpecimenError, match="measured.json"):
        specimens.build(TRAINED)


def test_training_without_the_text_is_one_sentence_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(corpus, "COMMAND", "no-such-bible")
    for program in (train.main, lambda _: tokenizer.main()):
        assert program([]) == 2
        assert "'no-such-bible'" in capsys.readouterr().err


def test_verses_become_chapters_and_some_are_held_out():
    lines = ["Ge1:1 One.", "Ge1:2 Two.", "Ge2:1 Three."]
    assert corpus.chapters(lines) == ["One. Two.", "Three."]
    trained_on, held_out = corpus.split_held_out([str(i) for i in range(40)])
    assert held_out == ["10", "30"] and len(trained_on) == 38


@pytest.mark.slow
def test_two_short_trainings_agree_and_learn(monkeypatch):
    monkeypatch.setattr(train, "BATCH_SIZE", 2)
    stream = torch.arange(1, 40).repeat(20)
    models = [building.untrained(TRAINED) for _ in range(2)]
    notes = [
        train.train_from_scratch(model, recipe(TRAINED), stream, steps=3, threads=1)
        for model in models
    ]
    assert notes[0]["tokens"] == 2 * (train.COPY_PHASE.length + 2 * train.TEXT_PHASE.length)
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    untouched = building.untrained(TRAINED).state_dict()
    assert not torch.equal(
        first["model.layers.0.mlp.gate.weight"], untouched["model.layers.0.mlp.gate.weight"]
    )


def test_repeated_segments_and_passages_are_repeated():
    sampler = batches.BatchSampler(torch.arange(1, 1000), 2048, seed=3)
    mix = batches.SequenceMix(
        length=160, text_share=0.0, repeated_text_share=0.0, segment_lengths=(8, 72)
    )
    ids, predictable = sampler.batch(1, mix)
    size = int((~predictable[0]).sum()) - 1
    assert torch.equal(ids[0, size:], ids[0, :-size])
    twice, _ = sampler.batch(1, dataclasses.replace(mix, repeated_text_share=1.0))
    assert twice.unique().numel() <= 160 - 8
    text, predictable = sampler.batch(4, dataclasses.replace(mix, text_share=1.0))
    assert predictable.all() and (text.diff(dim=1) == 1).all()


def test_mutual_information_against_known_values():
    letters = torch.tensor([0, 1, 2, 3] * 250)
    assert metrics.mutual_information(letters, letters) == pytest.approx(math.log(4))
    assert metrics.mutual_information(letters, letters // 2) == pytest.approx(math.log(2))
    assert metrics.mutual_information(letters, torch.zeros_like(letters)) == pytest.approx(
        0, abs=1e-9
    )


def test_an_even_router_has_the_least_balance_loss():
    even = torch.eye(4).repeat(5, 1) * 9
    assert train.balance_loss(even, top_k=1).item() == pytest.approx(1.0)
    assert train.balance_loss(even[:1].repeat(20, 1), top_k=1).item() > 3


def test_implied_attention_times_values_is_what_the_mixer_computes(built):
    model = built[TRAINED].model
    mixer, seen = model.model.layers[0].linear_attn, {}
    hidden = torch.randn(
        2, 90, model.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    handle = mixer.norm.register_forward_pre_hook(lambda _, args: seen.update(mixed=args[0]))
    with torch.no_grad():
        mixer(hidden)
        matrix = head_metrics.implied_attention(mixer, hidden)
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


def test_initial_queries_match_the_keys_one_token_later():
    model = building.untrained(TRAINED)
    initial_weights.prepare(model, recipe(TRAINED).std)
    mixer = model.model.layers[0].linear_attn
    taps = mixer.conv1d.weight[:, 0]
    assert taps[: mixer.key_dim].mean(0).argmax() == 3
    assert taps[mixer.key_dim : 2 * mixer.key_dim].mean(0).argmax() == 2
    assert torch.equal(
        model.lm_head.weight * (initial_weights.EMBEDDING_STD / recipe(TRAINED).std),
        model.model.embed_tokens.weight,
    )


def test_recipes_are_plain_files_with_a_prompt():
    for family in BY_HAND:
        data = json.loads((recipes.FOLDER / f"{family}.json").read_text(encoding="utf-8"))
        assert data["prompt"] and data["config"]["model_type"] == family
