"""Loading: what can be loaded and how, and one clear sentence for everything that cannot."""

from __future__ import annotations

import shutil

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from torch.testing import assert_close

from explorer import errors, load, specimens
from explorer.checkpoints import cards
from explorer.checkpoints import load as loading
from explorer.vocabulary.formatting import ranges
from tests.support.folders import broken, no_network, not_loaded, saved  # noqa: F401  fixtures
from tests.support.messages import refused
from tests.support.models import FAMILIES, PROMPT, specimen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_specimen_loads_with_its_label(family, no_network):
    model = load(f"specimen:{family}")
    assert (
        model.label == f"specimen:{family}"
        and model.family == family
        and model.weights in ("trained", "random, seed 0")
    )
    assert next(model.hf.parameters()).dtype == torch.float32 and not model.hf.training
    assert model.hf.config._attn_implementation == "eager" and not no_network


@pytest.mark.parametrize("family", ["bloom", "xlstm", "mamba", "gpt_oss"])
def test_an_implementation_that_a_class_does_not_have(family):
    refused(
        "no_such_attention",
        lambda: load(f"specimen:{family}", attn_implementation="sdpa"),
        family=family,
    )


@pytest.mark.slow
def test_a_specimen_without_weights_is_its_shape(no_network):
    model = load("specimen:qwen3_next", weights=False)
    assert model.weights == "none: shapes only" and model.sizes == specimen("qwen3_next").sizes
    assert {p.device.type for p in model.hf.parameters()} == {"meta"} and not no_network


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoint",
    [
        card.id
        for card in cards.all_cards()
        if card.place == 1 and card.family in specimens.FAMILIES
    ],
)
def test_a_card_loads_at_its_full_size_without_the_network(checkpoint, no_network):
    model = load(checkpoint, weights=False)
    card = cards.card(checkpoint)
    assert (
        model.label == checkpoint
        and model.family == card.family
        and type(model.hf).__name__ == card.architecture
    )
    assert {p.device.type for p in model.hf.parameters()} == {"meta"}
    assert next(model.hf.parameters()).dtype == torch.bfloat16
    assert (
        model.num_layers == card.config["num_hidden_layers"]
        and model.hidden_size == card.config["hidden_size"]
    )
    assert any(row.available for row in model.support(model.num_layers - 1)) and not no_network


def test_a_dtype_is_kept():
    assert (
        next(load("specimen:llama", dtype=torch.bfloat16).hf.parameters()).dtype == torch.bfloat16
    )
    assert (
        next(load("specimen:llama", weights=False, dtype=torch.float16).hf.parameters()).dtype
        == torch.float16
    )
    not_loaded("specimen:llama", "no_such_dtype", {"dtype": "float16"}, dtype="'float16'")


def test_a_folder_loads_as_the_model_that_was_saved(saved, no_network):
    model = load(saved)
    assert (
        model.label == str(saved) and model.weights == "as found in the folder" and not no_network
    )
    mine, theirs = model.record(PROMPT), specimen("llama").record(PROMPT)
    assert set(mine.values) == set(theirs.values) and mine.tokens == theirs.tokens
    for key, value in theirs.values.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(mine[key], value), key
    with model.trace(PROMPT):
        logits = model.logits.save()
    assert_close(logits, theirs["logits"])
    assert torch.equal(load(str(saved)).record(PROMPT, ["logits"])["logits"], theirs["logits"])


def test_a_folder_loads_for_its_shapes_without_its_weights(broken):
    (broken / "model.safetensors").unlink()
    model = load(broken, weights=False)
    assert (
        model.weights == "none: shapes only"
        and model.record(PROMPT, ["logits"])["logits"].device.type == "meta"
    )
    not_loaded(broken, "no_weights", path=broken)


def test_a_folder_in_shards_loads_too(broken):
    specimen("llama").hf.save_pretrained(broken, max_shard_size="100KB")
    (broken / "model.safetensors").unlink()
    assert len(list(broken.glob("model-*.safetensors"))) > 1
    assert torch.equal(
        load(broken).record(PROMPT, ["logits"])["logits"],
        specimen("llama").record(PROMPT, ["logits"])["logits"],
    )


