"""Replays of state-space recurrences against transformers' own kernels, and the attention they
imply.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from explorer.recurrence import state_space
from explorer.recurrence.replay import Replay

BATCH, SEQ, HEADS, KEY, VALUE = 2, 9, 3, 5, 4


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def ssd() -> Replay:
    rates, steps = -draw(HEADS, seed=3).exp(), F.softplus(draw(BATCH, SEQ, HEADS, seed=4))
    return Replay(
        "ssd",
        {
            "attention_queries": draw(BATCH, SEQ, HEADS, KEY, seed=0),
            "attention_keys": draw(BATCH, SEQ, HEADS, KEY, seed=1),
            "attention_values": draw(BATCH, SEQ, HEADS, VALUE, seed=2),
            "decays": steps * rates,
            "betas": steps,
            "skip": draw(HEADS, seed=5),
            "state_input": None,
        },
    ), rates


def test_the_ssd_replay_is_the_kernel(ssd):
    replay, rates = ssd
    given = replay.given
    outputs, state = mamba2_chunk_scan(
        given["attention_values"],
        given["betas"],
        rates,
        given["attention_keys"],
        given["attention_queries"],
        chunk_size=4,
        D=given["skip"],
        return_final_states=True,
    )
    found, last = replay.run()
    assert_close(found, outputs, rtol=1e-4, atol=1e-4)
    assert_close(last, state.mT, rtol=1e-4, atol=1e-4)  # the kernel's state lies the other way
    mixed = torch.einsum("bhqk,bkhd->bqhd", replay.state_attention(), given["attention_values"])
    assert_close(mixed, outputs, rtol=1e-4, atol=1e-4)


def test_an_ssd_replay_goes_on_from_a_state(ssd):
    replay, _ = ssd
    cut = 4
    first = Replay(
        "ssd",
        {
            name: x if name == "skip" or x is None else x[:, :cut]
            for name, x in replay.given.items()
        },
    )
    rest = {
        name: x if name == "skip" or x is None else x[:, cut:] for name, x in replay.given.items()
    }
    second = Replay("ssd", {**rest, "state_input": first.run()[1]})
    assert_close(second.run()[0], replay.run()[0][:, cut:])
    assert_close(second.run()[1], replay.run()[1])
    assert not second.fresh and replay.fresh


def test_a_retention_replay_is_the_recurrence_and_its_implied_attention():
    q, k, v = (
        draw(BATCH, SEQ, HEADS, size, seed=seed) for size, seed in ((KEY, 0), (KEY, 1), (VALUE, 2))
    )
    decays = -draw(HEADS, seed=3).exp()
    replay = Replay(
        "retention",
        {
            "attention_queries": q,
            "attention_keys": k,
            "attention_values": v,
            "decays": decays,
            "state_input": None,
        },
    )
    state, outputs = torch.zeros(BATCH, HEADS, KEY, VALUE), []
    for token in range(SEQ):
        state = (
            decays.exp()[:, None, None] * state + k[:, token, :, :, None] * v[:, token, :, None, :]
        )
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, token], state))
    found, last = replay.run()
    assert_close(found, torch.stack(outputs, dim=1), rtol=1e-4, atol=1e-4)
    assert_close(last, state, rtol=1e-4, atol=1e-4)
    assert_close(
        torch.einsum("bhqk,bkhd->bqhd", replay.state_attention(), v), found, rtol=1e-4, atol=1e-4
    )
    assert_close(replay.states([1]), replay.states()[:, :, 1:2])
    assert_close(replay.state_at(4, [2]), replay.states()[:, 4, 2:])


def test_one_head_alone_is_that_head(ssd):
    replay, _ = ssd
    states = replay.states()
    assert_close(replay.states([2]), states[:, :, 2:])
    assert_close(replay.state_at(-1), states[:, -1])
    assert_close(replay.norms(), states.flatten(3).norm(dim=-1))
    with pytest.raises(ValueError, match="token 9 .* 9 tokens"):
        replay.state_at(SEQ)
    with pytest.raises(ValueError, match="head 3 "):
        replay.states([HEADS])


def test_the_selective_scan_replay_is_the_kernel():
    channels = 6
    rates, steps = (
        -draw(channels, KEY, seed=3).exp(),
        F.softplus(draw(BATCH, channels, SEQ, seed=4)),
    )
    queries, keys, values = (
        draw(BATCH, KEY, SEQ, seed=0),
        draw(BATCH, KEY, SEQ, seed=1),
        draw(BATCH, channels, SEQ, seed=2),
    )
    skip = draw(channels, seed=5)
    outputs, state = mamba_selective_scan(
        values, steps, rates, keys, queries, D=skip, return_last_state=True
    )
    replay = Replay(
        "selective_scan",
        {
            "attention_queries": queries.mT,
            "attention_keys": keys.mT,
            "attention_values": values.mT,
            "decays": torch.einsum("bcs,cn->bscn", steps, rates),
            "betas": steps.mT,
            "skip": skip,
        },
    )
    found, last = replay.run()
    assert_close(found, outputs.mT, rtol=1e-4, atol=1e-5)
    assert_close(last, state, rtol=1e-4, atol=1e-5)
    assert_close(
        torch.einsum("bcqk,bkc->bqc", replay.state_attention(), values.mT),
        outputs.mT,
        rtol=1e-4,
        atol=1e-5,
    )
    assert_close(replay.states([4]), replay.states()[:, :, 4:5])


def test_a_gated_recurrence_forgets_at_the_start_of_a_text():
    values, gates = draw(BATCH, SEQ, 4, seed=0), torch.sigmoid(draw(BATCH, SEQ, 4, seed=1))
    gates[:, 0] = 0
    stale = draw(BATCH, 4, seed=2)
    replay = Replay(
        "gated_recurrence",
        {"attention_values": values, "recurrent_gate": gates, "state_input": stale},
    )
    outputs, last = replay.run()
    want = values[:, 0]
    for token in range(1, SEQ):
        want = gates[:, token] * want + values[:, token]
    assert_close(last, want)
    assert replay.fresh
    assert_close(
        torch.einsum("bcqk,bkc->bqc", replay.state_attention(), values),
        outputs,
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.slow
def test_what_is_made_without_looking_at_the_state_is_differentiable(ssd):
    replay, _ = ssd
    given = {
        name: x.double().requires_grad_() if isinstance(x, torch.Tensor) else x
        for name, x in replay.given.items()
    }
    assert torch.autograd.gradcheck(
        lambda v: state_space_outputs({**given, "attention_values": v}), given["attention_values"]
    )


def state_space_outputs(given: dict) -> torch.Tensor:
    return torch.stack(
        [out for out, _ in state_space.ssd_steps(*(given[name] for name in list(given)[:6]))], dim=1
    )
