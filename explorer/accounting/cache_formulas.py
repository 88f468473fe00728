"""The formula behind every size of a cache: which figures of a configuration its axes are.

The sizes are those of the tensors that a run of the model kept (`explorer.accounting.cache_probe`).
Here each axis gets a name, and a source where that source evaluates to the same number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from explorer.accounting.cache_probe import CachedTensor, CacheOwner, CacheProbe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Names of an axis with their sources, the likeliest first.
_KV_HEADS = (("KvHeads", "num_key_value_heads"), ("KvHeads", "num_attention_heads"))
_HEAD_DIM = (("HeadDim", "head_dim"), ("HeadDim", "hidden_size ÷ num_attention_heads"))
_LATENT = (("Latent", "kv_lora_rank + qk_rope_head_dim"),)
_KEY_VALUE_DIM = (("KeyValueDim", "qk_head_dim + v_head_dim"),)
_HEADS = (
    ("ValueHeads", "linear_num_value_heads"),
    ("Heads", "linear_num_heads"),
    ("Heads", "num_heads"),
    ("Heads", "mamba_num_heads"),
    ("Heads", "mamba_n_heads"),
)
_STATE_ROWS = (
    ("KeyDim", "linear_key_head_dim"),
    ("KeyDim", "linear_head_dim"),
    ("HeadDim", "mamba_head_dim"),
    ("HeadDim", "mamba_d_head"),
    ("HeadDim", "head_dim"),
)
_STATE_COLUMNS = (
    ("ValueDim", "linear_value_head_dim"),
    ("ValueDim", "linear_head_dim"),
    ("StateDim", "ssm_state_size"),
    ("StateDim", "mamba_d_state"),
    ("StateDim", "state_size"),
)
_CHANNELS = (
    ("Channels", "lru_width"),
    ("Channels", "mamba_expand × hidden_size"),
    ("Channels", "expand × hidden_size"),
    ("Channels", "intermediate_size"),
)
_CONVOLVED = (
    (
        "Conv",
        "2 × linear_num_key_heads × linear_key_head_dim"
        " + linear_num_value_heads × linear_value_head_dim",
    ),
    ("Conv", "3 × linear_num_heads × linear_head_dim"),
    ("Conv", "mamba_num_heads × mamba_head_dim + 2 × n_groups × ssm_state_size"),
    ("Conv", "mamba_d_ssm + 2 × mamba_n_groups × mamba_d_state"),
    ("Conv", "num_heads × head_dim + 2 × n_groups × state_size"),
    *(("Conv", source) for _, source in _CHANNELS),
    ("Conv", "hidden_size"),
)
_WIDTH = (
    ("Width", "linear_conv_kernel_dim"),
    ("Width", "mamba_d_conv"),
    ("Width", "conv_L_cache"),
    ("Width", "conv_kernel"),
    ("Width", "conv1d_width - 1"),
)

#: Axes of a recurrent state, by their number without the batch: names for the shape, candidates.
_STATES = {
    3: (["heads", "key_dim", "value_dim"], (_HEADS, _STATE_ROWS, _STATE_COLUMNS)),
    2: (["channels", "state_dim"], (_CHANNELS, _STATE_COLUMNS)),
    1: (["channels"], (_CHANNELS,)),
}

_Candidates = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class _Factor:
    """One factor of a size: its name in the formula, its number, and the source of the number."""

    symbol: str
    number: int
    source: str


def cache_rows(
    config: PreTrainedConfig, run: CacheProbe, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Return the rows of `accounting.cache_sizes` for what a run kept, for each kind of block.

    dtype: the dtype that replaces the run's own.

    Raises ValueError for a tensor without a known formula.
    """
    equal: dict[tuple, list[CacheOwner]] = {}
    for owner in run.owners:
        equal.setdefault((owner.window, owner.tensors), []).append(owner)
    return [row for group in equal.values() for row in _Rows(config, run, group, dtype).rows()]


