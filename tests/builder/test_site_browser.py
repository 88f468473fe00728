"""The built site in a real browser: slider, card, checkpoints, filters, search; keyboard, phone,
dark, no script, from a file.
"""

from __future__ import annotations

import pytest

from tests.support.built_site import FAMILIES, HYBRID, MIXTURE, PAGES, address, site, stage  # noqa: F401  fixtures
from tests.support.facts_records import records
from tests.support.pages import CONTRAST


def part(page, name: str, host: str):
    return page.locator(f'.bd-svg:visible [data-value="{name}"][data-host="{host}"]')


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (500, True)])
def test_pages_are_whole_fit_their_width_and_ask_nobody_else(
    visit, address: str, name: str, width: int, dark: bool
) -> None:
    seen = visit(address + name, width=width, dark=dark)
    assert seen.page.locator("h1").inner_text()
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.page.evaluate(CONTRAST) == []
    seen.assert_clean()


def test_the_slider_redraws_the_block_by_keyboard(visit, address: str) -> None:
    seen = visit(address + HYBRID)
    page = seen.page
    assert stage(page) == ("0", "0") and part(page, "decays", "linear_attn").is_visible()
    page.locator("block-diagram input[type=range]").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert stage(page) == ("3", "1")
    assert (
        part(page, "attention_scores", "self_attn").is_visible()
        and part(page, "decays", "linear_attn").count() == 0
    )
    assert (
        page.locator(".bd-identity code").inner_text()
        == "layers[3].input + self_attn.attention_output + mlp.mlp_output == layer_output"
    )
    assert "Gated attention" in page.locator("block-diagram input[type=range]").get_attribute(
        "aria-valuetext"
    )
    page.keyboard.press("End")
    assert stage(page) == ("47", "1")
    page.keyboard.press("Home")
    assert stage(page) == ("0", "0")
    seen.assert_clean()


def test_the_redraw_is_done_when_the_input_event_is_over(visit, address: str) -> None:
    page = visit(address + HYBRID).page
    drawn = page.evaluate("""() => {
        const slider = document.querySelector('block-diagram input[type=range]');
        slider.value = 7;
        slider.dispatchEvent(new Event('input', {bubbles: true}));
        const stage = document.querySelector('.bd-stage');
        const scores = stage.querySelector('[data-value=attention_scores]');
        return [stage.dataset.layer, Boolean(scores)]; }""")
    assert drawn == ["7", True]


def test_a_tick_for_each_block_shaped_by_its_mixer(visit, address: str) -> None:
    page = visit(address + HYBRID).page
    assert page.locator(".bd-ticks > i").count() == 48
    assert page.locator(".bd-ticks .bd-tick-attention").count() == 12
    box = page.locator(".bd-track").bounding_box()
    tick = page.locator('.bd-ticks > i[data-layer="24"]').bounding_box()
    page.mouse.click(tick["x"] + tick["width"] / 2, box["y"] + box["height"] / 2)
    assert stage(page)[0] == "24"


def test_pointing_shows_and_enter_pins_and_escape_lets_go(visit, address: str) -> None:
    seen = visit(address + HYBRID)
    page, card = seen.page, seen.page.locator(".bd-card")
    page.evaluate(
        "window.selected = [];"
        "document.addEventListener('part-select', (event) => selected.push(event.detail))"
    )
    part(page, "router_logits", "mlp").hover()
    assert "model.layers[0].mlp.router_logits" in card.inner_text()
    page.mouse.move(2, 2)
    assert "router_logits" not in card.inner_text()
    part(page, "decays", "linear_attn").focus()
    assert "model.layers[0].linear_attn.decays" in card.inner_text()
    page.keyboard.press("Enter")
    assert part(page, "decays", "linear_attn").get_attribute("aria-pressed") == "true"
    part(page, "router_logits", "mlp").hover()
    page.mouse.move(2, 2)
    assert "linear_attn.decays" in card.inner_text()
    for word in (
        "Gates [batch seq heads]",
        "f32[B, S, ValueHeads]",
        "[B, S, 32]",
        "log decay",
        "torch_chunk_gated_delta_rule",
    ):
        assert word.lower() in card.inner_text().lower()
    page.keyboard.press("Escape")
    assert part(page, "decays", "linear_attn").get_attribute("aria-pressed") == "false"
    assert page.evaluate("selected.map((one) => [one.name, one.host, one.layer, one.pinned])") == [
        ["decays", "linear_attn", 0, True],
        ["decays", "linear_attn", 0, False],
    ]
    seen.assert_clean()


