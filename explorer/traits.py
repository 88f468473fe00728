"""Traits: what is particular about a model, decided on the built model and its configuration.

Each has a label, one line of meaning, and the evidence it was decided on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from explorer.model import LanguageModel


@dataclass(frozen=True)
class Trait:
    name: str
    label: str
    meaning: str
    evidence: str


def traits(model: "LanguageModel") -> list[dict[str, str]]:
    """The traits of a loaded model, which may be without weights."""
    return [asdict(trait) for find in (_mixers, _attention, _rotary, _mixture, _frame) for trait in find(model)]


def _hosts(model: "LanguageModel", name: str) -> list:
    return [block.hosts[name] for block in model.anatomy.blocks if block.hosts[name].places]


def _mixers(model: "LanguageModel") -> Iterator[Trait]:
    kinds = model.kinds
    if len(set(kinds)) > 1:
        counts = " and ".join(f"{kinds.count(kind)} with {kind}" for kind in dict.fromkeys(kinds))
        yield Trait("hybrid", "Hybrid", "blocks of different mixers alternate: a recurrent state in some, softmax attention in others",
                    f"of {len(kinds)} blocks, {counts}")
    for host in _hosts(model, "linear_attn")[:1]:
        yield Trait("delta_rule", "Gated delta rule", "a recurrent mixer whose state forgets by a decay and writes only what it does not predict yet",
                    f"the mixer calls {host.traits['kernel']}")
        if "conv_width" in host.sizes:
            yield Trait("short_convolution", "Short convolution", "queries, keys and values pass a causal convolution over a few tokens first",
                        f"width {host.sizes['conv_width']} over {host.sizes['channels']} channels")
        if host.sizes["key_heads"] < host.sizes["heads"]:
            yield Trait("grouped_value", "Grouped-value recurrence", "several value heads share one key head",
                        f"{host.sizes['key_heads']} key heads, {host.sizes['heads']} value heads")


def _attention(model: "LanguageModel") -> Iterator[Trait]:
    for host in _hosts(model, "self_attn")[:1]:
        heads, shared = host.sizes["num_heads"], host.sizes["num_kv_heads"]
        if shared < heads:
            label = "Multi-query attention" if shared == 1 else "Grouped-query attention"
            yield Trait("grouped_query", label, "several query heads share one key and value head", f"{heads} query heads over {shared}")
        if "head_gate" in host.places:
            yield Trait("head_gate", "Gated heads", "a gate computed from the input multiplies the heads' outputs before the projection",
                        f"read at {host.places['head_gate'][0].says}")
        attention = next(m for i in range(model.num_layers) if model.kinds[i] == "self_attn" for m in [model.layers[i].self_attn._module])
        norms = [name for name in host.traits.get("before", ()) if _is_norm(getattr(attention, name, None))]
        if norms:
            per_head = getattr(attention, norms[0]).weight.shape[0] == host.sizes["qk_head_dim"]
            yield Trait("qk_norm", "Query/key norms", "queries and keys are normed before the rotary embedding",
                        f"{' and '.join(norms)} run before the scores, {'one head' if per_head else 'all heads'} wide")


def _is_norm(module: Any) -> bool:
    return isinstance(module, torch.nn.Module) and not list(module.children()) and [p.dim() for p in module.parameters()] in ([1], [1, 1])


def _rotary(model: "LanguageModel") -> Iterator[Trait]:
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0)) or 1.0
    if share < 1 and "head_dim" in model.sizes:
        yield Trait("partial_rotary", "Partial rotary", "the rotary embedding turns only the first dimensions of each query and key",
                    f"partial_rotary_factor {share:g}: {int(share * model.qk_head_dim)} of {model.qk_head_dim} dimensions")
    if rope.get("mrope_section"):
        yield Trait("mrope", "Multimodal rotary", "rotary frequencies are shared out to time, height and width; on text the three agree",
                    f"mrope_section {rope['mrope_section']}")


def _mixture(model: "LanguageModel") -> Iterator[Trait]:
    for host in _hosts(model, "mlp"):
        if "expert_weights" not in host.places:
            continue
        scoring = host.traits["scoring"]
        yield Trait("mixture", "Mixture of experts", "a router sends each token to a few of many expert MLPs",
                    f"{host.sizes['top_k']} of {host.sizes['num_experts']}, scored by {scoring.words}")
        if scoring.renormalised:
            yield Trait("renormalised", "Renormalised routing", "a token's expert weights are divided by their sum",
                        "a sum and a division follow the top-k")
        if "shared" in host.traits:
            gated = host.traits["shared_gated"]
            yield Trait("shared_expert", "Gated shared expert" if gated else "Shared expert",
                        "one more expert runs for every token" + (", scaled by a gate per token" if gated else ""),
                        f"{host.traits['shared']} is added to the routed sum")
        return


def _frame(model: "LanguageModel") -> Iterator[Trait]:
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        yield Trait("tied_head", "Tied head", "the head's matrix is the embedding's", "tie_word_embeddings is true")
    if model.anatomy.norm is not None and _one_plus(model.hf.get_submodule(model.anatomy.norm)):
        yield Trait("one_plus_gain", "1 + weight norm gain", "norms multiply by one plus their weight, so a weight of zero passes the normed stream through",
                    "the final norm with its weight at zero does not return zero")


def _one_plus(norm: torch.nn.Module) -> bool:
    """Asked of a copy with real numbers: whether the norm's output survives a weight of zero."""
    if not any(True for _ in norm.parameters()):
        return False
    tried = copy.deepcopy(norm).to_empty(device="cpu") if next(norm.parameters()).is_meta else copy.deepcopy(norm).cpu()
    tried = tried.float()  # some norms want their input in the format of their weight
    with torch.no_grad():
        for parameter in tried.parameters():
            parameter.zero_()
        width = next(tried.parameters()).shape[0]
        return bool(type(tried).forward(tried, torch.arange(1.0, width + 1)[None, None]).any())
