"""`python asgi_peer.py PORT UPSTREAM_PORT`: a streaming proxy the usual Python way, ASGI under hypercorn with httpx behind.

What people write, with care: one client with warm connections and no bound on them, bodies passed on as they come both
ways, fields of the connection dropped, and the upstream let go when the client leaves. uvloop below, no access log.
It runs in the peers' own environment, so nothing of ours is imported.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import hypercorn.asyncio
import hypercorn.config
import uvloop

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

OF_THE_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)

BODY_FOLLOWS = (b"content-length", b"transfer-encoding")


def passed_on(fields: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in fields if name.lower() not in OF_THE_CONNECTION]


class Proxy:
    def __init__(self, upstream_port: int) -> None:
        self._upstream = f"http://127.0.0.1:{upstream_port}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(limits=limits, timeout=None)  # an answer may take its time

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        whole = asyncio.Event()
        body = self._body(receive, whole) if any(name in BODY_FOLLOWS for name, _ in scope["headers"]) else None
        if body is None:  # httpx would send an empty one in chunks
            whole.set()
        tasks = [
            asyncio.create_task(self._relay(scope, body, send)),
            asyncio.create_task(self._left(receive, whole)),
        ]
        _, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        for failed in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(failed, Exception):
                raise failed

    async def _relay(self, scope: dict[str, Any], body: AsyncIterator[bytes] | None, send: Send) -> None:
        url = self._upstream + scope["raw_path"].decode() + ("?" + scope["query_string"].decode()).rstrip("?")
        fields = passed_on(scope["headers"])
        request = self._client.build_request(scope["method"], url, headers=fields, content=body)
        response = await self._client.send(request, stream=True)
        try:
            fields = passed_on(response.headers.raw)
            await send({"type": "http.response.start", "status": response.status_code, "headers": fields})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()

    @staticmethod
    async def _body(receive: Receive, whole: asyncio.Event) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client left")
            more = message.get("more_body", False)
            if chunk := message.get("body", b""):
                yield chunk
        whole.set()

    @staticmethod
    async def _left(receive: Receive, whole: asyncio.Event) -> None:
        """Returns when the client leaves; the request's own messages are `_body`'s."""
        await whole.wait()
        while (await receive())["type"] != "http.disconnect":
            pass


def main(port: str, upstream_port: str) -> None:
    config = hypercorn.config.Config()
    config.bind, config.loglevel, config.keep_alive_max_requests = [f"127.0.0.1:{port}"], "error", 1_000_000_000
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        proxy = Proxy(int(upstream_port))
        runner.run(hypercorn.asyncio.serve(proxy, config))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