class _Rows:
    """Makes the rows of blocks that keep equal tensors."""

    def __init__(
        self, config: PreTrainedConfig, run: CacheProbe, group: list[CacheOwner], dtype: torch.dtype
    ) -> None:
        self.config, self.run, self.owner, self.dtype = config, run, group[0], dtype
        self.layers = [owner.layer for owner in group]
        self.tensors: dict[str, list[CachedTensor]] = {}
        for one in self.owner.tensors:
            self.tensors.setdefault(one.kind, []).append(one)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows: states, then inputs of a convolution, then keys and values."""
        unknown = self.tensors.keys() - {"recurrent", "convolution", "keys", "values"}
        if unknown:
            raise ValueError(
                f"what {self.config.model_type} keeps as {', '.join(sorted(unknown))} "
                "has no formula here"
            )
        for one in self.tensors.get("recurrent", ()):
            yield self._state(one)
        for one in self.tensors.get("convolution", ()):
            yield self._convolution(one)
        for keys, values in zip(
            self.tensors.get("keys", ()), self.tensors.get("values", ()), strict=True
        ):
            yield self._keys_and_values(keys, values)

    def _state(self, tensor: CachedTensor) -> dict[str, Any]:
        if len(tensor.shape) - 1 not in _STATES:
            raise ValueError(
                f"a state of {len(tensor.shape)} axes ({self.config.model_type}) "
                "has no formula here"
            )
        names, candidates = _STATES[len(tensor.shape) - 1]
        factors = [
            self._axis(number, known)
            for number, known in zip(tensor.shape[1:], candidates, strict=True)
        ]
        names = [
            "head_dim" if factor.symbol == "HeadDim" else name
            for name, factor in zip(names, factors, strict=True)
        ]
        names = [
            "state_dim" if factor.symbol == "StateDim" else name
            for name, factor in zip(names, factors, strict=True)
        ]
        if tensor.dtype == self.run.dtype == torch.float32 != self.dtype:
            raise ValueError(
                f"whether the state of {self.config.model_type} has the model's dtype "
                "does not show in float32"
            )
        fixed = tensor.dtype == torch.float32 != self.run.dtype
        return self._row(
            "recurrent state",
            "RecurrentLayers",
            factors,
            tensor,
            ["batch", *names],
            note="float32 whatever the model's dtype" if fixed else None,
        )

    def _convolution(self, tensor: CachedTensor) -> dict[str, Any]:
        if len(tensor.shape) != 3:
            raise ValueError(
                f"inputs of a convolution of {len(tensor.shape)} axes ({self.config.model_type}) "
                "have no formula here"
            )
        channels = self._axis(tensor.shape[1], _CONVOLVED)
        width = self._axis(tensor.shape[2], _WIDTH)
        whole = " - " not in width.source
        note = (
            "transformers keeps Width columns; the next token needs the last Width - 1"
            if whole
            else None
        )
        count = "RecurrentLayers" if "recurrent" in self.tensors else "ConvolutionLayers"
        return self._row(
            "convolution inputs",
            count,
            [channels, width],
            tensor,
            ["batch", "channels", "width"],
            note=note,
        )

    def _keys_and_values(self, keys: CachedTensor, values: CachedTensor) -> dict[str, Any]:
        (_, heads, tokens, key_dim), value_dim = keys.shape, values.shape[-1]
        window = self.owner.window
        # The token being read brings its own keys and values, so one fewer than the window is kept.
        if tokens != (self.run.tokens if window is None else min(self.run.tokens, window - 1)):
            raise ValueError(
                f"{self.config.model_type} keeps keys of {tokens} positions "
                f"for {self.run.tokens} tokens"
            )
        shape = ["batch", "kv_heads", "tokens", "head_dim"]
        name, note = "keys and values", None
        if key_dim == value_dim:
            factors = [
                _Factor("2", 2, "keys and values"),
                self._axis(heads, _KV_HEADS),
                self._axis(key_dim, _HEAD_DIM),
            ]
        elif heads == 1:
            factors = [self._axis(key_dim + value_dim, _LATENT)]
            name, shape, note = (
                "latents",
                ["batch", "tokens", "latent"],
                "one latent and one rotary key for all heads",
            )
        else:
            factors = [
                self._axis(heads, _KV_HEADS),
                self._axis(key_dim + value_dim, _KEY_VALUE_DIM),
            ]
        if window is None:
            return self._row(name, "AttentionLayers", factors, keys, shape, grows=True, note=note)
        row = self._row(f"{name} in the window", "SlidingLayers", factors, keys, shape, grows=True)
        row["tokens_at_most"] = window - 1
        row["note"] = (
            f"for at most the last {window - 1} tokens: the window of {window} less the newest"
        )
        return row

    def _axis(self, number: int, candidates: _Candidates) -> _Factor:
        """Return an axis under the first name whose source evaluates to its length."""
        for symbol, source in candidates:
            if figure(self.config, source) == number:
                return _Factor(symbol, number, source)
        return _Factor(candidates[0][0], number, "read off the cache")

    def _blocks(self) -> str:
        """Return what the configuration calls these blocks."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            attends = "sliding_attention" if self.owner.window else "full_attention"
            return f"{attends} blocks" if self.owner.attends else "blocks"
        found = {kinds[layer] for layer in self.layers}
        return f"{found.pop()} blocks" if len(found) == 1 else "blocks"

    def _row(
        self,
        name: str,
        count: str,
        factors: list[_Factor],
        tensor: CachedTensor,
        shape: list[str],
        grows: bool = False,
        note: str | None = None,
    ) -> dict[str, Any]:
        """Return one row; formula, numbers and bytes come from the same factors."""
        dtype = self.dtype if tensor.dtype == self.run.dtype else tensor.dtype
        written = str(dtype).removeprefix("torch.")
        factors = [
            _Factor(count, len(self.layers), self._blocks()),
            *factors,
            _Factor("Bytes", dtype.itemsize, f"one {written} number"),
        ]
        size = math.prod(factor.number for factor in factors)
        return {
            "name": name,
            "formula": " × ".join(factor.symbol for factor in factors),
            "numbers": " × ".join(str(factor.number) for factor in factors),
            "generics": [
                {"name": one.symbol, "number": one.number, "source": one.source}
                for one in factors
                if not one.symbol.isdigit()
            ],
            "layers": self.layers,
            "shape": shape,
            "dtype": written,
            "per_token_bytes": size if grows else None,
            "fixed_bytes": None if grows else size,
            "tokens_at_most": None,
            "note": note,
        }


def figure(config: PreTrainedConfig, source: str) -> int | None:
    """Evaluate a source such as "hidden_size ÷ num_attention_heads" on a configuration.

    None where the configuration lacks one of the figures named. Read from left to right,
    × and ÷ before + and -.
    """
    total = 0
    for sign, term in re.findall(r"(?:^|([+-]) )([^+-]+)", source):
        product = 1
        for operation, word in re.findall(r"(?:^|([×÷]) )(\S+)", term.strip()):
            number = int(word) if word.isdigit() else _figure(config, word)
            if not isinstance(number, int) or (operation == "÷" and product % number):
                return None
            product = product // number if operation == "÷" else product * number
        total += -product if sign == "-" else product
    return total


def _figure(config: PreTrainedConfig, name: str) -> Any:
    """Return one figure of a configuration; None where it has none, or one for each block."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' word for a figure that differs between blocks
        return None
