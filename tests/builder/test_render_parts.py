"""Pieces of pages: shared parts, the index, layouts, figures and the printout."""

from __future__ import annotations

import re

import pytest

from builder.pages import figures, render
from builder.pages.checkpoints import by_checkpoint
from builder.pages.printout import printout_html
from explorer import vocabulary
from explorer.model.printout import folded
from tests.support.facts_records import records
from tests.support.pages import Text


def test_parts_that_agree_between_checkpoints_appear_once() -> None:
    made = records("qwen3_moe")
    same = by_checkpoint(made, lambda record: record["family"])
    assert same == [("", "qwen3_moe", True)]
    different = by_checkpoint(made, lambda record: record["sizes"]["num_layers"])
    assert [(ids, here) for ids, _, here in different] == [
        (made[0]["checkpoint"], True),
        (made[1]["checkpoint"], False),
    ]


def test_only_the_first_checkpoint_shows_until_another_is_chosen() -> None:
    made = records("qwen3_moe")
    page = render.family_page(made)
    for tag in re.findall(r"<\w+[^>]*data-checkpoint=[^>]*>", page):
        assert ("hidden" in tag) == (made[0]["checkpoint"] not in tag), tag


def test_records_of_several_families_are_refused() -> None:
    with pytest.raises(ValueError, match="one family"):
        render.family_page([records("llama", 1)[0], records("qwen3_moe", 1)[0]])
    with pytest.raises(ValueError, match="one family"):
        render.family_page([])


def test_the_index_filters_on_what_the_records_say() -> None:
    families = [records("llama"), records("qwen3_next")]
    page = render.index_page(families, {"llama": {"title": "The Llama", "summary": "plain"}})
    assert "The Llama" in page and "plain" in page
    for made in families:
        for trait in made[0]["traits"]:
            assert f'data-trait="{trait["name"]}"' in page
        for row in made[0]["values"]:
            assert f"{row['host'].rpartition('.')[2].partition('[')[0]}.{row['name']} " in page
    assert page.count('class="bd-tick bd-tick-recurrent"') == 36


def test_layouts_page_has_every_layout_value_and_host() -> None:
    page = render.layouts_page()
    for layout in vocabulary.LAYOUTS.values():
        assert f'id="layout-{layout.name}"' in page and layout.meaning in page
    for value in vocabulary.VALUES:
        assert f"{value.host}.{value.name}" in page
    for host in vocabulary.HOSTS.values():
        assert host.path in page


def test_notes_link_values_to_their_rows() -> None:
    link = render.value_link(records("qwen3_next", 1)[0])
    assert link("router_logits") == "#value-mlp-router_logits"
    assert link("self_attn.attention_queries") == "#value-self_attn-attention_queries"
    assert link("attention_sinks") is None and link("mlp.decays") is None


def test_figures_show_their_formula() -> None:
    found = {item.name: item for item in figures.figures(records("qwen3_next", 1)[0])}
    assert (
        found["parameters"].value == "79.7 B"
        and "routed experts 77.3 B" in found["parameters"].formula
    )
    assert (
        found["recurrent state"].value == "72 MiB"
        and "36 × 32 × 128 × 128 × 4" in found["recurrent state"].formula
    )
    assert found["keys and values"].value == "24 KiB per token"
    # 262 144 tokens of 24 KiB, 72 MiB of state and 2.25 MiB of convolution inputs.
    assert found["cache and state at 262\u202f144 tokens"].value == "6.07 GiB"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (512, "512"),
        (134_515_008, "134.5 M"),
        (79_674_391_296, "79.7 B"),
        (1.04e12, "1.0 T"),
        (49_152, "49.2 k"),
        (None, "not known"),
    ],
)
def test_counts_are_short(value: float | None, said: str) -> None:
    assert figures.count(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (24576, "24 KiB"),
        (2_359_296, "2.25 MiB"),
        (5 * 1024**4, "5 TiB"),
    ],
)
def test_sizes_are_in_powers_of_1024(value: float, said: str) -> None:
    assert figures.size(value) == said


def test_block_numbers_come_in_runs() -> None:
    assert figures.layer_ranges([0, 1, 2, 4, 6, 7]) == "0–2, 4, 6–7"
    assert figures.layer_ranges(range(0, 40, 2)).endswith("10, …")


def test_the_printout_is_coloured_by_host_and_loses_no_text() -> None:
    record = records("qwen3_next", 1)[0]
    html = str(printout_html(record["printout"]))
    assert str(Text(f"<pre>{html}</pre>")) == " ".join(record["printout"].split())
    assert (
        '(<b class="role-recurrent">decays</b>)' in html
        and '(<b class="role-attention">attention_scores</b>)' in html
    )
    assert (
        '(<b class="role-router">router_logits</b>)' in html
        and '(<span class="role-router">router/gate</span>)' in html
    )
    assert '(<span class="role-norm">input_layernorm</span>)' in html


def test_runs_of_equal_blocks_fold_and_others_do_not() -> None:
    lines = [
        "M(",
        "  (0): B(",
        "    (a): X()",
        "  )",
        "  (1): B(",
        "    (a): Y()",
        "  )",
        "  (2-3): 2 x B(",
        "    (a): X()",
        "  )",
        ")",
    ]
    assert folded(lines) == [*lines[:7], "  (2-3): 2 x B( … as (0) … )", ")"]