def test_a_click_and_a_space_pin_as_well(visit, address: str) -> None:
    page = visit(address + HYBRID).page
    part(page, "betas", "linear_attn").click()
    assert page.evaluate("document.querySelector('block-diagram').pinned.name") == "betas"
    part(page, "betas", "linear_attn").click()
    assert page.evaluate("document.querySelector('block-diagram').pinned") is None
    part(page, "layer_mid", "layers").focus()
    page.keyboard.press("Space")
    assert page.evaluate("document.querySelector('block-diagram').pinned.name") == "layer_mid"
    page.locator(".bd-unpin").click()
    assert page.evaluate("document.querySelector('block-diagram').pinned") is None
    page.locator('.bd-strip [data-value="logits"]').click()
    assert "model.logits" in page.locator(".bd-card").inner_text()


def test_a_pinned_card_follows_the_slider_and_says_where_the_value_is_missing(
    visit, address: str
) -> None:
    page = visit(address + HYBRID).page
    part(page, "decays", "linear_attn").click()
    page.evaluate("document.querySelector('block-diagram').layer = 5")
    assert "model.layers[5].linear_attn.decays" in page.locator(".bd-card").inner_text()
    page.evaluate("document.querySelector('block-diagram').layer = 3")
    said = page.locator(".bd-card").inner_text()
    assert "Block 3 has no linear_attn.decays" in said and "0–2, 4–6" in said


def test_another_checkpoint_without_a_reload(visit, address: str) -> None:
    seen = visit(address + MIXTURE)
    page = seen.page
    first, second = (record["checkpoint"] for record in records("qwen3_moe"))
    page.evaluate("window.mark = 1")
    page.locator("block-diagram input[type=range]").focus()
    page.keyboard.press("End")
    page.locator("checkpoint-select select").select_option(second)
    assert page.evaluate("window.mark") == 1
    assert f"checkpoint={second.replace('/', '%2F')}" in page.url
    assert (
        page.locator(".bd-ticks > i").count() == 94
        and page.locator(".bd-count").inner_text() == "94"
    )
    assert stage(page)[0] == "47"
    for selector, _name in ((".printout pre", "print(model) on "), (".choice .chosen", "")):
        shown = page.locator(f"{selector}:visible")
        assert shown.count() == 1 and second in (
            shown.get_attribute("aria-label") or shown.inner_text()
        )
    assert (
        page.locator(".config dl:visible", has_text="num_hidden_layers").inner_text().count("94")
        >= 1
    )
    page.reload()
    assert page.locator("checkpoint-select select").input_value() == second
    assert page.locator(".bd-ticks > i").count() == 94
    page.locator("checkpoint-select select").select_option(first)
    assert "checkpoint" not in page.url and page.locator(".bd-ticks > i").count() == 48
    seen.assert_clean()


def test_an_unknown_checkpoint_in_the_address_leaves_the_first(visit, address: str) -> None:
    seen = visit(f"{address}{MIXTURE}?checkpoint=%3Cscript%3Ealert(1)%3C%2Fscript%3E")
    assert (
        seen.page.locator("checkpoint-select select").input_value()
        == records("qwen3_moe")[0]["checkpoint"]
    )
    seen.assert_clean()


