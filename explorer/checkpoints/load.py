"""Load a model with standard names and values from a name or a path."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from explorer import specimens
from explorer.checkpoints import cards, configuration, files, gguf_file, hub
from explorer.checkpoints.sources import expanded, is_path, named_source
from explorer.discovery.anatomy import Anatomy
from explorer.discovery.backbone import NotADecoder
from explorer.discovery.discover import discover
from explorer.discovery.record_run import recorded_run, remember
from explorer.discovery.residual import CannotTrace
from explorer.errors import (
    LoadError,
    abbreviated,
    first_sentence,
    is_internal_error,
    panics_as_errors,
)
from explorer.meta_device import build_meta
from explorer.model.language_model import LanguageModel
from explorer.specimens import bpe
from explorer.specimens.recipes import recipe
from explorer.specimens.small import default_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SPECIMEN = "specimen:"

#: Before a model type: transformers' own default sizes for it, which are no released checkpoint's.
DEFAULT = "default:"

#: transformers sets torch's default dtype while it builds a model, so two are never built at once.
_BUILDING = threading.RLock()


#: The most parameters of a model that is copied to be run once.
_SMALL = 50_000_000


class _Found(NamedTuple):
    """What a source leads to; ``weights`` is where the numbers come from."""

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    label: str
    weights: str


def load(
    source: str | os.PathLike[str],
    *,
    weights: bool = True,
    attn_implementation: str = "eager",
    experts_implementation: str | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> LanguageModel:
    """Load a language model with standard names and values.

    source: ``"specimen:<family>"`` for a small model made here, the id of a
        checkpoint whose card is shipped, a checkpoint folder, a ``.gguf`` file, or
        the id of a checkpoint on the hub; ``"default:<family>"`` for the sizes that
        transformers' configuration class has as defaults, which come without weights.
    weights: False builds the model at its full size on the meta device, for shapes.
    attn_implementation: ``"eager"`` by default, so that every value of
        the vocabulary reads; `support` says what another takes away.
    experts_implementation: None for transformers' default (``"grouped_mm"``).
    dtype: float32 with weights, bfloat16 without, unless given.
    trust_remote_code: run modeling code that comes with a checkpoint; off unless asked.

    Raises LoadError (and, for names, UnknownFamily and UnknownCheckpoint, all
    ValueErrors) with one sentence that says what to do.
    """
    with _BUILDING:
        source = named_source(source)
        _check_dtype(dtype)
        if source.startswith(SPECIMEN):
            found = _specimen(source.removeprefix(SPECIMEN), dtype, weights, attn_implementation)
        elif source.startswith(DEFAULT):
            found = _default(source.removeprefix(DEFAULT), dtype, weights, attn_implementation)
        elif is_path(source):
            path = Path(expanded(source))
            if path.suffix.lower() == ".gguf":
                found = _gguf(path, dtype, weights, attn_implementation)
            else:
                found = _folder(path, dtype, weights, attn_implementation, trust_remote_code)
        elif not weights:
            found = _shapes(source, dtype, attn_implementation, trust_remote_code)
        else:
            found = _hub(source, dtype, attn_implementation, trust_remote_code)
        module, tokenizer, label, numbers = found
        switched: Any = module  # transformers leaves its methods untyped
        if experts_implementation is not None:
            with _broken(label):
                switched.set_experts_implementation(experts_implementation)
        model = LanguageModel(
            switched.eval(),
            tokenizer,
            _anatomy(module, label, attn_implementation, experts_implementation),
            label,
            numbers,
        )
        if source.startswith(SPECIMEN):
            model.reload = lambda dtype: load(source, dtype=dtype)
        return model


def _check_dtype(dtype: Any) -> None:
    """Raise LoadError for what somebody gave that is no dtype."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise LoadError(f"{dtype!r} is not a dtype; give one of torch's, such as torch.bfloat16.")


