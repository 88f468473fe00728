"""The typed section of a family's page and its costs: everything of the record, numbers apart
from what checkpoints share.
"""

from __future__ import annotations

import json
import re

import pytest

from builder.pages import costs, render
from builder.pages import signature as typed
from builder.pages.plot import Curve, plot, ticks
from builder.records.facts_file import compact_json
from explorer.signature.text import typed as in_text
from tests.support.facts_records import records
from tests.support.pages import Text


def section(page: str, start: str = "## Signature", end: str = "## Printout") -> str:
    return page[page.index(start) : page.index(end)]


def details(page: str, name: str) -> list[str]:
    """The parts of the page on one module class."""
    found = re.findall(
        r"<details[^>]*><summary><code>(.*?)</code>(.*?)</details>", section(page), re.DOTALL
    )
    return [body for called, body in found if called == name]


def bare(text: object) -> str:
    """Without spaces, which cells of a table have none of between them."""
    return "".join(str(text).split())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_next"])
def test_the_section_carries_the_signature(family: str) -> None:
    made = records(family)
    found, page = made[0]["signature"], render.family_page(made)
    text = bare(Text(section(page)))

    def shown(words: str, where: str = text) -> bool:
        return bare(words) in where

    for row in found["generics"]:
        assert shown(
            f"{row['name']} {row['number']}"
            f"{'= ' + row['formula'] if 'formula' in row else ''} {row['source']}"
        )
    for axis, number in found["axes"].items():
        assert shown(f"{axis} {number}")
    assert all(
        shown(f"{name} of the call: {meaning}") for name, meaning in found["variables"].items()
    )
    for entry in found["entries"]:
        given = ", ".join(f"{part['name']}: {in_text(part['type'])}" for part in entry["arguments"])
        assert shown(
            f"{entry['name']} ({given}) → "
            f"{entry['results'][0]['name']}: {in_text(entry['results'][0]['type'])}"
        )
    assert shown("writes the cache: ") and shown("uses no cache")
    for row in found["cache"]:
        for tensor in row["tensors"]:
            later = (
                "the same"
                if tensor["after_decode"] == tensor["after_prefill"]
                else in_text(tensor["after_decode"])
            )
            assert shown(f"{tensor['name']} {in_text(tensor['after_prefill'])} {later}")
    for one in found["blocks"]:
        parts = bare(Text(" ".join(details(page, one["class"]))))
        for sub in one["submodules"]:
            bound = f"<{', '.join(sub['arguments'])}>" if sub["arguments"] else ""
            assert shown(
                f"{sub['name']} {str(sub['count']) + ' × ' if 'count' in sub else ''}"
                f"{sub['class']}{bound}",
                parts,
            )
        typed_parts = [*one["parameters"], *one["buffers"], *one["values"]]
        assert all(shown(f"{part['name']} {in_text(part['type'])}", parts) for part in typed_parts)
        for function in one["functions"]:
            assert all(
                shown(f"{part['name']}: {in_text(part['type'])}", parts)
                for part in function["arguments"]
            )
            assert all(shown(in_text(part["type"]), parts) for part in function["results"])
    assert shown(f"All {found['resolved']['axes']} axes")


def test_each_module_class_appears_once_and_those_of_blocks_first_and_open() -> None:
    made = records("qwen3_next")
    page = render.family_page(made)
    classes = re.findall(r"<details( open)?><summary><code>(.*?)</code>", section(page))
    assert [name for _, name in classes if name != "Axes"][:2] == ["Qwen3NextDecoderLayer"] * 2
    assert sorted(name for _, name in classes) == sorted(
        one["class"] for one in made[0]["signature"]["blocks"]
    )
    assert [bool(opened) for opened, _ in classes] == [True, True, *[False] * (len(classes) - 2)]
    assert "on 36 of 48 blocks: 0–2" in str(Text(section(page)))


def test_a_value_of_a_class_leads_to_its_row() -> None:
    page = render.family_page(records("qwen3_next", 1))
    targets = re.findall(r'<a href="#(value-[^"]*)"', section(page))
    assert len(targets) > 30 and all(f'id="{target}"' in page for target in targets)


@pytest.mark.slow
def test_checkpoints_share_what_is_the_same_in_names() -> None:
    """Of a second one only what it has of its own is there too: its numbers, and classes that
    are built otherwise.
    """
    made = records("qwen3_5_moe_text")
    one, both = (
        section(render.family_page(made[:count]), "### Entries", "## Printout") for count in (1, 2)
    )
    assert made[0]["sizes"] != made[1]["sizes"] and len(both) < 1.15 * len(one)
    numbers = section(render.family_page(made), "### Generics", "### Entries")
    assert all(f'data-checkpoint="{record["checkpoint"]}"' in numbers for record in made)


def test_classes_that_one_checkpoint_lacks_are_marked_with_those_that_have_them() -> None:
    made = records("qwen3_5_moe_text")
    gone = made[0]["signature"]["blocks"].pop()
    found = next(row for row in typed.classes(made, made) if row["name"] == gone["class"])
    assert (found["ids"], found["visible"]) == (made[1]["checkpoint"], False)
    assert (
        f'<details data-checkpoint="{made[1]["checkpoint"]}" hidden><summary><code>{gone["class"]}'
        in render.family_page(made)
    )


