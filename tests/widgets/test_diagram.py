"""The block diagram: what is drawn follows from the facts, is readable, and cannot be injected
into.
"""

from __future__ import annotations

import json
import re
from html import unescape
from xml.etree import ElementTree

import pytest

from explorer import load, vocabulary
from explorer.facts.record import anatomy
from explorer.widgets.diagram import LAYOUTS, block_svg, element
from explorer.widgets.diagram.cells import cell_grid, lit_cells
from explorer.widgets.diagram.describe import attribute_of_host, attribute_of_path, describe
from explorer.widgets.diagram.page_element import card_data
from tests.support.diagrams import EACH, pills, trees, values_in
from tests.support.facts_records import drawn
from tests.support.tiny import tiny

families = pytest.mark.parametrize("family", EACH)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@families
@layouts
def test_every_value_of_the_block_is_drawn_once(family: str, layout: str) -> None:
    for block, tree in zip(describe(drawn(family)), trees(family, layout), strict=True):
        seen = [name for name, *_ in pills(tree)]
        assert set(seen) == {f"{host}.{name}" for host, name in block.values if host != "model"}
        assert len(seen) == len(set(seen))


@families
@layouts
def test_parts_can_be_reached_and_named(family: str, layout: str) -> None:
    assert all(tree.get("aria-label") for tree in trees(family, layout))
    for node in (node for tree in trees(family, layout) for node in tree.iter()):
        if node.get("data-value"):
            assert node.get("tabindex") == "0" and node.get("role") == "button"
            assert node.get("aria-label").startswith(node.get("data-value"))
            assert any(name.startswith("role-") for name in node.get("class").split())


@families
@layouts
def test_nothing_leaves_the_drawing(family: str, layout: str) -> None:
    for tree in trees(family, layout):
        _, _, width, height = map(float, tree.get("viewBox").split())
        for node in tree.iter():
            if node.tag.endswith("rect") and node.get("width"):
                x, y, w, h = (float(node.get(key)) for key in ("x", "y", "width", "height"))
                assert x >= 0 and x + w <= width and y >= 0 and y + h <= height, (
                    ElementTree.tostring(node)
                )


@families
@layouts
def test_pills_do_not_cover_each_other(family: str, layout: str) -> None:
    for tree in trees(family, layout):
        boxes = pills(tree)
        for index, (one, x, y, w, h) in enumerate(boxes):
            for other, x2, y2, w2, h2 in boxes[index + 1 :]:
                assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y, (
                    f"{one} covers {other}"
                )


def down_the_stream(family: str, layout: str) -> list[str]:
    """What stands on the stream, top to bottom: ``>`` where something leaves it, ``+`` and its
    like, its named points.
    """
    tree, found = trees(family, layout)[0], []
    x = 24 if layout == "wide" else 13
    for node in tree.iter():
        kind = (node.get("class") or "").split()
        if kind[:1] == ["bd-edge"] and node.get("d").startswith(f"M{x} "):
            found.append((float(node.get("d").split("L")[0].split()[1]), ">"))
        elif kind[:1] == ["bd-addend"]:
            found.append((float(node.get("d").split()[-1]), f"+{node.get('data-addend')}"))
        elif kind[:1] == ["bd-onstream"]:
            found.append((float(node.get("y")), "norm"))
    found += [
        (y, name)
        for name, _, y, _, _ in pills(tree)
        if name in ("layers.layer_input", "layers.layer_mid", "layers.layer_output")
    ]
    return [what for _, what in sorted(found)]


@layouts
@pytest.mark.parametrize(
    ("family", "stream"),
    [
        (
            "llama",
            "layers.layer_input > +attention_output "
            "layers.layer_mid > +mlp_output layers.layer_output",
        ),
        ("gpt_neox", "layers.layer_input > > +mlp_output +attention_output layers.layer_output"),
        # One norm is read by both.
        ("cohere", "layers.layer_input > +attention_output +mlp_output layers.layer_output"),
        (
            "falcon_h1",
            "layers.layer_input > +attention_output +mixer.attention_output "
            "layers.layer_mid > +mlp_output layers.layer_output",
        ),
        ("mamba", "layers.layer_input > +attention_output layers.layer_output"),
        # Its stream itself is normed after each add, and what is normed is what the MLP reads.
        (
            "openai-gpt",
            "layers.layer_input > +attention_output norm "
            "layers.layer_mid > +mlp_output norm layers.layer_output",
        ),
    ],
)
def test_the_stream_is_read_and_added_to_in_the_order_of_the_forward(
    family: str, layout: str, stream: str
) -> None:
    assert down_the_stream(family, layout) == stream.split()


def test_a_parallel_block_says_so_in_its_title() -> None:
    assert describe(drawn("gpt_neox"))[0].title == "Attention beside MLP"
    assert describe(drawn("falcon_h1"))[0].title == "Mamba-2 mixer beside Attention, then MLP"
    assert describe(drawn("llama"))[0].title == "Attention, then MLP"


