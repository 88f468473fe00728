"""Places: how the axes of a value lie in the tensor found, there and back."""

from __future__ import annotations

import random
from collections import namedtuple
from dataclasses import replace
from itertools import permutations
from math import prod

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from explorer.discovery.hook_point import (
    ExpertSelection,
    HookPoint,
    arrange,
    from_layout,
    get_element,
    is_identity,
    read_value,
    to_layout,
    with_element,
    write_value,
)

AXES = ("batch", "seq", "heads", "key_dim", "value_dim")


def place(side="output", element=None, arrangement=(("batch",), ("seq",)), repeat=None):
    return HookPoint("", side, element, arrangement, "somewhere", (), repeat)


def cases(distinct: bool, count: int = 60):
    """Random layouts: axes of random extents, permuted, some merged in the layout's order,
    which is what nobody could tell from a shape."""
    make = random.Random(7 if distinct else 11)
    for _ in range(count):
        axes = AXES[: make.randint(1, 5)]
        pool = (
            make.sample((2, 3, 5, 7, 11), len(axes))
            if distinct
            else [make.choice((1, 2, 3, 4)) for _ in axes]
        )
        order = list(axes)
        make.shuffle(order)
        groups, rest = [], order
        while rest:
            size = make.randint(1, min(2, len(rest)))
            groups.append(tuple(sorted(rest[:size], key=axes.index)))
            rest = rest[size:]
        yield axes, dict(zip(axes, pool, strict=False)), tuple(groups)


def native(axes, sizes, groups):
    """Return a tensor numbered along the layout's axes and arranged as ``groups``.

    It is made independently of the code under test.
    """
    layout = torch.arange(prod(sizes.values())).reshape([sizes[a] for a in axes])
    flat = [a for group in groups for a in group]
    moved = layout
    names = list(axes)
    for position, axis in enumerate(flat):
        moved = moved.movedim(names.index(axis), position)
        names.insert(position, names.pop(names.index(axis)))
    return layout, moved.reshape([prod(sizes[a] for a in group) for group in groups])


@pytest.mark.parametrize(("axes", "sizes", "groups"), list(cases(distinct=True)))
def test_distinct_sizes_have_one_arrangement(axes, sizes, groups):
    layout, tensor = native(axes, sizes, groups)
    found = arrange(tuple(tensor.shape), axes, sizes)
    assert torch.equal(to_layout(tensor, found, axes, sizes), layout)


@pytest.mark.parametrize(("axes", "sizes", "groups"), list(cases(distinct=False)))
def test_equal_sizes_still_give_the_axes_and_there_and_back_changes_nothing(axes, sizes, groups):
    _, tensor = native(axes, sizes, groups)
    found = arrange(tuple(tensor.shape), axes, sizes)
    served = to_layout(tensor, found, axes, sizes)
    assert tuple(served.shape) == tuple(sizes[a] for a in axes)
    assert torch.equal(from_layout(served, found, axes), tensor)


def test_equal_sizes_do_not_suggest_a_transposition():
    for order in permutations(AXES[:3]):
        assert arrange((4, 4, 4), order, dict.fromkeys(AXES[:3], 4)) == tuple(
            (axis,) for axis in order
        )


def test_merged_axes_are_split_in_the_layouts_order():
    sizes = {"batch": 2, "seq": 6, "top_k": 3}
    assert arrange((12, 3), ("batch", "seq", "top_k"), sizes) == (("batch", "seq"), ("top_k",))
    assert arrange((36,), ("batch", "seq", "top_k"), sizes) == (("batch", "seq", "top_k"),)


def test_an_axis_of_one_is_placed():
    assert (
        arrange((7, 12), ("batch", "seq", "num_experts"), {"batch": 1, "seq": 7, "num_experts": 12})
        is not None
    )
    assert arrange((1, 7), ("batch", "seq"), {"batch": 1, "seq": 7}) == (("batch",), ("seq",))


def test_a_dimension_of_one_that_is_no_axis_is_left_out_and_put_back():
    axes, sizes = ("batch", "seq", "heads"), {"batch": 2, "seq": 3, "heads": 5}
    tensor = torch.arange(30).reshape(2, 3, 5, 1)
    found = arrange((2, 3, 5, 1), axes, sizes)
    served = to_layout(tensor, found, axes, sizes)
    assert served.shape == (2, 3, 5) and torch.equal(from_layout(served, found, axes), tensor)


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (2, 12), (4, 6, 2), (25,), ()])
def test_a_tensor_without_the_axes_is_not_arranged(shape):
    sizes = {"batch": 4, "seq": 6}
    assert arrange(shape, ("batch", "seq"), sizes) is None


def test_an_unknown_size_is_not_arranged():
    assert arrange((2, 7), ("batch", "seq"), {"batch": 2}) is None


