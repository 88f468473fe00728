"""A real Chromium, watched: the tests and the measurements open pages through this.

Playwright drives the browser the system has; it is imported only when a page is
opened. While ``launched()`` is open an event loop runs in its thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

EXECUTABLE = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    # A name that is not this machine never resolves: a page that asks another host fails, and is seen to.
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
    """The one file a browser asks for that no page named."""
    return urlsplit(address).path == "/favicon.ico"


@dataclass
class Visit:
    """One opened page and what it did.

    ``errors``: console errors and uncaught exceptions; ``foreign``: addresses on
    other hosts it asked for; ``failed``: local requests answered 400 or worse, or
    not at all; ``frames``: size in bytes of each websocket message received.
    """

    page: object
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)

    def assert_clean(self) -> None:
        """No error on the console, no missing file, nothing asked of another host."""
        assert not self.foreign, f"asked other hosts: {self.foreign}"
        assert not self.failed, f"failed requests: {self.failed}"
        assert not self.errors, f"console errors: {self.errors}"

    def watch(self) -> None:
        page = self.page
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self._asked(request.url))
        page.on("requestfailed", lambda request: self._failed(request.url, request.failure))
        page.on(
            "response",
            lambda answer: (
                self._failed(answer.url, answer.status) if answer.status >= 400 else None
            ),
        )
        page.on("websocket", self._socket)

    def _console(self, message: object) -> None:
        if message.type == "error" and not is_favicon((message.location or {}).get("url", "")):
            self.errors.append(message.text)

    def _asked(self, address: str) -> None:
        if is_foreign(address):
            self.foreign.append(address)

    def _failed(self, address: str, why: object) -> None:
        # A request the page itself took back (it navigated on) is no failure.
        if "ERR_ABORTED" not in str(why) and not is_favicon(address):
            self.failed.append(f"{address}: {why}")

    def _socket(self, socket: object) -> None:
        self._asked(socket.url)
        socket.on("framereceived", lambda data: self.frames.append(size_of(data)))


@contextmanager
def launched() -> Iterator[object]:
    """Chromium with a profile of its own, for as long as the block runs."""
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
    browser: object,
    address: str,
    *,
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    javascript: bool = True,
    wait: str = "load",
) -> Visit:
    """A page in a fresh context of ``browser``, watched from before its first request."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        java_script_enabled=javascript,
        permissions=["clipboard-read", "clipboard-write"],
    )
    seen = Visit(context.new_page())
    seen.watch()
    seen.page.goto(address, wait_until=wait)
    return seen
