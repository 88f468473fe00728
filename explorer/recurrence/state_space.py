"""State-space recurrences as plain tensor arithmetic: replay, states and implied attention.

Each multiplies its state with a factor and adds what a token writes. What is written does not
depend on the state, so that the implied attention is a product and needs no solve.

*ssd* (Dao and Gu, "Transformers are SSMs", 2024; Mamba-2): per head, with keys B, queries C,
values x, steps b and log decays g = b A,

    S <- exp(g) S + b k v'        y = S'q + D v

*retention* (Sun et al., "Retentive Network", 2023; Qin et al., "Lightning Attention-2", 2024) is
the same with b = 1, one g for each head and no D.

*selective scan* (Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State
Spaces", 2023): per channel, keys and queries shared by all channels, a log decay for
each entry of the channel's state,

    h <- exp(g) h + b k v         y = q.h + D v

*gated recurrence* (De et al., "Griffin", 2024; the RG-LRU): per channel, one number,

    h <- a h + v                  y = h

Layouts are the vocabulary's. Arithmetic is in float32, or in float64 where the values are float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from explorer.recurrence.delta_rule import Heads, chosen_heads, decay_products, pick, working_dtype


def ssd_steps(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    skip: Tensor | None = None,
    state: Tensor | None = None,
    heads: Heads = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per token ``(head_output [batch heads value_dim], state [batch heads key_dim value_dim])``.

    queries, keys: LinearQK [batch seq heads key_dim]; values: LinearV [batch seq heads value_dim];
    decays, betas: Gates [batch seq heads]; skip: [heads]; state: the State entering, None for
    zeros. With ``heads``, only those are replayed.
    Raises ValueError for a head out of range.
    """
    some = chosen_heads(heads, values.shape[2])
    dtype = working_dtype(values)
    q, k, v, g, b = (pick(x, some).to(dtype) for x in (queries, keys, values, decays, betas))
    past = None if skip is None else _picked(skip, some, 0).to(dtype)[:, None]
    if state is None:
        current = values.new_zeros(
            (values.shape[0], v.shape[2], k.shape[3], v.shape[3]), dtype=dtype
        )
    else:
        current = _picked(state, some, 1).to(dtype)
    for q_t, k_t, v_t, g_t, b_t in zip(*(x.unbind(1) for x in (q, k, v, g, b)), strict=True):
        written = (k_t * b_t[..., None]).unsqueeze(-1) * v_t.unsqueeze(-2)
        current = current * g_t.exp()[..., None, None] + written
        output = (q_t.unsqueeze(-2) @ current).squeeze(-2)
        yield (output if past is None else output + past * v_t), current