def test_a_tensor_of_the_right_layout_is_returned_itself():
    tensor = torch.zeros(2, 7)
    arrangement = (("batch",), ("seq",))
    assert is_identity(arrangement, ("batch", "seq"))
    assert to_layout(tensor, arrangement, ("batch", "seq"), {"batch": 2, "seq": 7}) is tensor
    assert from_layout(tensor, arrangement, ("batch", "seq")) is tensor


def test_a_served_tensor_is_a_view_that_writes_one_position():
    axes, sizes = ("batch", "seq", "heads"), {"batch": 2, "seq": 3, "heads": 5}
    tensor = torch.zeros(6, 5)
    view = to_layout(tensor, arrange((6, 5), axes, sizes), axes, sizes)
    view[1, 2, 4] = 1
    assert tensor.nonzero().tolist() == [[5, 4]]


def test_repeats_are_made_along_the_axis_and_cost_nothing_else():
    axes, sizes = (
        ("batch", "seq", "heads", "key_dim"),
        {"batch": 1, "seq": 2, "heads": 6, "key_dim": 4},
    )
    narrow = torch.randn(1, 2, 3, 4)
    where = place("input", 0, tuple((a,) for a in axes), ("heads", 2))
    served = read_value(narrow, where, axes, sizes)
    assert served.shape == (1, 2, 6, 4)
    for head in range(6):
        assert torch.equal(served[:, :, head], narrow[:, :, head // 2])


def test_entries_that_were_chosen_are_served_and_put_back_alone():
    axes, sizes = (
        ("batch", "seq", "top_k", "width"),
        {"batch": 1, "seq": 2, "num": 4, "width": 3, "top_k": 2},
    )
    selection = ExpertSelection("top_k", "num", "numbers")
    whole = torch.arange(24.0).view(4, 2, 3)  # an entry for each of four, two tokens
    where = replace(
        place("output", None, (("num",), ("batch", "seq"), ("width",))), selection=selection
    )
    numbers = torch.tensor([[[2, 0], [3, 1]]])
    served = read_value(whole, where, axes, sizes, numbers)
    assert torch.equal(served[0, 0, 0], whole[2, 0]) and torch.equal(served[0, 1, 1], whole[1, 1])
    assert torch.equal(write_value(served, where, axes, sizes, whole, numbers), whole)
    changed = write_value(
        served.index_fill(2, torch.tensor(1), -1.0), where, axes, sizes, whole, numbers
    )
    other = (changed != whole).any(-1)
    assert other.nonzero().tolist() == [[0, 0], [1, 1]] and (changed[other] == -1).all()
    assert torch.equal(whole, torch.arange(24.0).view(4, 2, 3))


def test_the_first_entries_are_served_and_put_back_alone():
    axes, sizes = ("batch", "seq", "few"), {"batch": 1, "seq": 2, "few": 3, "many": 4}
    whole, where = (
        torch.arange(8.0).view(2, 4),
        place("output", None, (("batch", "seq"), ("many",))),
    )
    where = replace(where, selection=ExpertSelection("few", "many", ""))
    served = read_value(whole, where, axes, sizes)
    assert torch.equal(served, whole[None, :, :3])
    changed = write_value(-served, where, axes, sizes, whole)
    assert torch.equal(changed[:, :3], -whole[:, :3]) and torch.equal(changed[:, 3:], whole[:, 3:])


def test_take_and_put_on_arguments():
    first, second = torch.zeros(1), torch.ones(1)
    call = ((first, second), {"mask": None, "beta": second})
    assert get_element(call, place("input", 1)) is second
    assert get_element(call, place("input", "beta")) is second
    assert get_element(call, place("input", "mask")) is None
    assert (
        get_element(call, place("input", 5)) is None
        and get_element(call, place("input", "absent")) is None
    )
    new = torch.full((1,), 9.0)
    args, kwargs = with_element(call, place("input", 0), new)
    assert args[0] is new and args[1] is second and kwargs["beta"] is second
    args, kwargs = with_element(call, place("input", "mask"), new)
    assert kwargs["mask"] is new and call[1]["mask"] is None


def test_take_and_put_on_results_keep_their_type():
    pair = namedtuple("pair", "stream weights")
    old, new = torch.zeros(1), torch.ones(1)
    for given in ((old, 3), [old, 3], pair(old, 3)):
        changed = with_element(given, place("output", 0), new)
        assert (
            type(changed) is type(given)
            and changed[0] is new
            and changed[1] == 3
            and given[0] is old
        )
    assert with_element(old, place(), new) is new and get_element(old, place()) is old
    output = CausalLMOutputWithPast(logits=old)
    changed = with_element(output, place("output", "logits"), new)
    assert (
        type(changed) is CausalLMOutputWithPast and changed.logits is new and output.logits is old
    )
    assert get_element(output, place("output", "logits")) is old
