"""Loading a checkpoint folder."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from explorer.checkpoints import adapters, configuration, files
from explorer.checkpoints.quantised import check_scales, dequantised
from explorer.checkpoints.weights import (
    Found,
    as_sentences,
    no_language_model,
    tokenizer_of,
    weighted,
)
from explorer.errors import LoadError, abbreviated
from explorer.meta_device import build_meta


def load_folder(
    path: Path, dtype: torch.dtype | None, weights: bool, attention: str, trust: bool
) -> Found:
    if not os.path.isdir(path):
        files.refuse_kind(path)
    if not os.path.exists(path):
        raise LoadError(
            f"There is nothing at {abbreviated(path)}; give a checkpoint folder or a .gguf file."
        )
    if path.is_file():
        raise LoadError(
            f"{path} is a single file; give the checkpoint folder it is in, with its config.json."
        )
    adapter = adapters.adapter_of(path) if weights else None
    if not (path / "config.json").exists():
        raise LoadError(f"{path} has no config.json; give the folder of a transformers checkpoint.")
    names, size = files.check_weights(path) if weights else ([], 0)
    options: dict[str, Any] = {"trust_remote_code": trust, "local_files_only": True}
    with as_sentences(path):
        config = configuration.read_config(path, str(path), **options)
        if not configuration.has_causal_model(config):
            raise LoadError(no_language_model(path, config))
        try:
            tokenizer = tokenizer_of(path, **options)
        except Exception as error:
            raise LoadError(
                f"{path} has no tokenizer that transformers can read; add its tokenizer.json."
            ) from error
        if len(tokenizer) < 2:  # transformers makes an empty one where there is none
            raise LoadError(f"{path} has no tokenizer; add its tokenizer.json.")
        if not weights:
            with configuration.few_modules(str(path)):
                module = build_meta(config, dtype or torch.bfloat16, attention)
            return Found(module, tokenizer, str(path), "none: shapes only")
        if not hasattr(config, "auto_map"):
            configuration.check_sizes(str(path), config, names, size)
        origin = "as found in the folder" + dequantised(str(path), config)
        check_scales(path, config)
        with adapters.without(path) if adapter else nullcontext(path) as own:
            model = weighted(own, str(path), config, dtype, attention, **options)
        if adapter:
            adapters.merge(path, adapter, model)
            origin += ", its adapter merged"
    return Found(model, tokenizer, str(path), origin)
