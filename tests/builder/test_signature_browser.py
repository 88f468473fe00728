"""The typed section in a real browser: names and numbers, by pointer and by keyboard, by
checkpoint, without a script.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from builder.pages import mkdocs, write
from explorer.signature.text import typed as in_text
from tests.support.facts_records import records
from tests.support.pages import CONTRAST

ROOT = Path(__file__).resolve().parents[2]
PAGE = "families/qwen3_5_moe_text/index.html"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, serve) -> str:
    """The page of a family whose checkpoints have other sizes."""
    source, out = tmp_path_factory.mktemp("site") / "site", tmp_path_factory.mktemp("public")
    shutil.copytree(ROOT / "site", source, ignore=shutil.ignore_patterns("index.md"))
    made = records("qwen3_5_moe_text")
    write.write_family(made, site=source)
    write.write_index([made], site=source)
    write.write_shared(site=source)
    return serve(
        mkdocs.build_site(
            out,
            families={"qwen3_5_moe_text": "Qwen3.5-MoE"},
            config=ROOT / "mkdocs.yml",
            site=source,
        )
    )


def member(page, name: str, kind: str = "MoeDecoderLayer"):
    """The type of a member of the first class that is called so."""
    shown = page.locator(".signature details", has=page.locator("summary", has_text=kind)).first
    return shown.locator("li", has=page.locator("b", has_text=name)).locator("code").first


def numbers(page) -> None:
    page.locator("typed-notation").get_by_role("button", name="numbers").click()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (500, True)])
def test_everything_open_fits_its_width_and_can_be_read(
    visit, address: str, width: int, dark: bool
) -> None:
    seen = visit(address + PAGE, width=width, dark=dark)
    seen.page.evaluate(
        "document.querySelectorAll('details').forEach((part) => { part.open = true; })"
    )
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.page.evaluate(CONTRAST) == []
    seen.assert_clean()


def test_every_type_shows_the_record_s_numbers_of_the_chosen_checkpoint(
    visit, address: str
) -> None:
    seen = visit(address + PAGE)
    page, (first, second) = seen.page, records("qwen3_5_moe_text")
    numbers(page)
    for record in (first, second):
        page.locator("checkpoint-select select").select_option(record["checkpoint"])
        shown = page.evaluate("""() =>
            [...document.querySelectorAll('.signature li')]
            .filter((row) => !row.closest('[hidden]') && row.querySelector('a'))
            .map((row) => ['b', 'code'].map((tag) => row.querySelector(tag).textContent))""")
        wanted = [
            [row["name"], in_text(row["type"], True)]
            for one in record["signature"]["blocks"]
            for row in one["values"]
        ]
        assert sorted(shown) == sorted(wanted) and len(shown) > 40
    page.locator("typed-notation").get_by_role("button", name="names").click()
    assert "Vocab" in page.locator(".entries code").first.inner_text()
    seen.assert_clean()


def test_a_checkpoint_in_the_address_has_its_numbers(visit, address: str) -> None:
    second = records("qwen3_5_moe_text")[1]
    seen = visit(f"{address}{PAGE}?checkpoint={second['checkpoint']}")
    hidden = next(
        str(row["number"]) for row in second["signature"]["generics"] if row["name"] == "Hidden"
    )
    assert hidden != "2048" and "Hidden" in member(seen.page, "layer_input").inner_text()
    numbers(seen.page)
    assert hidden in member(seen.page, "layer_input").inner_text()
    seen.assert_clean()


def test_an_axis_tells_its_number_to_the_pointer(visit, address: str) -> None:
    page, told = (seen := visit(address + PAGE)).page, seen.page.locator("#axis-tooltip")
    assert not told.is_visible()
    axis = page.locator(".signature .members:visible i", has_text="HeadDim / 4").first
    axis.hover()
    assert told.inner_text() == "HeadDim / 4 = 256 / 4 = 64"
    box, here = told.bounding_box(), axis.bounding_box()
    assert abs(box["y"] - here["y"]) < 80
    page.mouse.move(5, 5)
    assert not told.is_visible()
    page.locator(".entries i", has_text="S").first.hover()
    assert told.inner_text().startswith("S: ") and "tokens" in told.inner_text()
    numbers(page)
    page.locator(".entries i", has_text="248320").first.hover()
    assert told.inner_text() == "Vocab = 248320"


def test_arrow_keys_walk_the_axes_of_a_class(visit, address: str) -> None:
    page, told = (seen := visit(address + PAGE)).page, seen.page.locator("#axis-tooltip")
    stops = page.locator(".signature .members:visible [tabindex='0']")
    assert stops.count() == page.locator(".signature .members:visible").count() == 2, (
        "one stop for each open class"
    )
    stops.first.focus()
    assert told.inner_text() == "Hidden = 2048"
    for key, text in (
        ("ArrowRight", "Hidden = 2048"),
        ("ArrowDown", "B: "),
        ("ArrowRight", "S: "),
        ("Home", "Hidden = 2048"),
    ):
        page.keyboard.press(key)
        assert told.inner_text().startswith(text)
        assert (
            page.evaluate("document.activeElement.getAttribute('aria-describedby')")
            == "axis-tooltip"
        )
    page.keyboard.press("Escape")
    assert not told.is_visible()
    page.keyboard.press("End")
    page.keyboard.press("Tab")
    assert page.evaluate(
        "!document.activeElement.closest('.members') || document.activeElement.tagName === 'A'"
    ), "tab leaves the axes"


def test_a_formula_tells_its_numbers_on_focus_and_on_hover(visit, address: str) -> None:
    page, told = (seen := visit(address + PAGE)).page, seen.page.locator("#axis-tooltip")
    row = page.locator(".formulas > div:visible", has_text="S tokens")
    assert "64880640 * B + 20480 * B * S" in row.inner_text().replace("\u00a0", " ")
    row.locator(".formula").focus()
    assert "4 * B * S * 2 * 256 * 10 + " in told.inner_text().replace("\u00a0", " ")
    page.mouse.move(5, 5)
    page.locator(".formulas .formula:visible").first.hover()
    assert "2 * 248320 * 2048 + 2048 + " in told.inner_text().replace("\u00a0", " ")


def test_a_point_of_a_plot_tells_what_it_comes_to(visit, address: str) -> None:
    page = visit(address + PAGE).page
    plots = page.locator(".plots:visible svg")
    assert plots.count() == 2 and plots.first.locator(".point[tabindex='0']").count() == 1
    point = plots.first.locator(".point").first
    assert not point.locator("text").is_visible()
    point.focus()
    assert point.locator("text").is_visible() and point.get_attribute("aria-label").startswith(
        "1\u202fk tokens: cache 20 MiB, state 61.9 MiB"
    )
    page.keyboard.press("ArrowRight")
    assert (
        not point.locator("text").is_visible()
        and plots.first.locator(".point").nth(1).locator("text").is_visible()
    )


def test_without_a_script_names_and_numbers_are_there(visit, address: str) -> None:
    page = visit(address + PAGE, javascript=False).page
    assert not page.locator("typed-notation").is_visible()
    assert page.locator(".generics:visible tr", has_text="Hidden").first.inner_text().split() == [
        "Hidden",
        "2048",
        "hidden_size",
    ]
    assert "Hidden" in member(page, "layer_input").inner_text()
    assert page.locator(".plots:visible svg .point").first.get_attribute("tabindex") == "0"


def test_the_section_works_in_html_that_arrives_later(visit, address: str) -> None:
    seen = visit(address + PAGE)
    page = seen.page
    page.evaluate("""async () => { const text = await (await fetch(location.href)).text();
        const there = new DOMParser().parseFromString(text, 'text/html');
        const article = document.adoptNode(there.querySelector('article'));
        document.querySelector('article').replaceWith(article); }""")
    numbers(page)
    assert (
        page.locator("#axis-tooltip").count() == 1
        and "2048" in member(page, "layer_input").inner_text()
    )
    seen.assert_clean()
