"""Models on the meta device: building them, and the arguments of the calls that probe them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
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
    """Build a configuration's causal language model at full size on the meta device, in eval mode.

    model_class: the class to build; None for the one that transformers has for the configuration.

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


#: What a forward calls its cache: one name in new releases of transformers, two in earlier ones.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_argument(model: torch.nn.Module) -> str | None:
    """Return the name of the argument that a model's forward takes its cache by, None without."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def cache_of(output: Any, state: bool = False) -> dict[str, Any] | None:
    """Return the cache in a model's output as a keyword argument of the next call, or None.

    state: also what a family has in place of one, the state that rwkv returns.
    """
    if not isinstance(output, Mapping):
        return None
    names = (*CACHE_NAMES, "state") if state else CACHE_NAMES
    return next(({name: output[name]} for name in names if output.get(name) is not None), None)


#: Batch and sequence lengths to choose from, so that no size of the model equals one of them.
_LENGTHS = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


#: The method by which transformers' models warn of padding.
_WARNS = "warn_if_padding_and_no_attention_mask"


@contextmanager
def without_padding_warning(model: torch.nn.Module) -> Iterator[None]:
    """Keep a model from looking for padding in its ids, which have no values on the meta device."""
    warning = [module for module in model.modules() if hasattr(module, _WARNS)]
    for module in warning:
        module.__dict__[_WARNS] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for module in warning:
            module.__dict__.pop(_WARNS, None)


def mask_arguments(ids: torch.Tensor, masked: bool) -> dict[str, torch.Tensor]:
    """Return the attention mask of a run on the meta device, where it needs one."""
    return {"attention_mask": torch.ones_like(ids)} if masked else {}


def probe_lengths(model: PreTrainedModel) -> tuple[int, int]:
    """Return a batch and a sequence length that, like their product, are no size of the model."""
    taken = {extent for parameter in model.parameters() for extent in parameter.shape}
    config = model.config.get_text_config()
    taken |= {value for value in config.to_dict().values() if isinstance(value, int)}
    free = [n for n in _LENGTHS if n not in taken]
    return next((b, s) for b in free for s in free if s > b and b * s not in taken)