def test_a_norm_that_two_sublayers_read_is_drawn_once() -> None:
    for family, count in (("cohere", 1), ("falcon_h1", 2), ("gpt_neox", 2), ("olmo2", 0)):
        assert block_svg(drawn(family)).count('class="bd-norm ') == count, family
    assert "× scale" in block_svg(drawn("falcon_h1")), (
        "attention reads the norm's result times a number"
    )


@pytest.mark.slow
def test_blocks_that_only_scale_by_numbers_of_their_own_are_one_kind() -> None:
    """Fifty drawings that differ in a number would be fifty times the page."""
    model = tiny(
        "beam",
        hidden_size=64,
        intermediate_size=112,
        moe_intermediate_size=40,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        num_experts=8,
        num_experts_per_tok=3,
        n_group=2,
        topk_group=1,
    )
    record = {"family": "beam", "checkpoint": "random", **anatomy(model)}
    assert [len(block["layers"]) for block in record["blocks"]] == [3, 5]
    first = record["blocks"][0]
    scales = [step["by"] for step in first["stream"] if step["kind"] == "scale"]
    assert all(len(by) == 3 and len(set(by)) == 3 for by in scales) and first["identity"].endswith(
        "a[i] and b[i] numbers of each block's own"
    )
    assert f"× {min(scales[0]):.4g} … {max(scales[0]):.4g}" in block_svg(record)


def test_an_untraced_block_is_described_as_such() -> None:
    for layout in LAYOUTS:
        assert "not traced" in block_svg(drawn("zamba"), 0, layout)
        assert "not traced" not in block_svg(drawn("mamba"), 0, layout)


def test_a_norm_behind_a_sublayer_is_a_step_on_its_way_to_the_stream() -> None:
    record = drawn("gemma2")
    assert [sub["steps"] for sub in record["blocks"][0]["sublayers"]] == [
        ["o_proj → post_attention_layernorm"],
        ["post_feedforward_layernorm"],
    ]
    assert "post_feedforward_layernorm" in block_svg(record)


def test_a_hybrid_has_two_shapes_in_the_order_of_the_blocks() -> None:
    first, second = describe(drawn("qwen3_next"))
    assert (first.first, second.first) == (0, 3)
    assert first.sublayers[0].role == "recurrent" and second.sublayers[0].role == "attention"


def test_the_recurrence_loops_and_attention_takes_a_softmax() -> None:
    record = drawn("qwen3_next")
    for layout in LAYOUTS:
        recurrent, attention = (block_svg(record, shape, layout) for shape in (0, 1))
        assert "bd-loop" in recurrent and "bd-loop" not in attention
        assert "softmax</text>" in attention and "softmax</text>" not in recurrent


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_a_field_of_cells(layout: str) -> None:
    record = drawn("qwen3_next")
    experts = record["blocks"][0]["sublayers"][1]["experts"]
    svg = block_svg(record, 0, layout)
    field = next(
        node
        for node in ElementTree.fromstring(svg).iter()
        if (node.get("class") or "").startswith("bd-cells")
    )
    every, lit = field
    pitch, side = (float(field.get(f"data-{name}")) for name in ("pitch", "side"))
    wide = [
        (float(length) - side) / pitch + 1 for length in re.findall(r"h([\d.]+)", every.get("d"))
    ]
    assert sum(map(round, wide)) == experts["count"] and all(
        abs(cells - round(cells)) < 0.02 for cells in wide
    )
    assert lit.get("d").count("M") == len(field.get("data-lit").split()) == experts["chosen"]
    # What lights a cell lies on one of the line's dashes.
    left, top, columns = (
        float(field.get("data-left")),
        float(field.get("data-top")),
        int(field.get("data-columns")),
    )
    for cell, x, y in zip(
        field.get("data-lit").split(),
        *zip(*re.findall(r"M([\d.]+) ([\d.]+)", lit.get("d")), strict=True),
        strict=True,
    ):
        row, column = divmod(int(cell), columns)
        assert float(x) == pytest.approx(left + column * pitch, abs=0.05) and float(
            y
        ) == pytest.approx(top + row * pitch, abs=0.05)
    assert "bd-dashed" in svg and "shared expert" in svg


def test_a_mixture_without_a_shared_expert_draws_none() -> None:
    assert "shared expert" not in block_svg(drawn("qwen3_moe"))


def test_lit_cells_are_distinct_and_within_the_field() -> None:
    for count, chosen in ((8, 2), (128, 8), (512, 10), (4, 9)):
        lit = lit_cells(count, chosen)
        assert len(set(lit)) == len(lit) == min(count, chosen)
        assert all(0 <= cell < count for cell in lit)
        assert lit == lit_cells(count, chosen)


