"""What a model holds and what a call keeps: parameters by part, cache and state sizes.

Everything here works on the meta device, where a model of any released size builds in
a fraction of a second: shapes are real, numbers are not allocated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: What the active count says, for whoever prints it.
ACTIVE_CONVENTION = (
    "Active counts every parameter but the routed experts a token does not choose. "
    "The embedding matrix is counted whole, although a token reads one row of it; "
    "a matrix shared by embedding and head is counted once."
)

#: The parts parameters are counted by, in the order shown.
PARTS = (
    "embedding", "head", "attention", "linear attention", "router", "routed experts", "shared expert", "dense mlp",
    "norms", "other",
)

_TOP_K_NAMES = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "topk")


def build_meta(
    config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16, attn_implementation: str = "eager",
    experts_implementation: str | None = None,
) -> PreTrainedModel:
    """The causal language model of a configuration at its full size on the meta device, in eval mode.

    Raises ValueError where transformers has no causal language model for the configuration.
    """
    from explorer import engine  # noqa: F401  before any modeling module
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        name = config.model_type or type(config).__name__
        raise ValueError(f"transformers has no causal language model for a {name} configuration")
    chosen: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    if experts_implementation is not None:
        chosen["experts_implementation"] = experts_implementation
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), **chosen).eval()


def parameters(model: Any) -> dict[str, Any]:
    """Count a model's parameters: ``{total, active, by_part: [{part, count, active, note?}]}``.

    ``model`` is a transformers model, on any device, or something that wraps one as
    ``_module``. `ACTIVE_CONVENTION` says what active means; it is None where the number
    of experts a token chooses is neither on a module nor in the configuration.
    """
    model = getattr(model, "_module", model)
    kinds = _Kinds(model)
    count = dict.fromkeys(PARTS, 0)
    active: dict[str, Fraction | None] = dict.fromkeys(PARTS, Fraction(0))
    notes = {"embedding": "also the head: one matrix, counted once"} if kinds.tied else {}
    for path, parameter in model.named_parameters():
        part = kinds.part(path, parameter)
        used: Fraction | None = Fraction(parameter.numel())
        if part == "routed experts":
            experts, chosen = kinds.routing(path, parameter)
            used = None if chosen is None else used * chosen / experts
            notes[part] = f"{chosen} of {experts} for each token" if chosen else "how many a token chooses is not known"
        count[part] += parameter.numel()
        active[part] = None if used is None or active[part] is None else active[part] + used
    rows = [
        {
            "part": part, "count": count[part], "active": None if active[part] is None else int(active[part]),
            **({"note": notes[part]} if part in notes else {}),
        }
        for part in PARTS if count[part]
    ]
    uses = [row["active"] for row in rows]
    return {
        "total": sum(row["count"] for row in rows),
        "active": None if None in uses else sum(uses),
        "by_part": rows,
    }


class _Kinds:
    """Tells which part of a model a parameter belongs to, from where it stands in the tree."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.config = model.config.get_text_config()
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.embedding = getattr(embedding, "weight", None)
        self.head = None if head is None else list(head.parameters())
        self.tied = self.head is not None and any(p is self.embedding for p in self.head)

    def part(self, path: str, parameter: nn.Parameter) -> str:
        if parameter is self.embedding:
            return "embedding"
        if self.head is not None and any(parameter is p for p in self.head):
            return "head"
        owners = self._owners(path)
        if not owners:
            return "other"
        names = [name for name, _ in owners]
        if any(name.startswith("shared_expert") for name in names):
            return "shared expert"
        if "experts" in names:
            return "routed experts"
        inside_mlp = any(_is_mlp(name) for name in names)
        if inside_mlp and names[-1] in ("gate", "router") and self._beside_experts(path):
            return "router"
        # A norm inside a sublayer belongs to it: a head norm to the attention, say.
        sublayers = owners[:-1] if _is_norm(owners[-1][1]) else owners
        for name, module in reversed(sublayers):
            if hasattr(module, "A_log") or name == "linear_attn":
                return "linear attention"
            if "attn" in name or "attention" in name:
                return "attention"
        if inside_mlp:
            return "dense mlp"
        return "norms" if _is_norm(owners[-1][1]) else "other"

    def routing(self, path: str, parameter: nn.Parameter) -> tuple[int, int | None]:
        """How many experts stand beside an expert's parameter, and how many of them a token chooses."""
        segments = path.split(".")
        cut = segments.index("experts")
        host, experts = self.modules[".".join(segments[:cut])], self.modules[".".join(segments[: cut + 1])]
        stacked = getattr(experts, "num_experts", parameter.shape[0])
        count = len(experts) if isinstance(experts, nn.ModuleList) else stacked
        asked = [*host.modules(), self.config]
        found = (getattr(one, name, None) for one in asked for name in _TOP_K_NAMES)
        return count, next((number for number in found if isinstance(number, int)), None)

    def _owners(self, path: str) -> list[tuple[str, nn.Module]]:
        """``(attribute name, module)`` of every module above a parameter, outermost first."""
        segments = path.split(".")[:-1]
        return [(segments[i], self.modules[".".join(segments[: i + 1])]) for i in range(len(segments))]

    def _beside_experts(self, path: str) -> bool:
        host = self.modules[path.rsplit(".", 2)[0]]
        return any(name == "experts" for name, _ in host.named_children())


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _is_mlp(name: str) -> bool:
    return name in ("mlp", "feed_forward", "ffn", "moe", "block_sparse_moe")


