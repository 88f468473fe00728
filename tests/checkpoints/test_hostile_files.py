"""Files that say what is not true, or choose code: each is refused in one sentence, at once."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from explorer import load
from explorer.checkpoints import cards
from explorer.checkpoints.configuration import check_counts, few_modules, without_choices
from explorer.errors import LoadError
from explorer.model.errors import PromptError
from tests.support.folders import broken, changed, no_network, not_loaded, saved  # noqa: F401  fixtures
from tests.support.messages import sentence
from tests.support.models import PROMPT


@pytest.mark.parametrize(
    "keys",
    [
        {"_attn_implementation": "sdpa"},
        {"attn_implementation": "flex_attention"},
        {"_attn_implementation": "kernels-community/x"},
        {"_attn_implementation_internal": "kernels-community/x"},
        {"_experts_implementation": "batched_mm"},
    ],
)
@pytest.mark.parametrize("weights", [True, False])
def test_no_key_of_a_configuration_chooses_the_code_that_runs(broken, keys, weights, no_network):
    changed(broken, **keys)
    model = load(broken, weights=weights)
    assert model.hf.config._attn_implementation == "eager" and not no_network
    assert model.hf.config._experts_implementation != "batched_mm"
    assert model.support()["attention_probabilities"].available


def test_a_caller_still_chooses(broken):
    changed(broken, _attn_implementation="eager")
    assert load(broken, attn_implementation="sdpa").hf.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"num_hidden_layers": 1_000_000_000}, "num_hidden_layers"),
        ({"num_hidden_layers": -1_000_000_000}, "num_hidden_layers"),
        ({"num_attention_heads": 1 << 40}, "num_attention_heads"),
        ({"rope_parameters": {"num_groups": 10**9}}, "num_groups"),
    ],
)
@pytest.mark.parametrize("weights", [True, False])
def test_a_count_that_no_model_has(broken, keys, named, weights):
    changed(broken, **keys)
    not_loaded(broken, "count_too_large", {"weights": weights}, name=named)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": 5000}, "more_blocks_than_tensors"),
        ({"intermediate_size": 1 << 33}, "more_parameters_than_bytes"),
        ({"vocab_size": 1 << 40}, "more_parameters_than_bytes"),
    ],
)
def test_sizes_that_the_weights_do_not_bear_out_are_not_allocated(broken, keys, message):
    changed(broken, **keys)
    not_loaded(broken, message, path=broken)


def test_a_model_of_too_many_modules_is_not_built():
    with pytest.raises(LoadError, match="over 50 modules"), few_modules("it", most=50):
        [torch.nn.Sequential(torch.nn.Identity()) for _ in range(51)]
    torch.nn.Sequential(torch.nn.Identity())


@pytest.mark.parametrize("checkpoint", cards.IDS)
def test_counts_of_released_models_are_believed(checkpoint):
    check_counts(checkpoint, cards.config(checkpoint).to_dict())


def test_sizes_that_are_no_counts_are_believed():
    check_counts("it", {"vocab_size_per_layer_input": 262_144, "max_steps": 10**7})


def test_configurations_inside_a_configuration_choose_nothing_either():
    config = AutoConfig.for_model(
        "gemma3", text_config={"model_type": "gemma3_text", "_attn_implementation": "owner/kernel"}
    )
    config.text_config._attn_implementation = "owner/kernel"
    assert without_choices(config).text_config._attn_implementation is None


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/other/model.safetensors", "..\\model.safetensors"]
)
def test_an_index_leads_to_its_own_folder_alone(broken, name):
    weights = broken / "model.safetensors"
    (broken.parent / "other").mkdir()
    weights.rename(broken.parent / "other" / weights.name)
    index = {"weight_map": {"model.norm.weight": name}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    not_loaded(broken, "outside_folder", name=name)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json", "tokenizer.json"])
def test_files_that_nest_too_deeply(broken, name):
    (broken / name).write_text("[" * 200_000)
    with pytest.raises(LoadError) as caught:
        load(broken)
    assert str(broken) in str(caught.value) and "\n" not in str(caught.value)


def splitting(folder: Path, pattern: str) -> None:
    """Make a folder's tokenizer split texts by a regular expression first."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    own = [one for one in [tokenizer["pre_tokenizer"]] if one]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, *own]}
    file.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("pattern", ["(x+x+)+y", "(?:x+x*)+y", "(x+x+x+)+z"])
def test_a_tokenizer_that_panics_on_a_prompt_is_one_sentence(broken, pattern):
    splitting(broken, pattern)
    model = load(broken)
    with pytest.raises(PromptError, match=sentence("tokenizer_stops")) as caught:
        model.record("x" * 40)
    assert "\n" not in str(caught.value)
    assert model.record(PROMPT)["logits"].isfinite().all()


def test_a_gguf_array_longer_than_the_file(tmp_path):
    file = tmp_path / "x.gguf"
    key = b"tokenizer.ggml.tokens"
    head = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key
    for kind in (8, 4, 9):  # strings, numbers, arrays
        file.write_bytes(head + struct.pack("<IIQ", 9, kind, 1 << 40))
        assert "1,099,511,627,776" in not_loaded(file, "damaged_gguf", path=file)


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "expert_count"])
def test_a_gguf_count_that_no_model_has(tmp_path, key):
    import gguf

    from tests.support.gguf_files import write_llama

    file = tmp_path / "x.gguf"
    write_llama(file, gguf.GGMLQuantizationType.F32)
    data = file.read_bytes()
    name = f"llama.{key}".encode()
    if name not in data:  # an entry of its own, first of all
        count = struct.unpack_from("<Q", data, 16)[0]
        entry = struct.pack("<Q", len(name)) + name + struct.pack("<II", 4, 10**9)
        data = data[:16] + struct.pack("<Q", count + 1) + entry + data[24:]
    else:
        at = data.index(name) + len(name) + 4
        data = data[:at] + struct.pack("<I", 10**9) + data[at + 4 :]
    file.write_bytes(data)
    not_loaded(file, "count_too_large", name=f"llama.{key}", count="1,000,000,000")
