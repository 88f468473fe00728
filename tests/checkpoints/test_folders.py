"""Checkpoint folders that cannot be loaded: each is refused in one sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from safetensors.torch import load_file, save_file

from explorer import load
from tests.support.folders import broken, changed, no_network, not_loaded, saved  # noqa: F401  fixtures
from tests.support.models import PROMPT, specimen


@pytest.mark.parametrize(
    ("source", "name", "path"),
    [
        ("/nowhere/at/all", "no_such_path", "/nowhere/at/all"),
        ("./nowhere", "no_such_path", "nowhere"),
        ("../nowhere", "no_such_path", "../nowhere"),
        ("~/nowhere-at-all", "no_such_path", Path("~/nowhere-at-all").expanduser()),
        ("nothing.gguf", "no_such_file", "nothing.gguf"),
        ("nothing.safetensors", "no_such_path", "nothing.safetensors"),
    ],
)
def test_a_path_with_nothing_at_it(source, name, path, no_network):
    not_loaded(source, name, path=path)
    assert not no_network


def test_a_folder_without_a_configuration(tmp_path):
    not_loaded(tmp_path, "no_config", path=tmp_path)


@pytest.mark.parametrize("text", ["{nope", "{}", "[]", "", '"llama"'])
def test_a_configuration_that_is_none(broken, text):
    (broken / "config.json").write_text(text)
    not_loaded(broken, "unreadable", path=broken)


@pytest.mark.parametrize(
    ("model_type", "name"), [("unheard_of", "unreadable"), ("vit", "no_language_model")]
)
def test_a_configuration_of_no_language_model(broken, model_type, name):
    changed(broken, model_type=model_type, architectures=None)
    assert model_type in not_loaded(broken, name, path=broken)


def test_weights_that_do_not_fit_the_configuration(broken):
    changed(broken, hidden_size=160)
    not_loaded(broken, "sizes_differ", path=broken)


def test_weights_that_are_not_all_there_are_never_made_up(broken):
    changed(broken, num_hidden_layers=5)
    said = not_loaded(broken, "weights_lacking", path=broken)
    assert re.search(r"model\.layers\.3\.\S+ and \d+ ", said)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 7, b"hello world, this is no tensor file", None]
)
def test_a_truncated_or_damaged_weights_file(broken, content):
    file = broken / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    not_loaded(broken, "damaged_weights", path=file)


def test_a_pickle_is_refused_and_not_opened(broken):
    marker = broken / "ran"

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (marker,))

    (broken / "model.safetensors").unlink()
    torch.save({"weights": Bomb()}, broken / "pytorch_model.bin")
    not_loaded(broken, "pickles", names="pytorch_model.bin")
    for name in (
        "pytorch_model.bin",
        "model.pt",
        "model.ckpt",
        "model.th",
        "model.pickle",
        "model.joblib",
    ):
        (broken / name).exists() or shutil.copy(broken / "pytorch_model.bin", broken / name)
        not_loaded(broken / name, "pickle", path=broken / name)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["model.pickle", "model.joblib", "model.th", "pytorch_model.BIN"])
def test_a_folder_of_pickles_is_refused_as_one(broken, name):
    (broken / "model.safetensors").rename(broken / name)
    not_loaded(broken, "pickles", names=name)


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
    not_loaded(broken, "other_forms", names=name)
    assert f"{name} is {what}" in not_loaded(broken / name, "other_form")
    assert f"{name} is {what}" in not_loaded(f"/nowhere/{name}", "other_form")


def test_a_folder_with_a_gguf_file_points_to_it(broken):
    (broken / "model.safetensors").rename(broken / "model.gguf")
    not_loaded(broken, "gguf_inside", name="model.gguf")


def add_weights(folder: Path, *names: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {name: torch.zeros(2) for name in names},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def test_weights_of_no_parameter_are_reported(broken):
    add_weights(broken, "model.extra.weight", "another.weight", "model.layers.0.more.weight")
    with pytest.warns(UserWarning, match=r"another\.weight and 2 more\.$"):
        assert load(broken).record("a word", ["logits"])["logits"].isfinite().all()


def test_weights_of_blocks_that_the_configuration_does_not_have_are_refused(broken):
    add_weights(broken, "model.layers.3.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight")
    not_loaded(broken, "too_many_blocks", blocks="model.layers 3–4", own="blocks 0 to 2")


def test_a_pickle_beside_whole_weights_is_left_alone(broken):
    (broken / "training_args.bin").write_bytes(b"not even a pickle")
    assert load(broken).weights == "as found in the folder"


def test_a_single_weights_file_is_no_checkpoint(saved):
    not_loaded(saved / "model.safetensors", "single_file", path=saved / "model.safetensors")


@pytest.mark.parametrize("text", ["{}", "[1]", "{nope", '{"weight_map": 3}'])
def test_an_index_that_is_none(broken, text):
    (broken / "model.safetensors.index.json").write_text(text)
    not_loaded(broken, "no_index", path=broken / "model.safetensors.index.json")


def test_an_index_that_names_a_shard_that_is_missing(broken):
    (broken / "model.safetensors").rename(broken / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    not_loaded(broken, "shard_missing", path=broken, names="model-00002-of-00002.safetensors")


def test_a_folder_without_a_tokenizer_or_with_a_broken_one(broken):
    (broken / "tokenizer.json").write_text("{}")
    not_loaded(broken, "no_tokenizer", path=broken)
    for file in broken.glob("token*"):
        file.unlink()
    not_loaded(broken, "no_tokenizer", path=broken)


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
        not_loaded(broken, "own_code", path=broken)
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
    ("options", "named"),
    [
        ({"attn_implementation": "nonsense"}, "nonsense"),
        ({"experts_implementation": "nonsense"}, "nonsense"),
        ({"attn_implementation": "flash_attention_2"}, "flash"),
    ],
)
def test_an_implementation_that_is_not_there(options, named):
    said = not_loaded("specimen:qwen3_moe", "unreadable", options, path="specimen:qwen3_moe")
    assert named in said.lower()


@pytest.mark.parametrize("named", ['{"weight_map": {"a": 1}}', '{"weight_map": {"a": "."}}'])
def test_an_index_that_names_no_files_is_one_sentence(tmp_path, named):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(named)
    not_loaded(tmp_path, "no_index")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    specimen("qwen3_moe").hf.save_pretrained(tmp_path)
    not_loaded(tmp_path, "empty_tokenizer", path=tmp_path)
