"""Carry a WebSocket session of a lab edge: admission, greeting, answers, and the idle limit that services have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from headrace.lab.asgi import Receive, Scope, Send, compact, headers_of
from headrace.lab.controls import Controls, Tally
from headrace.lab.realtime import RealtimeSession, ResponsesSession, Session

SUBPROTOCOL = "realtime"
KEY_SUBPROTOCOL = "openai-insecure-api-key."
LOOKS_PER_LIMIT = 10
_EMPTY = (b"content-length", b"0")


async def serve_websocket(
    scope: Scope,
    receive: Receive,
    send: Send,
    controls: Controls,
    tally: Tally,
    location: Callable[[str, str], str],
    model: str,
) -> None:
    """One socket from its upgrade to its end. Refusals are answers to the upgrade: 307, 401, 404, or as told."""
    await receive()  # websocket.connect
    path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
    if controls.silent:
        await receive()  # websocket.disconnect: nothing else can come before an answer
        return
    status = _refusal(scope, path, controls)
    if status:
        extra = [(b"location", location(path, query).encode())] if status == 307 else []
        tally.add("redirected" if status == 307 else "refused")
        await send({"type": "websocket.http.response.start", "status": status, "headers": [*extra, _EMPTY]})
        await send({"type": "websocket.http.response.body", "body": b"", "more_body": False})
        return
    offered = scope["subprotocols"]
    await send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL if SUBPROTOCOL in offered else None})
    tally.add("websockets")
    session = RealtimeSession(model) if path.endswith("/realtime") else ResponsesSession()
    await _converse(session, scope, receive, send, controls, tally)


async def _converse(
    session: Session, scope: Scope, receive: Receive, send: Send, controls: Controls, tally: Tally
) -> None:
    idle = asyncio.ensure_future(_drop_when_idle(scope["state"]["connection"], controls, tally))
    try:
        greeted = controls.greet
        if greeted:
            await _say(send, session.greeting())
        while (message := await receive())["type"] != "websocket.disconnect":
            if not greeted:
                greeted = True
                await _say(send, session.greeting())
            await _reply(session, message, send, controls, tally)
    finally:
        idle.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await idle


async def _reply(session: Session, message: dict[str, Any], send: Send, controls: Controls, tally: Tally) -> None:
    text = message.get("text") or (message.get("bytes") or b"").decode("utf-8", "replace")
    made = 0
    for is_token, event in session.on_event(text, controls.tokens):
        if is_token:
            await asyncio.sleep(controls.token_s if made else controls.first_token_s)
            made += 1
            tally.add("tokens")
        await _say(send, [event])
    tally.add("answered")


async def _say(send: Send, events: list[dict[str, Any]]) -> None:
    for event in events:
        await send({"type": "websocket.send", "text": compact(event).decode()})


async def _drop_when_idle(connection: Any, controls: Controls, tally: Tally) -> None:
    """Reset a socket from which no byte came for the limit: what load balancers in front of services do."""
    while True:
        limit = controls.websocket_idle_s
        await asyncio.sleep(max(limit, 1.0) / LOOKS_PER_LIMIT)
        if limit and connection.silent_for_s > limit:
            tally.add("idled_out")
            connection.cut()
            return


def _refusal(scope: Scope, path: str, controls: Controls) -> int:
    """The status that refuses this upgrade, or 0."""
    if controls.drain_to:
        return 307
    if path not in {"/v1/realtime", "/v1/responses"}:
        return 404
    if controls.require_key and not _has_key(scope, controls.require_key):
        return 401
    return controls.take_failure()


def _has_key(scope: Scope, key: str) -> bool:
    # Browsers cannot set Authorization on a WebSocket; the service takes the key as a subprotocol.
    return headers_of(scope).get("authorization") == f"Bearer {key}" or KEY_SUBPROTOCOL + key in scope["subprotocols"]
