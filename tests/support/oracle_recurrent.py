"""Recurrent mixers as the oracle works them out: from modules, kernels and weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from tests.support.oracle import Forward, Named, Noted


def _conv(forward: Forward, path: str) -> Noted:
    call = forward.function("causal_conv1d_fn", path)
    assert call is not None, path
    return call


def _kernel(forward: Forward, path: str, name: str) -> Noted:
    call = forward.function(name, path)
    assert call is not None, path
    return call


def _last(x: torch.Tensor, length: int) -> torch.Tensor:
    """Return the last tokens of [batch channels seq], tokens first: a cache may pad."""
    return x[..., -length:].transpose(1, 2)


def _delta_rule(forward: Forward, path: str) -> Named:
    call = _kernel(forward, path, "torch_chunk_gated_delta_rule")
    queries, keys, values = call.args
    decays, betas = call.kwargs["g"], call.kwargs["beta"]
    times = values.shape[2] // keys.shape[2]
    queries, keys = (x.repeat_interleave(times, dim=2) for x in (queries, keys))
    module = forward.hf.get_submodule(path)
    _, _, _, _, b, a = module.fix_query_key_value_ordering(
        forward.call(f"{path}.in_proj_qkvz").result, forward.call(f"{path}.in_proj_ba").result
    )
    yield "betas", torch.sigmoid(b)
    yield "decays", -module.A_log.exp() * functional.softplus(a + module.dt_bias)
    yield "conv_input", _last(_conv(forward, path).args[0], values.shape[1])
    yield "attention_queries", queries
    yield "attention_keys", keys
    yield "attention_values", values
    outputs, states = _delta_steps(queries, keys, values, decays, betas)
    yield "attention_head_outputs", outputs
    yield "attention_head_outputs", call.output[0]
    yield "states", states
    yield "state_output", states[:, -1]
    yield "state_output", call.output[1]
    mixed, _ = _delta_steps(queries, keys, _one_hot(values), decays, betas)
    yield "state_attention", mixed.transpose(1, 2)


def _one_hot(values: torch.Tensor) -> torch.Tensor:
    """Return values [batch seq heads seq] that are a unit vector of its own for each token.

    What a recurrence makes of them is the matrix that it mixes values with.
    """
    batch, seq, heads = values.shape[:3]
    return torch.eye(seq)[None, :, None].expand(batch, seq, heads, seq)


def _delta_steps(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and states of the gated delta rule, one token after the other."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (queries, keys))
    q = q * queries.shape[-1] ** -0.5
    state = torch.zeros(*values[:, 0].shape[:2], keys.shape[-1], values.shape[-1])
    states, outputs = [], []
    for t in range(values.shape[1]):
        state = decays[:, t].exp()[..., None, None] * state
        error = values[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], betas[:, t, :, None] * error)
        states.append(state)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1), torch.stack(states, 1)


def _ssd(forward: Forward, path: str) -> Named:
    call = _kernel(forward, path, "mamba2_chunk_scan")
    x, step, _, keys, queries = call.args
    heads = x.shape[2]
    keys, queries = (one.repeat_interleave(heads // one.shape[2], dim=2) for one in (keys, queries))
    module = forward.hf.get_submodule(path)
    betas = functional.softplus(step + module.dt_bias).clamp(*call.kwargs["dt_limit"])
    decays = -betas * module.A_log.exp()
    yield "conv_input", _last(_conv(forward, path).args[0], x.shape[1])
    yield "attention_queries", queries
    yield "attention_keys", keys
    yield "attention_values", x
    yield "betas", betas
    yield "decays", decays
    yield "skip", module.D
    outputs, states = _ssd_steps(queries, keys, x, decays, betas, module.D)
    yield "attention_head_outputs", outputs
    yield "states", states
    yield "state_output", states[:, -1]
    mixed, _ = _ssd_steps(queries, keys, _one_hot(x), decays, betas, module.D)
    yield "state_attention", mixed.transpose(1, 2)


def _ssd_steps(
    queries: torch.Tensor,
    keys: torch.Tensor,
    x: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor,
    skip: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and states of Mamba-2's recurrence, one token after the other."""
    state = torch.zeros(*x[:, 0].shape[:2], keys.shape[-1], x.shape[-1])
    states, outputs = [], []
    for t in range(x.shape[1]):
        written = torch.einsum("bhk,bhv->bhkv", keys[:, t], betas[:, t, :, None] * x[:, t])
        state = decays[:, t].exp()[..., None, None] * state + written
        states.append(state)
        read = torch.einsum("bhkv,bhk->bhv", state, queries[:, t])
        outputs.append(read + skip[:, None] * x[:, t])
    return torch.stack(outputs, 1), torch.stack(states, 1)


def _selective_scan(forward: Forward, path: str) -> Named:
    call = _kernel(forward, path, "mamba_selective_scan")
    x, step, _, keys, queries = call.args
    x, step, keys, queries = (one.transpose(1, 2) for one in (x, step, keys, queries))
    module = forward.hf.get_submodule(path)
    betas = functional.softplus(step + module.dt_proj.bias)
    decays = -betas[..., None] * module.A_log.exp()
    yield "conv_input", _last(_conv(forward, path).args[0], x.shape[1])
    yield "attention_queries", queries
    yield "attention_keys", keys
    yield "attention_values", x
    yield "betas", betas
    yield "decays", decays
    yield "skip", module.D
    outputs, states = _scan_steps(queries, keys, x, decays, betas, module.D)
    yield "attention_head_outputs", outputs
    yield "head_gate", functional.silu(call.kwargs["z"].transpose(1, 2))
    yield "states", states
    yield "state_output", states[:, -1]
    of_tokens = torch.eye(x.shape[1])[:, None, :, None].expand(-1, *x.shape)
    columns = [
        _scan_steps(queries, keys, one, decays, betas, module.D)[0].transpose(1, 2)
        for one in of_tokens
    ]
    yield "state_attention", torch.stack(columns, -1)


def _scan_steps(
    queries: torch.Tensor,
    keys: torch.Tensor,
    x: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor,
    skip: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and states of Mamba's recurrence, one token after the other."""
    state = torch.zeros(*x[:, 0].shape, keys.shape[-1])
    states, outputs = [], []
    for t in range(x.shape[1]):
        state = decays[:, t].exp() * state + (betas * x)[:, t, :, None] * keys[:, t, None]
        states.append(state)
        outputs.append((state * queries[:, t, None]).sum(-1) + skip * x[:, t])
    return torch.stack(outputs, 1), torch.stack(states, 1)


def _short_conv(forward: Forward, path: str) -> Named:
    module = forward.hf.get_submodule(path)
    into, gate, x = (forward.call(path).input @ module.in_proj.weight.T).chunk(3, dim=-1)
    yield "conv_input", into * x
    yield "conv_gate", gate
    width = module.conv.weight.shape[-1]
    padded = functional.pad((into * x).transpose(1, 2), (width - 1, 0))
    windows = padded.unfold(-1, width, 1)
    yield "conv_output", (windows * module.conv.weight).sum(-1).transpose(1, 2)


MIXERS: dict[str, Callable[[Forward, str], Named]] = {
    "linear_attn": _delta_rule,
    "ssd": _ssd,
    "selective_scan": _selective_scan,
    "short_conv": _short_conv,
}
