"""Probes of families whose sizes do not change alone, are rounded, or say how often a line runs."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

from explorer import load
from explorer.meta_device import build_meta
from explorer.signature import signature
from explorer.signature.block_kinds import block_list, few_blocks
from explorer.signature.infer import InferredTypes
from explorer.signature.observation import TensorSite, observe
from explorer.signature.probes import Probes
from explorer.signature.probing import probe
from explorer.signature.resizable import ResizableModel
from explorer.signature.types import Types
from explorer.specimens.small import small_config
from tests.support.signatures import calls, counted

#: Sizes that a model is built of which no probe had, those that follow included.
OTHERS = {
    "zamba": {"MambaHeads": 8, "Hidden": 160, "Channels": 320, "StateDim": 9},
    "bailing_hybrid": {"RopeDim": 10, "HeadDim": 10, "NopeDim": 14},
    "dots3_note_text": {"RopeDim": 12, "HeadDim": 30, "Latent": 50},
    "xlstm": {"Hidden": 640, "EmbeddingDim": 640, "FfnRoundUpToMultipleOf": 80},
}


@cache
def probed(family: str) -> tuple[Probes, Types]:
    module = build_meta(small_config(family))
    path = block_list(module)
    config, _, count = few_blocks(module, path)
    first_blocks = None if count is None else (path, count)
    probes = probe(ResizableModel(config, type(module), first_blocks=first_blocks))
    return probes, Types.of(probes)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_every_axis_resolves_and_holds_on_a_model_that_was_not_probed(family):
    probes, types = probed(family)
    assert types.unresolved == [] and not set(probes.fixed) & set(OTHERS[family])
    sizes = {**probes.model.numbers, **OTHERS[family], "B": 6, "S": 14, "Past": 14}
    assert all(
        sizes[name] == expression.value(sizes) for name, expression in probes.dependent.items()
    )
    assert not any(run.items() >= OTHERS[family].items() for run in probes.runs)
    model = probes.model.build({name: sizes[name] for name in probes.model.numbers})
    seen = observe(model, 6, 14, products=True)
    sizes |= {name: size.value(sizes) for name, size in types.rounded.items()}
    assert seen.keys() == types.by_site.keys()
    assert [site for site, one in seen.items() if not types.by_site[site].holds(one, sizes)] == []


def test_a_size_follows_another_that_alone_changes_nothing_but_by_rounding():
    probes, _ = probed("bailing_hybrid")
    assert set(probes.dependent) & {"HeadDim", "RopeDim"}


def test_a_width_that_is_rounded_up_shows_where_the_multiple_is_a_size_of_the_configuration():
    _, types = probed("xlstm")
    width = types.by_site[
        TensorSite("", "backbone.blocks.0.ffn.proj_up", "parameter", "weight")
    ].axes[0]
    assert (
        str(width) == "RoundedHidden"
        and types.rounded["RoundedHidden"].to == "FfnRoundUpToMultipleOf"
    )


def test_a_multiple_of_a_size_that_cannot_change_is_taken_for_no_bare_number():
    """The one number of "zamba" that no size gives stands, until a size that might be in it is one
    that nobody could change."""
    probes, whole = probed("zamba")
    numbers = {
        one.axes[axis].constant for one in whole.by_site.values() for axis in range(len(one.axes))
    }
    assert 2 in numbers
    held = copy.copy(probes)
    held.fixed, held.model = ["Fixed"], copy.copy(probes.model)
    held.model.numbers = {**probes.model.numbers, "Fixed": 2}
    held.runs = [{**run, "Fixed": 2} for run in probes.runs]
    unresolved = Types.of(held).unresolved
    assert unresolved and {number for _, _, number in unresolved} == {
        one for one in numbers if one and one > 1 and one % 2 == 0
    }


@pytest.mark.slow
def test_operations_of_a_loop_over_heads_are_those_torch_counts():
    module = build_meta(small_config("zamba"))
    found = signature(module, [InferredTypes(*probed("zamba"))])["costs"]["flops"]
    assert "StateDim" in found["formula"]
    assert [calls(found, T=context) for context in (12, 130)] == [
        counted(module, context) for context in (12, 130)
    ]


class Loops(torch.nn.Module):
    """Multiplies by each of some matrices on one line, and by another of the same shape on the
    next."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(times, 5, 5, device="meta"))
        self.other = torch.nn.Parameter(torch.empty(5, 5, device="meta"))

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def forward(
        self, ids: torch.Tensor, use_cache: bool, **again: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        x = ids.flatten()[:, None].expand(-1, 5).float()
        for one in self.weight:
            x = x @ one
        return {"state": x @ self.other}


@pytest.mark.parametrize("times", [1, 2, 7])
def test_products_of_one_line_are_one_with_all_their_rows(times):
    seen = observe(Loops(times), 3, 11, products=True)
    found = {site.name: one.shape for site, one in seen.items() if site.what == "matmul"}
    assert found == {
        "0.aten.mm.left": (3 * times, 5),
        "0.aten.mm.right": (5, 5),
        "0.aten.mm.out": (3 * times, 5),
        "1.aten.mm.left": (3, 5),
        "1.aten.mm.right": (5, 5),
        "1.aten.mm.out": (3, 5),
    }


def test_a_head_s_width_that_no_figure_gives_is_a_share_of_two_sizes():
    model = load("specimen:openai-gpt")
    found = signature(model)
    assert found["resolved"]["unresolved"] == []
    dims = {row["name"]: row["type"]["dims"] for row in found["values"]}
    assert dims["attention_queries"] == ["B", "Heads", "S", "Hidden / Heads"]


@pytest.mark.slow
def test_mixtures_that_loop_over_their_experts_have_types_over_them():
    found = signature(build_meta(small_config("jetmoe")))
    assert found["resolved"]["unresolved"] == [] and found["resolved"]["fixed"] == []
    parts = [
        part
        for one in found["blocks"]
        if one["class"] == "JetMoeParallelExperts"
        for part in one["parameters"]
    ]
    assert parts and all(part["type"]["dims"][0] == "Experts" for part in parts)
