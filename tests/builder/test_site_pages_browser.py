"""The built site in a real browser: filters, search, links, themes, pages opened from a file,
weight.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from tests.support.built_site import HYBRID, MIXTURE, address, site, stage  # noqa: F401  fixtures
from tests.support.facts_records import records


def test_formulas_show_on_hover_and_focus(visit, address: str) -> None:
    page = visit(address + HYBRID).page
    figure = page.locator(".figure:visible", has=page.locator(".name", has_text="recurrent state"))
    formula = figure.locator(".tip-text")
    assert not formula.is_visible()
    figure.focus()
    assert formula.is_visible() and "36 × 32 × 128 × 128 × 4" in formula.inner_text()
    page.locator(".figure").first.hover()
    assert page.locator(".figure .tip-text").first.is_visible()


def test_the_index_filters_by_trait_and_by_value(visit, address: str) -> None:
    seen = visit(address + "index.html")
    page = seen.page
    shown = lambda: page.locator(".card:visible h3 a").all_inner_texts()  # noqa: E731
    assert len(shown()) == 3
    page.locator('[data-trait="hybrid"]').focus()
    page.keyboard.press("Space")
    assert (
        len(shown()) == 1
        and "1 of 3" in page.locator(".tally").inner_text()
        and "traits=hybrid" in page.url
    )
    page.get_by_role("button", name="clear", exact=True).click()
    page.get_by_label("value name").fill("router_lo")
    assert len(shown()) == 2
    page.get_by_label("value name").fill("decays")
    assert len(shown()) == 1
    page.reload()
    assert len(shown()) == 1 and page.get_by_label("value name").input_value() == "decays"
    page.locator(".found:visible a").first.click()
    assert page.url.endswith("families/qwen3_next/index.html#value-linear_attn-decays")
    assert page.locator("tr:target th").inner_text().startswith("decays")
    seen.assert_clean()


def test_a_filter_that_nothing_fits_says_so(visit, address: str) -> None:
    page = visit(address + "index.html").page
    page.get_by_label("value name").fill("<b>no such value</b>")
    assert page.locator(".card:visible").count() == 0 and page.locator(".none").is_visible()


@pytest.mark.parametrize("from_file", [False, True])
def test_search_finds_a_value_by_name(visit, site: Path, address: str, from_file: bool) -> None:
    seen = visit((site.as_uri() + "/" if from_file else address) + "index.html")
    page = seen.page
    page.locator(".md-search__input").click()
    page.locator(".md-search__input").press_sequentially("state_attention")
    result = page.locator(".md-search-result__link").first
    result.wait_for(state="visible")
    assert "qwen3_next" in result.get_attribute("href") or "layouts" in result.get_attribute("href")
    seen.assert_clean()


def test_a_page_opened_from_a_file_works(visit, site: Path) -> None:
    seen = visit(site.as_uri() + "/" + MIXTURE)
    page = seen.page
    page.locator("block-diagram input[type=range]").focus()
    page.keyboard.press("End")
    assert stage(page) == ("47", "0")
    second = records("qwen3_moe")[1]["checkpoint"]
    page.locator("checkpoint-select select").select_option(second)
    assert page.locator(".bd-ticks > i").count() == 94
    page.get_by_role("link", name="What the layouts mean").click()
    assert page.locator("h1").inner_text().startswith("Layouts")
    seen.assert_clean()


def test_the_theme_can_be_switched_and_stays(visit, address: str) -> None:
    page = visit(address + HYBRID).page
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    page.locator("label[title=Dark]").click()
    assert page.evaluate(ground) == "rgb(16, 20, 27)"
    page.reload()
    assert page.evaluate(ground) == "rgb(16, 20, 27)"


def test_every_link_inside_the_site_leads_somewhere(site: Path) -> None:
    missing = []
    for path in site.rglob("*.html"):
        if path.name == "404.html":
            continue
        for target in re.findall(r'(?:href|src)="([^"]+)"', path.read_text(encoding="utf-8")):
            file, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target) or (not file and not anchor):
                continue
            there = (path.parent / file.partition("?")[0]) if file else path
            if there.is_dir():
                there = there / "index.html"
            if not there.exists() or (
                anchor
                and there.suffix == ".html"
                and f'id="{anchor}"' not in there.read_text(encoding="utf-8")
                and anchor != "__skip"
            ):
                missing.append((path.name, target))
    assert missing == []


def test_a_page_weighs_little(site: Path) -> None:
    """Page, styles and scripts, compressed: what a first visit costs, the search index aside."""
    page = site / HYBRID
    text = page.read_text(encoding="utf-8")
    files = {
        (page.parent / name).resolve()
        for name in re.findall(r'(?:src|href)="([^"]+\.(?:js|css))"', text)
    }
    weight = sum(len(gzip.compress(path.read_bytes())) for path in (page, *files))
    assert weight <= 250_000
