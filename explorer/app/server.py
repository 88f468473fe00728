"""The explorer as a local web server: wiring only.

``serve`` loads the first model, then serves pages until it is stopped. Each page gets a
`Session`; all of them share one model worker and one store of models and runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import panel as pn
from bokeh.document import Document
from tornado.websocket import WebSocketClosedError

import explorer.engine.nnsight_api  # noqa: F401  before anything that imports transformers' modeling code
from explorer.app.diagram import diagram
from explorer.app.display import Services
from explorer.app.guard import TOKEN, Guard, install, new_token
from explorer.app.loop_monitor import LoopLagMonitor
from explorer.app.page import ASSETS, build
from explorer.app.session import Session
from explorer.app.store import Store
from explorer.app.worker import Worker
from explorer.checkpoints.load import load
from explorer.model.prompts import model_inputs

log = logging.getLogger(__name__)

DEFAULT_MODEL = "specimen:qwen3_next"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 5006

#: Addresses that this machine alone reaches, and those that mean all its addresses.
LOOPBACK, EVERY_ADDRESS = ("127.0.0.1", "localhost", "::1"), ("0.0.0.0", "::")

#: Pages open at a time. Each holds figures and a run; Panel itself sets no limit.
MOST_SESSIONS = 8


class BusyPort(OSError):
    """Another program has the port; the message says so in one sentence."""


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    model: str = DEFAULT_MODEL
    prompt: str | None = None
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    browser: bool = True
    #: Whether visitors need a token where other machines can reach the server.
    token: bool = True


class SessionLimiter:
    """Limits the number of open pages.

    A page counts once its script connects over a websocket, not when it is fetched. The session
    of a page that was closed or reloaded stays on the server for a while; it does not count. A
    browser keeps a reloaded page connected until the new one has arrived, so a page is not refused
    before its script connects.
    """

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self.most = most
        self._open: dict[object, Callable[[], bool]] = {}
        self._lock = threading.Lock()

    def enter(self, key: object, left: Callable[[], bool] = lambda: False) -> bool:
        """Count a page; return False when the limit is reached.

        ``left()`` returns whether the page has lost its connection.
        """
        with self._lock:
            if sum(not has_left() for has_left in self._open.values()) >= self.most:
                return False
            self._open[key] = left
            return True

    def leave(self, key: object) -> None:
        with self._lock:
            self._open.pop(key, None)

    @property
    def sentence(self) -> str:
        """What a visitor reads when the limit is reached."""
        return (
            f"This explorer already has {self.most} pages open, which is its limit: "
            "close one, then reload."
        )


def page(services: Services, limiter: SessionLimiter) -> pn.Template:
    """Build a page with its session; its first message is answered by a refusal when too many
    are open.
    """
    document = pn.state.curdoc
    assert document is not None  # Panel calls this for a page
    template, board, bridge = build(document)
    session = Session(
        services,
        board,
        send=bridge._send_msg,
        post=functools.partial(_post, document),
        batched=functools.partial(_batched, document),
    )

    @functools.cache
    def has_place() -> bool:
        """Return whether the page may stay; settled by its first message."""
        return limiter.enter(document, lambda: connections(document) == 0)

    def on_message(event: Any) -> None:
        if has_place():
            session.receive(event.data)
        else:
            bridge._send_msg({"page_limit": limiter.sentence})

    bridge.on_msg(on_message)

    def on_closed(context: object) -> None:
        limiter.leave(document)
        session.close()

    pn.state.on_session_destroyed(on_closed)
    return template


def connections(document: Document) -> int:
    """Return how many websockets are connected to a page."""
    session = getattr(document.session_context, "session", None)
    return session.connection_count if session is not None else 0


@contextlib.contextmanager
def _batched(document: Document) -> Iterator[None]:
    """Send all changes in one message; the models of the page are counted once, before that."""
    with pn.io.hold(document), document.models.freeze():
        yield


def _post(document: Document, work: Callable[[], None]) -> None:
    """Run ``work`` on the event loop with the page's document; do nothing if the page is gone."""
    try:
        document.add_next_tick_callback(work)
    except RuntimeError:
        log.debug("a page went before its result came")


