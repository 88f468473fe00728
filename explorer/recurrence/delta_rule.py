"""The gated delta rule as plain tensor arithmetic: replay, states and implied attention.

A gated DeltaNet head keeps a matrix ``S`` of shape ``[key_dim, value_dim]``.
With ``k`` and ``q`` l2-normed, ``q`` divided by ``sqrt(key_dim)``, log decay ``g``
and write strength ``b``, one token does

    S <- exp(g) * S                    forget
    S <- S + k (b * (v - S'k))'        write what the state does not already predict
    y  = S'q                           read

(Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta
Rule", 2024.) Where the decay is a vector over the key channels, as in Kimi Delta
Attention, ``exp(g)`` scales the rows of ``S`` one by one.

Every function takes the kernel's raw arguments in the layouts of the vocabulary:
queries and keys ``LinearQK [batch seq heads key_dim]`` before the l2 norm and the
scale, values ``LinearV [batch seq heads value_dim]``, decays and betas
``Gates [batch seq heads]``. It works in float32, like the reference kernel, or in
float64 when the values are float64; every result is differentiable.
``heads`` (one index or several) replays those heads alone, so that the memory of
one head is all it takes; the result keeps the heads axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Heads = int | Sequence[int] | None

#: Tokens whose arguments are cast and normed at once: bounds what a replay holds.
_CHUNK = 256

#: A log decay below this forgets everything in float32 and in float64; the
#: floor keeps minus infinity out of sums and differences.
_LOWEST_DECAY = -1e4


def delta_rule_steps(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    state: Tensor | None = None,
    heads: Heads = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Replay the rule token by token, yielding what it reads and the state it leaves.

    ``decays`` may be ``[batch seq heads key_dim]`` (one decay per channel).
    ``state`` is the ``State [batch heads key_dim value_dim]`` before the first
    token, with all heads; None means zeros. Yields, per token,
    ``(head_output [batch heads value_dim], state [batch heads key_dim value_dim])``;
    each state is a tensor of its own. Raises ValueError on shapes that do not
    belong together and on a head out of range.
    """
    _check(queries, keys, values, decays, betas, state)
    chosen = chosen_heads(heads, values.shape[2])
    dtype = working_dtype(values)
    current = _initial_state(keys, values, state, chosen, dtype)
    for start in range(0, values.shape[1], _CHUNK):
        span = slice(start, start + _CHUNK)
        q, k = _unit_pair(queries[:, span], keys[:, span], values.shape[2], chosen, dtype)
        v, g, b = (pick(x[:, span], chosen).to(dtype) for x in (values, decays, betas))
        keep = g.exp()
        keep = keep[..., None] if keep.dim() == 4 else keep[..., None, None]
        for q_t, k_t, v_t, keep_t, b_t in zip(
            *(x.unbind(1) for x in (q, k, v, keep, b)), strict=True
        ):
            current = current * keep_t
            predicted = _read(current, k_t)
            correction = (v_t - predicted) * b_t.unsqueeze(-1)
            current = torch.addcmul(current, k_t.unsqueeze(-1), correction.unsqueeze(-2))
            yield _read(current, q_t), current


def delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    state: Tensor | None = None,
    heads: Heads = None,
) -> tuple[Tensor, Tensor]:
    """Head outputs ``LinearV [batch seq heads value_dim]`` and the last ``State`` of a replay."""
    outputs, last = [], None
    for output, new in delta_rule_steps(queries, keys, values, decays, betas, state, heads):
        outputs.append(output)
        last = new
    if last is None:
        raise ValueError("a replay needs at least one token")
    return torch.stack(outputs, dim=1), last


def delta_rule_states(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    state: Tensor | None = None,
    heads: Heads = None,
) -> Tensor:
    """The state after every token: ``States [batch seq heads key_dim value_dim]``.

    It holds ``batch * seq * heads * key_dim * value_dim`` numbers; pass ``heads``,
    or use `delta_rule_steps` or `delta_rule_state_at`, on a long prompt.
    """
    steps = delta_rule_steps(queries, keys, values, decays, betas, state, heads)
    return _stack([after for _, after in steps])


