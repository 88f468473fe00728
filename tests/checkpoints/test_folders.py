"""Checkpoint folders that cannot be loaded: each is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from safetensors.torch import load_file, save_file

from explorer import load
from tests.support.folders import broken, no_network, refused, saved  # noqa: F401  fixtures
from tests.support.models import PROMPT, specimen


def changed(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


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
