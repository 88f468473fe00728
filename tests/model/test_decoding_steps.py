"""Decoding steps of state-space mixers: what their kernels hold; reading changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from explorer import load
from explorer.model.errors import Unavailable


@pytest.fixture(scope="module", params=["mamba", "mamba2"])
def model(request):
    return load(f"specimen:{request.param}")


@pytest.fixture(scope="module")
def ids(model):
    return model.tokenizer(
        "In the beginning God created the heaven and the earth", return_tensors="pt"
    )["input_ids"]


def prefilled(model, ids):
    with torch.no_grad():
        return model.hf(ids[:, :8], use_cache=True).cache


@pytest.mark.parametrize("grad", [True, False])
def test_looking_at_the_state_that_enters_leaves_the_cache_as_it_was(model, ids, grad):
    looked, plain = prefilled(model, ids), prefilled(model, ids)
    with torch.set_grad_enabled(grad), model.trace(ids[:, 8:9], cache=looked, use_cache=True):
        entering = model.layers[1].mixer.state_input.save()
    with torch.no_grad():
        model.hf(ids[:, 8:9], cache=plain, use_cache=True)
    assert entering is not None
    assert_close(looked.layers[1].recurrent_states[0], plain.layers[1].recurrent_states[0])


def test_what_a_steps_kernel_does_not_hold_is_refused_by_its_name(model, ids):
    anatomy = model.anatomy.block(1).hosts[model.kinds[1]]
    for name in sorted(anatomy.prompt_only):
        if name in ("states", "state_attention"):
            continue
        with pytest.raises(Unavailable, match=rf"{name} .*decoding step"):
            with (
                torch.no_grad(),
                model.trace(ids[:, 8:9], cache=prefilled(model, ids), use_cache=True),
            ):
                getattr(model.layers[1].mixer, name).save()
    assert ("skip" in anatomy.prompt_only) is (model.kinds[1] == "ssd")


def test_a_state_written_on_a_step_is_the_state_the_cache_keeps():
    model = load("specimen:mamba2")
    ids = torch.arange(3, 14)[None]
    cache = prefilled(model, ids)
    with torch.no_grad(), model.trace(ids[:, 8:9], cache=cache, use_cache=True):
        model.layers[1].mixer.state_input[:] = 0
        left = model.layers[1].mixer.state_output.save()
    assert_close(cache.layers[1].recurrent_states[0].mT, left)
    clean = prefilled(model, ids)
    with torch.no_grad():
        model.hf(ids[:, 8:9], cache=clean, use_cache=True)
    assert not torch.allclose(clean.layers[1].recurrent_states[0].mT, left)
