"""From a recipe to a running model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

import explorer.engine.nnsight_api  # noqa: F401  the engine must be imported before transformers' model classes
from explorer.specimens import bpe, weights
from explorer.specimens.errors import SpecimenError
from explorer.specimens.recipes import Recipe, recipe
from explorer.specimens.small import small_config

#: The longest text of a model whose configuration names no length.
_NO_LENGTH = 1 << 20


@dataclass(frozen=True)
class Specimen:
    """A small model of one family, ready to run.

    ``weights`` is "trained" or "random, seed N"; ``measured`` holds the figures
    taken after training and is empty for a random one.
    """

    family: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    config: PreTrainedConfig
    weights: str
    measured: dict[str, Any]
    prompt: str


def config_of(family: str) -> PreTrainedConfig:
    """The configuration of the specimen of ``family``, a fresh object. Raises UnknownFamily."""
    return _config(recipe(family))


def _config(made: Recipe) -> PreTrainedConfig:
    return small_config(made.family, **made.config, dtype="float32")


def build(
    family: str,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str = "eager",
) -> Specimen:
    """Build the specimen of ``family`` in evaluation mode.

    Numbers are made in float32 and rounded to ``dtype`` afterwards, so that every dtype is the same
    model. Raises UnknownFamily, or SpecimenError where a weights file is missing or damaged.
    """
    return build_recipe(recipe(family), dtype, device, attn_implementation)


def build_recipe(
    made: Recipe,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str = "eager",
) -> Specimen:
    """Build the small model of a recipe, as `build` does."""
    model = empty(_config(made), attn_implementation)
    if made.weights is None:
        weights.fill(model, made.seed, made.std, made.norm_std)
    else:
        weights.load(model, made.weights)
    model = _in_dtype(model, dtype)
    return Specimen(
        family=made.family,
        model=model.to(device).eval(),  # pyright: ignore[reportArgumentType]  a decorated method
        tokenizer=bpe.load_tokenizer(_longest(model.config)),
        config=model.config,
        weights="trained" if made.weights else f"random, seed {made.seed}",
        measured=_measured(made),
        prompt=made.prompt,
    )


def untrained(family: str) -> PreTrainedModel:
    """The model of ``family`` as its recipe's seed draws it; a weights file is not read."""
    made = recipe(family)
    model = empty(_config(made))
    weights.fill(model, made.seed, made.std, made.norm_std)
    return model


def empty(config: PreTrainedConfig, attn_implementation: str = "eager") -> PreTrainedModel:
    """The model in float32 as its class initialises it; the process's random state is restored."""
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=torch.float32
        )


def _longest(config: PreTrainedConfig) -> int:
    """The longest text the model's positions allow, in tokens."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or _NO_LENGTH


def _in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model as transformers loads it in ``dtype`` from a folder.

    What is rounded is the class's to say: some keep a router, a state's decay or a buffer in
    float32.
    """
    if dtype == torch.float32:
        return model
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=model.state_dict(),
            dtype=dtype,
            attn_implementation="eager",
        )
    finally:
        if shown:
            logging.enable_progress_bar()


def _measured(made: Recipe) -> dict[str, Any]:
    if made.weights is None:
        return {}
    if not made.measured_path.is_file():
        raise SpecimenError(
            f"The measurements {made.measured_path.name} of a trained specimen are missing."
        )
    return json.loads(made.measured_path.read_text(encoding="utf-8"))
