"""The explorer in a real browser: what a person does on the page, and what the page must not do."""

from __future__ import annotations

import numpy as np
import pytest

from explorer import load
from explorer.app import MOST_SESSIONS
from explorer.widgets.text import shown_token
from tests.explorer_server import HYBRID, Explorer, explorer  # noqa: F401  a fixture

PROMPT = "In the beginning God created the heaven"
LONG = "And the LORD spake unto Moses, saying, Speak unto the children of Israel. " * 40
DRAWN = "document.body.dataset.drawn !== undefined && document.querySelector('[data-job]').hidden"

#: Whether the page shows the run of a model on a prompt; its address says which.
SHOWN = """([model, prompt]) => {
  const said = new URLSearchParams(location.search), long = new URLSearchParams(location.hash.slice(1))
  return document.querySelector('[data-job]').hidden && said.get('model') === model && (said.get('prompt') ?? long.get('prompt')) === prompt
}"""

#: The bytes of a figure's image, in the page: shape and a sum over all of them that tells images apart.
IMAGE = """(name) => {
  const plot = Bokeh.documents[0].get_model_by_name('figure_' + name)
  const source = plot.renderers.find((one) => one.data_source?.data.image).data_source
  const cells = source.data.image[0]
  return {shape: cells.shape, bytes: cells.BYTES_PER_ELEMENT, left: source.data.x[0], wide: source.data.dw[0],
          sum: cells.reduce((sum, cell, place) => (sum * 31 + cell * (place % 1009 + 1)) % 2147483647, 7)}
}"""


class Seen:
    """An open explorer page and what a person does on it."""

    def __init__(self, visited) -> None:
        self.visited, self.page = visited, visited.page
        self.page.wait_for_function(DRAWN, timeout=60_000)

    def settled(self, act) -> None:
        """Do something and wait until the page shows what it asked for."""
        before = self.page.evaluate("Number(document.body.dataset.drawn)")
        act()
        self.page.wait_for_function(
            f"(before) => Number(document.body.dataset.drawn) > before && {DRAWN}", arg=before, timeout=60_000
        )

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def run(self, prompt: str, model: str | None = None) -> None:
        """Run a prompt, and wait until the page shows that run and no other."""
        if model:
            self.page.select_option("[data-model]", model)
        self.page.fill("[data-prompt]", prompt)
        self.page.click("[data-run]")
        self.page.wait_for_function(SHOWN, arg=[model or self.page.input_value("[data-model]"), prompt], timeout=60_000)

    def image(self, name: str) -> dict:
        return self.page.evaluate(IMAGE, name)

    def tab(self, name: str) -> None:
        self.settled(lambda: self.page.click(f"#tab-{name}"))

    def block(self, layer: int) -> None:
        """Move the slider as a person does."""
        slider = self.page.locator("block-diagram input[type=range]")
        if slider.input_value() == str(layer):
            return
        self.settled(lambda: slider.fill(str(layer)))


@pytest.fixture
def opened(visit, explorer: Explorer):
    """Opens a view of the running explorer."""
    return lambda width=1440, dark=False, **view: Seen(
        visit(explorer.at(**{"prompt": PROMPT} | view), width=width, height=1000, dark=dark)
    )


@pytest.fixture(scope="module")
def model():
    return load(HYBRID)


def test_the_page_opens_clean_and_says_what_it_shows(opened, model):
    seen = opened()
    assert seen.text("[data-weights]") == "weights: random, seed 0"
    tokens = model.record(PROMPT, values=["logits"]).tokens
    assert seen.page.eval_on_selector_all("[data-strip] button", "all => all.map(one => one.textContent)") == [
        shown_token(token) for token in tokens
    ]
    assert f"{len(tokens)} tokens" in seen.text("[data-status]") and "random" in seen.text("[data-status]")
    likeliest = model.record(PROMPT, values=["logits"])["logits"][0, -1].argmax()
    assert seen.page.text_content("[data-next] tbody td") == shown_token(model.tokenizer.decode([likeliest]))
    seen.visited.assert_clean()