def _anatomy(module: PreTrainedModel, label: str, attention: str, experts: str | None) -> Anatomy:
    """Find where the values of ``module`` are, on a copy on the meta device or on the model itself.

    A forward whose control flow depends on numbers cannot run there; a copy of a small model runs
    with its weights instead.
    """
    itself = module.device.type == "meta" and module.dtype == torch.bfloat16 and experts is None
    meta_model = module
    if not itself:
        with _broken(label):
            meta_model = build_meta(
                module.config,
                attn_implementation=attention,
                experts_implementation=experts,
                model_class=type(module),
            )
    try:
        try:
            anatomy = discover(meta_model)
            if meta_model is not module:
                remember(module, recorded_run(meta_model))
            return anatomy
        except (NotImplementedError, RuntimeError):
            if module.device.type == "meta" or module.num_parameters() > _SMALL:
                raise
            return discover(copy.deepcopy(module).eval())
    except (CannotTrace, NotADecoder) as error:
        raise NotTraceable(label, module, first_sentence(error)) from error
    except Exception as error:  # a forward of another kind may raise anything
        if is_internal_error(error):
            raise
        call = "called with token ids and asked to keep a cache"
        raise NotTraceable(label, module, f"{call}, it stops: {first_sentence(error)}") from error


class NotTraceable(LoadError):
    """A model whose forward cannot be traced; ``reason`` says why."""

    def __init__(self, label: str, module: Any, reason: str) -> None:
        super().__init__(
            f"{label} is of the class {type(module).__name__}, whose forward does not go the way "
            f"the standard values are found ({reason})."
        )
        self.reason = reason


def _specimen(family: str, dtype: torch.dtype | None, weights: bool, attention: str) -> _Found:
    if not weights:
        config = specimens.config_of(family)
        return _Found(
            build_meta(config, dtype or torch.bfloat16, attention),
            _specimen_tokenizer(),
            f"{SPECIMEN}{family}",
            "none: shapes only",
        )
    with _broken(f"{SPECIMEN}{family}"):
        specimen = specimens.build(family, dtype=dtype or torch.float32)
        switched: Any = specimen.model
        switched.set_attn_implementation(attention)
    return _Found(specimen.model, specimen.tokenizer, f"{SPECIMEN}{family}", specimen.weights)


def _default(family: str, dtype: torch.dtype | None, weights: bool, attention: str) -> _Found:
    recipe(family)  # raises where there is no such family
    if weights:
        raise LoadError(
            f"The default configuration of {family} is no released checkpoint, so it has no "
            "weights: load it with "
            f"weights=False, or the family's small model as 'specimen:{family}'."
        )
    with _broken(f"{DEFAULT}{family}"):
        return _Found(
            build_meta(default_config(family), dtype or torch.bfloat16, attention),
            _specimen_tokenizer(),
            f"{DEFAULT}{family}",
            "none: shapes only",
        )


def _specimen_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of a model without weights: its shapes do not depend on it."""
    return bpe.load_tokenizer(model_max_length=1 << 20)


def _shapes(source: str, dtype: torch.dtype | None, attention: str, trust: bool) -> _Found:
    def read(local: bool) -> PreTrainedConfig:
        return configuration.read_config(
            source, source, trust_remote_code=trust, local_files_only=local
        )

    config = cards.config(source) if source in cards.IDS else hub.read(source, read)
    with _broken(source), configuration.few_modules(source):
        return _Found(
            build_meta(config, dtype or torch.bfloat16, attention),
            _specimen_tokenizer(),
            source,
            "none: shapes only",
        )


def _hub(source: str, dtype: torch.dtype | None, attention: str, trust: bool) -> _Found:
    def read(local: bool) -> _Found:
        options: dict[str, Any] = {"trust_remote_code": trust, "local_files_only": local}
        tokenizer = _tokenizer(source, **options)
        config = configuration.read_config(source, source, **options)
        model = _weighted(source, source, config, dtype, attention, **options)
        return _Found(model, tokenizer, source, "from the hub")

    return hub.read(source, read)


def _tokenizer(source: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    auto: Any = AutoTokenizer
    with panics_as_errors():
        return auto.from_pretrained(source, **options)


def _weighted(
    source: str | Path,
    label: str,
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    attention: str,
    **options: Any,
) -> PreTrainedModel:
    """A model with all its weights from the checkpoint, in float32 unless ``dtype`` is given."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    if not options.get("gguf_file"):
        options["use_safetensors"] = True
    model, report = auto.from_pretrained(
        source,
        config=config,
        dtype=dtype or torch.float32,
        attn_implementation=attention,
        output_loading_info=True,
        **options,
    )
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise LoadError(
            f"{label} lacks the weights {missing[0]}{more}, which its configuration calls for; "
            "fetch it again."
        )
    files.check_surplus(label, report["unexpected_keys"], model)
    return model


