"""One request as the lab's dialects see it, over whatever version it came.

Theory: `serve_http` reads the body, then runs the answer and a watch for the client's leaving side by side. A client
that leaves cancels the answer, so a generator needs no check of its own: its next `await` ends it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Fields = Iterable[tuple[str, str]]

MAX_BODY = 256 * 1024 * 1024


class ClientGone(Exception):
    """The client left before its request was whole."""


@dataclass(slots=True, eq=False)
class Exchange:
    """A whole request and the way to answer it. `headers`: lower-case names, the first of repeated ones."""

    method: str
    path: str
    query: str
    version: str
    headers: dict[str, str]
    body: bytes
    send: Send
    cut: Callable[[], None]
    finished: bool = False
    fields: list[tuple[str, str]] = field(default_factory=list)  # put on every answer to this request

    async def respond(
        self, status: int, body: bytes, content_type: str = "application/json", extra: Fields = ()
    ) -> None:
        """A whole answer with its length."""
        await self._head(status, [("content-type", content_type), ("content-length", str(len(body))), *extra])
        self.finished = True
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def begin_stream(self, extra: Fields = ()) -> None:
        """The head of an event stream: leaves at once, before any event."""
        await self._head(
            200, [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"), *extra]
        )

    async def begin_bytes(self, content_type: str) -> None:
        """The head of a body whose length is not known yet; its pieces are `event`s, its end is `end_stream`."""
        await self._head(200, [("content-type", content_type)])

    async def event(self, wire: bytes) -> None:
        await self.send({"type": "http.response.body", "body": wire, "more_body": True})

    async def end_stream(self) -> None:
        self.finished = True
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _head(self, status: int, fields: Fields) -> None:
        encoded = [(name.encode(), value.encode()) for name, value in (*fields, *self.fields)]
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})


async def serve_http(
    scope: Scope,
    receive: Receive,
    send: Send,
    answer: Callable[[Exchange], Awaitable[None]],
    on_cancelled: Callable[[Exchange], None],
) -> None:
    """Answer one request; `on_cancelled` is called once when the client left before the answer was finished."""
    try:
        body = await _whole_body(receive)
    except ClientGone:
        return
    exchange = _exchange(scope, body, send)
    answering = asyncio.ensure_future(answer(exchange))
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done() and not exchange.finished:
            answering.cancel()
            on_cancelled(exchange)
        await asyncio.wait({answering})
        if not answering.cancelled():
            answering.result()
    finally:
        leaving.cancel()
        answering.cancel()


def wrapped(app: Application) -> Callable[..., Awaitable[None]]:
    """The application in the five-argument form that hypercorn's connections call."""

    async def call(scope: Scope, receive: Receive, send: Send, _spawn: object, _soon: object) -> None:
        await app(scope, receive, send)

    return call


def compact(value: object) -> bytes:
    """JSON as the services send it on event lines: no spaces, UTF-8 unescaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def headers_of(scope: Scope) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


def _exchange(scope: Scope, body: bytes, send: Send) -> Exchange:
    return Exchange(
        method=scope["method"],
        path=scope["raw_path"].decode("latin-1"),
        query=scope["query_string"].decode("latin-1"),
        version=scope["http_version"],
        headers=headers_of(scope),
        body=body,
        send=send,
        cut=scope["state"]["connection"].cut,
    )


async def _whole_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            raise ClientGone
        if not message.get("more_body", False):
            return b"".join(parts)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