def test_another_model_can_be_picked_and_says_what_its_weights_are(opened):
    seen = opened()
    seen.run(PROMPT, "specimen:qwen3_next")
    assert seen.text("[data-label]") == "specimen:qwen3_next" and seen.text("[data-weights]") == "weights: trained"
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
    assert seen.page.is_hidden(hint) and seen.text("[data-run]") == "Run" and seen.text("[data-label]") == "specimen:llama"
    seen.visited.assert_clean()


def test_every_panel_opens_clean_with_small_messages(opened):
    seen = opened(prompt=LONG)
    for block in (0, 3):
        seen.block(block)
        for tab in ("router", "attention", "state", "stream", "compare", "tensor"):
            seen.tab(tab)
    seen.visited.assert_clean()
    assert max(seen.visited.frames) < 1_000_000


def test_the_slider_moves_diagram_and_panels(opened):
    seen = opened(tab="router")
    before = seen.image("router_grid")
    assert "Gated DeltaNet" in seen.text(".bd-stage")
    seen.block(3)
    assert seen.page.get_attribute(".bd-stage", "data-layer") == "3" and "Gated attention" in seen.text(".bd-stage")
    assert "block 3" in seen.text("[data-card=router_grid] [data-title]")
    assert seen.image("router_grid")["sum"] != before["sum"]
    lit = seen.page.eval_on_selector_all(".bd-narrow .bd-cells .on", "all => all.map(one => Number(one.dataset.expert))")
    slots = seen.page.eval_on_selector_all("[data-router-words] b", "all => all.map(one => Number(one.textContent.split(' ')[1]))")
    assert sorted(lit) == sorted(slots) and len(slots) == 6


def test_choosing_a_head_redraws_its_pattern_and_nothing_else(opened):
    seen = opened(tab="attention", block=3)
    one, every = seen.image("attention_one"), seen.image("attention_all")
    painted = seen.page.locator("[data-card=attention_one] .plot").screenshot()
    seen.settled(lambda: seen.page.select_option("[data-card=attention_one] [data-head]", "4"))
    assert "head 4" in seen.text("[data-card=attention_one] [data-title]")
    assert seen.image("attention_one")["sum"] != one["sum"] and seen.image("attention_all") == every
    assert seen.page.locator("[data-card=attention_one] .plot").screenshot() != painted
    assert seen.image("attention_one")["bytes"] == 1


def test_a_tile_of_the_mosaic_chooses_its_head(opened):
    seen = opened(tab="attention", block=3)
    box = seen.page.locator("[data-card=attention_all] .plot").bounding_box()
    # The second tile of three in the first of three rows.
    seen.page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.2)
    seen.page.wait_for_function("document.querySelector('[data-card=attention_one] [data-head]').value === '1'")
    assert "head 1" in seen.text("[data-card=attention_one] [data-title]")


