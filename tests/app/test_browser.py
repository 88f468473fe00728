"""The explorer in a real browser: what its panels show, and that it is what the model did."""

from __future__ import annotations

import numpy as np
import pytest

from explorer import load
from explorer.widgets.views.labels import shown_token
from tests.support.app_browser import LONG, PROMPT, opened  # noqa: F401  a fixture
from tests.support.explorer_server import HYBRID, explorer  # noqa: F401  a fixture


@pytest.fixture(scope="module")
def model():
    return load(HYBRID)


def test_the_page_opens_clean_and_says_what_it_shows(opened, model):
    seen = opened()
    assert seen.text("[data-weights]") == "weights: random, seed 0"
    tokens = model.record(PROMPT, values=["logits"]).tokens
    assert seen.page.eval_on_selector_all(
        "[data-strip] button", "all => all.map(one => one.textContent)"
    ) == [shown_token(token) for token in tokens]
    assert f"{len(tokens)} tokens" in seen.text("[data-status]") and "random" in seen.text(
        "[data-status]"
    )
    likeliest = model.record(PROMPT, values=["logits"])["logits"][0, -1].argmax()
    assert seen.page.text_content("[data-next] tbody td") == shown_token(
        model.tokenizer.decode([likeliest])
    )
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
    assert seen.page.get_attribute(
        ".bd-stage", "data-layer"
    ) == "3" and "Gated attention" in seen.text(".bd-stage")
    assert "block 3" in seen.text("[data-card=router_grid] [data-title]")
    assert seen.image("router_grid")["sum"] != before["sum"]
    lit = [
        int(number)
        for number in seen.page.get_attribute(".bd-narrow .bd-cells", "data-lit").split()
    ]
    slots = seen.page.eval_on_selector_all(
        "[data-router-words] b", "all => all.map(one => Number(one.textContent.split(' ')[1]))"
    )
    assert sorted(lit) == sorted(slots) and len(slots) == 6


def test_the_types_of_the_diagram_are_those_of_the_run(opened):
    seen = opened()
    seen.page.get_by_role("button", name="at B, S").click()
    assert (
        f"[1, {len(seen.page.query_selector_all('[data-strip] [data-token]'))}, "
        in seen.page.locator(".bd-svg:visible .bd-t").first.text_content()
    )


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
    seen.page.wait_for_function(
        "document.querySelector('[data-card=attention_one] [data-head]').value === '1'"
    )
    assert "head 1" in seen.text("[data-card=attention_one] [data-title]")


def test_zooming_in_shows_the_exact_cells(opened):
    seen = opened(tab="attention", block=3, prompt=LONG)
    words = "[data-card=attention_one] [data-reduction]"
    assert seen.text(words).startswith("maximum of")
    whole = seen.image("attention_one")
    plot = seen.page.locator("[data-card=attention_one] .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    at = [
        (box["x"] + box["width"] * share, box["y"] + box["height"] * share) for share in (0.4, 0.55)
    ]
    seen.page.mouse.move(*at[0])
    seen.page.mouse.down()
    seen.page.mouse.move(*at[1], steps=4)
    seen.page.mouse.up()
    seen.page.wait_for_function(
        f"document.querySelector('{words}').textContent === 'every cell shown'"
    )
    near = seen.image("attention_one")
    assert (
        near["left"] > whole["left"]
        and near["wide"] < whole["wide"]
        and near["shape"][1] == near["wide"]
    )


MARKUP = (
    "<script>window.hacked = 1</script> <img src=x onerror='window.hacked=2'> "
    "<b>bold</b> &amp; $$x^2$$ \\(y\\)"
)
STRANGE = (
    "e\u0301 \u05e9\u05dc\u05d5\u05dd \u202eturned\u202c "
    "\u0645\u0631\u062d\u0628\u0627 z\u0335\u0321\u0322"
)


