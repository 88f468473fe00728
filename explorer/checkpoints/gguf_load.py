"""Loading a GGUF file."""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from explorer.checkpoints import configuration, gguf_config, gguf_file
from explorer.checkpoints.weights import Found, tokenizer_of, weighted
from explorer.errors import LoadError, abbreviated, first_sentence, is_internal_error
from explorer.meta_device import build_meta


def load_gguf(path: Path, dtype: torch.dtype | None, weights: bool, attention: str) -> Found:
    if not os.path.isfile(path):
        raise LoadError(f"There is no file {abbreviated(path)}; give the path of a .gguf file.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LoadError(f"{path} is not a GGUF file; fetch it again.")
    try:
        for package in ("accelerate", "gguf"):
            importlib.import_module(package)
    except ImportError as error:
        raise LoadError(
            "Reading a GGUF file needs two more packages: pip install gguf accelerate."
        ) from error
    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        with (
            gguf_file.read_once(path) as reader,
            # A folder of its own: what lies beside the file belongs to other models.
            tempfile.TemporaryDirectory() as folder,
        ):
            gguf_file.check_blocks(path.name, reader)
            gguf_file.state_key_heads(reader)
            (Path(folder) / path.name).symlink_to(path.resolve())
            config = _config(folder, path.name, reader, **options)
            names = [tensor.name for tensor in reader.tensors]
            empty = configuration.check_sizes(path.name, config, names, path.stat().st_size)
            gguf_config.check_rotary(path.name, reader, empty)
            gguf_file.check_tensors(path.name, reader, empty)
            tokenizer = tokenizer_of(folder, **options)
            if not weights:
                return Found(
                    build_meta(config, dtype or torch.bfloat16, attention),
                    tokenizer,
                    path.name,
                    "none: shapes only",
                )
            model = weighted(Path(folder), path.name, config, dtype, attention, **options)
            stored = gguf_file.precision(reader)
    except LoadError:
        raise
    except Exception as error:  # a damaged file makes the reader fail in many ways
        if is_internal_error(error):
            raise
        if "not supported" in str(error):
            raise LoadError(
                f"{path} cannot be read as a model ({first_sentence(error)})."
            ) from error
        raise LoadError(
            f"{path} cannot be read ({first_sentence(error)}); "
            "if it is truncated or damaged, fetch it again."
        ) from error
    return Found(model, tokenizer, path.name, f"as found in the file, {stored}")


def _config(folder: str, label: str, reader: Any, **options: Any) -> Any:
    """The configuration of a file, with every key that changes the numbers in it."""
    from transformers import PreTrainedConfig

    raw, _ = PreTrainedConfig.get_config_dict(folder, **options)
    return configuration.without_choices(gguf_config.file_config(label, reader, raw))
