"""Loading: what can be loaded and how, and one clear sentence for everything that cannot."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from explorer import errors, load
from explorer.checkpoints import cards
from explorer.checkpoints import load as loading
from explorer.errors import LoadError
from explorer.specimens.errors import UnknownFamily
from explorer.vocabulary.formatting import ranges
from tests.support.models import FAMILIES, PROMPT, specimen


@pytest.fixture
def no_network(monkeypatch):
    """Connections are refused and counted."""
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The llama specimen as a transformers checkpoint folder."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = specimen("llama")
    model.hf.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def broken(saved, tmp_path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(saved, tmp_path / "broken"))


def refused(source, description: str, error: type = LoadError, **options) -> str:
    """Load and be refused in one sentence, which is not a library's."""
    with pytest.raises(error, match=description) as caught:
        load(source, **options)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert (
        "\n" not in message
        and len(message) < 500
        and message[-1] in ".?"
        and "Traceback" not in message
    )
    return message


def changed(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


# -- what loads ----------------------------------------------------------------------------


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


def test_a_specimen_without_weights_is_its_shape(no_network):
    model = load("specimen:qwen3_next", weights=False)
    assert model.weights == "none: shapes only" and model.sizes == specimen("qwen3_next").sizes
    assert {p.device.type for p in model.hf.parameters()} == {"meta"} and not no_network


@pytest.mark.parametrize("checkpoint", cards.IDS)
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
    refused("specimen:llama", "'float16' is not a dtype", dtype="float16")


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
    refused(broken, "has no weights; add its .safetensors files or load with weights=False")


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


# -- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "description", "error"),
    [
        ("specimen:nothing", "no specimen of the family 'nothing'; ", UnknownFamily),
        ("specimen:qwen3next", "did you mean 'qwen3_next'?", UnknownFamily),
        ("specimen:", "no specimen", UnknownFamily),
        ("llama", "'llama' is a family: load its small model as 'specimen:llama'", LoadError),
        ("", "Say what to load", LoadError),
        ("  ", "Say what to load", LoadError),
        (None, "Say what to load", LoadError),
        (3, "Say what to load", LoadError),
        ("a/b/c", "No checkpoint card is called", cards.UnknownCheckpoint),
        (
            "~nobody-of-that-name/x",
            "There is no user 'nobody-of-that-name' on this machine",
            LoadError,
        ),
        ("x" * 5000, "What to load has 5,000 characters", LoadError),
        ("a/" + "x" * 5000, "has 5,002 characters", LoadError),
        ("/" + "x" * 300, "There is nothing at /xxx", LoadError),
        ("x" * 300 + ".gguf", "There is no file xxx", LoadError),
    ],
)
def test_a_name_that_is_none_is_answered_with_the_nearest(source, description, error, no_network):
    refused(source, re.escape(description), error)
    refused(source, re.escape(description), error, weights=False)
    assert not no_network


def test_a_misspelt_checkpoint_is_answered_at_once_without_a_network(no_network):
    """The downloads are looked at, the hub is asked once, and the nearest shipped id is offered."""
    for options in ({}, {"weights": False}):
        refused(
            "Qwen/Qwen3-Nxt-80B-A3B-Instruct",
            "hub cannot be reached; did you mean Qwen/Qwen3-Next-80B-A3B-Instruct",
            **options,
        )
    refused(
        "somebody/nothing-like-it",
        r"no checkpoint 'somebody/nothing-like-it' here and the hub cannot be reached\.$",
    )


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
        refused(name, re.escape(f"The hub has no checkpoint '{name}'{near}") + "$", **options)
    assert [source for source, _ in asked] == [name, name] and not no_network


def test_a_card_asked_for_with_weights_says_how_to_have_it_without(no_network):
    refused(
        "Qwen/Qwen3-30B-A3B",
        (
            "weights of Qwen/Qwen3-30B-A3B are not here.*weights=False for its shapes, or "
            "give the folder"
        ),
    )


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
    ("answer", "description"),
    [
        (
            RepositoryNotFoundError,
            "The hub has no checkpoint 'Qwen/Qwen3-30B-A3Bx'; did you mean Qwen/Qwen3-30B-A3B?",
        ),
        (GatedRepoError, "given out by its owners on request"),
        (TimeoutError(), "the hub cannot be reached"),
    ],
)
def test_what_the_hub_answers_is_said_in_a_sentence(
    answer, description, hub_that_answers, no_network
):
    asked = hub_that_answers(answer)
    refused("Qwen/Qwen3-30B-A3Bx", re.escape(description))
    assert [source for source, _ in asked] == ["Qwen/Qwen3-30B-A3Bx"] and asked[0][1][
        "timeout"
    ] <= 10


