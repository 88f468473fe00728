"""Small GGUF files with random weights, of the architecture llama."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy
from gguf.quants import quantize
from tokenizers import pre_tokenizers

HIDDEN, WIDTH, HEADS, KV_HEADS, BLOCKS = 64, 96, 4, 2, 2

_SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "attn_v": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (WIDTH, HIDDEN),
    "ffn_up": (WIDTH, HIDDEN),
    "ffn_down": (HIDDEN, WIDTH),
}


def write_llama(path: Path, stored: gguf.GGMLQuantizationType, vocab_size: bool = True) -> None:
    """Write a model whose matrices are ``stored`` in one type."""
    tokens = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Th", "The"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    if vocab_size:
        writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges(["T h", "Th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)} | {
        f"blk.{block}.{name}": shape for block in range(BLOCKS) for name, shape in _SHAPES.items()
    }
    random = numpy.random.default_rng(0)
    for name, shape in shapes.items():
        numbers = random.standard_normal(shape, dtype=numpy.float32)
        kind = stored if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