def test_zooming_in_shows_the_exact_cells(opened):
    seen = opened(tab="attention", block=3, prompt=LONG)
    words = "[data-card=attention_one] [data-reduction]"
    assert seen.text(words).startswith("maximum of")
    whole = seen.image("attention_one")
    plot = seen.page.locator("[data-card=attention_one] .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    at = [(box["x"] + box["width"] * share, box["y"] + box["height"] * share) for share in (0.4, 0.55)]
    seen.page.mouse.move(*at[0])
    seen.page.mouse.down()
    seen.page.mouse.move(*at[1], steps=4)
    seen.page.mouse.up()
    seen.page.wait_for_function(f"document.querySelector('{words}').textContent === 'every cell shown'")
    near = seen.image("attention_one")
    assert near["left"] > whole["left"] and near["wide"] < whole["wide"] and near["shape"][1] == near["wide"]


MARKUP = "<script>window.hacked = 1</script> <img src=x onerror='window.hacked=2'> <b>bold</b> &amp; $$x^2$$ \\(y\\)"
STRANGE = "e\u0301 \u05e9\u05dc\u05d5\u05dd \u202eturned\u202c \u0645\u0631\u062d\u0628\u0627 z\u0335\u0321\u0322"


@pytest.mark.parametrize("prompt", [MARKUP, STRANGE], ids=["markup", "strange"])
def test_a_prompt_is_shown_and_never_interpreted(opened, model, prompt):
    seen = opened()
    seen.run(prompt)
    tokens = model.record(prompt, values=["logits"]).tokens
    shown = seen.page.eval_on_selector_all("[data-strip] button", "all => all.map(one => one.textContent)")
    assert shown == [shown_token(token) for token in tokens]
    assert "\u202e" not in "".join(shown)
    for tab in ("router", "attention", "state", "stream", "compare"):
        seen.tab(tab)
    seen.settled(lambda: seen.page.locator(".bd-narrow [data-value=layer_output]").click())
    assert prompt.splitlines()[0][:8] in seen.text("[data-part-code]") or "\\u202e" in seen.text("[data-part-code]")
    assert seen.page.evaluate("[window.hacked, document.querySelectorAll('img, b b, [onerror]').length]") == [None, 0]
    seen.visited.assert_clean()


def test_ablating_an_expert_shows_what_it_did(opened, model):
    from explorer import ablate_expert

    seen = opened(tab="router", block=0)
    expert = int(seen.page.get_attribute("[data-ablate]", "data-ablate"))
    seen.page.click("[data-ablate]")
    seen.page.wait_for_selector("[data-next] .up, [data-next] .down")
    seen.tab("compare")
    assert f"ablate expert {expert} of block 0" in seen.text("[data-compare-title]")
    before = model.record(PROMPT, values=["logits"])["logits"][0, -1].softmax(-1)
    after = model.record(PROMPT, values=["logits"], edits=[ablate_expert(0, expert)])["logits"][0, -1].softmax(-1)
    first = int(before.argmax())
    row = seen.page.eval_on_selector_all("[data-compare] tbody tr:first-child td", "all => all.map(one => one.textContent)")
    assert float(row[1].split()[0]) == pytest.approx(100 * float(before[first]), rel=5e-3)
    assert float(row[2].split()[0]) == pytest.approx(100 * float(after[first]), rel=5e-3)
    assert float(row[3].replace("−", "-")) == pytest.approx(100 * float(after[first] - before[first]), rel=5e-2)
    assert "KL(before ‖ after)" in seen.text("[data-card=compare_kl] [data-title]")
    seen.page.click("[data-switch]")
    seen.page.wait_for_function("!document.querySelector('[data-next] .up, [data-next] .down')")
    seen.visited.assert_clean()


def test_zeroing_a_head_changes_what_the_panels_show_after(opened):
    seen = opened(tab="stream", block=3)
    before = seen.image("stream_addends")
    seen.tab("attention")
    seen.page.click("[data-card=attention_one] [data-zero-head]")
    seen.page.wait_for_selector("[data-shown]:not([hidden])")
    seen.page.click("[data-show=after]")
    seen.page.wait_for_selector("[data-show=after][aria-pressed=true]")
    seen.tab("stream")
    assert seen.image("stream_addends")["sum"] != before["sum"]


def test_panels_refuse_with_the_reason(opened):
    seen = opened(tab="attention", block=0)
    assert "no softmax pattern: its mixer is a recurrent mixer" in seen.text("#panel-attention [data-panel-refusal]")
    seen.block(3)
    assert seen.page.is_hidden("#panel-attention [data-panel-refusal]") and seen.page.is_visible("[data-card=attention_one]")
    seen.tab("state")
    assert "Blocks with a state: 0, 1, 2" in seen.text("#panel-state [data-panel-refusal]")
    seen.run(PROMPT, "specimen:llama")
    seen.tab("router")
    assert "No block of this model has a router" in seen.text("#panel-router [data-panel-refusal]")
    assert seen.page.get_attribute("[data-kind] option[value=expert]", "disabled") is not None
    seen.visited.assert_clean()


def test_clicking_a_part_shows_the_tensor_itself(opened, model):
    seen = opened(block=1)
    seen.settled(lambda: seen.page.click(".bd-narrow [data-value=decays]"))
    decays = model.record(PROMPT, values=["decays"], layers=[1])["decays", 1]
    facts = dict(seen.page.eval_on_selector_all("[data-part-facts] > div", "all => all.map(one => [...one.children].map(c => c.textContent))"))
    assert facts["shape"] == " × ".join(map(str, decays.shape)) and facts["dtype"] == "float32"
    for name, value in (("minimum", decays.min()), ("mean", decays.mean()), ("maximum", decays.max())):
        assert float(facts[name].replace("−", "-")) == pytest.approx(float(value), rel=1e-2)
    seen.page.click("[data-part-copy]")
    code = seen.page.evaluate("navigator.clipboard.readText()")
    space: dict = {}
    exec(compile(code, "<copied>", "exec"), space)  # noqa: S102  the page promises that it runs
    np.testing.assert_allclose(space["shown"].numpy(), decays.numpy(), atol=1e-6)
    seen.settled(lambda: seen.page.keyboard.press("Escape"))
    assert seen.page.get_attribute("#tab-router", "aria-selected") == "true"


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
        reached.add(seen.page.evaluate("document.activeElement.dataset ? Object.keys(document.activeElement.dataset)[0] ?? '' : ''"))
    assert {"prompt", "model", "run", "token", "tab", "value", "codeButton", "themeButton"} <= reached
    nameless = seen.page.evaluate("""[...document.querySelectorAll('button, select, input, textarea')].filter((one) => one.offsetParent
      && !one.textContent.trim() && !one.labels?.length && !one.getAttribute('aria-label') && !one.title).map((one) => one.outerHTML)""")
    assert nameless == []


@pytest.mark.parametrize("prompt, sentence", [("", "The prompt is empty"), ("word " * 9000, "takes at most")], ids=["empty", "long"])
def test_a_prompt_that_cannot_run_is_said_and_the_last_run_stays(opened, prompt, sentence):
    seen = opened()
    seen.page.fill("[data-prompt]", prompt)
    seen.page.click("[data-run]")
    seen.page.wait_for_selector("[data-notice]:not([hidden])")
    assert sentence in seen.text("[data-notice]")
    assert seen.page.locator("[data-strip] button").count() > 3
    seen.visited.assert_clean()


def test_an_address_that_names_a_file_waits_for_the_person(visit, explorer):
    visited = visit(explorer.at(model="/nowhere/model.gguf", prompt=PROMPT), width=1440, height=1000)
    page = visited.page
    page.wait_for_selector("[data-notice]:not([hidden])", timeout=60_000)
    assert "press Run" in page.inner_text("[data-notice]") and "/nowhere/model.gguf" in page.inner_text("[data-notice]")
    assert page.input_value("[data-path]") == "/nowhere/model.gguf" and page.input_value("[data-prompt]") == PROMPT
    assert page.is_hidden("[data-job]") and page.inner_text("[data-label]") == "no model yet"
    page.click("[data-run]")
    page.wait_for_function("document.querySelector('[data-notice]').textContent.includes('There is no file')", timeout=60_000)
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
        return box is not None and 0 <= box["y"] and box["y"] + box["height"] <= 1000

    seen.settled(pill.click)
    assert in_view(seen.page.locator("[data-part-name]")) and in_view(seen.page.locator("#tab-tensor")) and not in_view(pill)
    assert in_view(seen.page.locator("[data-card=part] .plot"))
    seen.settled(lambda: seen.page.click("[data-let-go]"))
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
    assert seen.page.evaluate("scrollY") == 0 and seen.page.locator("[data-part-name]").bounding_box()["y"] < 400


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_narrow_window_holds_everything(opened, dark):
    seen = opened(width=500, dark=dark, prompt=LONG)
    assert seen.page.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
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


def test_a_card_fills_the_window_and_goes_back(opened):
    seen = opened(tab="attention", block=3)
    seen.page.click("[data-card=attention_one] [data-expand]")
    assert seen.page.locator("[data-card=attention_one]").bounding_box()["width"] > 1300
    seen.page.keyboard.press("Escape")
    assert seen.page.locator("[data-card=attention_one]").bounding_box()["width"] < 800


def test_the_pointer_reads_a_cell_out(opened, model):
    seen = opened(tab="router", block=0)
    plot = seen.page.locator("[data-card=router_grid] .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    seen.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.3)
    seen.page.wait_for_function("document.querySelector('[data-card=router_grid] [data-readout]').textContent.includes('≈')")
    said = seen.text("[data-card=router_grid] [data-readout]")
    place, rest = said.split(" → expert ")
    expert, value = rest.split(": ≈ ")
    scores = model.record(PROMPT, values=["router_scores"], layers=[0])["router_scores", 0][0]
    assert float(value) == pytest.approx(float(scores[int(place.split()[0]), int(expert)]), abs=0.02)
    assert seen.page.locator("[data-strip] .pointed").count() == 1


def test_a_slider_in_motion_is_never_pulled_back(opened):
    seen = opened(tab="attention", prompt=LONG)
    positions = seen.page.evaluate("""async () => {
      const slider = document.querySelector('block-diagram input[type=range]'), seen = []
      for (let step = 0; step < 40; step++) {
        const wanted = step % 4
        slider.value = wanted
        slider.dispatchEvent(new Event('input', {bubbles: true}))
        for (let frame = 0; frame < 2; frame++) {
          await new Promise((done) => requestAnimationFrame(done))
          seen.push(Number(slider.value) === wanted && Number(document.querySelector('.bd-stage').dataset.layer) === wanted)
        }
      }
      return seen
    }""")
    assert all(positions)
    seen.page.wait_for_function("new URLSearchParams(location.search).get('block') === '3' && !document.querySelector('[data-card=attention_one]').hidden")
    assert "block 3" in seen.text("[data-card=attention_one] [data-title]")


def test_reloading_again_and_again_locks_nobody_out(opened):
    seen = opened()
    for _ in range(MOST_SESSIONS + 1):
        seen.page.reload()
        seen.page.wait_for_function(DRAWN)
    assert seen.page.query_selector("[data-full]") is None


def arrived(page, address: str) -> None:
    """Open a page that finds a place; those that were closed just now give theirs back in a moment."""
    for _ in range(100):
        page.goto(address, wait_until="commit")
        page.wait_for_selector("h1")
        if page.query_selector("[data-full]") is None:
            break
        page.wait_for_timeout(100)
    page.wait_for_function("document.querySelector('[data-model]').options.length", timeout=60_000)


def test_a_page_too_many_says_so_and_a_closed_one_gives_its_place_back(chromium, explorer):
    context = chromium.new_context()
    first, *_ = pages = [context.new_page() for _ in range(MOST_SESSIONS)]
    for page in pages[:-1]:
        arrived(page, explorer.at(prompt=PROMPT))
    # Fetched while there is one place left, and slower to speak than the one that takes it.
    slow, held = context.new_page(), []
    slow.route("**/explorer.js", lambda route: held.append(route))
    slow.goto(explorer.at(), wait_until="commit")
    while not held:
        slow.wait_for_timeout(50)
    arrived(pages[-1], explorer.at(prompt=PROMPT))
    held[0].continue_()
    slow.wait_for_selector("[data-full]", timeout=60_000)
    late = context.new_page()
    late.goto(explorer.at())
    for page in (slow, late):
        assert f"{MOST_SESSIONS} pages open" in page.inner_text("[data-full][role=alert]")
        assert page.query_selector("[data-run-form]") is None
    first.close()
    arrived(late, explorer.at(prompt=PROMPT))
    context.close()
