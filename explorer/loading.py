"""Loading: from a name or a path to a model with standard names and values."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from explorer import cards, engine, specimens  # noqa: F401  the engine before any modeling code
from explorer.accounting import build_meta
from explorer.finding.discover import discover
from explorer.model import LanguageModel
from explorer.specimens import bpe

SPECIMEN = "specimen:"

#: Files that hold weights as pickles, which can run code when they are read.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class LoadError(ValueError):
    """A model cannot be loaded; the message says what and what to do."""


def load(source: str | os.PathLike, *, weights: bool = True, attn_implementation: str = "eager",
         experts_implementation: str | None = None, dtype: torch.dtype | None = None,
         trust_remote_code: bool = False) -> LanguageModel:
    """Load a language model with standard names and values.

    source: ``"specimen:<family>"`` for a small model made here, the id of a
        checkpoint whose card is shipped, a checkpoint folder, a ``.gguf`` file, or
        the id of a checkpoint on the hub.
    weights: False builds the model at its full size on the meta device, for shapes.
    attn_implementation: ``"eager"`` unless told otherwise, so that every value of
        the vocabulary reads; `support` says what another takes away.
    experts_implementation: None for transformers' default (``"grouped_mm"``).
    dtype: float32 with weights, bfloat16 without, unless given.
    trust_remote_code: run modeling code that comes with a checkpoint; off unless asked.

    Raises LoadError (and, for names, UnknownFamily and UnknownCheckpoint, all
    ValueErrors) with one sentence that says what to do.
    """
    source = os.fspath(source)
    if source.startswith(SPECIMEN):
        found = _specimen(source.removeprefix(SPECIMEN), dtype, weights, attn_implementation)
    elif _is_path(source):
        path = Path(source).expanduser()
        if path.suffix.lower() == ".gguf":
            found = _gguf(path, dtype, attn_implementation)
        else:
            found = _folder(path, dtype, weights, attn_implementation, trust_remote_code)
    elif not weights:
        found = _shapes(source, dtype, attn_implementation, trust_remote_code)
    else:
        found = _hub(source, dtype, attn_implementation, trust_remote_code)
    module, tokenizer, label, numbers = found
    if experts_implementation is not None:
        module.set_experts_implementation(experts_implementation)
    anatomy = discover(build_meta(module.config, attn_implementation=attn_implementation,
                                  experts_implementation=experts_implementation))
    return LanguageModel(module.eval(), tokenizer, anatomy, label, numbers)


def _is_path(source: str) -> bool:
    return (
        Path(source).expanduser().exists()
        or source.startswith(("/", "./", "../", "~"))
        or source.lower().endswith((".gguf", ".safetensors", *PICKLES))
    )


def _specimen(family: str, dtype: torch.dtype | None, weights: bool, attention: str) -> tuple:
    if not weights:
        config = specimens.config_of(family)
        return build_meta(config, dtype or torch.bfloat16, attention), _specimen_tokenizer(), f"{SPECIMEN}{family}", "none: shapes only"
    specimen = specimens.build(family, dtype=dtype or torch.float32)
    specimen.model.set_attn_implementation(attention)
    return specimen.model, specimen.tokenizer, f"{SPECIMEN}{family}", specimen.weights


def _specimen_tokenizer() -> Any:
    """Some tokenizer for a model without weights: its shapes do not depend on which."""
    return bpe.load_tokenizer(model_max_length=1 << 20)


def _shapes(source: str, dtype: torch.dtype | None, attention: str, trust: bool) -> tuple:
    config = cards.config(source) if source in cards.IDS else _hub_config(source, trust)
    return build_meta(config, dtype or torch.bfloat16, attention), _specimen_tokenizer(), source, "none: shapes only"


def _hub_config(source: str, trust: bool) -> Any:
    from transformers import AutoConfig

    with _hub_errors(source):
        return AutoConfig.from_pretrained(source, trust_remote_code=trust)


@contextlib.contextmanager
def _hub_errors(source: str):
    """Turn the many ways a hub can fail into one sentence."""
    if source.count("/") != 1:
        cards.card(source)  # raises UnknownCheckpoint with the nearest names
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        with contextlib.suppress(cards.UnknownCheckpoint):
            cards.card(source)
            raise LoadError(
                f"The weights of {source} are not here and the hub could not be reached; "
                f"load it with weights=False for its shapes, or give the folder you downloaded."
            ) from error
        near = _near(source)
        raise LoadError(f"There is no checkpoint {source!r} here or on a hub that can be reached{near}.") from error


def _near(source: str) -> str:
    try:
        cards.card(source)
    except cards.UnknownCheckpoint as error:
        return "; " + str(error)[0].lower() + str(error)[1:].rstrip(".")
    return ""


def _hub(source: str, dtype: torch.dtype | None, attention: str, trust: bool) -> tuple:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _hub_errors(source):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype or torch.float32, attn_implementation=attention,
            trust_remote_code=trust, use_safetensors=True,
        )
    return model, tokenizer, source, "released"


def _folder(path: Path, dtype: torch.dtype | None, weights: bool, attention: str, trust: bool) -> tuple:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if path.suffix.lower() in PICKLES:
        raise LoadError(f"{path} is a pickle, which can run code when read; convert it to safetensors and give its folder.")
    if not path.exists():
        raise LoadError(f"There is nothing at {path}; give a checkpoint folder or a .gguf file.")
    if path.is_file():
        raise LoadError(f"{path} is a single file; give the checkpoint folder it is in, with its config.json.")
    if not (path / "config.json").exists():
        raise LoadError(f"{path} has no config.json; give the folder of a transformers checkpoint.")
    if weights:
        _check_weights(path)
    with _broken(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust, local_files_only=True)
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust, local_files_only=True)
        except (OSError, ValueError) as error:
            raise LoadError(f"{path} has no tokenizer that transformers reads; add its tokenizer.json.") from error
        if not weights:
            return build_meta(config, dtype or torch.bfloat16, attention), tokenizer, str(path), "none: shapes only"
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or torch.float32, attn_implementation=attention,
            trust_remote_code=trust, use_safetensors=True, local_files_only=True,
        )
    return model, tokenizer, str(path), "as found in the folder"


@contextlib.contextmanager
def _broken(path: Path):
    from safetensors import SafetensorError

    try:
        yield
    except LoadError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        if "trust_remote_code" in str(error):
            raise LoadError(f"{path} brings modeling code of its own; read it, then load with trust_remote_code=True.") from error
        raise LoadError(f"{path} cannot be read as a checkpoint ({error}); check that every file arrived whole.") from error


def _check_weights(path: Path) -> None:
    """Safetensors, all there and whole, or one sentence."""
    from safetensors import SafetensorError, safe_open

    index = path / "model.safetensors.index.json"
    files = sorted(path.glob("*.safetensors"))
    if index.exists():
        try:
            named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError) as error:
            raise LoadError(f"{index} is not an index of weights; fetch it again.") from error
        missing = [name for name in named if not (path / name).exists()]
        if missing:
            raise LoadError(f"{path} lacks {', '.join(missing)}, which its index names; fetch what is missing.")
        files = [path / name for name in named]
    if not files:
        pickled = [p.name for p in sorted(path.iterdir()) if p.suffix.lower() in PICKLES]
        if pickled:
            raise LoadError(
                f"{path} holds its weights as pickles ({', '.join(pickled)}), which can run code when read; "
                "convert them to safetensors."
            )
        raise LoadError(f"{path} has no weights; add its .safetensors files or load with weights=False.")
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                opened.keys()
        except SafetensorError as error:
            raise LoadError(f"{file} is truncated or damaged ({error}); fetch it again.") from error


def _gguf(path: Path, dtype: torch.dtype | None, attention: str) -> tuple:
    if not path.is_file():
        raise LoadError(f"There is no file {path}; give the path of a .gguf file.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LoadError(f"{path} is not a GGUF file; fetch it again.")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise LoadError("Reading a GGUF file needs two more packages: pip install gguf accelerate.") from error
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype or torch.float32, attn_implementation=attention, local_files_only=True
        )
    except (OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise LoadError(f"{path} cannot be read as a model ({error}); check that it arrived whole.") from error
    return model, tokenizer, path.name, "released"
