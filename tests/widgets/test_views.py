"""What the explorer draws, without a browser: views, reductions, scales, words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from explorer.app.figure_base import colours
from explorer.vocabulary import MIXERS
from explorer.widgets.views import attention as views_attention
from explorer.widgets.views import next_token as views_next
from explorer.widgets.views import residual as views_stream
from explorer.widgets.views import router as views_router
from explorer.widgets.views import state as views_state
from explorer.widgets.views import tensor as views_part
from explorer.widgets.views.downsample import (
    DIVERGING,
    EMPTY,
    FURTHEST,
    MAXIMUM,
    MINIMUM,
    SEQUENTIAL,
    Scale,
    Window,
    cells_in_window,
    quantised,
    reduced,
    scale_of,
)
from explorer.widgets.views.labels import axis_label, number, shown_token
from explorer.widgets.views.picture import (
    Heatmap,
    Mosaic,
    Refusal,
    marks_in,
    mosaic_picture,
    picture,
)
from explorer.widgets.views.selection import Selection
from tests.support.synthetic import synthetic

HYBRID = ("linear_attn", "self_attn")


# -- reductions and scales ------------------------------------------------------


def test_a_reduction_keeps_what_its_name_says():
    values = np.arange(35, dtype=np.float32).reshape(5, 7) - 20
    for name, pick in (
        (MAXIMUM, np.max),
        (MINIMUM, np.min),
        (FURTHEST, lambda block: max(block.ravel(), key=abs)),
    ):
        small = reduced(values, (2, 3), name)
        assert small.shape == (3, 3)
        for row in range(3):
            for column in range(3):
                block = values[2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
                assert small[row, column] == pick(block), (name, row, column)


def test_empty_cells_count_only_where_a_block_has_nothing_else():
    values = np.array([[np.nan, -3.0, np.nan, np.nan]], dtype=np.float32)
    for name in (MAXIMUM, MINIMUM, FURTHEST):
        small = reduced(values, (1, 2), name)
        assert small[0, 0] == -3 and not np.isfinite(small[0, 1])


def test_a_window_is_exact_and_is_where_its_cells_are():
    values = np.random.default_rng(0).normal(size=(1000, 1000)).astype(np.float32)
    whole, _, factors = cells_in_window(values, None, 640, MAXIMUM)
    assert factors == (2, 2) and whole.shape == (500, 500)
    part, box, factors = cells_in_window(values, Window(10.4, 20.6, 110.2, 90.0), 640, MAXIMUM)
    assert factors == (1, 1) and (box.left, box.top, box.right, box.bottom) == (10, 20, 111, 90)
    assert np.array_equal(part, values[20:90, 10:111])


def test_a_picture_says_what_was_reduced_and_covers_its_cells():
    rec = synthetic(1001, HYBRID)
    drawn = picture(views_attention.one_head(rec, Selection(block=1)))
    assert drawn.reduction == "maximum of 2 × 2 cells"
    assert drawn.indexes.dtype == np.uint8 and drawn.indexes.shape == (501, 501)
    assert drawn.wide == 1002, "a last cell that is half full keeps its size"
    assert drawn.indexes.nbytes < 1_000_000
    near = picture(views_attention.one_head(rec, Selection(block=1)), Window(0, 0, 100, 100))
    assert near.reduction == "every cell shown" and near.scale == drawn.scale


def test_indexes_run_along_their_scale():
    values = np.array([[0.0, 0.5, 1.0, np.nan, -np.inf]], dtype=np.float32)
    assert quantised(values, Scale(0, 1, False)).tolist() == [
        [SEQUENTIAL[0], 64, SEQUENTIAL[1], EMPTY, EMPTY]
    ]
    signed = np.array([[-2.0, 0.0, 2.0]], dtype=np.float32)
    assert quantised(signed, Scale(-2, 2, True)).tolist() == [[DIVERGING[0], 191, DIVERGING[1]]]
    for theme in ("light", "dark"):
        assert len(colours(theme)) == 256 and colours(theme)[EMPTY].endswith(", 0)")


@pytest.mark.parametrize(
    ("values", "signed", "expected"),
    [
        ([[0.2, 0.7]], False, (0.0, 0.7)),
        ([[-1.0, 3.0]], True, (-3.0, 3.0)),
        ([[-1.0, 3.0]], False, (-1.0, 3.0)),
        ([[0.0, 0.0]], False, (0.0, 1.0)),
        ([[np.nan, np.nan]], True, (-1.0, 1.0)),
    ],
)
def test_scales(values, signed, expected):
    scale = scale_of(np.array(values, dtype=np.float32), signed)
    assert (scale.low, scale.high) == pytest.approx(expected) and not scale.clipped


def test_a_scale_cut_off_says_so():
    values = np.full((100, 100), 0.01, dtype=np.float32)
    values[0, 0] = 1.0
    scale = scale_of(values, False, 0.0, 1.0, clip=99.5)
    assert scale.clipped and scale.high == pytest.approx(0.01)


# -- router ---------------------------------------------------------------------


def test_router_views_agree_with_the_recording():
    rec = synthetic(20, HYBRID, experts=8, top_k=2)
    chosen = Selection(block=1, token=3)
    grid = views_router.token_by_expert(rec, chosen)
    assert np.array_equal(grid.values, rec["router_scores", 1][0].numpy())
    assert len(grid.marks) == 40
    for expert, token in grid.marks:
        assert expert in rec["expert_indices", 1][0, token]
    weights = views_router.token_by_expert(rec, chosen.moved(router="weights")).values
    assert np.isfinite(weights).sum() == 40 and np.nansum(weights, axis=1) == pytest.approx(1.0)
    load = views_router.layer_by_expert(rec)
    assert load.values.shape == (2, 8) and load.values.sum(axis=1) == pytest.approx(2.0)
    slots = views_router.slots_of(rec, chosen)
    assert [slot.expert for slot in slots] == rec["expert_indices", 1][0, 3].tolist()
    assert views_router.margins(rec, chosen).lines[0].values == pytest.approx(
        rec["router_margin", 1][0].numpy()
    )


def test_unused_experts_are_those_no_token_chose():
    rec = synthetic(2, HYBRID, experts=16, top_k=2)
    unused = views_router.unused_experts(rec, 0)
    assert set(unused) == set(range(16)) - set(rec["expert_indices", 0].flatten().tolist())


def test_outlines_come_with_zooming_in():
    rec = synthetic(200, HYBRID)
    grid = views_router.token_by_expert(rec, Selection())
    assert len(marks_in(grid, picture(grid))) == 0
    marks = marks_in(grid, picture(grid, Window(0, 10, 8, 40)))
    assert len(marks) == 60 and marks[:, 1].min() >= 10 and marks[:, 1].max() < 40


def test_blocks_without_a_router_say_so():
    rec = synthetic(5, HYBRID, experts=None)
    for view in (
        views_router.token_by_expert(rec, Selection()),
        views_router.layer_by_expert(rec),
        views_router.margins(rec, Selection()),
    ):
        assert isinstance(view, Refusal) and "dense" in view.reason


# -- attention ------------------------------------------------------------------


def test_attention_views_hide_what_the_mask_hides():
    rec = synthetic(9, HYBRID, heads=6, kv_heads=2)
    chosen = Selection(block=1, head=4, token=3)
    for pattern in ("probabilities", "scores"):
        view = views_attention.one_head(rec, chosen.moved(pattern=pattern))
        assert np.isnan(view.values[np.triu_indices(9, 1)]).all()
        kept = np.tril_indices(9)
        assert view.values[kept] == pytest.approx(
            rec[f"attention_{pattern}", 1][0, 4].numpy()[kept]
        )
    assert "key/value head 1" in view.title
    mosaic = views_attention.all_heads(rec, chosen)
    assert [tile.group for tile in mosaic.tiles] == ["kv 0"] * 3 + [
        "kv 1"
    ] * 3 and mosaic.columns % 3 == 0


def test_the_strongest_keys_come_first():
    rec = synthetic(9, HYBRID)
    most_read_keys = views_attention.most_read_keys(rec, Selection(block=1, token=6), 3)
    row = rec["attention_probabilities", 1][0, 0, 6]
    assert [key for key, _ in most_read_keys] == row.topk(3).indices.tolist()


def test_rows_that_do_not_sum_to_one_are_noted():
    rec = synthetic(9, HYBRID)
    assert views_attention.one_head(rec, Selection(block=1)).note != ""
    assert "sink" not in views_attention.one_head(rec, Selection(block=1)).note
    rec.values["attention_probabilities", 1] = rec["attention_probabilities", 1] * 0.5
    assert "sink" in views_attention.one_head(rec, Selection(block=1)).note


def test_a_recurrent_block_refuses_a_pattern_and_points_to_state():
    rec = synthetic(5, HYBRID)
    view = views_attention.one_head(rec, Selection(block=0))
    assert isinstance(view, Refusal)
    assert MIXERS["linear_attn"].meaning in view.reason and "State" in view.reason


@pytest.mark.parametrize(("heads", "tokens"), [(3, 5), (16, 40), (9, 300)])
def test_a_mosaic_places_every_head_where_its_tile_is(heads, tokens):
    rec = synthetic(tokens, ("self_attn",), heads=heads, kv_heads=1 if heads == 3 else heads)
    drawn = mosaic_picture(views_attention.all_heads(rec, Selection()))
    assert len(drawn.boxes) == heads
    for tile, box in enumerate(drawn.boxes):
        assert drawn.tile_at((box.left + box.right) / 2, (box.top + box.bottom) / 2) == tile
        assert (
            drawn.indexes[int(box.top) : int(box.bottom), int(box.left) : int(box.right)] != EMPTY
        ).any()
    assert drawn.tile_at(-5, -5) is None


# -- state ----------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True])
def test_state_views_agree_with_the_replay(begun):
    rec = synthetic(15, HYBRID)
    chosen = Selection(block=0, token=7, head=2)
    if begun:  # a forward that went on from an earlier one
        rec.values["state_input", 0] = torch.ones(1, 4, 6, 5)
    state = rec.replay(0).states([2])[0, 7, 0].numpy()
    assert views_state.state_matrix(rec, chosen).values == pytest.approx(state, abs=1e-6)
    norms = views_state.norms_per_token(rec, 0)
    assert norms[7, 2] == pytest.approx(np.linalg.norm(state), rel=1e-5)
    assert views_state.retained_share(rec, chosen).values == pytest.approx(
        rec["decays", 0][0].exp().T.numpy()
    )
    implied = views_state.implied_attention(rec, chosen)
    kept = np.tril_indices(15)
    assert implied.signed and implied.values[kept] == pytest.approx(
        rec["state_attention", 0][0, 2].numpy()[kept]
    )
    assert "short convolution" in implied.note
    curves = views_state.norm_over_time(rec, chosen, norms)
    assert curves.lines[-1].role == "recurrent" and curves.lines[-1].values == pytest.approx(
        norms[:, 2]
    )


def test_forgetting_is_not_hidden_by_the_reduction():
    rec = synthetic(1400, ("linear_attn",))
    view = views_state.retained_share(rec, Selection())
    drawn = picture(view)
    assert drawn.reduction.startswith("minimum of")
    assert drawn.indexes.min() == quantised(view.values.min(keepdims=True), drawn.scale)[0, 0]


def test_a_softmax_block_refuses_a_state_and_names_the_blocks_that_have_one():
    rec = synthetic(5, ("linear_attn", "self_attn", "linear_attn"))
    chosen = Selection(block=1)
    for view in (
        views_state.retained_share(rec, chosen),
        views_state.state_matrix(rec, chosen),
        views_state.implied_attention_of_all_heads(rec, chosen),
    ):
        assert isinstance(view, Refusal) and "0, 2" in view.reason


# -- stream, next token, parts -----------------------------------------------------


def test_stream_views():
    rec = synthetic(6, HYBRID)
    addends = views_stream.addend_norms(rec)
    assert addends.y.labels == ("0 recurrent mixer", "0 MLP", "1 attention", "1 MLP")
    expected = (
        (rec["mlp_output", 1].norm(dim=-1) / rec["layer_input", 1].norm(dim=-1)).log10()[0].numpy()
    )
    assert addends.values[3] == pytest.approx(expected, abs=1e-5)
    assert views_stream.stream_norms(rec).values.shape == (3, 6)
    weights = views_stream.line_weights(rec, Selection(block=1, token=2))
    assert set(weights) == {"attention_output", "mlp_output"} and all(
        0 <= share <= 1 for share in weights.values()
    )


def test_next_token_tables_hold_both_runs():
    before, after = synthetic(6, HYBRID), synthetic(6, HYBRID, seed=1)
    chosen = Selection(token=4)
    rows = views_next.top_tokens(before, after, chosen, str, 3)
    first, second = (rec["logits"][0, 4].softmax(-1) for rec in (before, after))
    assert [row.token_id for row in rows[:3]] == first.topk(3).indices.tolist()
    assert set(second.topk(3).indices.tolist()) <= {row.token_id for row in rows}
    for row in rows:
        assert row.difference == pytest.approx(
            float(second[row.token_id] - first[row.token_id]), abs=1e-6
        )
    kl = views_next.divergence(before, after)
    assert (
        kl.shape == (6,)
        and (kl > 0).all()
        and views_next.divergence(before, before) == pytest.approx(0.0)
    )


@pytest.mark.parametrize(
    ("name", "block", "shape"),
    [
        ("layer_input", 0, (6, 16)),
        ("attention_keys", 0, (6, 6)),
        ("attention_keys", 1, (6, 4)),
        ("decays", 0, (6, 4)),
        ("router_margin", 1, (1, 6)),
        ("attention_scores", 1, (6, 6)),
        ("logits", 0, (6, 50)),
    ],
)
def test_any_value_has_a_picture_of_two_of_its_axes(name, block, shape):
    view = views_part.value_picture(synthetic(6, HYBRID), Selection(block=block, part=name))
    assert isinstance(view, Heatmap) and view.values.shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["infinity", "the lowest number", "added to the score"])
def test_what_a_mask_set_is_left_out_of_the_facts_and_of_the_picture(dtype, way):
    value = views_part.value_of("attention_scores", ("self_attn",))
    lowest = torch.finfo(dtype).min
    hidden = {
        "infinity": float("-inf"),
        "the lowest number": lowest,
        "added to the score": lowest * 0.99,
    }[way]
    scores = torch.tensor([[[[1.0, hidden], [3.0, 2.0]]]], dtype=dtype)
    facts = views_part.summarise(scores, value)
    assert (facts.minimum, facts.mean, facts.maximum) == (1.0, 2.0, 3.0) and not facts.finite
    rec = synthetic(2, HYBRID)
    rec.values["attention_scores", 1] = scores
    shown = views_part.value_picture(rec, Selection(block=1, part="attention_scores"))
    assert np.array_equal(shown.values, [[1, np.nan], [3, 2]], equal_nan=True)
    assert facts.shape == (1, 1, 2, 2) and facts.axes == ("batch", "num_heads", "query", "key")


def test_every_view_draws_a_single_token():
    rec = synthetic(1, HYBRID)
    for view in (
        views_router.token_by_expert(rec, Selection()),
        views_attention.one_head(rec, Selection(block=1)),
        views_state.retained_share(rec, Selection()),
        views_state.state_matrix(rec, Selection()),
        views_stream.addend_norms(rec),
    ):
        assert picture(view).indexes.size
    assert isinstance(views_attention.all_heads(rec, Selection(block=1)), Mosaic)


# -- text -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" in", "·in"),
        ("\n", "⏎"),
        ("", "∅"),
        ("\u0301", "◌\u0301"),
        ("a\u202eb", "a‹U+202E›b"),
        ("<b>", "<b>"),
        ("\x00", "‹U+0000›"),
        ("a\u200bb", "a‹U+200B›b"),
        ("שלום", "שלום"),
    ],
)
def test_tokens_are_shown_and_never_turn_their_neighbours(token, shown):
    assert shown_token(token) == shown


@pytest.mark.parametrize("token", ["$$x$$", "\\(x\\)", "\\[x\\]"])
def test_no_label_is_read_as_mathematics(token):
    label = axis_label(token, 40)
    assert not any(pair in label for pair in ("$$", "\\(", "\\["))
    assert label.replace("\u2060", "")[1:-1] == token


def test_numbers_for_people():
    assert [number(value) for value in (0, 0.03141, -12.5, 1234567.0, float("nan"))] == [
        "0",
        "0.0314",
        "−12.5",
        "1.23e+06",
        "nan",
    ]