def delta_rule_state_at(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    tokens: int | Sequence[int],
    state: Tensor | None = None,
    heads: Heads = None,
) -> Tensor:
    """The states after the asked tokens, in the order asked, without keeping the others.

    ``tokens`` is one position or several, negative ones counted from the end. Returns
    ``[batch tokens heads key_dim value_dim]``; the replay stops at the last asked
    token. Raises ValueError on a token outside the sequence or when none is asked.
    """
    length = values.shape[1]
    asked = [tokens] if isinstance(tokens, int) else [int(token) for token in tokens]
    if not asked:
        raise ValueError("ask for the state after at least one token")
    for token in asked:
        if not -length <= token < length:
            raise ValueError(f"token {token} is outside a sequence of {length} tokens")
    positions = [token % length for token in asked]
    wanted, kept = set(positions), {}
    for token, (_, after) in enumerate(
        delta_rule_steps(queries, keys, values, decays, betas, state, heads)
    ):
        if token in wanted:
            kept[token] = after
        if len(kept) == len(wanted):
            break
    return _stack([kept[position] for position in positions])


def state_norms(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    state: Tensor | None = None,
    heads: Heads = None,
) -> Tensor:
    """Frobenius norm of the state after every token: ``Gates [batch seq heads]``.

    Replays the rule and keeps only the norms (no state, unless gradients need it).
    """
    steps = delta_rule_steps(queries, keys, values, decays, betas, state, heads)
    return _stack([torch.linalg.vector_norm(after, dim=(-2, -1)) for _, after in steps])


