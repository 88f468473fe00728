"""The explorer's page in a real browser, as the tests use it: a person's doings, and when what they
asked for is shown.
"""

from __future__ import annotations

import pytest
from playwright.sync_api import TimeoutError

from tests.support.explorer_server import Explorer

PROMPT = "In the beginning God created the heaven"
LONG = "And the LORD spake unto Moses, saying, Speak unto the children of Israel. " * 40
DRAWN = "document.body.dataset.drawn !== undefined && document.querySelector('[data-job]').hidden"

#: Whether the page shows the run of a model on a prompt; its address says which.
SHOWN = """([model, prompt]) => {
  const said = new URLSearchParams(location.search)
  const long = new URLSearchParams(location.hash.slice(1))
  const shown = said.get('prompt') ?? long.get('prompt')
  const idle = document.querySelector('[data-job]').hidden
  return idle && said.get('model') === model && shown === prompt
}"""

#: The bytes of a figure's image, in the page: shape and a sum over all of them that tells images
#: apart.
IMAGE = """(name) => {
  const plot = Bokeh.documents[0].get_model_by_name('figure_' + name)
  const source = plot.renderers.find((one) => one.data_source?.data.image).data_source
  const cells = source.data.image[0]
  return {shape: cells.shape, bytes: cells.BYTES_PER_ELEMENT,
          left: source.data.x[0], wide: source.data.dw[0],
          sum: cells.reduce(
            (sum, cell, place) => (sum * 31 + cell * (place % 1009 + 1)) % 2147483647, 7)}
}"""


class Seen:
    """An open explorer page and what a person does on it."""

    def __init__(self, visited) -> None:
        self.visited, self.page = visited, visited.page
        self.page.set_default_timeout(30_000)  # models run behind what the page shows
        try:
            self.page.wait_for_function(DRAWN, timeout=60_000)
        except TimeoutError as error:
            shown = self.page.inner_text("body")
            raise AssertionError(
                f"nothing was drawn; errors {visited.errors}, failed {visited.failed}; "
                f"the page says: {shown}"
            ) from error

    def settled(self, act) -> None:
        """Do something and wait until the page shows what it asked for."""
        before = self.page.evaluate("Number(document.body.dataset.drawn)")
        act()
        self.page.wait_for_function(
            f"(before) => Number(document.body.dataset.drawn) > before && {DRAWN}",
            arg=before,
            timeout=60_000,
        )

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def run(self, prompt: str, model: str | None = None) -> None:
        """Run a prompt, and wait until the page shows that run and no other."""
        if model:
            self.page.select_option("[data-model]", model)
        self.page.fill("[data-prompt]", prompt)
        self.page.click("[data-run]")
        self.page.wait_for_function(
            SHOWN, arg=[model or self.page.input_value("[data-model]"), prompt], timeout=60_000
        )

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
