"""Types in the diagram: every edge has one, by the record's signature, shortened without lying and
in full elsewhere.
"""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from explorer import vocabulary
from explorer.widgets.diagram import LAYOUTS, block_svg, element
from explorer.widgets.diagram.describe import describe
from explorer.widgets.diagram.outline import outline
from explorer.widgets.diagram.page_element import card_data
from explorer.widgets.diagram.types import Type, axis_name, format_type, type_of
from tests.support.diagrams import EACH
from tests.support.facts_records import drawn, records, with_long_type

ROW = {
    "dims": ["batch", "num_kv_heads", "seq", "head_dim"],
    "dtype": "float32",
    "shape": {
        "symbols": ["batch", "num_kv_heads", "seq", "head_dim"],
        "numbers": ["B", 2, "S", 256],
    },
}


def test_a_type_has_names_and_numbers() -> None:
    kind = type_of(ROW)
    assert format_type(kind.names, kind.dtype) == "f32[B, KvHeads, S, HeadDim]"
    assert format_type(kind.numbers, kind.without_dtype().dtype) == "[B, 2, S, 256]"


def test_a_signature_says_more_than_a_layout() -> None:
    inferred = {
        "dims": ["B", "KvHeads", "S", "NopeDim + RopeDim"],
        "numbers": ["B", 2, "S", 192],
        "dtype": "bfloat16",
    }
    assert type_of(ROW, inferred) == Type(
        ("B", "KvHeads", "S", "NopeDim + RopeDim"), ("B", "2", "S", "192"), "bf16"
    )
    # A class that stands in the model with several sizes has no numbers there.
    assert type_of(ROW, inferred | {"numbers": None}) == type_of(ROW)


def test_every_axis_of_the_vocabulary_has_a_short_name() -> None:
    for layout in vocabulary.LAYOUTS.values():
        for axis in layout.axes:
            assert re.fullmatch(r"[A-Z][A-Za-z]*", axis_name(axis))


@pytest.mark.parametrize(
    ("room", "text"),
    [
        (40, "bf16[B, Heads, S, NopeDim + RopeDim]"),
        (35, "bf16[B, Heads, S, …]"),
        (18, "bf16[B, …, S, …]"),
        (3, "bf16[B, …, S, …]"),
    ],
)
def test_what_is_shortened_keeps_its_axes(room: int, text: str) -> None:
    assert format_type(("B", "Heads", "S", "NopeDim + RopeDim"), "bf16", room) == text


def test_a_type_without_axes_is_format_type() -> None:
    assert format_type(()) == "[]" and format_type((), "f32", 1) == "f32[]"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", EACH)
def test_everything_drawn_has_its_type(family: str, layout: str) -> None:
    record = drawn(family)
    for shape, block in enumerate(describe(record)):
        tree = ElementTree.fromstring(block_svg(record, shape, layout))
        pills = {
            f"{node.get('data-host')}.{node.get('data-value')}"
            for node in tree.iter()
            if node.get("data-value")
        }
        typed = {}
        for node in tree.iter():
            for key in (node.get("data-of") or "").split():
                typed[key] = (
                    node.text,
                    float(node.get("data-room", "inf")),
                    node.get("data-dtype", ""),
                )
        assert pills == set(typed)
        for key, (text, room, dtype) in typed.items():
            kind = block.values[tuple(key.split("."))].full_type
            assert text == format_type(kind.names, dtype, room) and dtype in ("", kind.dtype)


def test_types_come_from_the_signature_of_the_block_in_view() -> None:
    """Kinds of blocks may have another type of one value."""
    record = records("qwen3_next", 1)[0]
    one, other = (block["layers"] for block in record["blocks"])
    rows = record["signature"]["values"]
    row = next(row for row in rows if row["name"] == "mlp_input")
    rows.append({**row, "layers": other, "type": {**row["type"], "dims": ["B", "S", "OtherDim"]}})
    row["layers"] = one
    drawings = [block_svg(record, shape) for shape, _ in enumerate(describe(record))]
    assert ["OtherDim" in drawing for drawing in drawings] == [False, True]


def test_what_is_cut_can_be_reached_and_is_named_in_full() -> None:
    (cut,) = [
        node
        for node in ElementTree.fromstring(block_svg(with_long_type("llama"))).iter()
        if "bd-cut" in (node.get("class") or "")
    ]
    full = "[B, S, NopeDim + RopeDim + StateDim]"
    assert cut.get("aria-label") == full and cut.get("tabindex") == "0"
    assert cut.findtext("title") == full
    assert "[B, S, …]" in "".join(cut.itertext())


@pytest.mark.slow
def test_types_that_do_not_fit_below_their_pills_are_in_full_in_a_line() -> None:
    (record,) = records("deepseek_v3", 1)
    for layout in LAYOUTS:
        for shape, _ in enumerate(describe(record)):
            text = block_svg(record, shape, layout)
            assert "bd-cut" not in text and ">q, k <" in text


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "openai-gpt"])
def test_the_text_form_has_every_value_in_full(family: str) -> None:
    record = drawn(family)
    for block in describe(record):
        html = outline(block)
        told = dict(re.findall(r'data-of="([^"]+)" data-dtype="[^"]*">([^<]+)<', html))
        values = {f"{host}.{name}" for host, name in block.values if host != "model"}
        assert values <= set(told) and "…" not in "".join(told.values())
        for key, text in told.items():
            kind = block.values[tuple(key.split("."))].full_type
            assert text == format_type(kind.names, kind.dtype)


def test_the_text_form_goes_down_the_stream() -> None:
    html = outline(describe(drawn("openai-gpt"))[0])
    order = [
        "token_embeddings",
        "layer_input",
        "reads the stream",
        "Attention adds",
        "normalised by",
        "layer_mid",
        "MLP adds",
        "normalised by",
        "layer_output",
        "logits",
    ]
    points = []
    for word in order:
        points.append(html.index(word, points[-1] + 1 if points else 0))
    assert points == sorted(points)


def test_the_script_is_given_each_type_once_and_by_shape() -> None:
    record = records("qwen3_next", 1)[0]
    data = card_data([record])
    (checkpoint,) = data["checkpoints"]
    assert len({json.dumps(kind) for kind in checkpoint["types"]}) == len(checkpoint["types"])
    blocks = describe(record)
    for index, where, kinds in checkpoint["values"]:
        value = data["values"][index]
        for shape, number in zip(where or [0], kinds, strict=True):
            kind = blocks[shape].values[value["host"], value["name"]].full_type
            given = json.loads(json.dumps(checkpoint["types"][number]))
            assert given == [list(kind.names), list(kind.numbers), kind.dtype]


def test_types_of_a_record_are_shown_never_interpreted() -> None:
    record = records("llama", 1)[0]
    for row in record["signature"]["values"]:
        row["type"]["dims"][-1] = '"><script>alert(1)</script>'
    assert "<script>alert(1)" not in element([record])