@pytest.mark.parametrize(
    ("count", "columns"), [(512, 32), (256, 32), (128, 16), (8, 8), (97, None)]
)
def test_cells_fill_their_field_in_full_rows_where_they_can(
    count: int, columns: int | None
) -> None:
    found, pitch = cell_grid(count, 186, 74)
    assert columns in (None, found)
    assert found * pitch <= 186.01 and -(-count // found) * pitch <= 74.01


def test_addend_edges_can_be_marked() -> None:
    svg = block_svg(drawn("llama"))
    assert re.findall(r'data-addend="(\w+)"', svg) == ["attention_output", "mlp_output"]


def test_a_block_without_a_norm_or_shapes_still_draws() -> None:
    record = drawn("llama")
    for sub in record["blocks"][0]["sublayers"]:
        sub["norm"] = None
    for row in record["values"]:
        row["shape"] = None
    for layout in LAYOUTS:
        assert "bd-norm" not in block_svg(record, 0, layout)


def test_sinks_have_a_place_between_scores_and_probabilities() -> None:
    record = drawn("llama")
    record["values"].append(
        {
            **next(row for row in record["values"] if row["name"] == "attention_scores"),
            "name": "attention_sinks",
            "layout": "Sinks",
            "dims": ["num_heads"],
            "shape": None,
        }
    )
    for layout in LAYOUTS:
        assert ("self_attn", "attention_sinks") in values_in(block_svg(record, 0, layout))


def test_text_of_a_record_is_shown_never_interpreted() -> None:
    record = drawn("llama")
    evil = "<script>alert(1)</script>"
    record["checkpoint"] = evil
    record["blocks"][0]["sublayers"][0].update(title=evil, summary=evil, steps=[evil])
    record["blocks"][0]["identity"] = evil
    record["values"][0]["meaning"] = f"</script>{evil}"
    for layout in LAYOUTS:
        assert evil not in block_svg(record, 0, layout)
    assert evil not in element([record]) and "</script><script>" not in element([record])


def test_unknown_layout_and_shape_are_refused() -> None:
    record = drawn("llama")
    with pytest.raises(ValueError, match="wide and narrow"):
        block_svg(record, 0, "tall")
    with pytest.raises(IndexError):
        block_svg(record, 9)


def test_the_element_holds_every_drawing_and_its_data() -> None:
    made = [drawn("qwen3_next"), drawn("qwen3_next", 1)]
    html = element(made)
    assert re.findall(r'data-drawing="([\d.]+)"', html) == ["0.1", "1.0", "1.1"]
    data = json.loads(unescape(re.search(r'class="bd-data">(.*?)</script>', html, re.DOTALL)[1]))
    assert [one["id"] for one in data["checkpoints"]] == [record["checkpoint"] for record in made]
    assert data["checkpoints"][0]["layers"] == 48


def test_card_data_says_which_shapes_have_a_value() -> None:
    record = drawn("qwen3_next")
    data = card_data([record])
    where = {
        (data["values"][index]["host"], data["values"][index]["name"]): have
        for index, have, _ in data["checkpoints"][0]["values"]
    }
    assert where["linear_attn", "decays"] == [0] and where["self_attn", "attention_scores"] == [1]
    assert where["mlp", "router_logits"] == [0, 1] and where["model", "logits"] is None


def test_a_surface_may_leave_card_and_strip_out() -> None:
    html = element([drawn("llama")], card=False, strip=False)
    assert "bd-card" not in html and "bd-strip" not in html and "bd-slider" in html


def test_hosts_are_named_by_their_last_part() -> None:
    """The last part of what the block calls them, kinds of one thing alike."""
    for name, host in vocabulary.HOSTS.items():
        assert attribute_of_path(host.path) == (attribute_of_host(name) if host.mixer else name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "host", "values"),
    [
        (
            "mamba2",
            "mixer",
            {
                "attention_queries",
                "decays",
                "betas",
                "state_output",
                "state_attention",
                "attention_head_outputs",
            },
        ),
        ("recurrent_gemma", "mixer", {"attention_values", "recurrent_gate", "state_output"}),
        ("kimi_linear", "linear_attn", {"attention_keys", "decays", "state", "states"}),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_recurrence_shows_its_values(family, host, values, layout):
    svg = block_svg(
        {"family": family, "checkpoint": "", **anatomy(load(f"specimen:{family}"))}, 0, layout
    )
    assert values <= {name for at, name in values_in(svg) if at == host}


def test_the_addend_of_a_mixer_beside_attention_has_a_name_of_its_own():
    record = {"family": "falcon_h1", "checkpoint": "", **anatomy(load("specimen:falcon_h1"))}
    for layout in LAYOUTS:
        assert sorted(re.findall(r'data-addend="([\w.]+)"', block_svg(record, 0, layout))) == [
            "attention_output",
            "mixer.attention_output",
            "mlp_output",
        ]
