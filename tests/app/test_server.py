"""The explorer's server: ports, origins, the limit of open pages, and what cannot be served."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import urllib.request
from contextlib import contextmanager

import pytest
from tornado.websocket import WebSocketClosedError

from explorer.__main__ import main
from explorer.app.server import BusyPort, SessionLimiter, free_port, origins, report_unawaited
from tests.support.app_page import HYBRID
from tests.support.explorer_server import explorer  # noqa: F401  a fixture


def test_pages_are_counted():
    limiter = SessionLimiter(2)
    assert limiter.enter("a") and limiter.enter("b") and not limiter.enter("c")
    limiter.leave("a")
    assert limiter.enter("c")


def test_a_page_nobody_looks_at_any_more_keeps_nobody_out():
    limiter, left = SessionLimiter(1), threading.Event()
    assert limiter.enter("a", left.is_set) and not limiter.enter("b")
    left.set()
    assert limiter.enter("b", left.is_set)


@contextmanager
def taken_port():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_origins_are_exact():
    assert origins("127.0.0.1", 5006) == ["127.0.0.1:5006", "localhost:5006"]
    assert origins("192.0.2.7", 80) == ["192.0.2.7:80"]
    assert all("*" not in origin for origin in origins("0.0.0.0", 5006))
    assert "[::1]:5006" in origins("::1", 5006)


def test_a_busy_port_is_reported_before_a_model_is_loaded(capsys):
    with taken_port() as port:
        with pytest.raises(BusyPort):
            free_port("127.0.0.1", port)
        assert main([HYBRID, "--port", str(port), "--no-browser"]) == 2
    said = capsys.readouterr().err
    assert (
        f"Port {port} of 127.0.0.1 is busy" in said
        and "Loading" not in said
        and "Traceback" not in said
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([HYBRID, "--prompt", ""], "The prompt is empty"),
        (["specimen:gpt2", "--prompt", "a " * 9000], "takes at most"),
        (["specimen:quen3_next"], "qwen3_next"),
        (["/no/such/model.gguf"], "/no/such/model.gguf"),
        ([HYBRID, "--port", "70000"], "no port 70000"),
        ([HYBRID, "--host", "192.0.2.7"], "192.0.2.7"),
    ],
)
def test_what_cannot_be_served_is_one_sentence_and_2(arguments, sentence, capsys):
    port = [] if "--port" in arguments else ["--port", "0"]
    assert main([*arguments, *port, "--no-browser"]) == 2
    said = [
        line
        for line in capsys.readouterr().err.strip().splitlines()
        if not line.startswith("Loading")
    ]
    assert len(said) == 1 and sentence in said[0]


def status_of(address: tuple[str, int], path: str, **headers: str) -> int:
    """The status of the answer to a GET with these headers."""
    line = http.client.HTTPConnection(*address, timeout=30)
    line.request("GET", path, headers=headers)
    status = line.getresponse().status
    line.close()
    return status


def websocket_status(address: tuple[str, int], origin: str, host: str) -> int:
    """How the server answers a websocket from a page of ``origin``."""
    return status_of(
        address,
        "/ws",
        **{
            "Host": host,
            "Origin": origin,
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Protocol": "bokeh, token",
        },
    )


def test_a_page_of_another_origin_gets_no_websocket(explorer):
    address = explorer.host, explorer.port
    own = f"{address[0]}:{address[1]}"
    assert websocket_status(address, "http://evil.example", own) == 403
    assert websocket_status(address, f"http://127.0.0.1:{explorer.port + 1}", own) == 403


@pytest.mark.parametrize("host", ["evil.example:{port}", "127.0.0.1", "127.0.0.1:{port}.evil", ""])
def test_a_host_name_the_server_does_not_know_gets_nothing(explorer, host):
    """As a page whose own name was made to lead here sends it, with an Origin that fits."""
    address, host = (explorer.host, explorer.port), host.format(port=explorer.port)
    assert websocket_status(address, f"http://{host}", host) == 403
    for path in ("/", "/assets/explorer.js", "/static/js/bokeh.min.js", "/nothing"):
        assert status_of(address, path, Host=host) == 403


def test_pages_cannot_be_framed_or_embedded(explorer):
    with urllib.request.urlopen(explorer.at(), timeout=60) as answer:
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    address = explorer.host, explorer.port
    assert status_of(address, "/autoload.js?bokeh-autoload-element=1") == 404


@pytest.mark.parametrize("path", ["/assets/explorer.js%00.css", "/%00", "/assets/%00"])
def test_an_address_with_a_null_byte_leads_nowhere(explorer, path):
    assert status_of((explorer.host, explorer.port), path) == 404


def test_a_page_closed_under_way_is_no_error_but_others_are_told(caplog):
    loop = asyncio.new_event_loop()
    for error in (WebSocketClosedError(), RuntimeError("told")):
        report_unawaited(loop, {"message": "never retrieved", "exception": error})
    loop.close()
    assert [str(record.exc_info[1]) for record in caplog.records] == ["told"]
