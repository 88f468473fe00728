"""Which requests the server answers: hosts, and the token where other machines reach it."""

from __future__ import annotations

import pytest
from tornado.httputil import HTTPHeaders, HTTPServerRequest, RequestStartLine
from tornado.testing import AsyncHTTPTestCase
from tornado.web import Application, RequestHandler

from explorer.app.guard import TOKEN, Guard, install
from explorer.app.server import Settings, _token, origins, reach

GUARD = Guard.of(["192.0.2.7:5006"], "secret")


def request(uri: str = "/", host: str = "192.0.2.7:5006", **headers: str) -> HTTPServerRequest:
    class Connection:
        context = None

        def set_close_callback(self, callback: object) -> None:
            pass

    return HTTPServerRequest(
        start_line=RequestStartLine("GET", uri, "HTTP/1.1"),
        headers=HTTPHeaders({"Host": host, **headers}),
        connection=Connection(),
    )


@pytest.mark.parametrize(
    ("uri", "cookie", "status"),
    [
        ("/", "", 403),
        (f"/?{TOKEN}=guess", "", 403),
        (f"/?{TOKEN}=", "", 403),
        (f"/?{TOKEN}=secret", "", None),
        ("/ws", "", 403),
        ("/ws", "bestiary-access-5006=secret", None),
        ("/ws", "bestiary-access-5007=secret", 403),
        ("/assets/explorer.js", "bestiary-access-5006=secre", 403),
        (f"/?{TOKEN}=secret&x={'x' * 70_000}", "", 414),
    ],
)
def test_a_token_opens_the_pages(uri, cookie, status):
    refusal = GUARD.refusal(request(uri, Cookie=cookie))
    assert (refusal and refusal[0]) == status


def test_hosts_are_names_with_ports_in_any_case():
    guard = Guard.of(origins("127.0.0.1", 80))
    assert guard.refusal(request(host="LocalHost")) is None
    assert guard.refusal(request(host="127.0.0.1:80")) is None
    assert guard.refusal(request(host="127.0.0.1:81"))[0] == 403


def test_who_can_come_is_said_where_other_machines_reach_the_server():
    assert _token(Settings(host="127.0.0.1")) is None and _token(Settings(host="::1")) is None
    assert _token(Settings(host="0.0.0.0", token=False)) is None
    first, second = (_token(Settings(host=host)) for host in ("0.0.0.0", "192.0.2.7"))
    assert first and second and first != second
    assert "any address" in reach("0.0.0.0", True) and "no token" in reach("192.0.2.7", False)


class Page(RequestHandler):
    def get(self) -> None:
        self.finish("the page")


class TestAGuardedApplication(AsyncHTTPTestCase):
    def get_app(self) -> Application:
        application = Application([("/", Page)])
        install(application, Guard.of([f"127.0.0.1:{self.get_http_port()}"], "secret"))
        return application

    def test_the_token_is_asked_for_once(self) -> None:
        assert self.fetch("/").code == 403
        answer = self.fetch(f"/?{TOKEN}=secret")
        assert answer.body == b"the page" and answer.headers["X-Frame-Options"] == "DENY"
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert self.fetch("/", headers={"Cookie": cookie.split(";")[0]}).code == 200

    def test_an_unknown_host_is_refused_by_every_method(self) -> None:
        for method, body in (("GET", None), ("POST", ""), ("OPTIONS", None)):
            answer = self.fetch(
                f"/?{TOKEN}=secret", method=method, body=body, headers={"Host": "evil.example"}
            )
            assert answer.code == 403 and b"the page" not in answer.body