def state_attention(
    queries: Tensor,
    keys: Tensor,
    decays: Tensor,
    betas: Tensor,
    heads: Heads = None,
    one_at_a_time: bool | None = None,
) -> Tensor:
    """The exact implied attention: ``M [batch heads query key]`` with head outputs = M · values.

    Unrolled from an empty state, a token's correction ``u_i = b_i (v_i - S'k_i)`` is
    linear in the values: ``(I + strict_tril(diag(b) (K K' * L))) U = diag(b) V`` with
    ``L[i, j] = exp(g_{j+1} + ... + g_i)`` for j <= i. The outputs are
    ``tril(Q K' * L) U``, hence

        M = tril(Q K' * L) (I + strict_tril(diag(b) (K K' * L)))^-1 diag(b)

    one unit-triangular solve per head (the UT transform of Yang et al., "Gated Delta
    Networks", 2024, over the whole sequence instead of one chunk). Column j is
    position j after the short convolution, rows need not sum to one and entries can be negative.
    It holds for a fresh prompt, that is without a state entering the call.

    ``L`` is formed from differences of log decays, summed in float64, and is
    exponentiated only where it is at most 1, so long sequences neither overflow nor
    lose the small differences. ``one_at_a_time`` solves head after head, so that the
    working memory is a few ``[batch query key]`` matrices beside the result; left out, this is done
    unless the tensors are on the meta device and take no memory.
    With decays per channel each channel of a query and a key fades by its own ``L``, inside
    their product; the working memory is then one ``[batch query key key_dim]``.
    """
    _check(queries, keys, None, decays, betas, None)
    count = decays.shape[2]
    chosen = chosen_heads(heads, count)
    if chosen is None:
        chosen = list(range(count))
    if one_at_a_time is None:
        one_at_a_time = queries.device.type != "meta"
    groups = [[head] for head in chosen] if one_at_a_time else [chosen]
    parts = [_implied_attention(queries, keys, decays, betas, group) for group in groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _implied_attention(
    queries: Tensor, keys: Tensor, decays: Tensor, betas: Tensor, group: list[int]
) -> Tensor:
    """`state_attention` of some heads at once."""
    dtype = working_dtype(queries)
    q, k = (x.transpose(1, 2) for x in _unit_pair(queries, keys, decays.shape[2], group, dtype))
    strength = pick(betas, group).transpose(1, 2).to(dtype)
    faded = pick(decays, group).transpose(1, 2)
    reads = _faded(q, k, faded, dtype)
    system = (_faded(k, k, faded, dtype) * strength.unsqueeze(-1)).tril(-1)
    # The solver reads the strict lower triangle alone and takes the diagonal as ones.
    solved = torch.linalg.solve_triangular(
        system, reads, upper=False, left=False, unitriangular=True
    )
    # A matrix of the solve is lower triangular up to rounding; make the causal zeros exact.
    return solved.tril() * strength.unsqueeze(-2)


def _faded(q: Tensor, k: Tensor, decays: Tensor, dtype: torch.dtype) -> Tensor:
    """``Q Kᵀ ∘ L [batch heads query key]``: queries times keys, decayed between the two."""
    if decays.dim() == 3:
        return (q @ k.transpose(-1, -2)) * decay_products(decays, dtype)
    parts = []
    for head in range(q.shape[1]):
        between = decay_products(
            decays[:, head].transpose(1, 2), dtype
        )  # [batch key_dim query key]
        parts.append(torch.einsum("bid,bjd,bdij->bij", q[:, head], k[:, head], between))
    return torch.stack(parts, dim=1)


def decay_products(decays: Tensor, dtype: torch.dtype) -> Tensor:
    """``L [batch heads query key]``: the share of a write at ``key`` left at ``query``, else 0."""
    total = decays.to(torch.float64).clamp(min=_LOWEST_DECAY).cumsum(-1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    length = decays.shape[-1]
    above = torch.ones(length, length, dtype=torch.bool, device=decays.device).triu(1)
    return between.masked_fill(above, float("-inf")).to(dtype).exp()


def _read(state: Tensor, direction: Tensor) -> Tensor:
    """``state' direction``: ``[batch heads value_dim]``, from a key or query per head."""
    return (direction.unsqueeze(-2) @ state).squeeze(-2)


def _unit_pair(
    queries: Tensor, keys: Tensor, count: int, chosen: list[int] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Queries and keys as the kernel uses them: one per value head, l2-normed, queries scaled."""
    q, k = (_unit(_key_heads(x, count, chosen).to(dtype)) for x in (queries, keys))
    return q * q.shape[-1] ** -0.5, k


def _unit(x: Tensor) -> Tensor:
    """l2-normalise the last axis as the kernel does, with the epsilon inside the root."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _key_heads(x: Tensor, count: int, chosen: list[int] | None) -> Tensor:
    """The query or key of each chosen value head; consecutive value heads may share one."""
    share = count // x.shape[2]
    if chosen is None:
        return x if share == 1 else x.repeat_interleave(share, dim=2)
    return pick(x, [head // share for head in chosen])


def pick(x: Tensor, chosen: list[int] | None) -> Tensor:
    """The chosen heads of ``[batch seq heads ...]``; a view of all or of one."""
    if chosen is None:
        return x
    if len(chosen) == 1:
        return x.narrow(2, chosen[0], 1)
    return x.index_select(2, torch.tensor(chosen, device=x.device))


def _initial_state(
    keys: Tensor, values: Tensor, state: Tensor | None, chosen: list[int] | None, dtype: torch.dtype
) -> Tensor:
    count = values.shape[2] if chosen is None else len(chosen)
    if state is None:
        return torch.zeros(
            values.shape[0],
            count,
            keys.shape[3],
            values.shape[3],
            dtype=dtype,
            device=values.device,
        )
    entering = state.to(device=values.device, dtype=dtype)
    if chosen is None:
        return entering
    return entering.index_select(1, torch.tensor(chosen, device=entering.device))


def working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _stack(per_token: list[Tensor]) -> Tensor:
    if not per_token:
        raise ValueError("a replay needs at least one token")
    return torch.stack(per_token, dim=1)


def chosen_heads(heads: Heads, count: int) -> list[int] | None:
    """The heads to replay as a list of indices, or None for all of them."""
    if heads is None:
        return None
    asked = [heads] if isinstance(heads, int) else [int(head) for head in heads]
    if not asked:
        raise ValueError("choose at least one head, or leave heads out to take all")
    for head in asked:
        if not -count <= head < count:
            raise ValueError(
                f"head {head} does not exist: there are {count} heads, 0 to {count - 1}"
            )
    return [head % count for head in asked]


def _check(
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    decays: Tensor,
    betas: Tensor,
    state: Tensor | None,
) -> None:
    """One sentence about the first shape that does not fit the others."""
    if queries.shape != keys.shape:
        raise ValueError(f"queries {_shape(queries)} and keys {_shape(keys)} must have one shape")
    batch, seq, key_heads, key_dim = _four(keys, "keys")
    heads = decays.shape[2] if decays.dim() >= 3 else 0
    if heads == 0 or heads % key_heads:
        raise ValueError(
            f"decays {_shape(decays)} do not give one number per token and head of keys "
            f"{_shape(keys)}"
        )
    expected = {"decays": (decays, (batch, seq, heads) + ((key_dim,) if decays.dim() == 4 else ()))}
    expected["betas"] = (betas, (batch, seq, heads))
    if values is not None:
        value_dim = _four(values, "values")[3]
        expected["values"] = (values, (batch, seq, heads, value_dim))
        if state is not None:
            expected["state"] = (state, (batch, heads, key_dim, value_dim))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} {_shape(tensor)} should be {list(shape)} to go with keys {_shape(keys)}"
            )


def _four(x: Tensor, name: str) -> tuple[int, ...]:
    if x.dim() != 4:
        raise ValueError(f"{name} {_shape(x)} should have four axes, batch seq heads and one more")
    return tuple(x.shape)


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)