def fixed_decay_steps(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    state: Tensor | None = None,
    heads: Heads = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per token ``(head_output [batch heads value_dim], state [batch heads key_dim value_dim])``.

    This is *ssd* with every step one and fixed decays [heads].
    """
    fixed = decays.expand(*values.shape[:3])
    return ssd_steps(queries, keys, values, fixed, torch.ones_like(fixed), state=state, heads=heads)


def fixed_decay_attention(
    queries: Tensor, keys: Tensor, decays: Tensor, heads: Heads = None
) -> Tensor:
    """``M [batch heads query key]`` with head outputs = M · values on a fresh prompt.

    M = tril(Q Kᵀ ∘ L), with decays [heads].
    """
    fixed = decays.expand(*queries.shape[:3])
    return ssd_attention(queries, keys, fixed, torch.ones_like(fixed), heads=heads)


def ssd_attention(
    queries: Tensor,
    keys: Tensor,
    decays: Tensor,
    betas: Tensor,
    skip: Tensor | None = None,
    heads: Heads = None,
) -> Tensor:
    """``M [batch heads query key]`` with head outputs = M · values on a fresh prompt.

    M = tril(Q Kᵀ ∘ L) diag(b), with the skip added on the diagonal.

    ``L[i, j] = exp(g_{j+1} + ... + g_i)``; it is that of a fresh prompt.
    """
    some = chosen_heads(heads, decays.shape[2])
    dtype = working_dtype(queries)
    q, k = (pick(x, some).transpose(1, 2).to(dtype) for x in (queries, keys))
    g, b = (pick(x, some).transpose(1, 2) for x in (decays, betas))
    found = (q @ k.mT) * decay_products(g, dtype) * b.to(dtype).unsqueeze(-2)
    return (
        found
        if skip is None
        else found
        + torch.diag_embed(_picked(skip, some, 0).to(dtype)[None, :, None].expand(found.shape[:3]))
    )


def scan_steps(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    skip: Tensor | None = None,
    state: Tensor | None = None,
    heads: Heads = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per token ``(output [batch channels], state [batch channels key_dim])``.

    queries, keys: SharedQK [batch seq key_dim]; values, betas: Channels [batch seq channels];
    decays: ChannelDecays [batch seq channels key_dim]; skip: [channels]. ``heads`` are
    channels here.
    """
    some = chosen_heads(heads, values.shape[2])
    dtype = working_dtype(values)
    v, g, b = (pick(x, some).to(dtype) for x in (values, decays, betas))
    q, k = queries.to(dtype), keys.to(dtype)
    past = None if skip is None else _picked(skip, some, 0).to(dtype)
    current = (
        v.new_zeros((v.shape[0], v.shape[2], k.shape[2]))
        if state is None
        else _picked(state, some, 1).to(dtype)
    )
    for q_t, k_t, v_t, g_t, b_t in zip(*(x.unbind(1) for x in (q, k, v, g, b)), strict=True):
        current = current * g_t.exp() + (b_t * v_t)[..., None] * k_t[:, None]
        output = (current * q_t[:, None]).sum(-1)
        yield (output if past is None else output + past * v_t), current


def scan_attention(
    queries: Tensor,
    keys: Tensor,
    decays: Tensor,
    betas: Tensor,
    skip: Tensor | None = None,
    heads: Heads = None,
) -> Tensor:
    """``M [batch channels query key]`` with outputs = M · values by channel, on a fresh prompt.

    ``M[i, j] = b_j sum_n q_i[n] k_j[n] exp(g_{j+1}[n] + ... + g_i[n])`` for j <= i, with the
    skip added on the diagonal. Computed channel by channel, so that the working memory is one
    ``[batch query key key_dim]``.
    """
    some = chosen_heads(heads, decays.shape[2])
    dtype = working_dtype(queries)
    pairs = torch.einsum("bin,bjn->bijn", queries.to(dtype), keys.to(dtype))
    parts = []
    for channel in range(decays.shape[2]) if some is None else some:
        faded = decay_products(
            decays[:, :, channel].transpose(1, 2), dtype
        )  # [batch key_dim query key]
        found = torch.einsum("bijn,bnij->bij", pairs, faded) * betas[:, None, :, channel].to(dtype)
        parts.append(
            found
            if skip is None
            else found
            + torch.eye(found.shape[-1], dtype=dtype, device=found.device) * skip[channel].to(dtype)
        )
    return torch.stack(parts, dim=1)


def gated_steps(
    values: Tensor, gates: Tensor, state: Tensor | None = None, heads: Heads = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per token ``(output [batch channels], state [batch channels])``, which are the same numbers.

    values, gates: Channels [batch seq channels]; state: UnitState [batch channels]. ``heads`` are
    channels here.
    """
    some = chosen_heads(heads, values.shape[2])
    dtype = working_dtype(values)
    v, a = (pick(x, some).to(dtype) for x in (values, gates))
    current = torch.zeros_like(v[:, 0]) if state is None else _picked(state, some, 1).to(dtype)
    for v_t, a_t in zip(v.unbind(1), a.unbind(1), strict=True):
        current = a_t * current + v_t
        yield current, current


def gated_attention(gates: Tensor, heads: Heads = None) -> Tensor:
    """``M [batch channels query key]`` with outputs = M · values on a fresh prompt.

    M[i, j] is the product of the gates after token j, up to token i.
    """
    some = chosen_heads(heads, gates.shape[2])
    # The first token's gate, which may be zero, is in no product.
    logs = pick(gates, some).transpose(1, 2).to(torch.float64).log().clamp(min=-1e4)
    return decay_products(logs, working_dtype(gates))


def _picked(x: Tensor, some: list[int] | None, dim: int) -> Tensor:
    return x if some is None else x.index_select(dim, torch.tensor(some, device=x.device))
