"""Low-rank adapters beside a checkpoint's weights: added to the weights, or refused."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from explorer.errors import LoadError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

#: Settings of an adapter that are followed only where they say this, and what says it.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
}


def adapter_of(path: Path) -> dict[str, Any] | None:
    """The settings of the adapter in a folder, None where it has none.

    Raises LoadError for an adapter that changes a model in another way than by adding products of
    two matrices to its weights, and for one that has no weights beside it.
    """
    file = path / CONFIG
    if not file.is_file():
        return None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise LoadError(f"{file} is not the configuration of an adapter; fetch it again.")
    if not (path / "config.json").is_file():
        base = settings.get("base_model_name_or_path") or "a model it does not name"
        raise LoadError(
            f"{path} is an adapter of {base}; put {CONFIG} and {WEIGHTS} into that model's folder "
            "and give that folder."
        )
    for name, plain in _PLAIN.items():
        if settings.get(name, plain[0]) not in plain:
            raise LoadError(
                f"The adapter in {path} says {name} = {settings[name]!r}, which is not read here; "
                "merge it into the weights with peft, or take it out of the folder."
            )
    if not (path / WEIGHTS).is_file():
        raise LoadError(
            f"{path} has an adapter without weights; add its {WEIGHTS}, or take {CONFIG} out of "
            "the folder."
        )
    return settings


@contextmanager
def without(path: Path) -> Iterator[Path]:
    """Yield a folder with the links to a checkpoint's files, but for its adapter's.

    Where peft is installed, transformers follows an adapter's configuration to another model.
    """
    with tempfile.TemporaryDirectory() as folder:
        for file in path.iterdir():
            if not file.name.startswith("adapter_"):
                (Path(folder) / file.name).symlink_to(file.resolve())
        yield Path(folder)


def merge(path: Path, settings: dict[str, Any], model: torch.nn.Module) -> None:
    """Add an adapter's products to a model's weights; raise LoadError where they do not fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path / WEIGHTS)
    except SafetensorError as error:
        raise LoadError(
            f"{path / WEIGHTS} is truncated or damaged ({error}); fetch it again."
        ) from error
    places: dict[str, Any] = dict(model.named_modules())
    # Beside an embedding's matrices, peft writes the weight that they are for.
    for name in [name for name in tensors if name.endswith(".base_layer.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".base_layer.weight")
        own = getattr(places.get(module), "weight", None)
        if own is None or not torch.equal(tensors.pop(name).to(own), own):
            raise _no_place(path, name)
    while tensors:
        name = next(iter(tensors))
        found = re.fullmatch(
            r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?[AB](\.weight)?", name
        )
        path_of = found[1] if found else ""
        kind, end = ("embedding_", "") if found and found[2] else ("", ".weight")
        start = name[: name.index(".lora_")] if found else ""
        pair = [tensors.pop(f"{start}.lora_{kind}{which}{end}", None) for which in "AB"]
        weight = getattr(places.get(path_of), "weight", None)
        first, second = pair
        if first is None or second is None or weight is None:
            raise _no_place(path, name)
        added = second.double() @ first.double() * _scale(settings, path_of, first.shape[0])
        added = added.T if kind or settings.get("fan_in_fan_out") else added
        if added.shape != weight.shape:
            raise _no_place(path, name)
        with torch.no_grad():
            weight.copy_((weight.double() + added.to(weight.device)).to(weight.dtype))


def _no_place(path: Path, name: str) -> LoadError:
    return LoadError(
        f"The adapter in {path} has {name}, which does not fit the model beside it; fetch both "
        "again."
    )


def _scale(settings: dict[str, Any], module: str, rank: int) -> float:
    """What an adapter's product is multiplied by at a module."""
    alpha = float(settings.get("lora_alpha") or 8)
    for pattern, own in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?{pattern}", module):
            alpha = float(own)
            break
    return alpha / (rank**0.5 if settings.get("use_rslora") else rank)