def origins(host: str, port: int) -> list[str]:
    """Return the exact origins a page may open its websocket from."""
    names = {host}
    if host in (*LOOPBACK, *EVERY_ADDRESS):
        names |= {"127.0.0.1", "localhost"}
    if host in EVERY_ADDRESS:
        names = (names - {host}) | {socket.gethostname(), *_own_addresses()}
    return sorted(f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names)


def _own_addresses() -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return set()


def free_port(host: str, port: int) -> int:
    """Return ``port`` if it is free on ``host`` (0: one the system gives).

    Raises BusyPort with a sentence for a port or host that cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError as error:
            raise BusyPort(
                f"Port {port} is reserved for the system; choose one above 1023 with --port."
            ) from error
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise BusyPort(
                    f"{host} is not an address of this machine; "
                    f"leave --host out for {DEFAULT_HOST}."
                ) from error
            raise BusyPort(
                f"Port {port} of {host} is busy; stop what uses it, "
                "or choose another one with --port."
            ) from error
        return probe.getsockname()[1]


def _token(settings: Settings) -> str | None:
    return new_token() if settings.token and settings.host not in LOOPBACK else None


def _address(host: str, port: int, token: str | None) -> str:
    """The address to open on this machine."""
    name = "127.0.0.1" if host in EVERY_ADDRESS else host
    query = "" if token is None else f"?{TOKEN}={token}"
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/{query}"


def reach(host: str, token: bool) -> str:
    """Return who can open the pages of a server that other machines reach."""
    where = "any address of this machine" if host in EVERY_ADDRESS else host
    who = "has the token in that address" if token else "knows that address: no token is asked for"
    return (
        f"Everybody who can reach {where} over the network and {who} can run models here, "
        "over a connection that is not encrypted."
    )


def report_unawaited(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error that nothing awaits, as the loop does by itself, unless a page was closed
    while a message was on its way to it.
    """
    if not isinstance(context.get("exception"), WebSocketClosedError):
        loop.default_exception_handler(context)


def serve(settings: Settings) -> None:
    """Load the model, then serve until stopped.

    Raises ValueError (a model or a prompt that will not do) and BusyPort before anything is served.
    """
    port = free_port(settings.host, settings.port)
    store = Store(load)
    print(f"Loading {settings.model} …", file=sys.stderr, flush=True)
    model = store.model(settings.model)
    if settings.prompt is not None:
        model_inputs(model, settings.prompt)
    services = Services(Worker(), store, diagram, LoopLagMonitor(), settings.model, settings.prompt)
    limiter = SessionLimiter()
    pn.extension()
    guard = Guard.of(origins(settings.host, port), _token(settings))
    address = _address(settings.host, port, guard.token)
    server: Any = pn.serve(
        {"/": lambda: page(services, limiter)},
        address=settings.host,
        port=port,
        websocket_origin=sorted(guard.hosts),
        static_dirs={"assets": str(ASSETS)},
        show=False,
        start=False,
        threaded=False,
        verbose=False,
        title="Bestiary explorer",
        # A page that is gone gives its place back; one whose websocket is slow to come keeps it.
        check_unused_sessions_milliseconds=3000,
        unused_session_lifetime_milliseconds=30_000,
        # A large page of figures is one message; patches stay far below.
        websocket_max_message_size=20_000_000,
        session_token_expiration=3600,
    )
    install(server._tornado, guard)  # bokeh gives its tornado application no public name
    print(f"The explorer is at {address}  (Ctrl-C stops it)", flush=True)
    if settings.host not in LOOPBACK:
        print(reach(settings.host, guard.token is not None), file=sys.stderr, flush=True)
    if settings.browser:
        server.io_loop.add_callback(webbrowser.open, address)
    server.io_loop.asyncio_loop.set_exception_handler(report_unawaited)
    services.loop_lag.start(server.io_loop.asyncio_loop)
    server.start()
    server.io_loop.start()
