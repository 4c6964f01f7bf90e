"""`python -m bench.dns_hypercorn PORT CERT KEY`: DNS over HTTPS the usual Python way, an ASGI application under hypercorn.

The application is as quick as one can be: the message is looked up by its bytes, and everything in it is prepared.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import hypercorn.asyncio
import hypercorn.config
import uvloop

from bench.dns_origin import answer

_known: dict[bytes, tuple[bytes, list[tuple[bytes, bytes]]]] = {}


def prepared(parameters: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    found = _known.get(parameters)
    if found is None:
        encoded = parameters.removeprefix(b"dns=")
        body = answer(base64.urlsafe_b64decode(encoded + b"=" * (-len(encoded) % 4)))
        fields = [(b"content-type", b"application/dns-message"), (b"cache-control", b"max-age=86400")]
        found = _known[parameters] = body, [*fields, (b"content-length", b"%d" % len(body))]
    return found


async def application(
    scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[dict[str, Any]], Awaitable[None]]
) -> None:
    if scope["type"] != "http":
        return
    body, fields = prepared(scope["query_string"])
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    await send({"type": "http.response.body", "body": body})


def main(port: str, cert: str, key: str) -> None:
    config = hypercorn.config.Config()
    config.bind, config.certfile, config.keyfile, config.loglevel = [f"127.0.0.1:{port}"], cert, key, "error"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hypercorn.asyncio.serve(application, config))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