def _folder(
    path: Path, dtype: torch.dtype | None, weights: bool, attention: str, trust: bool
) -> _Found:
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
    if not (path / "config.json").exists():
        raise LoadError(f"{path} has no config.json; give the folder of a transformers checkpoint.")
    names, size = files.check_weights(path) if weights else ([], 0)
    options: dict[str, Any] = {"trust_remote_code": trust, "local_files_only": True}
    with _broken(path):
        config = configuration.read_config(path, str(path), **options)
        if not configuration.has_causal_model(config):
            raise LoadError(
                f"{path} is a {config.model_type}, of which transformers has no causal language "
                "model."
            )
        try:
            tokenizer = _tokenizer(path, **options)
        except Exception as error:
            raise LoadError(
                f"{path} has no tokenizer that transformers can read; add its tokenizer.json."
            ) from error
        if len(tokenizer) < 2:  # transformers makes an empty one where there is none
            raise LoadError(f"{path} has no tokenizer; add its tokenizer.json.")
        if not weights:
            with configuration.few_modules(str(path)):
                module = build_meta(config, dtype or torch.bfloat16, attention)
            return _Found(module, tokenizer, str(path), "none: shapes only")
        if not hasattr(config, "auto_map"):
            configuration.check_sizes(str(path), config, names, size)
        model = _weighted(path, str(path), config, dtype, attention, **options)
    return _Found(model, tokenizer, str(path), "as found in the folder")


@contextlib.contextmanager
def _broken(path: Path | str) -> Generator[None]:
    """Turn the libraries' errors about files they cannot read into a LoadError of one sentence."""
    try:
        with panics_as_errors():
            yield
    except (LoadError, specimens.SpecimenError, specimens.UnknownFamily):
        raise
    except Exception as error:
        if is_internal_error(error):
            raise
        if "trust_remote_code" in str(error):
            raise LoadError(
                f"{path} brings modeling code of its own; read it, then load with "
                "trust_remote_code=True."
            ) from error
        if "ignore_mismatched_sizes" in str(error):
            raise LoadError(
                f"The weights in {path} do not have the sizes its configuration says; fetch both "
                "again."
            ) from error
        raise LoadError(f"{path} cannot be loaded ({first_sentence(error)}).") from error


def _gguf(path: Path, dtype: torch.dtype | None, weights: bool, attention: str) -> _Found:
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
            (Path(folder) / path.name).symlink_to(path.resolve())
            tokenizer = _tokenizer(folder, **options)
            config = configuration.read_config(folder, path.name, **options)
            names = [tensor.name for tensor in reader.tensors]
            configuration.check_sizes(path.name, config, names, path.stat().st_size)
            if not weights:
                return _Found(
                    build_meta(config, dtype or torch.bfloat16, attention),
                    tokenizer,
                    path.name,
                    "none: shapes only",
                )
            model = _weighted(Path(folder), path.name, config, dtype, attention, **options)
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
    return _Found(model, tokenizer, path.name, f"as found in the file, {stored}")
