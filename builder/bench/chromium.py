"""Open pages in a real Chromium and note errors and requests, for the tests and the measurements.

Playwright drives the system's browser; it is imported only when a page is opened. While
``launched()`` is open, an event loop runs in its thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Response, WebSocket

EXECUTABLE = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    # No other host resolves, so a page that requests one fails and is noticed.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1"}
LOCAL_SCHEMES = {"data", "blob", "about", "file", "chrome-error"}


def is_foreign(address: str) -> bool:
    """Whether an address leads to another host."""
    parts = urlsplit(address)
    return parts.scheme not in LOCAL_SCHEMES and (parts.hostname or "") not in LOCAL_HOSTS


def size_of(message: str | bytes) -> int:
    return len(message if isinstance(message, bytes) else message.encode())


def is_favicon(address: str) -> bool:
    """Whether an address is the one file that browsers request unasked."""
    return urlsplit(address).path == "/favicon.ico"


@dataclass
class Visit:
    """One opened page and what it did.

    ``errors``: console errors and uncaught exceptions; ``foreign``: requested addresses on other
    hosts; ``failed``: local requests answered 400 or worse, or not at all; ``frames``: bytes of
    each websocket message received.
    """

    page: Page
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)

    def assert_clean(self) -> None:
        """Assert that there were no console errors, no missing files and no requests to other
        hosts.
        """
        assert not self.foreign, f"requests to other hosts: {self.foreign}"
        assert not self.failed, f"failed requests: {self.failed}"
        assert not self.errors, f"console errors: {self.errors}"

    def watch(self) -> None:
        page = self.page
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self._requested(request.url))
        page.on("requestfailed", lambda request: self._failed(request.url, request.failure))
        page.on("response", self._response)
        page.on("websocket", self._socket)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not is_favicon((message.location or {}).get("url", "")):
            self.errors.append(message.text)

    def _requested(self, address: str) -> None:
        if is_foreign(address):
            self.foreign.append(address)

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self._failed(response.url, response.status)

    def _failed(self, address: str, why: object) -> None:
        # A request that the page aborted, as on navigation, is no failure.
        if "ERR_ABORTED" not in str(why) and not is_favicon(address):
            self.failed.append(f"{address}: {why}")

    def _socket(self, socket: WebSocket) -> None:
        self._requested(socket.url)
        socket.on("framereceived", lambda data: self.frames.append(size_of(data)))


@contextmanager
def launched() -> Iterator[Browser]:
    """Start Chromium with a fresh profile for as long as the block runs."""
    from playwright.sync_api import sync_playwright

    if not Path(EXECUTABLE).exists():
        raise FileNotFoundError(f"there is no Chromium at {EXECUTABLE}: `make browser` installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def open_page(
    browser: Browser,
    address: str,
    *,
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    javascript: bool = True,
    wait: Literal["commit", "domcontentloaded", "load", "networkidle"] = "load",
) -> Visit:
    """Open a page in a fresh context of ``browser``, watched from before its first request."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        java_script_enabled=javascript,
        permissions=["clipboard-read", "clipboard-write"],
    )
    visit = Visit(context.new_page())
    visit.watch()
    visit.page.goto(address, wait_until=wait)
    return visit