@dataclass(frozen=True)
class _Factor:
    """One factor of a size: its name in the formula, its number, and where the number comes from."""

    symbol: str
    number: int
    source: str


def cache_sizes(model: Any, dtype: torch.dtype | None = None) -> list[dict[str, Any]]:
    """What a call keeps between tokens, per sequence, by kind of block.

    ``model`` is a configuration or a model. Each row is ``{name, formula, numbers,
    generics: [{name, number, source}], layers, shape, dtype, per_token_bytes,
    fixed_bytes, tokens_at_most, note}``: ``formula`` over named sizes, ``numbers`` the
    same with this configuration's sizes; ``per_token_bytes`` for what grows with the
    sequence (at most ``tokens_at_most`` tokens where blocks slide), else ``fixed_bytes``.
    ``dtype`` is that of keys, values and convolution inputs (else the model's or the
    configuration's); the recurrent state is float32 whatever the model's dtype.
    Raises ValueError for a kind of block whose cache is not known here.
    """
    config, dtype = _config_and_dtype(model, dtype)
    makers = {"full_attention": _full_rows, "sliding_attention": _sliding_rows, "linear_attention": _recurrent_rows}
    rows: list[dict[str, Any]] = []
    for kind, layers in _layers_by_kind(config).items():
        if kind not in makers:
            raise ValueError(f"the cache of a {kind} block ({config.model_type}) is not known")
        rows += makers[kind](config, layers, dtype)
    return rows


def cache_bytes(model: Any, tokens: int, batch: int = 1, dtype: torch.dtype | None = None) -> int:
    """Bytes all rows of `cache_sizes` come to after ``tokens`` tokens of ``batch`` sequences."""
    total = 0
    for row in cache_sizes(model, dtype):
        if row["fixed_bytes"] is not None:
            total += row["fixed_bytes"]
        else:
            held = tokens if row["tokens_at_most"] is None else min(tokens, row["tokens_at_most"])
            total += row["per_token_bytes"] * held
    return total * batch


def measured_cache_bytes(model: PreTrainedModel, tokens: int, batch: int = 1) -> int:
    """Bytes of the tensors transformers' own cache really holds after a prompt of ``tokens`` tokens."""
    ids = torch.zeros(batch, tokens, dtype=torch.long, device=model.device)
    with torch.no_grad():
        kept = model(input_ids=ids, use_cache=True).cache
    return sum(tensor.numel() * tensor.element_size() for layer in kept.layers for tensor in _tensors(vars(layer)))


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        if held.dim():      # a bare number is bookkeeping, not memory of the sequence
            yield held
    elif isinstance(held, dict):
        for value in held.values():
            yield from _tensors(value)


