"""Checks of a checkpoint's files, before any library reads them."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

from explorer.errors import LoadError, abbreviated
from explorer.vocabulary.formatting import numbered, ranges

#: Files that hold weights as pickles, which can run code when they are read.
PICKLES = (".bin", ".pt", ".pth", ".th", ".ckpt", ".pkl", ".pickle", ".joblib")

#: Files that hold weights in a form that is not read here.
OTHERS = {
    ".npy": "a NumPy array",
    ".npz": "an archive of NumPy arrays",
    ".h5": "an HDF5 file, as Keras writes",
    ".msgpack": "a msgpack file, as Flax writes",
    ".onnx": "an ONNX graph",
}

#: The suffixes by which a source counts as a path: what is read, and what is refused in words.
KNOWN = (".gguf", ".safetensors", *PICKLES, *OTHERS)

_WANTED = "convert it to safetensors and give its folder"


def refuse_kind(path: Path) -> None:
    """Raise LoadError for a file of a kind that is not read, whether or not it exists."""
    if path.suffix.lower() in PICKLES:
        raise LoadError(
            f"{abbreviated(path)} is a pickle, which can run code when read; {_WANTED}."
        )
    if path.suffix.lower() in OTHERS:
        raise LoadError(
            f"{abbreviated(path)} is {OTHERS[path.suffix.lower()]}, which is not read here; "
            f"{_WANTED}."
        )


def check_weights(path: Path) -> tuple[list[str], int]:
    """Return the names of a folder's tensors and the bytes of its weight files.

    Raises LoadError unless it has all its weights, as readable safetensors.
    """
    from safetensors import SafetensorError, safe_open

    index = path / "model.safetensors.index.json"
    files = sorted(
        file
        for file in path.glob("*.safetensors")
        if file.is_file() and not file.name.startswith("adapter_")
    )
    if index.exists():
        try:
            named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if not all(isinstance(name, str) and name.endswith(".safetensors") for name in named):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LoadError(f"{index} is not an index of weights; fetch it again.") from error
        if outside := [name for name in named if not _is_inside(name)]:
            raise LoadError(
                f"{index} names {abbreviated(outside[0])}, which is not in its folder; "
                "fetch it again."
            )
        missing = [name for name in named if not (path / name).is_file()]
        if missing:
            raise LoadError(
                f"{path} lacks {', '.join(missing)}, which its index names; fetch what is missing."
            )
        files = [path / name for name in named]
    if not files:
        raise LoadError(_without(path))
    names: list[str] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                names += opened.keys()
        except SafetensorError as error:
            raise LoadError(f"{file} is truncated or damaged ({error}); fetch it again.") from error
    return names, sum(file.stat().st_size for file in files)


def _is_inside(name: str) -> bool:
    """Whether a file's name in an index leads to the index's own folder, or to one in it."""
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name


def _without(path: Path) -> str:
    """The error for a folder without safetensors."""
    there = sorted(path.iterdir())
    if pickled := [file.name for file in there if file.suffix.lower() in PICKLES]:
        return (
            f"{path} holds its weights as pickles ({_few(pickled)}), which can run code when read; "
            "convert them to safetensors."
        )
    if other := [file.name for file in there if file.suffix.lower() in OTHERS]:
        return (
            f"{path} holds weights in a form that is not read here ({_few(other)}); "
            "convert them to safetensors."
        )
    if packed := [file.name for file in there if file.suffix.lower() == ".gguf"]:
        return f"{path} holds its weights in {packed[0]}; give the path of that file."
    return f"{path} has no weights; add its .safetensors files or load with weights=False."


def _few(names: list[str], most: int = 4) -> str:
    """The first few of many names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_surplus(label: str, names: Iterable[str], module: Any) -> None:
    """Warn of weights that the model has no place for; raise LoadError where they are blocks."""
    lists = {
        path: len(part)
        for path, part in module.named_modules()
        if type(part).__name__ == "ModuleList"
    }
    beyond: dict[str, set[int]] = {}
    for name in names:
        for found in re.finditer(r"\.(\d+)\.", name):
            if (path := name[: found.start()]) in lists and int(found[1]) >= lists[path]:
                beyond.setdefault(path, set()).add(int(found[1]))
    for path, numbers in beyond.items():
        raise LoadError(too_many(label, f"{path} ", numbers, lists[path]))
    if names := sorted(names):
        warnings.warn(
            f"{label} holds weights that its model has no place for and that are left out: "
            f"{_few(names, 1)}.",
            stacklevel=2,
        )


def too_many(label: str, of: str, numbers: Iterable[int], count: int) -> str:
    """The error for weights of blocks that the configuration does not have."""
    return (
        f"{label} holds weights of {of}{ranges(sorted(numbers))}, and its configuration has "
        f"{numbered('block', count)}; fetch both again."
    )
