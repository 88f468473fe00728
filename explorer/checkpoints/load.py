"""Load a model with standard names and values from a name or a path."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from explorer import specimens
from explorer.checkpoints import cards, configuration, hub
from explorer.checkpoints.folders import load_folder
from explorer.checkpoints.gguf_load import load_gguf
from explorer.checkpoints.quantised import dequantised
from explorer.checkpoints.sources import check_options, expanded, is_path, named_source
from explorer.checkpoints.weights import Found, as_sentences, tokenizer_of, weighted
from explorer.discovery.anatomy import Anatomy
from explorer.discovery.backbone import NotADecoder
from explorer.discovery.discover import discover
from explorer.discovery.record_run import recorded_run, remember
from explorer.discovery.residual import CannotTrace
from explorer.errors import LoadError, first_sentence, is_internal_error
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
        check_options(weights, trust_remote_code, attn_implementation, experts_implementation)
        if source.startswith(SPECIMEN):
            found = _specimen(source.removeprefix(SPECIMEN), dtype, weights, attn_implementation)
        elif source.startswith(DEFAULT):
            found = _default(source.removeprefix(DEFAULT), dtype, weights, attn_implementation)
        elif is_path(source):
            path = Path(expanded(source))
            if path.suffix.lower() == ".gguf":
                found = load_gguf(path, dtype, weights, attn_implementation)
            else:
                found = load_folder(path, dtype, weights, attn_implementation, trust_remote_code)
        elif not weights:
            found = _shapes(source, dtype, attn_implementation, trust_remote_code)
        else:
            found = _hub(source, dtype, attn_implementation, trust_remote_code)
        model = _with_names(found, attn_implementation, experts_implementation)
        if source.startswith(SPECIMEN):
            model.reload = lambda dtype: load(source, dtype=dtype)
        return model


def load_specimen(specimen: specimens.Specimen) -> LanguageModel:
    """Give a small model that was built here standard names and values."""
    label = f"{SPECIMEN}{specimen.family}"
    with _BUILDING:
        found = Found(specimen.model, specimen.tokenizer, label, specimen.weights)
        return _with_names(found, "eager", None)


def _with_names(found: Found, attention: str, experts: str | None) -> LanguageModel:
    """Find where the values of a model are, and return it under standard names."""
    module, tokenizer, label, numbers = found
    switched: Any = module  # transformers leaves its methods untyped
    if experts is not None:
        with as_sentences(label):
            switched.set_experts_implementation(experts)
    anatomy = _anatomy(module, label, attention, experts)
    return LanguageModel(switched.eval(), tokenizer, anatomy, label, numbers)


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
        with as_sentences(label):
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


def _specimen(family: str, dtype: torch.dtype | None, weights: bool, attention: str) -> Found:
    if not weights:
        config = specimens.config_of(family)
        return Found(
            build_meta(config, dtype or torch.bfloat16, attention),
            _specimen_tokenizer(),
            f"{SPECIMEN}{family}",
            "none: shapes only",
        )
    with as_sentences(f"{SPECIMEN}{family}"):
        # Some classes take an implementation when they are built alone.
        specimen = specimens.build(
            family, dtype=dtype or torch.float32, attn_implementation=attention
        )
    return Found(specimen.model, specimen.tokenizer, f"{SPECIMEN}{family}", specimen.weights)


def _default(family: str, dtype: torch.dtype | None, weights: bool, attention: str) -> Found:
    recipe(family)  # raises where there is no such family
    if weights:
        raise LoadError(
            f"The default configuration of {family} is no released checkpoint, so it has no "
            "weights: load it with "
            f"weights=False, or the family's small model as 'specimen:{family}'."
        )
    with as_sentences(f"{DEFAULT}{family}"):
        return Found(
            build_meta(default_config(family), dtype or torch.bfloat16, attention),
            _specimen_tokenizer(),
            f"{DEFAULT}{family}",
            "none: shapes only",
        )


def _specimen_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of a model without weights: its shapes do not depend on it."""
    return bpe.load_tokenizer(model_max_length=1 << 20)


def _shapes(source: str, dtype: torch.dtype | None, attention: str, trust: bool) -> Found:
    def read(local: bool) -> PreTrainedConfig:
        return configuration.read_config(
            source, source, trust_remote_code=trust, local_files_only=local
        )

    config = cards.config(source) if source in cards.IDS else hub.read(source, read)
    with as_sentences(source), configuration.few_modules(source):
        return Found(
            build_meta(config, dtype or torch.bfloat16, attention),
            _specimen_tokenizer(),
            source,
            "none: shapes only",
        )


def _hub(source: str, dtype: torch.dtype | None, attention: str, trust: bool) -> Found:
    def read(local: bool) -> Found:
        options: dict[str, Any] = {"trust_remote_code": trust, "local_files_only": local}
        tokenizer = tokenizer_of(source, **options)
        config = configuration.read_config(source, source, **options)
        origin = "from the hub" + dequantised(source, config)
        model = weighted(source, source, config, dtype, attention, **options)
        return Found(model, tokenizer, source, origin)

    return hub.read(source, read)