def test_the_element_comes_alive_in_html_that_arrives_later(visit, address: str) -> None:
    """What instant navigation does: new HTML, no page scripts run again."""
    seen = visit(address + HYBRID)
    page = seen.page
    page.evaluate("""async () => { const text = await (await fetch(location.href)).text();
        const there = new DOMParser().parseFromString(text, 'text/html');
        const article = document.adoptNode(there.querySelector('article'));
        document.querySelector('article').replaceWith(article); }""")
    page.locator("block-diagram input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    assert stage(page) == ("1", "0") and page.locator(".bd-ticks > i").count() == 48
    seen.assert_clean()


def test_live_marks_light_cells_and_weigh_edges(visit, address: str) -> None:
    page = visit(address + HYBRID).page
    element = "document.querySelector('block-diagram')"
    page.evaluate(
        f"{element}.setMarks({{addends: {{attention_output: 0, mlp_output: 1}}, experts: [3, 17]}})"
    )
    lit_path = "document.querySelector('.bd-stage .bd-wide .bd-lit').getAttribute('d')"
    lit = f"({lit_path}.match(/M/g) ?? []).length"
    numbers = "document.querySelector('.bd-stage .bd-wide .bd-cells').dataset.lit"
    assert page.evaluate(lit) == 2 and page.evaluate(numbers) == "3 17"
    weights = (
        "[...document.querySelectorAll('.bd-stage .bd-wide [data-addend]')]"
        ".map((edge) => parseFloat(getComputedStyle(edge).strokeWidth))"
    )
    thin, thick = page.evaluate(weights)
    assert thick > 4 * thin
    page.evaluate(f"{element}.layer = 1")
    assert page.evaluate(lit) == 2 and page.evaluate(numbers) == "3 17"
    # Cells that are lit by the script lie where the drawing has them.
    page.evaluate(f"{element}.layer = 0")
    page.evaluate(f"{element}.setMarks(null)")
    points = f"{lit_path}.match(/M[^h]*/g).map((at) => at.slice(1).split(' ').map(Number))"
    drawn = page.evaluate(points)
    page.evaluate(
        f"{element}.setMarks({{addends: {{}}, experts: {numbers}.split(' ').map(Number)}})"
    )
    for one, other in zip(drawn, page.evaluate(points), strict=True):
        assert one == pytest.approx(other, abs=0.05)
    page.evaluate(f"{element}.setMarks({{addends: {{}}, experts: []}})")
    assert page.evaluate(lit) == 0
    page.evaluate(f"{element}.setMarks(null)")
    assert page.evaluate(lit) == 10 and len(set(page.evaluate(weights))) == 1


def test_at_500_pixels_the_boxes_stack_and_the_stream_stays(visit, address: str) -> None:
    page = visit(address + HYBRID, width=500).page
    assert page.locator(".bd-narrow").is_visible() and not page.locator(".bd-wide").is_visible()
    boxes = sorted(
        (box.bounding_box() for box in page.locator(".bd-narrow .bd-box").all()),
        key=lambda box: box["y"],
    )
    assert len(boxes) == 2 and boxes[0]["y"] + boxes[0]["height"] < boxes[1]["y"]
    assert page.locator(".bd-narrow .bd-stream").bounding_box()["x"] < boxes[0]["x"]
    card = page.locator(".bd-card").bounding_box()
    assert card["y"] > boxes[1]["y"] + boxes[1]["height"]
    part(page, "decays", "linear_attn").click()
    assert "linear_attn.decays" in page.locator(".bd-card").inner_text()
    card = page.locator(".bd-card").bounding_box()
    assert card["y"] > 0 and card["y"] + card["height"] <= 900, "what was clicked is told in view"
    assert "linear_attn.decays" in page.locator(".bd-card").inner_text(), (
        "not of what came under the pointer"
    )
    page.locator(".bd-unpin").click()
    where = part(page, "decays", "linear_attn")
    assert 0 < where.bounding_box()["y"] < 900 and where.evaluate(
        "(node) => node === document.activeElement"
    )


def test_at_desktop_width_the_card_stands_beside_the_diagram(visit, address: str) -> None:
    page = visit(address + HYBRID, width=1440).page
    stage_box, card = (
        page.locator(".bd-stage").bounding_box(),
        page.locator(".bd-card").bounding_box(),
    )
    assert card["x"] >= stage_box["x"] + stage_box["width"] and card["y"] < stage_box["y"] + 40
    page.evaluate("document.querySelector('.bd-stage').scrollIntoView({block: 'end'})")
    assert 0 < page.locator(".bd-card").bounding_box()["y"] < 300, (
        "it stays beside what is looked at"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 1440


def test_without_javascript_the_first_diagram_and_all_tables_are_there(visit, address: str) -> None:
    page = visit(address + HYBRID, javascript=False).page
    assert (
        page.locator(".bd-wide").is_visible() and part(page, "decays", "linear_attn").is_visible()
    )
    assert (
        not page.locator("checkpoint-select").is_visible()
        and not page.locator(".bd-slider").is_visible()
    )
    record = records("qwen3_next", 1)[0]
    for row in record["values"]:
        assert page.locator(
            f'[id="value-{row["host"].rpartition(".")[2].partition("[")[0]}-{row["name"]}"]'
        ).is_visible()
    for selector in (".printout pre", ".parts", ".config dl", ".evidence"):
        assert page.locator(f"{selector}:visible").count()
    cards = visit(address + "index.html", javascript=False).page
    assert (
        cards.locator(".card:visible").count() == len(FAMILIES)
        and not cards.locator(".filters").is_visible()
    )
