"""The index in a real browser: filters, keyboard, 500 pixels, dark, no requests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from builder.pages import mkdocs, write
from explorer.traits.catalogue import BY_NAME
from tests.support.facts_records import records
from tests.support.pages import CONTRAST

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("llama", "gpt2", "gemma2", "gpt_oss", "qwen3_next", "mamba")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, serve) -> str:
    """The index of six families as a build makes it, with pages to link to."""
    source, out = tmp_path_factory.mktemp("site") / "site", tmp_path_factory.mktemp("public")
    shutil.copytree(ROOT / "site", source, ignore=shutil.ignore_patterns("index.md", "families"))
    for family in FAMILIES:
        write.write_family(records(family, 1), site=source)
    write.write_index([records(family, 1) for family in FAMILIES], site=source)
    write.write_shared(site=source)
    return serve(mkdocs.build_site(out, config=ROOT / "mkdocs.yml", site=source)) + "index.html"


def shown(page) -> set[str]:
    return set(page.locator(".card:visible h3 > code").all_inner_texts())


def chip(page, name: str):
    return page.locator(f'[data-trait="{name}"]')


def opened(page, name: str) -> None:
    """Open the group a filter is in, by keyboard."""
    summary = page.locator(
        "details", has=page.locator(f'[data-trait="{name}"], [data-name="{name}"]')
    ).locator("summary")
    if not summary.evaluate("(node) => node.parentElement.open"):
        summary.focus()
        page.keyboard.press("Enter")


@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (1280, True), (500, False), (500, True)]
)
def test_it_is_legible_fits_and_asks_for_nothing_more(
    visit, address: str, width: int, dark: bool
) -> None:
    seen = visit(address, width=width, dark=dark)
    page, asked = seen.page, []
    # A browser looks at the page's icon whenever its address changes.
    page.on(
        "request",
        lambda request: asked.append(request.url) if "favicon" not in request.url else None,
    )
    for name in ("hybrid", "latent_attention", "grouped_query", "router_softmax"):
        if chip(page, name).count():
            opened(page, name)
            chip(page, name).focus()
            page.keyboard.press("Space")
            chip(page, name).hover()
    assert shown(page) == {"qwen3_next"}
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST) == []
    assert asked == []
    seen.assert_clean()


def test_traits_narrow_down_together_and_say_what_would_be_left(visit, address: str) -> None:
    page = visit(address).page
    assert (
        shown(page) == set(FAMILIES)
        and chip(page, "grouped_query").locator("small").inner_text() == "4"
    )
    chip(page, "grouped_query").click()
    assert (
        shown(page) == {"llama", "gemma2", "gpt_oss", "qwen3_next"}
        and "4 of 6" in page.locator(".tally").inner_text()
    )
    chip(page, "sliding_window").click()
    assert shown(page) == {"gemma2", "gpt_oss"}
    assert chip(page, "attention_sinks").locator("small").inner_text() == "1"
    assert (
        "empty" in chip(page, "hybrid").get_attribute("class")
        and chip(page, "hybrid").locator("small").inner_text() == "0"
    )
    chip(page, "attention_sinks").click()
    assert shown(page) == {"gpt_oss"}
    card = page.locator(".card:visible")
    assert set(card.locator(".on").all_inner_texts()) == {
        BY_NAME[trait].label for trait in ("grouped_query", "attention_sinks", "sliding_window")
    }
    assert (
        page.locator("details", has=chip(page, "sliding_window")).locator(".chosen").inner_text()
        == "3 chosen"
    )
    page.get_by_role("button", name="clear", exact=True).click()
    assert (
        shown(page) == set(FAMILIES)
        and page.locator(".card .on").count() == 0
        and "?" not in page.url
    )
    assert (
        page.locator(".chosen:visible").count() == 0
        and chip(page, "attention_sinks").locator("small").inner_text() == "1"
    )


def test_values_are_chosen_by_name_and_lead_to_their_rows(visit, address: str) -> None:
    seen = visit(address)
    page = seen.page
    opened(page, "states")
    page.locator('[data-name="states"]').focus()
    page.keyboard.press("Enter")
    assert shown(page) == {"qwen3_next", "mamba"} and "values=states" in page.url
    page.locator('[data-name="head_gate"]').click()
    assert shown(page) == {"qwen3_next", "mamba"}
    page.locator('[data-name="router_margin"]').click()
    assert shown(page) == {"qwen3_next"}
    links = page.locator(".card:visible .found a").all_inner_texts()
    assert {"linear_attn.states", "self_attn.head_gate", "mlp.router_margin"} <= set(links)
    page.locator(".found:visible a", has_text="self_attn.head_gate").click()
    assert page.url.endswith("families/qwen3_next/index.html#value-self_attn-head_gate")
    assert page.locator("tr:target th").inner_text().startswith("head_gate")
    seen.assert_clean()


def test_trait_value_and_text_are_kept_in_the_address(visit, address: str) -> None:
    page = visit(f"{address}?traits=mixture%20rms_norm&values=router_logits&value=sink").page
    assert shown(page) == {"gpt_oss"}
    for pressed in (
        chip(page, "mixture"),
        chip(page, "rms_norm"),
        page.locator('[data-name="router_logits"]'),
    ):
        assert pressed.get_attribute("aria-pressed") == "true" and pressed.is_visible(), (
            "its group is open"
        )
    assert page.get_by_label("value name").input_value() == "sink"
    page.reload()
    assert shown(page) == {"gpt_oss"} and "values=router_logits" in page.url
    page.get_by_label("value name").fill("")
    assert shown(page) == {"gpt_oss", "qwen3_next"} and "value=" not in page.url.replace(
        "values=", ""
    )


def test_what_a_trait_means_is_told_to_pointer_and_keyboard(visit, address: str) -> None:
    page = visit(address).page
    about = page.locator(".about")
    assert about.inner_text()
    for trait, reach in (("attention_sinks", "hover"), ("hybrid", "focus")):
        getattr(chip(page, trait), reach)()
        entry = BY_NAME[trait]
        assert about.inner_text().startswith(f"{entry.label}: {entry.meaning}")


def test_on_a_phone_the_groups_are_closed_and_the_families_near(visit, address: str) -> None:
    page = visit(address, width=500).page
    assert (
        page.locator("details.group[open]").count() == 0 and not chip(page, "hybrid").is_visible()
    )
    first = page.locator(".card").first.bounding_box()
    assert first["y"] < 900 and first["x"] >= 0 and first["x"] + first["width"] <= 500
    opened(page, "hybrid")
    chip(page, "hybrid").click()
    assert shown(page) == {"qwen3_next"}
    assert page.locator(".card:visible").bounding_box()["width"] > 400


def test_on_a_desktop_the_filters_stay_beside_the_families(visit, address: str) -> None:
    page = visit(address, width=1280, height=700).page
    filters, card = page.locator(".filters"), page.locator(".card").first
    assert filters.bounding_box()["x"] + filters.bounding_box()["width"] <= card.bounding_box()["x"]
    page.locator(".card").last.scroll_into_view_if_needed()
    box = filters.bounding_box()
    assert box["y"] >= 0 and box["y"] + box["height"] <= 700, (
        "in sight while the families are scrolled"
    )
    assert page.locator(".tally").is_visible() or page.locator(".about").is_visible()


def test_a_filter_that_leaves_none_says_so_and_names_from_the_address_are_text(
    visit, address: str
) -> None:
    seen = visit(
        f"{address}?traits=%3Cscript%3Ealert(1)%3C%2Fscript%3E&value=%3Cb%3Enone%3C%2Fb%3E"
    )
    page = seen.page
    assert shown(page) == set() and page.locator(".none").is_visible()
    assert page.get_by_label("value name").input_value() == "<b>none</b>"
    seen.assert_clean()


def test_without_javascript_every_family_is_there_and_no_filter(visit, address: str) -> None:
    page = visit(address, javascript=False).page
    assert (
        page.locator(".card:visible").count() == len(FAMILIES)
        and not page.locator(".filters").is_visible()
    )
    assert page.locator(".card").first.bounding_box()["x"] < 60, "the families have the whole width"
