"""Visiting the explorer with a real browser: addresses, models, windows of any width, keys, and how
many may come.
"""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from explorer.app.server import MOST_SESSIONS
from tests.support.app_browser import DRAWN, LONG, PROMPT, opened  # noqa: F401  a fixture
from tests.support.explorer_server import HYBRID, Explorer, explorer  # noqa: F401  a fixture


def test_another_model_can_be_picked_and_says_what_its_weights_are(opened):
    seen = opened()
    seen.run(PROMPT, "specimen:qwen3_next")
    assert (
        seen.text("[data-label]") == "specimen:qwen3_next"
        and seen.text("[data-weights]") == "weights: trained"
    )
    assert "random" not in seen.text("[data-status]") and seen.page.is_hidden("[data-notice]")
    seen.visited.assert_clean()


def test_a_picked_model_says_that_it_waits_to_be_loaded(opened):
    seen = opened()
    hint = "[data-picked]"
    assert seen.page.is_hidden(hint) and seen.text("[data-run]") == "Run"
    seen.page.select_option("[data-model]", "specimen:llama")
    assert "press Load and run" in seen.text(hint) and seen.text("[data-run]") == "Load and run"
    assert seen.text("[data-label]") == HYBRID
    seen.page.select_option("[data-model]", HYBRID)
    assert seen.page.is_hidden(hint) and seen.text("[data-run]") == "Run"
    seen.page.select_option("[data-model]", label="path…")
    assert "Give a path" in seen.text(hint)
    seen.page.fill("[data-path]", "/nowhere/at/all")
    assert "press Load and run" in seen.text(hint)
    seen.run(PROMPT, "specimen:llama")
    assert (
        seen.page.is_hidden(hint)
        and seen.text("[data-run]") == "Run"
        and seen.text("[data-label]") == "specimen:llama"
    )
    seen.visited.assert_clean()


def test_keys_move_and_the_address_remembers(opened):
    seen = opened(tab="router", block=0, token=2)
    seen.settled(lambda: seen.page.keyboard.press("ArrowRight"))
    assert seen.page.get_attribute("[data-strip] [aria-selected=true]", "data-token") == "3"
    seen.settled(lambda: seen.page.keyboard.press("ArrowDown"))
    assert seen.page.get_attribute(".bd-stage", "data-layer") == "1"
    seen.settled(lambda: seen.page.keyboard.press("4"))
    seen.settled(lambda: seen.page.keyboard.press("]"))
    seen.page.keyboard.press("?")
    assert "token before" in seen.text("dialog[open]")
    seen.page.keyboard.press("Escape")
    assert not seen.page.query_selector("dialog[open]")
    for part in ("block=1", "token=3", "tab=state", "head=1"):
        assert part in seen.page.url
    seen.page.reload()
    seen.page.wait_for_function(DRAWN)
    assert seen.page.get_attribute(".bd-stage", "data-layer") == "1"
    assert seen.page.get_attribute("#tab-state", "aria-selected") == "true"
    assert "head 1" in seen.text("[data-card=state_one] [data-title]")


def test_what_can_be_used_can_be_reached_by_tab_and_has_a_name(opened):
    seen = opened(tab="router")
    reached = set()
    for _ in range(90):
        seen.page.keyboard.press("Tab")
        reached.add(
            seen.page.evaluate("Object.keys(document.activeElement.dataset ?? {})[0] ?? ''")
        )
    assert {
        "prompt",
        "model",
        "run",
        "token",
        "tab",
        "value",
        "codeButton",
        "themeButton",
    } <= reached
    nameless = seen.page.evaluate("""
      [...document.querySelectorAll('button, select, input, textarea')]
        .filter((one) => one.offsetParent && !one.textContent.trim() && !one.labels?.length)
        .filter((one) => !one.getAttribute('aria-label') && !one.title)
        .map((one) => one.outerHTML)""")
    assert nameless == []


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [("", "The prompt is empty"), (" \n", "The prompt is empty")],
    ids=["empty", "long"],
)
def test_a_prompt_that_cannot_run_is_said_and_the_last_run_stays(opened, prompt, sentence):
    seen = opened()
    seen.page.fill("[data-prompt]", prompt)
    seen.page.click("[data-run]")
    seen.page.wait_for_selector("[data-notice]:not([hidden])")
    assert sentence in seen.text("[data-notice]")
    assert seen.page.locator("[data-strip] button").count() > 3
    seen.visited.assert_clean()


def test_an_address_that_names_a_file_waits_for_the_person(visit, explorer):
    visited = visit(
        explorer.at(model="/nowhere/model.gguf", prompt=PROMPT), width=1440, height=1000
    )
    page = visited.page
    page.wait_for_selector("[data-notice]:not([hidden])", timeout=60_000)
    assert "press Run" in page.inner_text(
        "[data-notice]"
    ) and "/nowhere/model.gguf" in page.inner_text("[data-notice]")
    assert (
        page.input_value("[data-path]") == "/nowhere/model.gguf"
        and page.input_value("[data-prompt]") == PROMPT
    )
    assert page.is_hidden("[data-job]") and page.inner_text("[data-label]") == "no model yet"
    page.click("[data-run]")
    page.wait_for_function(
        "document.querySelector('[data-notice]').textContent.includes('There is no file')",
        timeout=60_000,
    )
    visited.assert_clean()