@pytest.mark.parametrize("prompt", [MARKUP, STRANGE], ids=["markup", "strange"])
def test_a_prompt_is_shown_and_never_interpreted(opened, model, prompt):
    seen = opened()
    seen.run(prompt)
    tokens = model.record(prompt, values=["logits"]).tokens
    shown = seen.page.eval_on_selector_all(
        "[data-strip] button", "all => all.map(one => one.textContent)"
    )
    assert shown == [shown_token(token) for token in tokens]
    assert "\u202e" not in "".join(shown)
    for tab in ("router", "attention", "state", "stream", "compare"):
        seen.tab(tab)
    seen.settled(lambda: seen.page.locator(".bd-narrow [data-value=layer_output]").click())
    assert prompt.splitlines()[0][:8] in seen.text("[data-part-code]") or "\\u202e" in seen.text(
        "[data-part-code]"
    )
    assert seen.page.evaluate(
        "[window.hacked, document.querySelectorAll('img, b b, [onerror]').length]"
    ) == [None, 0]
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
    after = model.record(PROMPT, values=["logits"], edits=[ablate_expert(0, expert)])["logits"][
        0, -1
    ].softmax(-1)
    first = int(before.argmax())
    row = seen.page.eval_on_selector_all(
        "[data-compare] tbody tr:first-child td", "all => all.map(one => one.textContent)"
    )
    assert float(row[1].split()[0]) == pytest.approx(100 * float(before[first]), rel=5e-3)
    assert float(row[2].split()[0]) == pytest.approx(100 * float(after[first]), rel=5e-3)
    assert float(row[3].replace("−", "-")) == pytest.approx(
        100 * float(after[first] - before[first]), rel=5e-2
    )
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
    assert "no softmax pattern: its mixer is a recurrent mixer" in seen.text(
        "#panel-attention [data-panel-refusal]"
    )
    seen.block(3)
    assert seen.page.is_hidden("#panel-attention [data-panel-refusal]") and seen.page.is_visible(
        "[data-card=attention_one]"
    )
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
    facts = dict(
        seen.page.eval_on_selector_all(
            "[data-part-facts] > div",
            "all => all.map(one => [...one.children].map(c => c.textContent))",
        )
    )
    assert facts["shape"] == " × ".join(map(str, decays.shape)) and facts["dtype"] == "float32"
    for name, value in (
        ("minimum", decays.min()),
        ("mean", decays.mean()),
        ("maximum", decays.max()),
    ):
        assert float(facts[name].replace("−", "-")) == pytest.approx(float(value), rel=1e-2)
    seen.page.click("[data-part-copy]")
    code = seen.page.evaluate("navigator.clipboard.readText()")
    space: dict = {}
    exec(compile(code, "<copied>", "exec"), space)
    np.testing.assert_allclose(space["shown"].numpy(), decays.numpy(), atol=1e-6)
    seen.settled(lambda: seen.page.keyboard.press("Escape"))
    assert seen.page.get_attribute("#tab-router", "aria-selected") == "true"


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
    seen.page.wait_for_function(
        "document.querySelector('[data-card=router_grid] [data-readout]').textContent.includes('≈')"
    )
    said = seen.text("[data-card=router_grid] [data-readout]")
    place, rest = said.split(" → expert ")
    expert, value = rest.split(": ≈ ")
    scores = model.record(PROMPT, values=["router_scores"], layers=[0])["router_scores", 0][0]
    assert float(value) == pytest.approx(
        float(scores[int(place.split()[0]), int(expert)]), abs=0.02
    )
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
          const shown = Number(document.querySelector('.bd-stage').dataset.layer)
          seen.push(Number(slider.value) === wanted && shown === wanted)
        }
      }
      return seen
    }""")
    assert all(positions)
    seen.page.wait_for_function(
        "new URLSearchParams(location.search).get('block') === '3' "
        "&& !document.querySelector('[data-card=attention_one]').hidden"
    )
    assert "block 3" in seen.text("[data-card=attention_one] [data-title]")
