"""The site in a browser: a step of each page's slider, and what a page weighs.

Times are taken inside the page, from the event to the frame after the change is painted: what a
person waits for, without the driver's share.
"""

from __future__ import annotations

import gzip
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from builder.bench.build import ROOT, copy_sources
from builder.bench.chromium import Visit, launched, open_page
from builder.bench.figures import Figure, Settings
from builder.bench.local_server import HOST, serve_folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Response

KILOBYTE = 1000

#: Parts of the search's addresses; the browser loads those only on searching.
_SEARCH = ("/search/", "search_index", "search/worker", "lunr")

#: For each step of a page's slider, the milliseconds to the frame in which the diagram shows the
#: new block.
_SLIDER = """async (steps) => {
  const painted = () => new Promise((done) => requestAnimationFrame(() => {
    const channel = new MessageChannel()
    channel.port1.onmessage = done
    channel.port2.postMessage(0)
  }))
  const diagram = document.querySelector('block-diagram')
  const slider = diagram.querySelector('input[type=range]')
  const stage = diagram.querySelector('.bd-stage'), blocks = Number(slider.max) + 1, times = []
  for (let step = 0; step < steps; step++) {
    const wanted = String((Number(slider.value) + 1) % blocks), start = performance.now()
    slider.value = wanted
    slider.dispatchEvent(new Event('input', { bubbles: true }))
    await painted()
    times.push(performance.now() - start)
    const shown = stage.dataset.layer
    if (shown !== wanted) throw new Error(`the diagram shows block ${shown}, not ${wanted}`)
    if (!stage.querySelector('svg')) throw new Error('the diagram is empty')
  }
  return times
}"""


def measure(settings: Settings) -> Iterator[Figure]:
    with _site(settings) as address, launched() as browser:
        for family in settings.families:
            yield _slider_figure(
                settings, browser, f"{address}families/{family}/index.html", family
            )
        for family in settings.families:
            yield _weight_figure(browser, f"{address}families/{family}/index.html", family)


@contextmanager
def _site(settings: Settings) -> Iterator[str]:
    """Serve the site that is named, else one built for the occasion; gives its address."""
    with tempfile.TemporaryDirectory() as folder:
        site = settings.site or _build_into(Path(folder), settings.families)
        server = serve_folder(site)
        try:
            yield f"http://{HOST}:{server.server_address[1]}/"
        finally:
            server.shutdown()
            server.server_close()


def _build_into(folder: Path, families: tuple[str, ...]) -> Path:
    """Build a copy of the authored site in ``folder``."""
    copy_sources(folder)
    command = [sys.executable, "-m", "builder", "build", *families, "--out", "public"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the site did not build: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "public"


def _slider_figure(settings: Settings, browser: Browser, address: str, family: str) -> Figure:
    visit = open_page(browser, address)
    visit.page.wait_for_selector("block-diagram .bd-stage svg")
    visit.page.evaluate(_SLIDER, 3)
    times = visit.page.evaluate(_SLIDER, settings.steps)
    visit.page.context.close()
    detail = f"input to painted diagram, median of {settings.steps}"
    return Figure(
        f"slider step, {family}", statistics.median(times), "ms", 100.0, detail, max(times)
    )


def _weight_figure(browser: Browser, address: str, family: str) -> Figure:
    sizes = _file_sizes(browser, address)
    largest = max(sizes, key=lambda path: sizes[path])
    own = sum(size for path, size in sizes.items() if "/families/" in path)
    detail = (
        f"{len(sizes)} files compressed, {own / KILOBYTE:.0f} kB of them this page's own; "
        f"largest {Path(largest).name}, {sizes[largest] / KILOBYTE:.0f} kB"
    )
    return Figure(f"page of {family}", sum(sizes.values()) / KILOBYTE, "kB", 250.0, detail)


def _file_sizes(browser: Browser, address: str) -> dict[str, int]:
    """Return the bytes of each file a page requests, compressed as a server would send it,
    without the search's files.
    """
    from playwright.sync_api import Error

    visit = Visit(browser.new_context().new_page())
    responses: list[Response] = []
    visit.page.on("response", lambda response: responses.append(response))
    visit.page.goto(address, wait_until="networkidle")
    sizes = {}
    for response in responses:
        path = urlsplit(response.url).path
        if any(part in path for part in _SEARCH):
            continue
        try:
            body = response.body()
        except Error:  # a response without a body
            continue
        sizes[path] = min(len(body), len(gzip.compress(body, 6)))
    visit.page.context.close()
    return sizes
