"""What a browser sees: the slider of a page, the heads of the app, what a page weighs.

Times are taken inside the page, from the event to the frame after the change is
painted, so that they hold what a person waits for and nothing of the driver's.
"""

from __future__ import annotations

import gzip
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from builder.bench.chromium import Visit, open_page
from builder.commands.demo import HOST, choose_port, serve_folder, stop, wait_for
from builder.commands.weights import gguf_path

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 512
KILOBYTE = 1000
#: Files of the search, which a reader loads only on searching.
SEARCH = ("/search/", "search_index", "search/worker", "lunr")
PATIENCE = 300.0

#: One step of a page's slider per entry: milliseconds to the frame in which the diagram shows the new block.
SLIDER = """async (steps) => {
  const painted = () => new Promise((done) => requestAnimationFrame(() => { const c = new MessageChannel(); c.port1.onmessage = done; c.port2.postMessage(0) }))
  const diagram = document.querySelector('block-diagram'), slider = diagram.querySelector('input[type=range]')
  const stage = diagram.querySelector('.bd-stage'), blocks = Number(slider.max) + 1, times = []
  for (let step = 0; step < steps; step++) {
    const wanted = String((Number(slider.value) + 1) % blocks), start = performance.now()
    slider.value = wanted
    slider.dispatchEvent(new Event('input', { bubbles: true }))
    await painted()
    times.push(performance.now() - start)
    if (stage.dataset.layer !== wanted) throw new Error(`the diagram shows block ${stage.dataset.layer}, not ${wanted}`)
    if (!stage.querySelector('svg')) throw new Error('the diagram is empty')
  }
  return times
}"""

