"""The explorer in a browser: the change of head at a long prompt, and the largest websocket
message.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from builder.bench.chromium import launched, open_page
from builder.bench.figures import Figure, Settings
from builder.bench.local_server import HOST, choose_port, stop, wait_for
from builder.bench.weights import gguf_path

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROMPT_TOKENS = 512
KILOBYTE = 1000

#: Seconds to wait for the explorer to start and for its first figures.
_PATIENCE = 300.0

#: Common short words, each one token in most vocabularies.
_COMMON_WORDS = (
    "the of and to in is that it was for on as with at by from one had not but what all were when "
    "we there can an your which"
)

_HEAD_IS_READY = (
    "document.body.dataset.drawn"
    " && document.querySelector('[data-card=attention_one] [data-head]').options.length > 1"
)

#: For each change of head, the milliseconds until the page reports that it is drawn.
_HEADS = """async (steps) => {
  const pick = document.querySelector('[data-card=attention_one] [data-head]')
  const count = pick.options.length, times = []
  for (let step = 0; step < steps; step++) {
    const before = Number(document.body.dataset.drawn || 0), start = performance.now()
    const drawn = new Promise((done) => new MutationObserver((_, watch) => {
      if (Number(document.body.dataset.drawn) > before) { watch.disconnect(); done() }
    }).observe(document.body, { attributes: true, attributeFilter: ['data-drawn'] }))
    const wanted = String((Number(pick.value) + 1) % count)
    pick.value = wanted
    pick.dispatchEvent(new Event('change', { bubbles: true }))
    await drawn
    times.push(performance.now() - start)
    if (pick.value !== wanted) throw new Error(`head ${pick.value} is shown, not ${wanted}`)
  }
  return times
}"""


def measure(settings: Settings) -> Iterator[Figure]:
    model = str(gguf_path() or "specimen:qwen3_next")
    with launched() as browser, running_explorer(model, _long_prompt()) as address:
        visit = open_page(browser, f"{address}?tab=attention&block=3")
        page = visit.page
        page.wait_for_function(_HEAD_IS_READY, timeout=_PATIENCE * 1000)
        page.wait_for_selector("[data-card=attention_one] canvas", state="visible", timeout=60_000)
        tokens = page.evaluate("document.querySelector('[data-strip]').children.length")
        page.evaluate(_HEADS, 3)
        times = page.evaluate(_HEADS, settings.steps)
        _open_every_tab(page)
        page.context.close()
    detail = f"{Path(model).name}: change to painted figures, median of {settings.steps}"
    name = f"head switch at {tokens} tokens"
    yield Figure(name, statistics.median(times), "ms", 150.0, detail, max(times))
    detail = f"of {len(visit.frames)} over the whole visit, every panel opened"
    largest = max(visit.frames) / KILOBYTE
    yield Figure("largest websocket message", largest, "kB", 1000.0, detail)


@contextmanager
def running_explorer(model: str, prompt: str) -> Iterator[str]:
    """Start an explorer, give its address, and stop it afterwards."""
    port = choose_port(0)
    command = [sys.executable, "-m", "explorer", model, "--port", str(port)]
    command += ["--prompt", prompt, "--no-browser"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            address = f"http://{HOST}:{port}/"
            if not wait_for(address, lambda: process.poll() is None, _PATIENCE):
                output.seek(0)
                last = output.read().strip().splitlines()[-1:]
                raise RuntimeError(f"the explorer did not start: {last}")
            yield address
        finally:
            stop(process)


def _long_prompt() -> str:
    """Return a prompt of about 512 tokens."""
    words = _COMMON_WORDS.split()
    count = len(words)
    return " ".join(words[(7 * at + at // count) % count] for at in range(PROMPT_TOKENS))


def _open_every_tab(page: Page) -> None:
    """Open every panel, so that the largest message of each is seen."""
    for tab in page.query_selector_all("[role=tab]"):
        before = page.evaluate("Number(document.body.dataset.drawn)")
        tab.click()
        page.wait_for_function(
            "(before) => Number(document.body.dataset.drawn) > before", arg=before, timeout=60_000
        )
