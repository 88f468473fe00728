"""What a checkpoint leads to: its tokenizer, its model with all its weights, or one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from explorer import specimens
from explorer.checkpoints import files
from explorer.errors import LoadError, first_sentence, is_internal_error, panics_as_errors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class Found(NamedTuple):
    """What a source leads to; ``weights`` is where the numbers come from."""

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    label: str
    weights: str


def tokenizer_of(source: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    auto: Any = AutoTokenizer
    with panics_as_errors():
        return auto.from_pretrained(source, **options)


def weighted(
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


@contextlib.contextmanager
def as_sentences(path: Path | str) -> Generator[None]:
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


def no_language_model(label: object, config: Any) -> str:
    """The error for a configuration of a model that is no causal language model."""
    return f"{label} is a {config.model_type}, of which transformers has no causal language model."