#: One change of head per entry: milliseconds until the page says that what was asked for is drawn.
HEADS = """async (steps) => {
  const pick = document.querySelector('[data-card=attention_one] [data-head]'), count = pick.options.length, times = []
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


def summary(times: list[float]) -> tuple[float, float]:
    """Median and worst, in milliseconds."""
    return statistics.median(times), max(times)


@contextmanager
def built_site(settings: object) -> Iterator[str]:
    """The address of a served site: the one named, else one built for the occasion."""
    with tempfile.TemporaryDirectory() as folder:
        site = settings.site or build_into(Path(folder), settings.families)
        server = serve_folder(site)
        try:
            yield f"http://{HOST}:{server.server_address[1]}/"
        finally:
            server.shutdown()
            server.server_close()


def build_into(folder: Path, families: tuple[str, ...]) -> Path:
    """Build a copy of the authored site in ``folder``, so that the repository's pages stay as they are."""
    shutil.copytree(
        ROOT / "site", folder / "site", ignore=shutil.ignore_patterns("index.md", "facts.json")
    )
    shutil.copy(ROOT / "mkdocs.yml", folder)
    command = [sys.executable, "-m", "builder", "build", *families, "--out", "public"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the site did not build: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "public"


def page_of(site: str, family: str) -> str:
    return f"{site}families/{family}/index.html"


def slider_rows(settings: object, site: str, browser: object) -> Iterator[tuple]:
    """Rows of `bench.Figure` (all but the section) for the slider of each family's page."""
    for family in settings.families:
        seen = open_page(browser, page_of(site, family))
        seen.page.wait_for_selector("block-diagram .bd-stage svg")
        seen.page.evaluate(SLIDER, 3)
        middle, worst = summary(seen.page.evaluate(SLIDER, settings.steps))
        seen.page.context.close()
        yield (
            f"slider step, {family}",
            middle,
            "ms",
            100.0,
            f"input to painted diagram, median of {settings.steps}",
            worst,
        )


@contextmanager
def running_explorer(model: str, prompt: str) -> Iterator[str]:
    """The address of an explorer of its own, stopped afterwards."""
    port = choose_port(0)
    with tempfile.TemporaryFile("w+") as said:
        command = [
            sys.executable,
            "-m",
            "explorer",
            model,
            "--port",
            str(port),
            "--prompt",
            prompt,
            "--no-browser",
        ]
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            address = f"http://{HOST}:{port}/"
            if not wait_for(address, lambda: process.poll() is None, PATIENCE):
                said.seek(0)
                raise RuntimeError(
                    f"the explorer did not start: {said.read().strip().splitlines()[-1:]}"
                )
            yield address
        finally:
            stop(process)


def long_prompt() -> str:
    """Common short words, each one token in most vocabularies: about 512 tokens."""
    words = [
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "that",
        "it",
        "was",
        "for",
        "on",
        "as",
        "with",
        "at",
        "by",
        "from",
        "one",
        "had",
        "not",
        "but",
        "what",
        "all",
        "were",
        "when",
        "we",
        "there",
        "can",
        "an",
        "your",
        "which",
    ]
    return " ".join(words[(7 * place + place // 30) % len(words)] for place in range(PROMPT_TOKENS))


def head_rows(settings: object, browser: object) -> Iterator[tuple]:
    """Rows for the change of head at a long prompt, and the largest message that came over the websocket."""
    model = str(gguf_path() or "specimen:qwen3_next")
    with running_explorer(model, long_prompt()) as address:
        seen = open_page(browser, f"{address}?tab=attention&block=3", wait="load")
        page = seen.page
        page.wait_for_function(
            "document.body.dataset.drawn && document.querySelector('[data-card=attention_one] [data-head]').options.length > 1",
            timeout=PATIENCE * 1000,
        )
        page.wait_for_selector("[data-card=attention_one] canvas", state="visible", timeout=60_000)
        tokens = page.evaluate("document.querySelector('[data-strip]').children.length")
        page.evaluate(HEADS, 3)
        middle, worst = summary(page.evaluate(HEADS, settings.steps))
        walk_tabs(page)
        page.context.close()
    name = Path(model).name
    yield (
        f"head switch at {tokens} tokens",
        middle,
        "ms",
        150.0,
        f"{name}: change to painted figures, median of {settings.steps}",
        worst,
    )
    yield (
        "largest websocket message",
        max(seen.frames) / KILOBYTE,
        "kB",
        1000.0,
        f"of {len(seen.frames)} over the whole visit, every panel opened",
    )


def walk_tabs(page: object) -> None:
    """Open every panel, so that the largest message of each is seen."""
    for tab in page.query_selector_all("[role=tab]"):
        before = page.evaluate("Number(document.body.dataset.drawn)")
        tab.click()
        page.wait_for_function(
            "(before) => Number(document.body.dataset.drawn) > before", arg=before, timeout=60_000
        )


def weigh(browser: object, address: str) -> dict[str, int]:
    """Bytes of each file a page asks for, compressed as a server would send it, the search's files aside."""
    from playwright.sync_api import Error

    seen = Visit(browser.new_context().new_page())
    answers: list[object] = []
    seen.page.on("response", lambda answer: answers.append(answer))
    seen.page.goto(address, wait_until="networkidle")
    sizes = {}
    for answer in answers:
        path = urlsplit(answer.url).path
        if any(part in path for part in SEARCH):
            continue
        try:
            body = answer.body()
        except Error:  # an answer without a body
            continue
        sizes[path] = min(len(body), len(gzip.compress(body, 6)))
    seen.page.context.close()
    return sizes


def weight_rows(settings: object, site: str, browser: object) -> Iterator[tuple]:
    for family in settings.families:
        sizes = weigh(browser, page_of(site, family))
        largest = max(sizes, key=sizes.get)
        own = sum(size for path, size in sizes.items() if "/families/" in path)
        yield (
            f"page of {family}",
            sum(sizes.values()) / KILOBYTE,
            "kB",
            250.0,
            f"{len(sizes)} files compressed, {own / KILOBYTE:.0f} kB of them this page's own; largest {Path(largest).name}, {sizes[largest] / KILOBYTE:.0f} kB",
        )