def test_a_checkpoint_among_the_downloads_needs_no_hub(saved, monkeypatch, no_network):
    """What transformers finds locally is taken as it is."""
    from transformers import AutoConfig

    real = AutoConfig.from_pretrained

    def downloaded(source, **options):
        return real(
            saved if source == "somebody/tiny" and options.get("local_files_only") else source,
            **options,
        )

    monkeypatch.setattr(AutoConfig, "from_pretrained", downloaded)
    model = load("somebody/tiny", weights=False)
    assert (
        model.label == "somebody/tiny" and model.sizes == specimen("llama").sizes and not no_network
    )


def test_what_a_library_says_is_cut_to_its_first_sentence():
    long = "\n\nThe file is wrong because of `this`. You can do a lot about it.\nAnd more."
    assert errors.first_sentence(ValueError(long)) == "The file is wrong because of `this`"
    assert (
        len(errors.first_sentence(ValueError("word " * 200))) == 200
        and errors.first_sentence(KeyError()) == "KeyError"
    )
    assert (
        errors.first_sentence(ValueError("version 5.24.0 of config.json is meant"))
        == "version 5.24.0 of config.json is meant"
    )


def test_a_mistake_of_our_own_is_not_taken_for_one_of_the_model(monkeypatch):
    """What the model trips over is one sentence, with its cause; what this package gets wrong is
    not hidden behind it.
    """
    monkeypatch.setattr(loading, "discover", lambda twin: torch.nn.Linear(2, 2)(None))
    with pytest.raises(
        LoadError, match="does not go the way the standard values are found"
    ) as caught:
        load("specimen:llama")
    assert isinstance(caught.value.__cause__, TypeError)
    monkeypatch.setattr(loading, "discover", lambda twin: ranges("ab"))
    with pytest.raises(TypeError):
        load("specimen:llama")


# -- files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "description"),
    [
        ("/nowhere/at/all", "There is nothing at /nowhere/at/all"),
        ("./nowhere", "There is nothing at nowhere"),
        ("../nowhere", "There is nothing at"),
        ("~/nowhere-at-all", "There is nothing at"),
        ("nothing.gguf", "There is no file nothing.gguf"),
        ("nothing.safetensors", "There is nothing at"),
    ],
)
def test_a_path_with_nothing_at_it(source, description, no_network):
    refused(source, description)
    assert not no_network


def test_a_folder_without_a_configuration(tmp_path):
    refused(tmp_path, "has no config.json; give the folder of a transformers checkpoint")


@pytest.mark.parametrize("text", ["{nope", "{}", "[]", "", '"llama"'])
def test_a_configuration_that_is_none(broken, text):
    (broken / "config.json").write_text(text)
    refused(broken, "cannot be loaded")


@pytest.mark.parametrize(
    ("model_type", "description"),
    [
        ("unheard_of", "unheard_of"),
        ("vit", "is a vit, of which transformers has no causal language model"),
    ],
)
def test_a_configuration_of_no_language_model(broken, model_type, description):
    changed(broken, model_type=model_type, architectures=None)
    refused(broken, description)


def test_weights_that_do_not_fit_the_configuration(broken):
    changed(broken, hidden_size=160)
    refused(broken, "do not have the sizes its configuration says")


def test_weights_that_are_not_all_there_are_never_made_up(broken):
    changed(broken, num_hidden_layers=5)
    refused(broken, r"lacks the weights model\.layers\.3\.\S+ and \d+ more")


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 7, b"hello world, this is no tensor file", None]
)
def test_a_truncated_or_damaged_weights_file(broken, content):
    file = broken / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    refused(broken, "model.safetensors is truncated or damaged .*fetch it again")


def test_a_pickle_is_refused_and_not_opened(broken):
    marker = broken / "ran"

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (marker,))

    (broken / "model.safetensors").unlink()
    torch.save({"weights": Bomb()}, broken / "pytorch_model.bin")
    refused(
        broken,
        r"weights as pickles \(pytorch_model.bin\), which can run code when read; convert them",
    )
    for name in (
        "pytorch_model.bin",
        "model.pt",
        "model.ckpt",
        "model.th",
        "model.pickle",
        "model.joblib",
    ):
        (broken / name).exists() or shutil.copy(broken / "pytorch_model.bin", broken / name)
        refused(broken / name, "is a pickle, which can run code when read")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["model.pickle", "model.joblib", "model.th", "pytorch_model.BIN"])
def test_a_folder_of_pickles_is_said_to_be_one(broken, name):
    (broken / "model.safetensors").rename(broken / name)
    refused(broken, rf"holds its weights as pickles \({name}\)")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.npy", "a NumPy array"),
        ("model.npz", "an archive of NumPy arrays"),
        ("tf_model.h5", "an HDF5 file"),
        ("flax_model.msgpack", "a msgpack file"),
        ("model.onnx", "an ONNX graph"),
    ],
)
def test_weights_of_another_kind_are_named_and_what_is_wanted(broken, name, what):
    (broken / "model.safetensors").rename(broken / name)
    refused(broken, rf"in a form that is not read here \({name}\); convert them to safetensors")
    refused(broken / name, f"{name} is {what}.*; convert it to safetensors and give its folder")
    refused(f"/nowhere/{name}", f"is {what}")


