"""Reading a GGUF file: it is parsed once, by a quick reader that transformers is given too."""

from __future__ import annotations

import contextlib
import functools
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from explorer.checkpoints.configuration import check_counts
from explorer.checkpoints.files import too_many
from explorer.errors import LoadError


@contextlib.contextmanager
def read_once(path: Path) -> Iterator[Any]:
    """Yield a `gguf.GGUFReader` of the file, and let transformers read the file through it too.

    transformers makes a reader for the configuration, one for the tokenizer's class and one for
    the weights, and for the weights a table of all tensor names for every module of the model. It
    imports both from gguf whenever it needs them; while this is open, it gets the ones made here.
    """
    import gguf

    make = {"GGUFReader": gguf.GGUFReader, "get_tensor_name_map": gguf.get_tensor_name_map}
    whole = path.resolve()
    reader = _quick(gguf.GGUFReader)(whole)

    def reader_of(file: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(file).resolve() == whole:
            return reader
        return make["GGUFReader"](file, *args, **kwargs)

    shared = {
        "GGUFReader": reader_of,
        "get_tensor_name_map": functools.cache(gguf.get_tensor_name_map),  # nobody changes a table
    }
    try:
        for name, value in shared.items():
            setattr(gguf, name, value)
        yield reader
    finally:
        for name, value in make.items():
            setattr(gguf, name, value)


def _quick(reader: type) -> type:
    """A reader that reads arrays at once, and keeps of an array of strings only its length.

    gguf's own makes several numpy arrays for each of the hundred thousand entries of a vocabulary
    and its merges, which takes most of the time. transformers reads the strings of the tokenizer by
    itself and takes only their number from this reader: each is empty here. Should gguf rename the
    method, arrays are read as before.
    """

    class QuickReader(reader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list, list]:
            from gguf import GGUFValueType

            if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
            count, start = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
            types = [GGUFValueType.ARRAY, kind]
            width = 8 if kind == GGUFValueType.STRING else 1
            if count * width > len(self.data) - start:
                raise ValueError(f"an array says it has {count:,} entries, more than the file")
            if kind == GGUFValueType.STRING:
                end = start
                for _ in range(count):
                    end += 8 + struct.unpack_from("<Q", self.data, end)[0]
                if end > len(self.data):
                    raise ValueError("a string ends beyond the file")
                return end - orig_offs, [self.data[:0]], [0] * count, types
            if kind not in self.gguf_scalar_to_np or not count:
                return super()._get_field_parts(orig_offs, raw_type)
            numbers = np.asarray(self._get(start, self.gguf_scalar_to_np[kind], count))
            parts = [numbers[index : index + 1] for index in range(count)]
            return 12 + numbers.nbytes, parts, list(range(count)), types

    return QuickReader


def check_blocks(label: str, reader: Any) -> None:
    """Raise LoadError where a file holds weights of more blocks than its metadata counts, which
    transformers would leave out silently, and where its metadata counts what no model has.
    """
    check_counts(label, {name: _number(field) for name, field in reader.fields.items()})
    count = stated(reader, f"{stated(reader, 'general.architecture')}.block_count")
    present = {
        int(match[1])
        for tensor in reader.tensors
        if (match := re.match(r"blk\.(\d+)\.", tensor.name))
    }
    if isinstance(count, int) and (numbers := {number for number in present if number >= count}):
        raise LoadError(too_many(label, "blocks ", numbers, count))


#: Tensors that are read for the configuration, or that are made from it.
_FOR_CONFIGURATION = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
)


def check_tensors(label: str, reader: Any, model: Any) -> None:
    """Raise LoadError for a tensor of a file that transformers would leave out of its model."""
    from transformers import modeling_gguf_pytorch_utils as by_name
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

    architecture = stated(reader, "general.architecture")
    if architecture in GGUF_CONFIG_ARCHS:
        return  # loaded by another reader, which reports what it leaves out
    processor = by_name.TENSOR_PROCESSORS.get(architecture, by_name.TensorProcessor)
    places = by_name.get_gguf_hf_weights_map(model, processor(config=model.config.to_dict()))
    for tensor in reader.tensors:
        name = tensor.name
        read = name in places or (
            name.endswith("_exps.weight") and name.removesuffix(".weight") in places
        )
        if not read and not _FOR_CONFIGURATION.fullmatch(name):
            raise LoadError(
                f"{label} holds the tensor {name}, which transformers' model of it has no place "
                "for; load the checkpoint's safetensors instead."
            )


def state_key_heads(reader: Any) -> None:
    """Give a file that says nothing of key heads as many as it has heads, as the format means it.

    Without the number, transformers leaves the rows of queries and keys in the format's order.
    """
    name = f"{stated(reader, 'general.architecture')}.attention.head_count"
    if name in reader.fields:
        reader.fields.setdefault(f"{name}_kv", reader.fields[name])


def precision(reader: Any) -> str:
    """How the file stores its numbers: ``"dequantised from Q4_1"``."""
    from gguf import LlamaFileType

    said = stated(reader, "general.file_type")
    if said not in tuple(LlamaFileType):
        return "its precision not stated"
    kind = LlamaFileType(said).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    return f"in {kind}" if kind in ("F32", "F16", "BF16") else f"dequantised from {kind}"


def _number(field: Any) -> Any:
    """A field's number, None where it holds something else (arrays are long and not read)."""
    from gguf import GGUFValueType

    text = (GGUFValueType.ARRAY, GGUFValueType.STRING)
    return None if not field.types or field.types[0] in text else field.contents()


def stated(reader: Any, key: str) -> Any:
    """A file's metadata under a key, None where it has none."""
    field = reader.fields.get(key)
    return None if field is None else contents(field)


def contents(field: Any) -> Any:
    """What a field of a file says; of an array of texts, which are not read, as many empty ones."""
    from gguf import GGUFValueType

    texts = [GGUFValueType.ARRAY, GGUFValueType.STRING]
    return [""] * len(field.data) if field.types == texts else field.contents()
