"""A recording made of random tensors in the vocabulary's layouts, for tests of what draws.

Views need shapes no shipped specimen has (hundreds of tokens, many experts,
heads in groups); this builds them in milliseconds. Numbers obey what the views rely
on: patterns are causal softmaxes, the chosen experts are the top of the scores.
"""

from __future__ import annotations

import torch

from explorer.model.recording import Recording
from explorer.recurrence import delta_rule as recurrence


def synthetic(
    tokens: int | list[str] = 12,
    kinds: tuple[str, ...] = ("linear_attn", "self_attn"),
    *,
    heads: int = 4,
    kv_heads: int = 2,
    experts: int | None = 8,
    top_k: int = 2,
    hidden: int = 16,
    vocab: int = 50,
    key_dim: int = 6,
    value_dim: int = 5,
    seed: int = 0,
) -> Recording:
    """A recording of ``tokens`` tokens; ``experts=None`` makes every MLP dense."""
    words = [f"t{n}" for n in range(tokens)] if isinstance(tokens, int) else tokens
    rec = Recording(
        "synthetic",
        "random, seed 0",
        torch.zeros(1, len(words), dtype=torch.long),
        words,
        [(kind,) for kind in kinds],
    )
    draw = torch.Generator().manual_seed(seed)
    seq = len(words)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    rec.values["logits", None] = normal(1, seq, vocab)
    for layer, kind in enumerate(kinds):
        values = {
            "layer_input": normal(1, seq, hidden),
            "layer_output": normal(1, seq, hidden),
            "attention_output": normal(1, seq, hidden),
            "mlp_output": normal(1, seq, hidden),
        }
        if kind == "self_attn":
            values |= _softmax_attention(normal, seq, heads, kv_heads)
        else:
            values |= _delta_net(normal, seq, heads, key_dim, value_dim)
        if experts:
            values |= _router(normal, seq, experts, top_k)
        rec.values |= {(name, layer): value for name, value in values.items()}
    return rec


def _softmax_attention(normal, seq: int, heads: int, kv_heads: int) -> dict:
    hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    scores = normal(1, heads, seq, seq).masked_fill(hidden, torch.finfo(torch.float32).min)
    return {
        "attention_queries": normal(1, heads, seq, 4),
        "attention_keys": normal(1, kv_heads, seq, 4),
        "attention_values": normal(1, kv_heads, seq, 4),
        "attention_scores": scores,
        "attention_probabilities": scores.softmax(-1),
    }


def _delta_net(normal, seq: int, heads: int, key_dim: int, value_dim: int) -> dict:
    values = {
        "attention_queries": normal(1, seq, heads, key_dim),
        "attention_keys": normal(1, seq, heads, key_dim),
        "attention_values": normal(1, seq, heads, value_dim),
        "decays": -normal(1, seq, heads).abs(),
        "betas": normal(1, seq, heads).sigmoid(),
    }
    values["state_attention"] = recurrence.state_attention(
        values["attention_queries"], values["attention_keys"], values["decays"], values["betas"]
    )
    return values


def _router(normal, seq: int, experts: int, top_k: int) -> dict:
    logits = normal(1, seq, experts)
    scores = logits.softmax(-1)
    best = scores.topk(top_k + 1)
    weights = best.values[..., :top_k]
    return {
        "router_logits": logits,
        "router_scores": scores,
        "router_margin": best.values[..., top_k - 1] - best.values[..., top_k],
        "expert_indices": best.indices[..., :top_k],
        "expert_weights": weights / weights.sum(-1, keepdim=True),
    }