def test_a_folder_with_a_gguf_file_points_to_it(broken):
    (broken / "model.safetensors").rename(broken / "model.gguf")
    refused(broken, "holds its weights in model.gguf; give the path of that file")


def add_weights(folder: Path, *names: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {name: torch.zeros(2) for name in names},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def test_weights_without_a_place_are_said_to_be_left_out(broken):
    add_weights(broken, "model.extra.weight", "another.weight", "model.layers.0.more.weight")
    with pytest.warns(
        UserWarning, match=r"has no place for and that are left out: another\.weight and 2 more\.$"
    ):
        assert load(broken).record("a word", ["logits"])["logits"].isfinite().all()


def test_weights_of_blocks_that_the_configuration_does_not_have_are_refused(broken):
    add_weights(broken, "model.layers.3.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight")
    refused(
        broken,
        (
            r"holds weights of model\.layers 3–4, and its configuration has blocks 0 to 2; "
            r"fetch both again"
        ),
    )


def test_a_pickle_beside_whole_weights_is_left_alone(broken):
    (broken / "training_args.bin").write_bytes(b"not even a pickle")
    assert load(broken).weights == "as found in the folder"


def test_a_single_weights_file_is_no_checkpoint(saved):
    refused(saved / "model.safetensors", "is a single file; give the checkpoint folder it is in")


@pytest.mark.parametrize("text", ["{}", "[1]", "{nope", '{"weight_map": 3}'])
def test_an_index_that_is_none(broken, text):
    (broken / "model.safetensors.index.json").write_text(text)
    refused(broken, "is not an index of weights; fetch it again")


def test_an_index_that_names_a_shard_that_is_missing(broken):
    (broken / "model.safetensors").rename(broken / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    message = refused(broken, "lacks model-00002-of-00002.safetensors, which its index names")
    assert "00001" not in message


def test_a_folder_without_a_tokenizer_or_with_a_broken_one(broken):
    (broken / "tokenizer.json").write_text("{}")
    refused(broken, "no tokenizer that transformers can read")
    for file in broken.glob("token*"):
        file.unlink()
    refused(broken, "no tokenizer that transformers can read; add its tokenizer.json")


REMOTE = {
    "configuration_mine.py": """
        from pathlib import Path
        from transformers import LlamaConfig
        Path(MARKER).touch()
        class MineConfig(LlamaConfig):
            model_type = "mine"
    """,
    "modeling_mine.py": """
        from transformers import LlamaForCausalLM
        from .configuration_mine import MineConfig
        class MineForCausalLM(LlamaForCausalLM):
            config_class = MineConfig
    """,
}


@pytest.mark.parametrize("model_type", ["mine", "llama"])
def test_code_that_comes_with_a_checkpoint_runs_only_when_trusted(
    broken, tmp_path, model_type, monkeypatch
):
    marker = tmp_path / "ran"
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    for name, text in REMOTE.items():
        (broken / name).write_text(dedent(text).replace("MARKER", repr(str(marker))))
    changed(
        broken,
        model_type=model_type,
        architectures=["MineForCausalLM"],
        auto_map={
            "AutoConfig": "configuration_mine.MineConfig",
            "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
        },
    )
    if model_type == "mine":
        refused(
            broken,
            "brings modeling code of its own; read it, then load with trust_remote_code=True",
        )
        assert not marker.exists()
        model = load(broken, trust_remote_code=True)
        assert marker.exists() and type(model.hf).__name__ == "MineForCausalLM"
    else:
        model = load(
            broken
        )  # transformers has this model type: the checkpoint's code is not needed
        assert not marker.exists()
    assert torch.equal(
        model.record(PROMPT, ["logits"])["logits"],
        specimen("llama").record(PROMPT, ["logits"])["logits"],
    )


@pytest.mark.parametrize(
    ("options", "description"),
    [
        ({"attn_implementation": "nonsense"}, "nonsense"),
        ({"experts_implementation": "nonsense"}, "nonsense"),
        ({"attn_implementation": "flash_attention_2"}, "FlashAttention2|flash"),
    ],
)
def test_an_implementation_that_is_not_there(options, description):
    refused("specimen:qwen3_moe", description, **options)


@pytest.mark.parametrize("named", ['{"weight_map": {"a": 1}}', '{"weight_map": {"a": "."}}'])
def test_an_index_that_names_no_files_is_one_sentence(tmp_path, named):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(named)
    refused(tmp_path, "is not an index of weights")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    specimen("qwen3_moe").hf.save_pretrained(tmp_path)
    refused(tmp_path, "has no tokenizer")