def test_a_path_that_leads_nowhere_is_said(opened):
    seen = opened()
    seen.page.select_option("[data-model]", label="path…")
    seen.page.fill("[data-path]", "/no/such/<b>folder</b>")
    seen.page.click("[data-run]")
    seen.page.wait_for_selector("[data-notice]:not([hidden])")
    assert "/no/such/<b>folder</b>" in seen.text("[data-notice]")


def test_on_a_narrow_page_a_click_leads_to_the_part_and_back(opened):
    seen = opened(width=500, block=0)
    pill = seen.page.locator(".bd-narrow [data-value=decays]")

    def in_view(place) -> bool:
        box = place.bounding_box()
        return box is not None and box["y"] >= 0 and box["y"] + box["height"] <= 1000

    seen.settled(pill.click)
    assert (
        in_view(seen.page.locator("[data-part-name]"))
        and in_view(seen.page.locator("#tab-tensor"))
        and not in_view(pill)
    )
    assert in_view(seen.page.locator("[data-card=part] .plot"))
    seen.settled(lambda: seen.page.click("[data-unpin]"))
    assert in_view(pill) and pill.get_attribute("aria-pressed") == "false"
    seen.settled(pill.click)
    seen.page.focus("[data-part-copy]")
    seen.settled(lambda: seen.page.keyboard.press("Escape"))
    assert in_view(pill) and seen.page.get_attribute("#tab-router", "aria-selected") == "true"
    seen.settled(lambda: seen.page.evaluate("document.querySelector('block-diagram').layer = 1"))
    assert in_view(pill), "moving the slider moves nothing else"


def test_on_a_wide_page_a_click_scrolls_nothing(opened):
    seen = opened(width=1440, block=0)
    seen.settled(seen.page.locator(".bd-narrow [data-value=layer_input]").click)
    assert (
        seen.page.evaluate("scrollY") == 0
        and seen.page.locator("[data-part-name]").bounding_box()["y"] < 400
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_narrow_window_holds_everything(opened, dark):
    seen = opened(width=500, dark=dark, prompt=LONG)
    assert seen.page.evaluate("document.documentElement.dataset.theme") == (
        "dark" if dark else "light"
    )
    for block in (3, 0):
        seen.block(block)
        for tab in ("router", "attention", "state", "stream", "compare", "tensor"):
            seen.tab(tab)
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= 500, (tab, block)
    seen.visited.assert_clean()


def test_the_theme_can_be_changed_and_is_kept(opened):
    seen = opened(tab="router")
    light = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    seen.page.click("[data-theme-button]")
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    colour = "Bokeh.documents[0].get_model_by_name('figure_router_grid').below[0].axis_line_color"
    seen.page.wait_for_function(f"({colour}) === '#9aa7b8'")
    seen.page.reload()
    seen.page.wait_for_function(DRAWN)
    assert seen.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert seen.page.evaluate(colour) == "#9aa7b8"


#: Why there is no room for a page, and what shows that there is.
REFUSED, STARTED = "[data-page-limit][role=alert]", "[data-model] option"


def fetched(explorer: Explorer) -> str:
    with urllib.request.urlopen(explorer.at(), timeout=60) as answer:
        return answer.read().decode()


def test_pages_that_nobody_connects_to_keep_nobody_out(opened, explorer):
    with ThreadPoolExecutor(MOST_SESSIONS) as visitors:
        texts = list(visitors.map(lambda _: fetched(explorer), range(MOST_SESSIONS)))
    assert all("data-run-form" in text for text in texts)
    assert opened().page.query_selector(REFUSED) is None


def test_reloading_again_and_again_locks_nobody_out(opened):
    seen = opened()
    for _ in range(MOST_SESSIONS + 1):
        seen.page.reload()
        seen.page.wait_for_function(DRAWN)
    assert seen.page.query_selector(REFUSED) is None


def started(page) -> bool:
    """Whether a page that has arrived found a place."""
    page.wait_for_selector(f"{REFUSED}, {STARTED}", state="attached", timeout=60_000)
    return page.query_selector(REFUSED) is None


def arrived(page, address: str) -> None:
    """Open a page that finds a place; those that were closed just now give theirs back in a
    moment.
    """
    for _ in range(10):
        page.goto(address, wait_until="commit")
        if started(page):
            return
    raise AssertionError("no place was given back")


def test_a_page_too_many_says_so_and_a_closed_one_gives_its_place_back(chromium, explorer):
    context = chromium.new_context(color_scheme="dark")
    first, *_ = pages = [context.new_page() for _ in range(MOST_SESSIONS)]
    for page in pages:
        arrived(page, explorer.at(prompt=PROMPT))
    late = context.new_page()
    late.goto(explorer.at())
    assert not started(late) and str(MOST_SESSIONS) in late.inner_text(REFUSED)
    assert late.query_selector("[data-run-form]") is None
    assert late.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 27)", (
        "in the theme of the system"
    )
    first.reload()
    assert started(first), "a page that is reloaded takes the place it had"
    first.close()
    arrived(late, explorer.at(prompt=PROMPT))
    context.close()