def test_a_folder_called_like_a_family_is_a_folder(saved, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    assert load("llama").weights == "as found in the folder"


@pytest.mark.parametrize(
    ("source", "name", "named"),
    [
        ("specimen:nothing", "no_such_family", {"family": "nothing"}),
        (
            "specimen:qwen3next",
            "no_such_family",
            {"family": "qwen3next", "hint": "did you mean 'qwen3_next'?"},
        ),
        ("specimen:", "no_such_family", {"family": ""}),
        ("llama", "bare_family", {"family": "llama"}),
        ("", "nothing_named", {}),
        ("  ", "nothing_named", {}),
        (None, "nothing_named", {}),
        (3, "nothing_named", {}),
        ("a/b/c", "no_such_card", {"name": "a/b/c"}),
        ("~nobody-of-that-name/x", "no_such_user", {"user": "nobody-of-that-name"}),
        ("x" * 5000, "name_too_long", {"count": "5,000", "start": "x" * 40}),
        ("a/" + "x" * 5000, "name_too_long", {"count": "5,002"}),
        ("/" + "x" * 300, "no_such_path", {}),
        ("x" * 300 + ".gguf", "no_such_file", {}),
    ],
)
def test_a_name_that_is_none_is_answered_with_the_nearest(source, name, named, no_network):
    not_loaded(source, name, **named)
    not_loaded(source, name, {"weights": False}, **named)
    assert not no_network


def test_a_misspelt_checkpoint_is_answered_at_once_without_a_network(no_network):
    """The downloads are looked at, the hub is asked once, and the nearest shipped id is offered."""
    misspelt, near = "Qwen/Qwen3-Nxt-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Instruct"
    for options in ({}, {"weights": False}):
        said = not_loaded(misspelt, "hub_away", options, name=misspelt)
        assert said.split("; ")[1].startswith(f"did you mean {near}")
    not_loaded("somebody/nothing-like-it", "hub_away", name="somebody/nothing-like-it", hint=".")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Qwen3-30B-A3B", "; did you mean Qwen/Qwen3-30B-A3B?"),
        ("qwen3-next-80b", "; did you mean Qwen/Qwen3-Next-80B-A3B-Instruct?"),
        ("nothing-like-it", "."),
    ],
)
def test_the_hub_has_ids_without_a_slash(name, near, hub_that_answers, no_network):
    """The first checkpoints on it have no owner in their names."""
    asked = hub_that_answers(RepositoryNotFoundError)
    for options in ({}, {"weights": False}):
        error = refused("not_on_hub", lambda options=options: load(name, **options), hint=near)
        assert repr(name) in str(error)
    assert [source for source, _ in asked] == [name, name] and not no_network


def test_a_card_asked_for_with_weights_says_how_to_have_it_without(no_network):
    not_loaded("Qwen/Qwen3-30B-A3B", "weights_away")


@pytest.fixture
def hub_that_answers(monkeypatch):
    """A hub whose one answer can be set; what it is asked is kept."""
    asked = []

    def answer(kind):
        def model_info(self, source, **options):
            asked.append((source, options))
            raise kind.__new__(kind) if isinstance(kind, type) else kind

        monkeypatch.setattr(HfApi, "model_info", model_info)
        return asked

    return answer


@pytest.mark.parametrize(
    ("answer", "name", "hint"),
    [
        (RepositoryNotFoundError, "not_on_hub", {"hint": "; did you mean Qwen/Qwen3-30B-A3B?"}),
        (GatedRepoError, "gated", {}),
        (TimeoutError(), "hub_away", {"hint": "; did you mean Qwen/Qwen3-30B-A3B?"}),
    ],
)
def test_answers_of_the_hub_become_one_sentence(answer, name, hint, hub_that_answers, no_network):
    asked = hub_that_answers(answer)
    assert "Qwen/Qwen3-30B-A3Bx" in not_loaded("Qwen/Qwen3-30B-A3Bx", name, **hint)
    assert [source for source, _ in asked] == ["Qwen/Qwen3-30B-A3Bx"] and asked[0][1][
        "timeout"
    ] <= 10


def test_a_checkpoint_among_the_downloads_needs_no_hub(saved, monkeypatch, no_network):
    """What transformers finds locally is taken as it is."""
    from transformers import PreTrainedConfig

    real = PreTrainedConfig.get_config_dict

    def downloaded(source, **options):
        return real(
            saved if source == "somebody/tiny" and options.get("local_files_only") else source,
            **options,
        )

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", downloaded)
    model = load("somebody/tiny", weights=False)
    assert (
        model.label == "somebody/tiny" and model.sizes == specimen("llama").sizes and not no_network
    )


def test_what_a_library_says_is_cut_to_its_first_sentence():
    long = "\n\nThe file is wrong because of `this`. You can do a lot about it.\nAnd more."
    assert errors.first_sentence(ValueError(long)) == "The file is wrong because of `this`"
    assert (
        len(errors.first_sentence(ValueError("word " * 200))) == 200
        and errors.first_sentence(KeyError("a")) == "there is nothing called 'a'"
    )
    assert (
        errors.first_sentence(ValueError("version 5.24.0 of config.json is meant"))
        == "version 5.24.0 of config.json is meant"
    )


def test_a_mistake_of_our_own_is_not_taken_for_one_of_the_model(monkeypatch):
    """What the model trips over is one sentence, with its cause; what this package gets wrong is
    not hidden behind it.
    """
    monkeypatch.setattr(loading, "discover", lambda model: torch.nn.Linear(2, 2)(None))
    error = refused("not_traceable", lambda: load("specimen:llama"), label="specimen:llama")
    assert isinstance(error.__cause__, TypeError)
    monkeypatch.setattr(loading, "discover", lambda model: ranges("ab"))
    with pytest.raises(TypeError):
        load("specimen:llama")
