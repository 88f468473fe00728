"""Configurations and options that are not what they should be: one sentence each."""

from __future__ import annotations

import json

import pytest

from builder.commands import demo
from explorer import load
from tests.support.folders import broken, changed, not_loaded, saved  # noqa: F401  fixtures


@pytest.mark.parametrize("text", ["5", "null", "[]", '"x"', "true", "1.5"])
def test_a_configuration_that_is_no_object(broken, text):
    (broken / "config.json").write_text(text)
    not_loaded(broken, "unreadable", path=broken, reason="its configuration is no JSON object")


@pytest.mark.parametrize(
    ("encoding", "said"),
    [("utf-8-sig", "byte-order mark"), ("utf-16", "not in UTF-8"), ("utf-32", "not in UTF-8")],
)
def test_a_configuration_in_another_encoding(broken, encoding, said):
    file = broken / "config.json"
    file.write_bytes(file.read_text().encode(encoding))
    assert said in not_loaded(broken, "unreadable", path=broken)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"hidden_act": "nonsense"}, "there is nothing called 'nonsense'"),
        ({"rope_parameters": {"rope_type": "nonsense"}}, "there is nothing called 'nonsense'"),
        ({"hidden_size": "80"}, "'hidden_size' expected int, got str"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' expected float, got str"),
        ({"num_hidden_layers": 2.5}, "'num_hidden_layers' expected int, got float"),
        ({"num_attention_heads": 7}, "attention heads"),
        ({"layer_types": ["nonsense"] * 3}, "layer_types"),
        ({"dtype": "nonsense"}, "nonsense"),
        ({"model_type": ["llama"]}, "list"),
    ],
)
@pytest.mark.parametrize("weights", [True, False])
def test_a_key_of_the_wrong_kind_is_named(broken, keys, said, weights):
    changed(broken, **keys)
    assert said in not_loaded(broken, "unreadable", {"weights": weights}, path=broken)


@pytest.mark.parametrize(
    ("keys", "message", "name"),
    [
        ({"rms_norm_eps": float("nan")}, "no_number", "rms_norm_eps"),
        ({"rms_norm_eps": float("inf")}, "no_number", "rms_norm_eps"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "no_number", "rope_theta"),
        ({"hidden_size": -80}, "size_of_nothing", "hidden_size"),
        ({"hidden_size": 0}, "size_of_nothing", "hidden_size"),
        ({"num_hidden_layers": 0}, "size_of_nothing", "num_hidden_layers"),
        ({"num_attention_heads": 0}, "size_of_nothing", "num_attention_heads"),
    ],
)
def test_a_number_that_no_model_has(broken, keys, message, name):
    changed(broken, **keys)
    not_loaded(broken, message, {"weights": False}, path=broken, name=name)


def test_of_a_key_said_twice_the_last_counts(broken):
    file = broken / "config.json"
    first = file.read_text().replace("{", '{"hidden_size": 7,', 1)
    file.write_text(first)
    assert json.loads(first)["hidden_size"] == load(broken, weights=False).hidden_size


@pytest.mark.parametrize("given", ["no", None, 1, []])
@pytest.mark.parametrize("name", ["weights", "trust_remote_code"])
def test_an_option_is_true_or_false(name, given):
    options = {name: given}
    not_loaded("specimen:llama", "not_true_or_false", options, name=name, given=repr(given))


@pytest.mark.parametrize("name", ["attn_implementation", "experts_implementation"])
def test_an_implementation_is_named(name):
    not_loaded("specimen:llama", "no_implementation", {name: 5}, name=name, given=5)


@pytest.mark.parametrize("part", [0, 4, 9, 100, 2000, 0.5, -1])
def test_weights_cut_short_anywhere(broken, part):
    file = broken / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(part * len(whole)) if 0 < part < 1 else part])
    not_loaded(broken, "damaged_weights", path=file)


@pytest.mark.parametrize("option", ["--site-port", "--explorer-port"])
@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_port_that_there_is_not(option, port, capsys):
    assert demo.main([option, port]) == 2
    assert capsys.readouterr().err == f"There is no port {port}; ports run from 0 to 65535.\n"


def test_a_vocabulary_of_another_size_than_the_tokenizers(broken):
    """Embeddings are often padded: the ids of the padding run, and have a name."""
    from tests.support.models import specimen

    model = specimen("llama")
    config = model.hf.config
    wider = type(model.hf)(type(config).from_dict(config.to_dict() | {"vocab_size": 2100}))
    wider.save_pretrained(broken)
    found = load(broken)
    assert found.vocab_size == 2100 > len(found.tokenizer)
    run = found.record([[5, 2099]], ["logits"])
    assert run["logits"].shape[-1] == 2100 and len(run.tokens) == 2
    assert len(found.top_tokens(run["logits"].new_ones(found.hidden_size), 2100)) == 2100


@pytest.mark.parametrize(("tied", "dtype"), [(True, "float16"), (False, "float16")])
def test_half_precision_tied_and_apart(broken, tied, dtype):
    import torch

    from tests.support.models import specimen

    model = specimen("llama")
    settings = model.hf.config.to_dict() | {"tie_word_embeddings": tied}
    half = type(model.hf)(type(model.hf.config).from_dict(settings)).to(getattr(torch, dtype))
    half.save_pretrained(broken)
    found = load(broken).hf
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
    for name, weight in half.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight.float())
