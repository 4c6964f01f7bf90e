"""The admin interface: what the daemon knows, and the few changes that may be asked of it, over HTTP on loopback.

Theory: an ASGI application served by hypercorn. Reading needs no token, because only this machine can connect; pages in a
browser can connect too, so Host and Origin are checked first (DNS rebinding, cross-site requests). Every change needs the
token. hypercorn is imported when the first connection comes: the port is open from the start, its cost is not.

      Host is loopback? --no--> 421      Origin is ours, or none? --no--> 403
      GET /status ... --> JSON           POST /reload ... --> token? --no--> 401

Rules for editing: 1. an answer never holds a secret; 2. a new path is one line in GETS or POSTS.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol
from urllib.parse import parse_qs

from proxy.routing import host_of, is_loopback

FORMAT = 1
"""The "version" field of every JSON answer; it grows when a field changes its meaning or goes."""
MAX_REQUESTS = 1000
MAX_ENTRIES = 5000
"""Cache entries in one answer: about 50 ms of work between which nothing else is served."""
MAX_QUERY_FIELDS = 16
GRACE_S = 1.0
JSON = b"application/json"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"

logger = logging.getLogger("headrace.admin")
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Query = Mapping[str, list[str]]


class Refused(Exception):
    """A request that gets an error answer."""

    def __init__(self, status: int, message: str, **fields: object) -> None:
        super().__init__(message)
        self.status = status
        self.fields = fields


class Operations(Protocol):
    """What the daemon offers here. Plain JSON types; no secrets."""

    def status(self) -> dict[str, object]: ...
    def edges(self) -> dict[str, object]: ...
    def requests(self, last: int) -> dict[str, object]: ...
    def tickets(self) -> dict[str, object]: ...
    def resolver(self) -> dict[str, object]: ...
    def metrics(self) -> str: ...
    async def rotate_tickets(self) -> dict[str, object]: ...
    def flush_resolver(self, name: str | None) -> dict[str, object]: ...
    async def query(self, name: str, rdtype: str, *, explained: bool = False) -> dict[str, object]: ...
    def cache(self) -> dict[str, object]: ...
    def cache_entries(self, below: str, limit: int) -> dict[str, object]: ...
    async def reload(self) -> dict[str, object]: ...


class AdminApp:
    """The ASGI application."""

    def __init__(self, operations: Operations, *, token: str, metrics: bool) -> None:
        self.operations = operations
        self.token = token
        self.with_metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, send)

    async def _http(self, scope: Scope, send: Send) -> None:
        try:
            status, kind, body = 200, JSON, await self._answer(scope)
            if isinstance(body, str):
                kind = TEXT
        except Refused as exc:
            status, kind, body = exc.status, JSON, {"error": str(exc), **exc.fields}
        except Exception:
            logger.exception("admin request failed", extra={"fields": {"path": scope["path"]}})
            status, kind, body = 500, JSON, {"error": "internal error; the log has the reason"}
        payload = body.encode() if isinstance(body, str) else json.dumps({"version": FORMAT, **body}).encode() + b"\n"
        await _respond(send, status, kind, payload, head_only=scope["method"] == "HEAD")

    async def _answer(self, scope: Scope) -> dict[str, object] | str:
        headers = {name.lower(): value for name, value in scope["headers"]}
        self._guard(headers, scope)
        path, query = scope["path"], _query_of(scope)
        if path in POSTS:
            if scope["method"] != "POST":
                raise Refused(405, f"{path} is a change: use POST")
            self._need_token(headers)
            return await POSTS[path](self.operations, query)
        if path not in GETS or (path == "/metrics" and not self.with_metrics):
            raise Refused(404, "no such page", paths=sorted([*GETS, *POSTS]))
        if scope["method"] not in ("GET", "HEAD"):
            raise Refused(405, f"{path} is read with GET")
        return await GETS[path](self.operations, query)

    def _guard(self, headers: Mapping[bytes, bytes], scope: Scope) -> None:
        """Refuse names that are not this machine (DNS rebinding) and pages of other sites."""
        host = headers.get(b"host", b"")
        if not is_loopback(host_of(host)):
            raise Refused(421, "this name is not served here; use 127.0.0.1, [::1] or localhost")
        origin = headers.get(b"origin")
        foreign_site = headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        if (origin is not None and origin.lower() != b"http://" + host.lower()) or foreign_site:
            raise Refused(403, "requests from other sites are refused")

    def _need_token(self, headers: Mapping[bytes, bytes]) -> None:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # Constant time, so that a token cannot be guessed byte by byte.
        right = hmac.compare_digest(given.strip(), self.token.encode())
        if not self.token or scheme.lower() != b"bearer" or not right:
            raise Refused(401, "a change needs the admin token: Authorization: Bearer TOKEN")


def _query_of(scope: Scope) -> Query:
    try:
        return parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=MAX_QUERY_FIELDS)
    except ValueError as exc:
        raise Refused(400, f"a query of more than {MAX_QUERY_FIELDS} fields") from exc


async def _status(operations: Operations, query: Query) -> dict[str, object]:
    return operations.status()


async def _edges(operations: Operations, query: Query) -> dict[str, object]:
    return operations.edges()


async def _requests(operations: Operations, query: Query) -> dict[str, object]:
    text = query.get("last", ["20"])[-1]
    # The length first: int() of thousands of digits is refused by Python itself, with a ValueError.
    if not text.isdecimal() or len(text) > 4 or not 1 <= int(text) <= MAX_REQUESTS:
        raise Refused(400, f"last must be a number from 1 to {MAX_REQUESTS}")
    return operations.requests(int(text))


async def _tickets(operations: Operations, query: Query) -> dict[str, object]:
    return operations.tickets()


async def _resolver(operations: Operations, query: Query) -> dict[str, object]:
    return operations.resolver()


async def _query(operations: Operations, query: Query) -> dict[str, object]:
    name, rdtype = query.get("name", [""])[-1], query.get("type", ["A"])[-1]
    if not name:
        raise Refused(400, "name is missing")
    return await operations.query(name, rdtype, explained=query.get("explain", ["0"])[-1] == "1")


async def _cache(operations: Operations, query: Query) -> dict[str, object]:
    return operations.cache()


async def _cache_entries(operations: Operations, query: Query) -> dict[str, object]:
    text = query.get("limit", ["1000"])[-1]
    if not text.isdecimal() or not 1 <= int(text) <= MAX_ENTRIES:
        raise Refused(400, f"limit must be a number from 1 to {MAX_ENTRIES}")
    return operations.cache_entries(query.get("below", [""])[-1], int(text))


async def _metrics(operations: Operations, query: Query) -> str:
    return operations.metrics()


async def _healthz(operations: Operations, query: Query) -> dict[str, object]:
    return {"ok": True}


async def _reload(operations: Operations, query: Query) -> dict[str, object]:
    return await operations.reload()


async def _rotate(operations: Operations, query: Query) -> dict[str, object]:
    return await operations.rotate_tickets()


async def _flush(operations: Operations, query: Query) -> dict[str, object]:
    return operations.flush_resolver(query.get("name", [None])[-1] if "name" in query else None)


Page = Callable[[Operations, Query], Awaitable[dict[str, object]]]
GETS: dict[str, Callable[[Operations, Query], Awaitable[dict[str, object] | str]]] = {
    "/status": _status,
    "/edges": _edges,
    "/requests": _requests,
    "/tickets": _tickets,
    "/resolver": _resolver,
    "/resolver/query": _query,
    "/resolver/cache": _cache,
    "/resolver/cache/entries": _cache_entries,
    "/metrics": _metrics,
    "/healthz": _healthz,
}
POSTS: dict[str, Page] = {"/reload": _reload, "/tickets/rotate": _rotate, "/resolver/flush": _flush}


async def _respond(send: Send, status: int, kind: bytes, payload: bytes, *, head_only: bool) -> None:
    fields = [
        (b"content-type", kind),
        (b"content-length", str(len(payload)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
    ]
    if status == 401:
        fields.append((b"www-authenticate", b'Bearer realm="headrace admin"'))
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": b"" if head_only else payload})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _say_why_it_ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("the admin interface ended", exc_info=task.exception())


class AdminServer:
    """Serves an AdminApp on a socket that is bound already.

    Owner: the daemon. The task of hypercorn begins with the first connection and ends in `close`, which alone cancels it.
    """

    def __init__(self, app: AdminApp, bound: socket.socket) -> None:
        self.app = app
        self._socket = bound
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.address: tuple[str, int] = bound.getsockname()[:2]

    def start(self) -> None:
        self._socket.setblocking(False)
        self._socket.listen(64)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._on_first_connection)

    def _on_first_connection(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        self._task = loop.create_task(self._serve(), name="admin")
        self._task.add_done_callback(_say_why_it_ended)

    async def _serve(self) -> None:
        from hypercorn.asyncio import serve
        from hypercorn.config import Config

        config = Config()
        # hypercorn makes a socket of its own from the number, and closes it.
        config.bind = [f"fd://{self._socket.detach()}"]
        config.errorlog = config.accesslog = None
        config.graceful_timeout = GRACE_S
        config.include_server_header = False
        config.h11_max_incomplete_size = 32 * 1024
        # A shutdown trigger of ours keeps hypercorn from taking SIGTERM and SIGINT.
        await serve(self.app, config, shutdown_trigger=self._stop.wait)  # type: ignore[arg-type]

    async def close(self) -> None:
        self._stop.set()
        if self._task is None:
            if self._socket.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
                self._socket.close()
            return
        done, _ = await asyncio.wait([self._task], timeout=2 * GRACE_S)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=GRACE_S)
