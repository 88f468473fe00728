"""Folders of quantised weights and of weights with an adapter: the numbers they stand for, or one
sentence.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from explorer import load
from explorer.checkpoints.quantised import DEQUANTISED
from tests.support.folders import broken, changed, not_loaded, saved  # noqa: F401  fixtures
from tests.support.models import specimen

QUERIES = "model.layers.0.self_attn.q_proj"


def rewritten(folder, change) -> None:
    """Change a folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_fp8_weights_are_dequantised_and_said_to_be(broken):
    """Stored as eight bits with a scale for each block of 4 by 4."""
    wanted = store_fp8(broken, 4)
    model = load(broken)
    assert model.weights == "as found in the folder, dequantised from fp8"
    for name, weight in wanted.items():
        torch.testing.assert_close(model.hf.state_dict()[name], weight)
    assert {parameter.dtype for parameter in model.hf.parameters()} == {torch.float32}


def test_fp8_weights_of_blocks_that_are_not_whole_are_refused(broken):
    store_fp8(broken, 128)  # some sizes are 144
    not_loaded(broken, "blocks_not_whole", path=broken, block="128 by 128")


def store_fp8(folder, block: int) -> dict[str, torch.Tensor]:
    """Rewrite a folder's projections in eight bits; return the numbers they stand for."""
    wanted = {}

    def store(tensors):
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weight = tensors[name].float()
            rows, columns = (-(-size // block) for size in weight.shape)
            scale = torch.rand(rows, columns) + 0.5
            spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            spread = spread[: weight.shape[0], : weight.shape[1]]
            tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            wanted[name] = tensors[name].float() * spread

    rewritten(folder, store)
    said = {"quant_method": "fp8", "weight_block_size": [block, block]}
    changed(folder, quantization_config=said)
    return wanted


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_mxfp4_experts_are_dequantised_and_said_to_be(tmp_path):
    """Stored as four bits with an exponent for each 32 numbers along the inputs."""
    model = specimen("gpt_oss")
    model.hf.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    wanted = {}

    def store(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            size = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8)
            scales = torch.randint(118, 122, size, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
            numbers = torch.where(codes > 7, -1.0, 1.0) * FP4[codes % 8]
            numbers = numbers * 2.0 ** (scales[..., None].float() - 127)
            wanted[name] = numbers.reshape(experts, outputs, inputs).transpose(1, 2)

    sizes = [model.hf.config.hidden_size, model.hf.config.intermediate_size]
    config = model.hf.config.to_dict() | {"intermediate_size": 96}
    assert sizes[0] % 32 == 0
    made = type(model.hf)(type(model.hf.config).from_dict(config))
    made.save_pretrained(tmp_path)
    rewritten(tmp_path, store)
    changed(tmp_path, quantization_config={"quant_method": "mxfp4"})
    found = load(tmp_path)
    assert found.weights == "as found in the folder, dequantised from mxfp4"
    for name, weight in wanted.items():
        torch.testing.assert_close(found.hf.state_dict()[name], weight)


@pytest.mark.parametrize("method", sorted(AUTO_QUANTIZER_MAPPING.keys() - set(DEQUANTISED)))
def test_other_methods_are_refused_by_name(broken, method):
    method = method.removesuffix("_4bit").removesuffix("_8bit")
    changed(broken, quantization_config={"quant_method": method})
    not_loaded(broken, "quantised", path=broken, method=method)


@pytest.mark.parametrize("said", [{}, {"load_in_8bit": True}, {"quant_method": "unheard_of"}])
def test_a_method_that_is_not_named_or_not_known(broken, said):
    changed(broken, quantization_config=said)
    not_loaded(broken, "quantised", path=broken)
    assert load(broken, weights=False).weights == "none: shapes only"


def give_adapter(folder, settings=None, **tensors) -> dict[str, torch.Tensor]:
    """Put a low-rank adapter into a folder; return its tensors."""
    rows, columns = specimen("llama").hf.get_submodule(QUERIES).weight.shape
    made = {
        f"base_model.model.{QUERIES}.lora_A.weight": torch.randn(4, columns),
        f"base_model.model.{QUERIES}.lora_B.weight": torch.randn(rows, 4),
    }
    made = {name: value for name, value in (made | tensors).items() if value is not None}
    save_file(made, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "base_model_name_or_path": "some/base"}
    (folder / "adapter_config.json").write_text(json.dumps(said | (settings or {})))
    return made


@pytest.mark.parametrize(
    ("settings", "scale"),
    [({}, 6 / 4), ({"use_rslora": True}, 6 / 2), ({"alpha_pattern": {"q_proj": 2}}, 2 / 4)],
)
def test_an_adapter_beside_the_weights_is_merged(broken, settings, scale):
    first, second = give_adapter(broken, settings).values()
    model, plain = load(broken), specimen("llama").hf.state_dict()
    assert model.weights == "as found in the folder, its adapter merged"
    for name, weight in model.hf.state_dict().items():
        added = scale * (second @ first) if name == f"{QUERIES}.weight" else 0
        torch.testing.assert_close(weight, plain[name] + added)


def test_an_adapter_of_the_embedding_is_merged(broken):
    config = specimen("llama").hf.config
    start = "base_model.model.model.embed_tokens.lora_embedding_"
    more = {
        f"{start}A": torch.randn(4, config.vocab_size),
        f"{start}B": torch.randn(config.hidden_size, 4),
    }
    embedding = specimen("llama").hf.get_input_embeddings().weight.detach().clone()
    more["base_model.model.model.embed_tokens.base_layer.weight"] = embedding
    give_adapter(broken, **more)
    plain = specimen("llama").hf.get_input_embeddings().weight
    wanted = plain + 1.5 * (more[f"{start}B"] @ more[f"{start}A"]).T
    torch.testing.assert_close(load(broken).hf.get_input_embeddings().weight, wanted)


def test_an_adapter_without_its_model(tmp_path):
    give_adapter(tmp_path)
    not_loaded(tmp_path, "adapter_alone", path=tmp_path, base="some/base")


@pytest.mark.parametrize(
    ("name", "value"),
    [("peft_type", "IA3"), ("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"])],
)
def test_an_adapter_of_another_kind_is_refused_by_name(broken, name, value):
    give_adapter(broken, {name: value})
    not_loaded(broken, "adapter_of_another_kind", path=broken, name=name, value=repr(value))


@pytest.mark.parametrize(
    "tensors",
    [
        {f"base_model.model.{QUERIES}.lora_B.weight": None},
        {f"base_model.model.{QUERIES}.lora_A.weight": torch.randn(4, 7)},
        {"base_model.model.model.nothing.lora_A.weight": torch.randn(4, 8)},
        {"base_model.model.model.norm.weight": torch.randn(8)},
    ],
)
def test_an_adapter_that_does_not_fit(broken, tensors):
    give_adapter(broken, **tensors)
    not_loaded(broken, "adapter_does_not_fit", path=broken)


def test_an_adapter_that_is_not_whole(broken):
    give_adapter(broken)
    (broken / "adapter_model.safetensors").write_bytes(b"\0" * 5)
    file = broken / "adapter_model.safetensors"
    not_loaded(broken, "damaged_weights", path=file)
    file.unlink()
    not_loaded(broken, "adapter_without_weights", path=broken)
    (broken / "adapter_config.json").write_text("[]")
    not_loaded(broken, "no_adapter_config", path=broken / "adapter_config.json")
