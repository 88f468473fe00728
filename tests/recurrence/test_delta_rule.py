"""The replay and the implied attention against transformers' own reference kernels."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

import explorer.engine.nnsight_api  # noqa: F401  the one import order that works
from explorer.recurrence import delta_rule as recurrence

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def arguments(
    batch=2, seq=13, heads=3, key_dim=8, value_dim=5, key_heads=None, dtype=torch.float32, seed=0
):
    """Kernel arguments of the kind a mixer hands on: unnormed keys, decays at most 0, betas in (0,
    1).
    """
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    qk = (batch, seq, key_heads or heads, key_dim)
    tensors = (
        2 * normal(*qk),
        3 * normal(*qk),
        normal(batch, seq, heads, value_dim),
        -torch.nn.functional.softplus(normal(batch, seq, heads) - 1),
        normal(batch, seq, heads).sigmoid(),
    )
    return tuple(x.to(dtype) for x in tensors)


def state_of(batch=2, heads=3, key_dim=8, value_dim=5):
    return torch.randn(batch, heads, key_dim, value_dim, generator=torch.Generator().manual_seed(7))


def kernel(rule, args, state=None):
    q, k, v, g, b = args
    return rule(
        q,
        k,
        v,
        g=g,
        beta=b,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def close(a, b):
    torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("rule", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
@pytest.mark.parametrize("state", [None, state_of()], ids=["fresh", "with state"])
@pytest.mark.parametrize("seq", [1, 13, 300])
def test_replay_is_the_kernel(rule, state, seq):
    args = arguments(seq=seq)
    outputs, last = recurrence.delta_rule(*args, state=state)
    expected, expected_last = kernel(rule, args, state)
    close(outputs, expected)
    close(last, expected_last)


@pytest.mark.parametrize("rule", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
def test_key_heads_shared_by_value_heads(rule):
    args = arguments(heads=6, key_heads=2)
    outputs, last = recurrence.delta_rule(*args)
    expected, expected_last = kernel(rule, args)
    close(outputs, expected)
    close(last, expected_last)
    one, _ = recurrence.delta_rule(*args, heads=4)
    close(one, expected[:, :, 4:5])
    close(
        recurrence.state_attention(args[0], args[1], args[3], args[4], heads=[4, 1])[:, 0]
        @ args[2][:, :, 4],
        expected[:, :, 4],
    )


def test_bfloat16_arguments_are_replayed_in_float32():
    args = arguments(dtype=torch.bfloat16)
    outputs, last = recurrence.delta_rule(*args)
    assert outputs.dtype == last.dtype == torch.float32
    _, expected_last = kernel(torch_recurrent_gated_delta_rule, args)
    close(last, expected_last)


def test_prefill_then_decode_is_one_longer_prefill():
    args = arguments(seq=11)
    whole, whole_last = recurrence.delta_rule(*args)
    first, state = recurrence.delta_rule(*(x[:, :7] for x in args))
    rest, last = recurrence.delta_rule(*(x[:, 7:] for x in args), state=state)
    close(torch.cat([first, rest], dim=1), whole)
    close(last, whole_last)


def test_a_state_does_not_see_later_tokens():
    args = arguments(seq=11)
    changed = tuple(
        torch.cat([x[:, :6], y[:, 6:]], dim=1)
        for x, y in zip(args, arguments(seq=11, seed=1), strict=True)
    )
    before, after = recurrence.delta_rule_states(*args), recurrence.delta_rule_states(*changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_states_hold_every_step_and_every_head():
    args = arguments()
    states = recurrence.delta_rule_states(*args, state=state_of())
    assert states.shape == (2, 13, 3, 8, 5)
    for token in (0, 5, 12):
        start = tuple(x[:, : token + 1] for x in args)
        close(states[:, token], kernel(torch_recurrent_gated_delta_rule, start, state_of())[1])
    close(recurrence.delta_rule_states(*args, state=state_of(), heads=2), states[:, :, 2:3])
    close(recurrence.delta_rule_states(*args, state=state_of(), heads=[2, 0]), states[:, :, [2, 0]])
    close(recurrence.delta_rule_states(*args, state=state_of(), heads=-1), states[:, :, 2:3])


def test_yielded_states_are_tensors_of_their_own():
    kept = [state for _, state in recurrence.delta_rule_steps(*arguments())]
    copies = [state.clone() for state in kept]
    kept[0].zero_()
    assert all(torch.equal(a, b) for a, b in zip(kept[1:], copies[1:], strict=True))


def test_state_at_keeps_the_asked_tokens_in_the_order_asked():
    args = arguments()
    states = recurrence.delta_rule_states(*args)
    assert torch.equal(
        recurrence.delta_rule_state_at(*args, tokens=[9, 2, -1, 2]), states[:, [9, 2, 12, 2]]
    )
    assert torch.equal(
        recurrence.delta_rule_state_at(*args, tokens=4, heads=1), states[:, 4:5, 1:2]
    )


def test_state_norms():
    args = arguments()
    states = recurrence.delta_rule_states(*args, state=state_of())
    close(recurrence.state_norms(*args, state=state_of()), states.flatten(-2).norm(dim=-1))
    assert recurrence.state_norms(*args, heads=[0, 2]).shape == (2, 13, 2)


@pytest.mark.parametrize("one_at_a_time", [True, False])
@pytest.mark.parametrize("seq", [1, 13, 200])
def test_implied_attention_times_values_is_the_output(seq, one_at_a_time):
    q, k, v, g, b = args = arguments(seq=seq)
    m = recurrence.state_attention(q, k, g, b, one_at_a_time=one_at_a_time)
    assert m.shape == (2, 3, seq, seq)
    assert torch.equal(m, m.tril())
    expected, _ = kernel(torch_recurrent_gated_delta_rule, args)
    close(torch.einsum("bhij,bjhv->bihv", m, v), expected)


def test_implied_attention_is_read_off_by_unit_values():
    """Column j of M is what the rule outputs when token j alone has the value 1."""
    q, k, _, g, b = arguments(batch=1, seq=9)
    m = recurrence.state_attention(q, k, g, b, heads=1)
    unit_values = torch.eye(9).view(1, 9, 1, 9).expand(1, 9, 3, 9)
    outputs, _ = kernel(torch_recurrent_gated_delta_rule, (q, k, unit_values, g, b))
    close(m[0, 0], outputs[0, :, 1])


def test_implied_attention_survives_strong_decays_over_long_sequences():
    q, k, v, g, b = arguments(batch=1, seq=700, heads=2)
    g = 40 * g  # the sum reaches many hundreds: exp of it overflows on its own
    g[:, 100] = float("-inf")  # forgets all
    m = recurrence.state_attention(q, k, g, b)
    assert m.isfinite().all()
    assert (m[:, :, 100:, :100] == 0).all()
    expected, _ = kernel(torch_recurrent_gated_delta_rule, (q, k, v, g, b))
    close(torch.einsum("bhij,bjhv->bihv", m, v), expected)


def test_decays_per_channel():
    q, k, v, g, b = arguments()
    spread = g.unsqueeze(-1).expand(*g.shape, k.shape[-1])
    close(recurrence.delta_rule(q, k, v, spread, b)[0], recurrence.delta_rule(q, k, v, g, b)[0])
    per_channel = spread * torch.linspace(0.1, 2, k.shape[-1])
    state = state_of()
    _, last = recurrence.delta_rule(*(x[:, :1] for x in (q, k, v, per_channel, b)), state=state)
    key = recurrence._unit(k[:, 0])
    faded = state * per_channel[:, 0].exp().unsqueeze(-1)
    wrote = (v[:, 0] - torch.einsum("bhkv,bhk->bhv", faded, key)) * b[:, 0, :, None]
    close(last, faded + torch.einsum("bhk,bhv->bhkv", key, wrote))
    mixed = torch.einsum("bhij,bjhv->bihv", recurrence.state_attention(q, k, per_channel, b), v)
    close(mixed, recurrence.delta_rule(q, k, v, per_channel, b)[0])
    close(recurrence.state_attention(q, k, spread, b), recurrence.state_attention(q, k, g, b))


def test_gradients():
    small = arguments(batch=1, seq=5, heads=2, key_dim=3, value_dim=2, dtype=torch.float64)
    args = tuple(x.requires_grad_() for x in small)
    assert torch.autograd.gradcheck(lambda *a: recurrence.delta_rule(*a), args)
    assert torch.autograd.gradcheck(lambda *a: recurrence.state_norms(*a), args)
    q, k, _, g, b = args
    assert torch.autograd.gradcheck(recurrence.state_attention, (q, k, g, b))


def test_one_head_over_thousands_of_tokens_in_bounded_memory():
    args = arguments(batch=1, seq=2000, heads=4, key_dim=64, value_dim=48)
    seen = [weakref.ref(state) for _, state in recurrence.delta_rule_steps(*args, heads=3)]
    gc.collect()
    assert len(seen) == 2000
    assert (
        sum(ref() is not None for ref in seen) == 0
    )  # nothing holds on to the states it went through
    _, last = kernel(torch_chunk_gated_delta_rule, args)
    close(recurrence.delta_rule_state_at(*args, tokens=-1, heads=3)[:, 0], last[:, 3:])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"heads": 3}, "head 3 .* 0 to 2"),
        ({"heads": []}, "at least one head"),
        ({"state": torch.zeros(2, 1, 8, 5)}, "state .* should be"),
    ],
)
def test_bad_choices_are_named(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        recurrence.delta_rule(*arguments(), **change)


def test_bad_shapes_are_named():
    q, k, v, g, b = arguments()
    with pytest.raises(ValueError, match="betas"):
        recurrence.delta_rule(q, k, v, g, b[:, :-1])
    with pytest.raises(ValueError, match="one shape"):
        recurrence.delta_rule(q[:, :, :1], k, v, g, b)
    with pytest.raises(ValueError, match="token 13 .* 13 tokens"):
        recurrence.delta_rule_state_at(q, k, v, g, b, tokens=[13])
    with pytest.raises(ValueError, match="at least one token"):
        recurrence.delta_rule_state_at(q, k, v, g, b, tokens=[])
    with pytest.raises(ValueError, match="at least one token"):
        recurrence.delta_rule(*(x[:, :0] for x in (q, k, v, g, b)))
