"""A real Chromium for the tests: fixtures that open pages and keep an eye on what they ask for.

    def test_page(visit, serve):
        seen = visit(serve(folder) + "index.html", width=500, dark=True)
        seen.page.click("text=Values")
        seen.assert_clean()

``seen.page`` is Playwright's page (sync API). The fixtures:

- ``chromium``: one browser per test module (Playwright keeps an event loop
  running in the thread while it lives, so it is not kept for the whole session)
- ``visit(address, *, width, height, dark, javascript, wait)``: a fresh profile
  and page per call, closed after the test; gives a ``Visit`` (builder/bench/chromium.py)
- ``serve(folder)``: a static server on 127.0.0.1, port 0; gives its address
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder.bench.chromium import Visit, launched, open_page
from builder.bench.local_server import serve_folder

#: How long, in milliseconds, a test waits for what a page should have by then. Arriving at a page
#: may take longer on a busy machine.
PATIENCE, ARRIVAL = 30_000, 60_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    with launched() as browser:
        yield browser


@pytest.fixture
def visit(chromium: object) -> Iterator[Callable[..., Visit]]:
    opened: list[Visit] = []

    def open_one(address: str, **options: object) -> Visit:
        opened.append(open_page(chromium, address, **options))
        page = opened[-1].page
        page.set_default_timeout(PATIENCE)
        page.set_default_navigation_timeout(ARRIVAL)
        return opened[-1]

    yield open_one
    for seen in opened:
        seen.page.context.close()


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[Path], str]]:
    servers = []

    def start(folder: Path) -> str:
        servers.append(serve_folder(Path(folder)))
        return f"http://127.0.0.1:{servers[-1].server_address[1]}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
