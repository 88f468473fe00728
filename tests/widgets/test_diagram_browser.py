"""The diagram's types and files in a real browser: notations, unfolding, the text form, saving."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from explorer.widgets import palette
from explorer.widgets.diagram import ASSETS, element
from tests.support.facts_records import with_long_type


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, serve) -> str:
    """A page with nothing but the element."""
    folder: Path = tmp_path_factory.mktemp("diagram")
    style = palette.css({"light": ":root", "dark": ".dark"}) + (
        ASSETS / "block-diagram.css"
    ).read_text(encoding="utf-8")
    scripts = "".join(
        f"<script>{(ASSETS / name).read_text(encoding='utf-8')}</script>"
        for name in ("drawing-file.js", "diagram-card.js", "block-diagram.js")
    )
    body = element([with_long_type("qwen3_next")])
    head = f"<!doctype html><meta charset=utf-8><title>diagram</title><style>{style}</style>"
    page = head + body + scripts
    (folder / "index.html").write_text(page, encoding="utf-8")
    return serve(folder) + "index.html"


def types(page) -> list[str]:
    return page.locator(".bd-svg:visible .bd-t").all_text_contents()


def test_types_are_written_by_name_in_numbers_or_for_a_call(visit, address: str) -> None:
    seen = visit(address)
    page = seen.page
    drawn = types(page)
    assert "[B, S, Conv]" in drawn and "[B, S, 8192]" not in drawn
    page.get_by_role("button", name="numbers").click()
    assert page.get_by_role("button", name="numbers").get_attribute("aria-pressed") == "true"
    assert "[B, S, 8192]" in types(page) and "[B, S, Conv]" not in types(page)
    assert not page.locator(".bd-call").is_visible()
    page.get_by_role("button", name="at B, S").press("Enter")
    page.get_by_label("B", exact=True).fill("16")
    page.get_by_label("S", exact=True).fill("300")
    assert "[16, 300, 8192]" in types(page)
    # A size that is none leaves what was written.
    page.get_by_label("S", exact=True).fill("-4")
    assert "[16, 300, 8192]" in types(page)
    page.evaluate("document.querySelector('block-diagram').layer = 3")
    assert "[16, 16, 300, 300]" in types(page)
    # By name again, it is what was drawn without the script.
    page.evaluate("document.querySelector('block-diagram').layer = 0")
    page.get_by_role("button", name="names").click()
    assert types(page) == drawn
    seen.assert_clean()


def test_a_shortened_type_unfolds_where_it_is_pointed_at_or_focused(visit, address: str) -> None:
    page = visit(address).page
    cut = page.locator(".bd-wide .bd-cut").first
    folded, full = cut.text_content(), cut.get_attribute("aria-label")
    assert "…" in folded and "…" not in full and len(full) > len(folded)
    for come, go in (
        (cut.focus, lambda: cut.evaluate("node => node.blur()")),
        (cut.hover, lambda: page.mouse.move(2, 2)),
    ):
        come()
        assert cut.text_content() == full
        right = cut.evaluate(
            "node => node.getBoundingClientRect().right"
            " - node.ownerSVGElement.getBoundingClientRect().right"
        )
        assert right < 1
        go()
        assert cut.text_content() == folded


def test_the_block_is_described_as_text_below_and_stays_open(visit, address: str) -> None:
    page = visit(address).page
    page.locator(".bd-words summary").press("Enter")
    assert (
        "linear_attn.state_output f32[B, ValueHeads, KeyDim, ValueDim]"
        in page.locator(".bd-words").inner_text()
    )
    page.evaluate("document.querySelector('block-diagram').layer = 3")
    assert page.locator(".bd-words[open]").count() == 1
    page.get_by_role("button", name="numbers").click()
    assert "self_attn.attention_keys bf16[B, 2, S, 256]" in page.locator(".bd-words").inner_text()


def test_the_drawing_in_view_is_saved_as_it_looks(visit, address: str, tmp_path) -> None:
    page = visit(address).page
    page.get_by_role("button", name="numbers").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="save SVG").click()
    assert download.value.suggested_filename == "qwen3_next-block-0.svg"
    download.value.save_as(tmp_path / "block.svg")
    text = (tmp_path / "block.svg").read_text(encoding="utf-8")
    tree = ElementTree.fromstring(text)
    assert "[B, S, 8192]" in [node.text for node in tree.iter() if node.tag.endswith("tspan")]
    # It stands alone: nothing in it needs a style sheet, and its colours are those of the page.
    assert "var(" not in text and "class=" not in text
    stream = page.locator(".bd-wide .bd-stream").evaluate("node => getComputedStyle(node).stroke")
    assert stream in {node.get("stroke") for node in tree.iter()}
    page.goto((tmp_path / "block.svg").as_uri())
    assert page.evaluate("document.querySelector('svg').getBoundingClientRect().width") == float(
        tree.get("width")
    )
