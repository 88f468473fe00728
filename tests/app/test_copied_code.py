"""The code behind each card, run as it is copied: it makes the numbers the card draws."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from explorer.app.cards import CARDS, run_for_card
from explorer.app.store import Store
from explorer.app.worker import Job
from explorer.checkpoints import load as loading
from explorer.widgets.views import code as snippets
from explorer.widgets.views.picture import Heatmap, Refusal
from explorer.widgets.views.selection import Selection
from explorer.widgets.views.tensor import value_of
from tests.support.copied_code import agree, numbers_of, run_cell

SOURCE, PROMPT = "specimen:qwen3_5_moe_text", 'The "evening" and the morning\nwere the first day'
RECURRENT, SOFTMAX = 1, 3


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    """Every cell loads the model; here they all get the same one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", functools.cache(loading.load))
        yield


@pytest.fixture(scope="module")
def store() -> Store:
    return Store(loading.load)


@pytest.fixture(scope="module")
def runs(store):
    """The run without and with interventions."""
    job = Job("test", lambda job: None, lambda job: None)
    edits = (snippets.Intervention("expert", 0, 5), snippets.Intervention("head", SOFTMAX, 1))
    edited = store.run(SOURCE, PROMPT, edits, job)
    return edited.baseline, edited


CASES = [
    (card, selection)
    for card in CARDS
    if card.code is not None and not card.compares
    for selection in (
        [
            Selection(block=RECURRENT, head=2, token=3, router=choice)
            for choice in ("scores", "logits", "weights")
        ]
        if card.name == "router_grid"
        else [
            Selection(block=SOFTMAX, head=2, token=3, pattern=choice)
            for choice in ("probabilities", "scores")
        ]
        if card.tab == "attention"
        else [Selection(block=RECURRENT, head=2, token=3)]
    )
]


@pytest.mark.parametrize(("card", "selection"), CASES, ids=lambda case: getattr(case, "name", None))
def test_a_cell_makes_the_numbers_of_its_card(card, selection, runs):
    plain, _ = runs
    agree(run_cell(card.code(plain, selection)), numbers_of(card.view(plain, selection)))


@pytest.mark.parametrize(
    "card",
    [card for card in CARDS if card.tab == "state" and card.code is not None and not card.compares],
    ids=lambda card: card.name,
)
def test_a_cell_makes_the_numbers_of_a_state_with_fixed_decays(card, store):
    run = store.run("specimen:minimax", PROMPT, (), Job("test", lambda job: None, lambda job: None))
    selection = Selection(block=1, head=2, token=3)
    if "state_written" in card.name or card.name == "written":
        assert isinstance(card.view(run, selection), Refusal)
    else:
        agree(run_cell(card.code(run, selection)), numbers_of(card.view(run, selection)))


def test_a_cell_carries_the_interventions_of_its_run(runs):
    _, edited = runs
    selection = Selection(block=SOFTMAX)
    card = next(card for card in CARDS if card.name == "router_grid")
    code = card.code(edited, selection)
    assert "ablate_expert(0, 5)" in code and f"zero_head({SOFTMAX}, 1)" in code
    agree(run_cell(code), numbers_of(card.view(edited, selection)))


def test_the_cell_of_a_comparison_makes_its_curve(runs, capsys):
    plain, edited = runs
    selection = Selection(token=3)
    card = next(card for card in CARDS if card.compares)
    shown = run_cell(card.code(edited, selection))
    agree(shown, card.view(run_for_card(card, plain, edited), selection).lines[0].values)
    assert shown.max() > 0 and len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.parametrize(
    ("key", "layer"),
    [
        ("decays", RECURRENT),
        ("attention_keys", SOFTMAX),
        ("shared_experts.mlp_neurons", 0),
        ("logits", None),
    ],
)
def test_the_cell_of_a_part_reads_it(key, layer, runs):
    plain, _ = runs
    value = value_of(key, plain.mixers[layer or 0])
    shown = run_cell(snippets.value_cell(plain.origin, key, layer, value.typed))
    recorded = plain[key, layer]
    assert shown.shape == tuple(recorded.shape)
    np.testing.assert_allclose(shown, recorded.numpy(), rtol=1e-4, atol=1e-5)


def test_text_in_a_cell_is_always_a_string_literal():
    for text in (
        'a "quoted" word',
        "it's",
        "\u202e turned",
        "two\nlines",
        "back\\slash",
        "é 😀",
        "'",
        "",
    ):
        assert eval(snippets.quoted(text)) == text
        assert "\u202e" not in snippets.quoted(text)


def test_every_card_of_a_heatmap_is_one_matrix(runs):
    plain, _ = runs
    for card in CARDS:
        view = card.view(plain, Selection(block=RECURRENT, part="decays"))
        if isinstance(view, Heatmap):
            assert view.values.shape == (view.y.size, view.x.size), card.name


def test_a_figure_makes_room_before_it_shows_more():
    """A browser cuts a range's ends off at the bounds it has, so new bounds must reach it first."""
    from explorer.app.figure_base import FigureTheme
    from explorer.app.figures import CellFigure

    figure = CellFigure(FigureTheme(), "cells")
    arrived: list[str] = []
    for name in ("bounds", "start", "end"):
        figure.figure.x_range.on_change(name, lambda attr, old, new: arrived.append(attr))
    figure._frame(22, 8)
    arrived.clear()
    figure._frame(45, 12)
    assert arrived[0] == "bounds" and figure.figure.x_range.end == 11.5
