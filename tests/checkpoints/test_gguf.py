"""A real model from a GGUF file: loaded once, run on real text; and files that are no such
thing.
"""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from torch.testing import assert_close

from explorer import load, zero_head
from explorer.checkpoints import gguf_file
from tests.support.folders import not_loaded


@pytest.fixture(scope="module")
def real(smollm2):
    torch.set_num_threads(1)
    return load(smollm2)


EIFFEL = "The Eiffel Tower is in the city of"


@pytest.mark.slow
def test_a_gguf_file_is_a_real_model(real, smollm2):
    assert (
        real.label == smollm2.name
        and real.weights == "as found in the file, dequantised from Q4_1"
        and real.family == "llama"
    )
    assert real.sizes == load("HuggingFaceTB/SmolLM2-135M-Instruct", weights=False).sizes
    assert {p.device.type for p in real.hf.parameters()} == {"cpu"}


def test_a_real_model_predicts_paris(real):
    rec = real.record(EIFFEL)
    assert real.tokenizer.decode([int(rec["next_token_probs"].argmax())]) == " Paris"
    assert real.top_tokens(rec["layer_output", -1][0, -1], 3)[0][0] == " Paris"
    assert "".join(rec.tokens) == EIFFEL
    with real.trace(EIFFEL):
        probs = real.next_token_probs.save()
    assert_close(probs, rec["next_token_probs"])


def test_patterns_of_a_real_model_are_distributions_over_the_past(real):
    rec = real.record(EIFFEL, ["attention_probabilities", "attention_scores"])
    for layer in range(real.num_layers):
        pattern = rec["attention_probabilities", layer]
        assert_close(pattern.sum(-1), torch.ones(pattern.shape[:-1]))
        assert pattern.triu(1).abs().max() == 0
        assert_close(rec["attention_scores", layer].softmax(-1), pattern)


def test_addends_of_a_real_model_add_up(real):
    rec = real.record(EIFFEL, ["layer_input", "layer_output", "attention_output", "mlp_output"])
    for layer in range(real.num_layers):
        total = (
            rec["layer_input", layer] + rec["attention_output", layer] + rec["mlp_output", layer]
        )
        assert torch.equal(total, rec["layer_output", layer])


def test_a_head_of_a_real_model_matters(real):
    clean = real.record(EIFFEL, ["next_token_probs"])["next_token_probs"]
    moved = [
        real.record(EIFFEL, ["next_token_probs"], edits=[zero_head(layer, 0)])["next_token_probs"]
        for layer in (0, 15, 29)
    ]
    assert all(not torch.equal(clean, probs) for probs in moved)
    assert all(abs(float(probs.sum()) - 1) < 1e-4 for probs in moved)


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("vocab_size", [True, False])
def test_a_file_is_loaded_as_transformers_loads_it(tmp_path, stored, vocab_size):
    """Weights to the bit, configuration and tokenizer, with the quick reader and with gguf's
    own.
    """
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.support.gguf_files import write_llama

    write_llama(tmp_path / "x.gguf", gguf.GGMLQuantizationType[stored], vocab_size)
    found = load(tmp_path / "x.gguf")
    wanted = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="x.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    weights = found.hf.state_dict()
    assert weights.keys() == wanted.state_dict().keys()
    for name, weight in wanted.state_dict().items():
        assert torch.equal(weights[name], weight) and weights[name].dtype == weight.dtype
    path = {"_name_or_path": None}
    assert found.hf.config.to_dict() | path == wanted.config.to_dict() | path
    assert found.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert found.tokenizer("The café")["input_ids"] == tokenizer("The café")["input_ids"]


def test_a_file_is_parsed_once_and_gguf_is_left_as_it_was(tmp_path, monkeypatch):
    import gguf

    from tests.support.gguf_files import write_llama

    opened = []
    plain = gguf.GGUFReader.__init__
    monkeypatch.setattr(
        gguf.GGUFReader, "__init__", lambda self, *a: (opened.append(a), plain(self, *a))[1]
    )
    write_llama(tmp_path / "x.gguf", gguf.GGMLQuantizationType.F32)
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    load(tmp_path / "x.gguf")
    assert len(opened) == 1
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before


@pytest.mark.parametrize("content", [b"", b"GG", b"hello, this is no model", b"\x89PNG\r\n"])
def test_a_file_that_is_called_gguf_and_is_not(tmp_path, content):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    not_loaded(file, "not_gguf", path=file)


@pytest.mark.parametrize("length", [4, 24, 64, 5000])
def test_a_gguf_file_cut_short_in_its_header(tmp_path, smollm2, length):
    file = tmp_path / "model.gguf"
    with smollm2.open("rb") as whole:
        file.write_bytes(whole.read(length))
    not_loaded(file, "damaged_gguf", path=file)


def tiny_gguf(path: Path) -> bytes:
    """A GGUF file of the smallest kind, one tensor in it, to be cut."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", numpy.zeros((64, 64), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_gguf_file_cut_short_in_its_tensors(tmp_path):
    file = tmp_path / "model.gguf"
    whole = tiny_gguf(file)
    file.write_bytes(whole[: len(whole) - 8000])
    not_loaded(file, "damaged_gguf", path=file)


def test_a_folder_called_gguf_is_no_file(tmp_path):
    (tmp_path / "x.gguf").mkdir()
    not_loaded(tmp_path / "x.gguf", "no_such_file", path=tmp_path / "x.gguf")


@pytest.mark.slow
def test_a_tokenizer_beside_the_file_is_not_its_own(tmp_path, smollm2):
    from tests.support.models import specimen

    (tmp_path / smollm2.name).symlink_to(smollm2)
    specimen("llama").tokenizer.save_pretrained(tmp_path)
    found = load(tmp_path / smollm2.name, weights=False)
    assert len(found.tokenizer) == 49152


def test_a_file_with_more_blocks_than_it_says_is_refused(tmp_path):
    from gguf import GGMLQuantizationType, GGUFReader

    from tests.support.gguf_files import write_llama

    file = tmp_path / "model.gguf"
    write_llama(file, GGMLQuantizationType.F32)
    field = GGUFReader(file, "r+").fields["llama.block_count"]
    assert field.parts[field.data[0]][0] == 2
    field.parts[field.data[0]][0] = 1
    not_loaded(file, "too_many_blocks", blocks="blocks 1", own="block 0 alone")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, "its precision not stated"),
        (9999, "its precision not stated"),
        (1, "in F16"),
        (2, "dequantised from Q4_0"),
    ],
)
def test_what_a_file_says_of_its_precision(tmp_path, said, words):
    from gguf import GGUFReader, GGUFWriter

    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    if said is not None:
        writer.add_file_type(said)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.close()
    assert gguf_file.precision(GGUFReader(tmp_path / "x.gguf")) == words


def test_a_file_without_metadata_is_one_sentence(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.kv_data[0].clear()
    writer.add_tensor("blk.0.attn_q.weight", numpy.zeros((4, 4), dtype=numpy.float32))
    (
        writer.write_header_to_file(),
        writer.write_kv_data_to_file(),
        writer.write_tensors_to_file(),
        writer.close(),
    )
    not_loaded(tmp_path / "x.gguf", "damaged_gguf", path=tmp_path / "x.gguf")