def test_an_axis_that_did_not_resolve_is_a_marked_number_and_listed() -> None:
    record = records("llama", 1)[0]
    found = record["signature"]
    one = next(one for one in found["blocks"] if one["class"] == "Embedding")
    one["parameters"][0]["type"]["dims"][1] = "?576"
    found["resolved"].update(
        resolved=found["resolved"]["axes"] - 1,
        unresolved=[{"at": "embed_tokens.weight", "axis": 1, "number": 576}],
    )
    page = section(render.family_page([record]))
    assert (
        '<b class="bare" title="this axis did not resolve">576?</b>' in page and "?576" not in page
    )
    assert (
        "axes resolved, 1 did not" in page
        and "<code>embed_tokens.weight</code> axis 1, 576" in page
    )


def test_a_model_without_a_signature_says_why() -> None:
    first, second = records("qwen3_5_moe_text")
    first["signature"] = {"unknown": "it does not <run>"}
    alone = render.family_page([first])
    assert "No signature: it does not &lt;run&gt;" in section(alone) and "### Generics" not in alone
    page = section(render.family_page([first, second]))
    assert f'data-checkpoint="{first["checkpoint"]}">No signature' in page
    # What there is belongs to the other, and is hidden until that is chosen.
    assert (
        page.count(f'<div data-checkpoint="{second["checkpoint"]}" hidden>') >= 3
        and '<div>\n<div class="table"><table class="generics">' not in page
    )


def test_how_a_cache_grows_is_stated() -> None:
    def grows(family: str) -> list[str]:
        record = records(family, 1)[0]
        return [
            tensor["grows"]
            for row in typed.cache_rows(record, [record])
            for tensor in row["tensors"]
        ]

    assert grows("gemma2") == ["up to the window"] * 2 + ["with every token"] * 2
    assert grows("qwen3_next") == ["fixed size"] * 2 + ["with every token"] * 2


# -- costs --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_every_cost_is_on_the_page_as_a_formula_and_as_what_it_comes_to(family: str) -> None:
    record = records(family, 1)[0]
    found, text = (
        record["signature"]["costs"],
        str(Text(section(render.family_page([record]), "### Sizes", "### Config"))),
    )
    rows = [found["parameters"], *found["weights"], found["cache"], found["flops"]]
    rows += [*found["parameters"]["by_part"], *found["flops"]["by_part"]]
    for row in rows:
        assert row["formula"] in text.replace("\u00a0", " ")
        assert row["number"] is not None or row["numbers"] in text
    assert f"{record['parameters']['total']:,}".replace(",", " ") in text.replace("\u202f", " ")


def test_points_of_a_plot_are_those_of_the_record() -> None:
    record = records("qwen3_next", 1)[0]
    (kept, first), (done, second) = costs.plots(record)
    over = record["signature"]["costs"]["cache"]["over"]
    assert (
        kept.count('class="point"') == len(over)
        and "256\u202fk tokens: cache 6 GiB, state 74.2 MiB, together 6.07 GiB" in kept
    )
    assert "tokens of the context" in kept and "cache and state of one sequence, bytes" in kept
    assert "1\u202fk tokens: over the context 201\u202fM, all else 7.13\u202fG" in done
    assert first == "solid: caches that grow with the context; dashed: fixed-size state"
    assert second.startswith(
        "solid: what grows with the context; dashed: all else. Counts matrix products"
    )


def test_a_curve_of_nothing_is_left_out() -> None:
    (kept, key), _ = costs.plots(records("llama", 1)[0])
    assert (
        key == "solid: caches that grow with the context"
        and "role-recurrent" not in kept
        and "together" not in kept
        and kept.count('class="curve') == 1
    )


def test_a_cost_without_a_formula_says_why() -> None:
    record = records("llama", 1)[0]
    record["signature"]["costs"]["flops"] = {"unknown": "no decoding step was run"}
    page = render.family_page([record])
    assert "No formula for the operations for a token: no decoding step was run." in page
    assert page.count('class="point"') == len(record["signature"]["costs"]["cache"]["over"])


@pytest.mark.parametrize(
    ("least", "most", "base"),
    [
        (3 << 20, 6 << 30, 2),
        (7e9, 5e10, 10),
        (1, 1, 2),
        (100, 120, 10),
        (1e6, 9e14, 10),
        (1023, 1 << 40, 2),
    ],
)
def test_round_numbers_enclose_what_is_drawn_and_are_few(
    least: float, most: float, base: int
) -> None:
    found = ticks(int(least), int(most), base)
    assert (
        found[0] <= least and found[-1] >= most and found == sorted(found) and 2 <= len(found) <= 6
    )
    assert found[0] * base > least or found[0] * 10 > least, "it starts near"


def test_a_plot_has_its_points_where_they_belong() -> None:
    drawn = plot("what", "tokens", [1024, 2048, 4096], [Curve("a", "mlp", [1, 2, 4])], str, str)
    xs, ys = (
        [float(one) for one in re.findall(rf'{side}="([\d.]+)"', drawn)] for side in ("cx", "cy")
    )
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2) and ys[0] - ys[
        1
    ] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert ys[2] < ys[0], "more is higher"


# -- records on disk ------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": []},
        {"a": [1, 2], "b": {"c": "é"}},
        [[1] * 90, {"k": ["x" * 30] * 9, "l": [{"m": 1}] * 40}],
        "x",
        None,
    ],
)
def test_short_json_says_the_same(value: object) -> None:
    assert json.loads(compact_json(value)) == value


def test_short_json_has_a_line_for_each_thing() -> None:
    found = compact_json(
        {
            "layers": list(range(99)),
            "rows": [{"name": "a" * 60, "type": {"dims": ["B", "S"]}} for _ in range(3)],
        }
    )
    assert [line.strip()[:10] for line in found.splitlines()] == [
        "{",
        '"layers": ',
        '"rows": [',
        *['{"name": "'] * 3,
        "]",
        "}",
    ]
