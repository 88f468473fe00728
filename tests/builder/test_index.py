"""The index's cards and filters: what they are made of, from real records."""

from __future__ import annotations

import pytest

from builder.pages import index, render
from explorer.traits.catalogue import BY_NAME, GROUPS
from tests.support.facts_records import records

FAMILIES = ("llama", "gpt2", "gemma2", "gpt_oss", "qwen3_next", "mamba")


@pytest.fixture(scope="module")
def made() -> list[index.Card]:
    return index.cards(
        [records(family, 1) for family in FAMILIES],
        {"llama": {"title": "The Llama", "summary": "plain"}},
    )


def test_a_card_says_its_notes_words_and_its_records_numbers(made) -> None:
    llama, hybrid = made[0], made[4]
    assert (llama["title"], llama["summary"]) == ("The Llama", "plain") and made[1][
        "title"
    ] == records("gpt2", 1)[0]["title"]
    assert [role for role, _ in hybrid["marks"]].count("attention") == 12 and len(
        hybrid["marks"]
    ) == 48
    assert ("linear_attn", "states") in hybrid["values"] and ("self_attn", "head_gate") in hybrid[
        "values"
    ]


def test_traits_that_most_families_have_do_not_describe_a_family(made) -> None:
    llama, gpt2 = made[0], made[1]
    names = lambda card, part: {trait["name"] for trait in card[part]}  # noqa: E731
    assert {"pre_norm", "rms_norm"} <= names(llama, "common")
    assert {"fused_qkv", "learned_positions", "layer_norm"} <= names(gpt2, "distinctive")
    for card in made:
        assert [*card["distinctive"], *card["common"]] != [] and names(card, "distinctive") | names(
            card, "common"
        ) == names(card, "traits")
        for part, fits in (
            ("distinctive", lambda count: 2 * count <= len(made)),
            ("common", lambda count: 2 * count > len(made)),
        ):
            assert all(
                fits(sum(name in names(other, "traits") for other in made))
                for name in names(card, part)
            )


def test_traits_are_listed_by_group_with_the_families_that_have_them(made) -> None:
    groups = index.trait_groups(made)
    assert [group["label"] for group in groups] == list(GROUPS.values())
    by_name = {
        trait["name"]: (group["label"], trait) for group in groups for trait in group["traits"]
    }
    groups_of = [by_name[name][0] for name in ("hybrid", "attention_sinks", "logit_cap")]
    assert groups_of == ["mixers", "attention", "scales and caps"]
    assert by_name["grouped_query"][1]["families"] == 4 and by_name["mixture"][1]["families"] == 2
    order = list(BY_NAME)
    for group in groups:
        names = [trait["name"] for trait in group["traits"]]
        assert names == sorted(names, key=order.index)


def test_a_record_of_an_older_version_is_shown_in_todays_words() -> None:
    record = records("llama", 1)[0]
    record["traits"] = [
        {"name": "multi_query", "label": "An old label", "meaning": "old", "evidence": "1 of 2"},
        {"name": "gone", "label": "A trait there was", "meaning": "it was", "evidence": "so"},
    ]
    groups = index.trait_groups(index.cards([[record]], {}))
    assert [
        (group["label"], [trait["label"] for trait in group["traits"]]) for group in groups
    ] == [("attention", [BY_NAME["multi_query"].label]), ("others", ["A trait there was"])]
    assert groups[0]["traits"][0]["meaning"] == BY_NAME["multi_query"].meaning


def test_values_to_choose_are_those_that_some_families_lack(made) -> None:
    values = {value["name"]: value["families"] for value in index.value_filters(made)}
    assert [
        values[name] for name in ("attention_sinks", "head_gate", "states", "attention_scores")
    ] == [1, 2, 2, 5]
    assert not {"logits", "layer_input", "layer_output", "attention_output"} & set(values)
    assert list(values) == sorted(values)


def test_the_page_has_a_filter_for_each_and_stays_html() -> None:
    page = render.index_page([records(family, 1) for family in ("llama", "gpt_oss")])
    body = page.split('<div class="families">')[1]
    assert "\n\n" not in body.strip(), "an empty line would hand the rest to Markdown"
    for name in ("attention_sinks", "grouped_query", "router_softmax_chosen"):
        assert page.count(f'data-trait="{name}"') == 1
    assert 'data-name="attention_sinks"' in page and 'data-name="layer_input"' not in page
    assert page.count('<details class="group" open>') == 2 and page.count('class="card"') == 2


def test_an_index_of_one_family_has_no_values_to_choose() -> None:
    assert "data-name=" not in render.index_page([records("llama", 1)])
