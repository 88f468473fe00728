"""The explorer on a real model, SmolLM2-135M: what it says, and what it does while a run takes its
time.
"""

from __future__ import annotations

import pytest

from tests.support.app_browser import DRAWN, Seen
from tests.support.explorer_server import running

PROMPT = "The Eiffel Tower is in the city of"
#: About 1,200 tokens: seconds of work for this model.
LONG = "A long walk along the river brought them to the gate of the old town. " * 75


@pytest.fixture(scope="module")
def real(smollm2):
    with running(str(smollm2), "--prompt", PROMPT) as explorer:
        yield explorer


@pytest.fixture
def seen(visit, real) -> Seen:
    return Seen(visit(real.at(tab="attention", block=12), width=1440, height=1000))


def test_paris_is_on_top_and_its_patterns_are_shown(seen):
    assert seen.text("[data-prompt]") == "" and seen.page.input_value("[data-prompt]") == PROMPT
    assert seen.text("[data-weights]") == "weights: as found in the file, dequantised from Q4_1"
    assert seen.page.text_content("[data-next] tbody td") == "·Paris"
    assert float(seen.page.text_content("[data-next] tbody td.bar").split()[0]) > 20
    assert "all 9 heads" in seen.text("[data-card=attention_all] [data-title]")
    assert "reads key/value head 0" in seen.text("[data-card=attention_one] [data-title]")
    assert seen.image("attention_one")["shape"] == [9, 9]
    seen.settled(lambda: seen.page.keyboard.press("ArrowLeft"))
    assert seen.page.text_content("[data-next] tbody td") != "·Paris"
    seen.visited.assert_clean()


def test_zeroing_a_head_of_it_moves_paris(seen):
    seen.page.click("[data-card=attention_one] [data-zero-head]")
    seen.page.wait_for_selector("[data-next] .up, [data-next] .down", timeout=60_000)
    seen.tab("compare")
    assert "zero head 0 of block 12" in seen.text("[data-compare-title]")
    cells = seen.page.eval_on_selector_all(
        "[data-compare] tbody tr:first-child td", "all => all.map(one => one.textContent)"
    )
    assert cells[0] == "·Paris" and cells[3] != "0"


def test_the_page_answers_while_a_run_goes_on_and_the_run_can_be_cancelled(seen):
    seen.page.fill("[data-prompt]", LONG)
    seen.page.click("[data-run]")
    seen.page.wait_for_function(
        "document.querySelector('[data-progress]').value > 0", timeout=60_000
    )
    drawn = seen.page.evaluate("Number(document.body.dataset.drawn)")
    seen.page.keyboard.press("Tab")
    seen.page.click("#tab-stream")
    seen.page.wait_for_function("(drawn) => Number(document.body.dataset.drawn) > drawn", arg=drawn)
    assert seen.page.is_visible("[data-job]"), "the run is still going on"
    seen.page.click("[data-cancel]")
    seen.page.wait_for_function(DRAWN, timeout=60_000)
    assert "Cancelled" in seen.text("[data-notice]")
    assert seen.page.locator("[data-strip] button").count() == 9, (
        "the last finished run is still shown"
    )
    seen.visited.assert_clean()