def _config_and_dtype(model: Any, dtype: torch.dtype | None) -> tuple[PreTrainedConfig, torch.dtype]:
    model = getattr(model, "_module", model)
    config = model.config if isinstance(model, nn.Module) else model
    if dtype is None:
        dtype = model.dtype if isinstance(model, nn.Module) else config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return config.get_text_config(), dtype or torch.bfloat16


def _layers_by_kind(config: PreTrainedConfig) -> dict[str, list[int]]:
    """Block numbers by what they mix tokens with."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        slides = getattr(config, "sliding_window", None) is not None
        kinds = ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
    grouped: dict[str, list[int]] = {}
    for layer, kind in enumerate(kinds):
        grouped.setdefault(kind, []).append(layer)
    return grouped


def _full_rows(config: PreTrainedConfig, layers: list[int], dtype: torch.dtype) -> list[dict[str, Any]]:
    return [_keys_and_values("keys and values", "AttentionLayers", "full_attention blocks", config, layers, dtype)]


def _sliding_rows(config: PreTrainedConfig, layers: list[int], dtype: torch.dtype) -> list[dict[str, Any]]:
    name, kind = "keys and values in the window", "sliding_attention blocks"
    row = _keys_and_values(name, "SlidingLayers", kind, config, layers, dtype)
    # The token being read brings its own keys and values, so one fewer than the window is kept.
    window = config.sliding_window
    row["tokens_at_most"] = window - 1
    row["note"] = f"for at most the last {window - 1} tokens: the window of {window} less the newest"
    return [row]


def _keys_and_values(
    name: str, count: str, kind: str, config: PreTrainedConfig, layers: list[int], dtype: torch.dtype
) -> dict[str, Any]:
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ValueError(f"the cache of latent attention ({config.model_type}) is not known")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    factors = [
        _Factor(count, len(layers), kind), _Factor("2", 2, "keys and values"),
        _Factor("KvHeads", heads, "num_key_value_heads"), _Factor("HeadDim", width, "head_dim"),
    ]
    return _row(name, layers, factors, dtype, ["batch", "kv_heads", "tokens", "head_dim"], grows=True)


def _recurrent_rows(config: PreTrainedConfig, layers: list[int], dtype: torch.dtype) -> list[dict[str, Any]]:
    if not hasattr(config, "linear_num_value_heads"):
        raise ValueError(f"the cache of a linear_attention block ({config.model_type}) is not known")
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    count = _Factor("RecurrentLayers", len(layers), "linear_attention blocks")
    state = [
        count, _Factor("ValueHeads", value_heads, "linear_num_value_heads"),
        _Factor("KeyDim", key_dim, "linear_key_head_dim"), _Factor("ValueDim", value_dim, "linear_value_head_dim"),
    ]
    history = [
        count, _Factor("Conv", channels, "2 × KeyHeads × KeyDim + ValueHeads × ValueDim"),
        _Factor("Width", config.linear_conv_kernel_dim, "linear_conv_kernel_dim"),
    ]
    return [
        _row("recurrent state", layers, state, torch.float32, ["batch", "heads", "key_dim", "value_dim"],
             note="float32 whatever the model's dtype"),
        _row("convolution inputs", layers, history, dtype, ["batch", "channels", "width"],
             note="transformers keeps Width columns; the next token needs the last Width - 1"),
    ]


def _row(
    name: str, layers: list[int], factors: list[_Factor], dtype: torch.dtype, shape: list[str],
    grows: bool = False, note: str | None = None,
) -> dict[str, Any]:
    """One row of `cache_sizes`; formula, numbers and bytes come from the same factors."""
    factors = [*factors, _Factor("Bytes", dtype.itemsize, f"one {str(dtype).removeprefix('torch.')} number")]
    size = 1
    for factor in factors:
        size *= factor.number
    return {
        "name": name,
        "formula": " × ".join(factor.symbol for factor in factors),
        "numbers": " × ".join(str(factor.number) for factor in factors),
        "generics": [
            {"name": f.symbol, "number": f.number, "source": f.source} for f in factors if not f.symbol.isdigit()
        ],
        "layers": layers,
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "per_token_bytes": size if grows else None,
        "fixed_bytes": None if grows else size,
        "tokens_at_most": None,
        "note": note,
    }
