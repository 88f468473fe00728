"""The browser fixtures themselves: what they must notice, they notice."""

from __future__ import annotations

import pytest

from builder.bench.chromium import is_foreign


@pytest.mark.parametrize(
    ("address", "foreign"),
    [
        ("http://127.0.0.1:5006/", False),
        ("ws://localhost:1/ws", False),
        ("data:image/png;base64,AA", False),
        ("file:///a/b.html", False),
        ("https://example.org/a.js", True),
        ("ws://example.org/", True),
    ],
)
def test_what_counts_as_another_host(address, foreign):
    assert is_foreign(address) is foreign


def test_a_clean_page_is_clean(visit, serve, tmp_path):
    (tmp_path / "index.html").write_text("<!doctype html><title>t</title><p id=a>shown</p>")
    seen = visit(serve(tmp_path), width=500, dark=True)
    assert seen.page.inner_text("#a") == "shown"
    assert seen.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert seen.page.evaluate("innerWidth") == 500
    seen.assert_clean()


def test_errors_missing_files_and_other_hosts_are_seen(visit, serve, tmp_path):
    (tmp_path / "index.html").write_text(
        "<!doctype html><img src=http://example.org/a.png><img src=missing.png>"
        "<script>console.error('said'); setTimeout(() => { throw new Error('thrown') })</script>"
    )
    seen = visit(serve(tmp_path), wait="networkidle")
    assert seen.foreign == ["http://example.org/a.png"]
    assert any("missing.png: 404" in line for line in seen.failed)
    assert "said" in seen.errors and any("thrown" in line for line in seen.errors)
    with pytest.raises(AssertionError, match="other hosts"):
        seen.assert_clean()


def test_a_page_without_scripts(visit, tmp_path):
    page = tmp_path / "index.html"
    page.write_text(
        "<!doctype html><p>before</p><script>document.body.textContent = 'after'</script>"
    )
    assert visit(page.as_uri(), javascript=False).page.inner_text("body") == "before"
    assert visit(page.as_uri()).page.inner_text("body") == "after"
