"""Models on the meta device: building them, running a few blocks of them, and the calls that probe them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from explorer.engine import nnsight_api as engine  # noqa: F401  before any modeling module

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def build_meta(
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str = "eager",
    experts_implementation: str | None = None,
    model_class: type[PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """The causal language model of a configuration at its full size on the meta device, in eval mode.

    model_class: the class to build, where it is known; else the one transformers has for the configuration.

    Raises ValueError where transformers has no causal language model for the configuration.
    """
    from transformers import AutoModelForCausalLM

    if model_class is None and type(config) not in AutoModelForCausalLM._model_mapping:
        name = config.model_type or type(config).__name__
        raise ValueError(f"transformers has no causal language model for a {name} configuration")
    chosen: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    if experts_implementation is not None:
        chosen["experts_implementation"] = experts_implementation
    with torch.device("meta"):
        make = AutoModelForCausalLM.from_config if model_class is None else model_class._from_config
        return make(copy.deepcopy(config), **chosen).eval()


#: Lengths tried for the probe's batch and sequence, so that no size of the model equals one of them.
_LENGTHS = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


#: What transformers' models call to warn of padding.
_WARNS = "warn_if_padding_and_no_attention_mask"


@contextmanager
def without_padding_warning(model: torch.nn.Module) -> Iterator[None]:
    """A model of shapes alone, that looks for no padding: some look among the ids to warn of it, and here there are none to look at."""
    warning = [module for module in model.modules() if hasattr(module, _WARNS)]
    for module in warning:
        module.__dict__[_WARNS] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for module in warning:
            module.__dict__.pop(_WARNS, None)


@contextmanager
def with_first_blocks(twin: torch.nn.Module, path: str, depth: int) -> Iterator[None]:
    """The twin with its first ``depth`` blocks alone."""
    owner, _, name = path.rpartition(".")
    holder, whole = twin.get_submodule(owner), twin.get_submodule(path)
    setattr(holder, name, whole[:depth])
    try:
        yield
    finally:
        setattr(holder, name, whole)


def mask_arguments(ids: torch.Tensor, masked: bool) -> dict[str, torch.Tensor]:
    """The mask that a run on shapes alone is given beside the ids, where it needs one."""
    return {"attention_mask": torch.ones_like(ids)} if masked else {}


def probe_lengths(model: torch.nn.Module) -> tuple[int, int]:
    """A batch and a sequence length that no dimension of the model's parameters equals, alone or multiplied."""
    taken = {extent for parameter in model.parameters() for extent in parameter.shape}
    config = model.config.get_text_config()
    taken |= {value for value in config.to_dict().values() if isinstance(value, int)}
    free = [n for n in _LENGTHS if n not in taken]
    return next((b, s) for b in free for s in free if s > b and b * s not in taken)
