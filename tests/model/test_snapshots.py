"""Recorded values are snapshots, whether the recording copied a tensor or kept the model's own."""

from __future__ import annotations

import pytest
import torch

from explorer import load
from explorer.model.snapshots import Snapshots, shared_keys
from tests.support.models import PROMPT, ids, specimen

#: Families that change tensors in place, with whether those are values: falcon its MLP's output,
#: llama4 its shared expert's; qwen3_moe the router's weights before they are read.
CHANGING = [("falcon", True), ("llama4_text", True), ("qwen3_moe", False)]


def forward(history, change=False):
    """Take one snapshot at a time ``"here"`` of a forward that may change its tensor afterwards."""
    snapshots = Snapshots(history)
    tensor = torch.arange(6.0).reshape(2, 3)
    taken = snapshots.take("here", tensor)
    if change:
        tensor.view(-1).add_(1)  # by a view: they share the counter
    return tensor, taken, snapshots.verify()


def aliases(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


# -- one address ------------------------------------------------------------------------------


def test_the_first_forward_copies_and_later_ones_keep_what_never_changes():
    history = {}
    tensor, taken, valid = forward(history)
    assert valid and not aliases(tensor, taken) and history == {"here": False}
    tensor, taken, valid = forward(history)
    assert valid and aliases(tensor, taken)


def test_what_changes_in_the_first_forward_is_always_copied():
    history = {}
    for _ in range(3):
        tensor, taken, valid = forward(history, change=True)
        assert valid and torch.equal(taken, tensor - 1)
    assert history == {"here": True}


def test_a_change_that_was_not_expected_is_noticed_and_copied_from_then_on():
    history = {}
    forward(history)
    assert not forward(history, change=True)[-1] and history == {"here": True}
    tensor, taken, valid = forward(history, change=True)
    assert valid and torch.equal(taken, tensor - 1)
    tensor, taken, valid = forward(history)
    assert valid and not aliases(tensor, taken)


def test_a_probe_holds_no_memory_of_what_it_watches():
    snapshots, tensor = Snapshots({}), torch.zeros(1000)
    snapshots.take("here", tensor)
    storage = tensor.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    assert uses == 2  # the tensor and ``storage``


def test_a_part_of_a_larger_storage_and_a_broadcast_tensor_are_copied():
    large = torch.arange(12.0)
    for tensor in (large[:3], large[:3].expand(4, 3)):
        taken = Snapshots({"here": False}).take("here", tensor)
        assert torch.equal(taken, tensor) and not aliases(taken, tensor)
        assert taken.untyped_storage().nbytes() == taken.numel() * taken.element_size()


def test_a_tensor_without_a_version_counter_is_copied():
    with torch.inference_mode():
        tensor = torch.zeros(3)
        taken = Snapshots({"here": False}).take("here", tensor)
    assert not aliases(taken, tensor)


@torch.no_grad()
def test_what_something_else_holds_is_copied_and_what_is_one_tensor_is_named():
    held, one = torch.zeros(3), torch.ones(2)
    values = {"held": held.detach(), "a": one.detach(), "b": one.detach(), "alone": torch.ones(4)}
    del one
    assert shared_keys(values) == {"a", "b"}
    assert not aliases(values["held"], held) and aliases(values["a"], values["b"])


# -- models -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "changes"), CHANGING)
def test_families_that_change_tensors_in_place_are_recorded_as_they_passed(family, changes):
    """The first recording copies everything where it passes; later ones equal it."""
    model = load(f"specimen:{family}")
    copied = model.record(PROMPT)
    assert set(model.change_history.values()) == {False, changes}
    for _ in range(2):
        kept = model.record(PROMPT)
        assert list(kept) == list(copied)
        for key in copied:
            assert kept[key] is None or (
                torch.equal(kept[key], copied[key])
                if isinstance(kept[key], torch.Tensor)
                else kept[key] == copied[key]
            )


def test_a_hook_that_changes_an_output_in_place_is_not_seen():
    """After recordings in which nothing changed: that forward runs twice, later ones once."""
    model = load("specimen:llama")
    before = model.record(PROMPT)
    model.record(PROMPT)
    forwards = []
    model.hf.register_forward_pre_hook(lambda *_: forwards.append(1))
    model.hf.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out.mul_(0.5))
    for expected in (2, 1):
        forwards.clear()
        after = model.record(PROMPT)
        assert len(forwards) == expected
        assert torch.equal(after["mlp_output", 0], before["mlp_output", 0])
        assert not torch.equal(after["layer_output", 0], before["layer_output", 0])


def test_recordings_do_not_share_memory_with_the_caller_or_the_model(any_model):
    tokens = ids(any_model).clone()
    any_model.record(tokens)
    rec = any_model.record(tokens)
    held = {
        tensor.untyped_storage().data_ptr()
        for tensor in (tokens, *any_model.hf.parameters(), *any_model.hf.buffers())
    }
    for key in rec:
        if isinstance(rec[key], torch.Tensor):
            assert rec[key].untyped_storage().data_ptr() not in held
            assert rec[key].untyped_storage().nbytes() == rec[key].numel() * rec[key].element_size()


def test_a_write_into_one_value_does_not_show_in_another():
    model = specimen("llama")
    model.record(PROMPT)
    rec = model.record(PROMPT)
    entering = rec["layer_input", 1].clone()
    rec["layer_output", 0].zero_()
    assert torch.equal(rec["layer_input", 1], entering)
    assert rec["layer_output", 0].abs().max() == 0
