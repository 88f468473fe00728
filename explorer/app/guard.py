"""Which HTTP requests the server answers, checked before any handler sees them.

A page of another site can make a browser send requests here (DNS rebinding): its Host header then
names that site. Only hosts this server was started for are answered, for pages, files and
websockets alike.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import unquote

from tornado.httputil import HTTPHeaders, HTTPServerRequest
from tornado.web import Application, OutputTransform, RequestHandler

#: The query argument that carries the token.
TOKEN = "access_token"

#: Bokeh's script for embedding a page into another site's, which it allows to read the answer.
_EMBEDDING = "/autoload.js"

#: The longest address answered, in characters.
_LONGEST_ADDRESS = 64_000

_HEADERS = {
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True)
class Guard:
    """The hosts that are answered, as ``name:port``, and the token a visitor needs (None: none)."""

    hosts: frozenset[str]
    token: str | None = None

    @classmethod
    def of(cls, hosts: Iterable[str], token: str | None = None) -> Guard:
        names = {host.lower() for host in hosts}
        # A browser leaves the standard port out.
        names |= {name.removesuffix(":80") for name in names if name.endswith(":80")}
        return cls(frozenset(names), token)

    def refusal(self, request: HTTPServerRequest) -> tuple[int, str] | None:
        """Return the status and the sentence for a request that is refused, None for others."""
        if request.host.lower() not in self.hosts:
            return 403, "This explorer does not answer to that host: use the address it printed."
        if len(request.uri or "") > _LONGEST_ADDRESS:
            return 414, "The address is too long."
        path = unquote(request.path)
        if "\0" in path or path.rstrip("/") == _EMBEDDING:
            return 404, "There is no such page."
        if self.token is not None and not (self.gave_token(request) or self._has_cookie(request)):
            return 403, "This explorer asks for a token: use the whole address it printed."
        return None

    def gave_token(self, request: HTTPServerRequest) -> bool:
        """Whether the token stands in the address."""
        given = request.query_arguments.get(TOKEN, [])
        return any(self._is_token(one.decode("utf-8", "replace")) for one in given)

    def _has_cookie(self, request: HTTPServerRequest) -> bool:
        cookie = request.cookies.get(self.cookie(request))
        return cookie is not None and self._is_token(cookie.value)

    def _is_token(self, text: str) -> bool:
        return self.token is not None and hmac.compare_digest(text.encode(), self.token.encode())

    @staticmethod
    def cookie(request: HTTPServerRequest) -> str:
        """The cookie's name; browsers share cookies between the ports of a host."""
        return f"bestiary-access-{request.host.rpartition(':')[2]}"


def new_token() -> str:
    return secrets.token_urlsafe(18)


class Refused(RequestHandler):
    """Answers every method with one status and sentence."""

    def initialize(self, status: int, sentence: str) -> None:
        self.status, self.sentence = status, sentence

    def prepare(self) -> None:
        self.set_status(self.status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(self.sentence)


def install(application: Application, guard: Guard) -> None:
    """Let ``application`` answer only what ``guard`` allows, with headers against framing."""
    find_handler = application.find_handler

    def guarded(request: HTTPServerRequest, **kwargs: Any) -> Any:
        if (refusal := guard.refusal(request)) is None:
            return find_handler(request, **kwargs)
        status, sentence = refusal
        return application.get_handler_delegate(
            request, Refused, {"status": status, "sentence": sentence}
        )

    class Headers(OutputTransform):
        """Adds the headers to every answer, and the cookie to one whose address has the token."""

        def __init__(self, request: HTTPServerRequest) -> None:
            self.request = request

        def transform_first_chunk(
            self, status_code: int, headers: HTTPHeaders, chunk: bytes, finishing: bool
        ) -> tuple[int, HTTPHeaders, bytes]:
            for name, value in _HEADERS.items():
                headers[name] = value
            if guard.token is not None and guard.gave_token(self.request):
                headers.add("Set-Cookie", _cookie(guard.cookie(self.request), guard.token))
            return status_code, headers, chunk

    application.find_handler = guarded
    application.add_transform(Headers)


def _cookie(name: str, value: str) -> str:
    cookie: SimpleCookie = SimpleCookie()
    cookie[name] = value
    cookie[name]["path"], cookie[name]["samesite"] = "/", "Strict"
    cookie[name]["httponly"] = True
    return cookie[name].OutputString()
