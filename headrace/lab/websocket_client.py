"""A WebSocket client on wsproto that counts pings and says how its socket ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from types import TracebackType
from typing import Any

import wsproto
from wsproto.connection import ConnectionType
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    TextMessage,
)
from wsproto.events import Request as Upgrade

from headrace.lab.clients import READ_SIZE, Target, open_stream

WAITING_EVENTS = 1024


class SocketClosed(Exception):
    """The socket ended; `code` is 1006 when no close frame came."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"closed {code} {reason}".rstrip())
        self.code = code


class WebSocketClient:
    """`async with WebSocketClient(target, "/v1/realtime?model=m") as socket`. Raises ConnectionError when refused."""

    def __init__(self, target: Target, path: str) -> None:
        self._target = target
        self._path = path
        self._wire = wsproto.WSConnection(ConnectionType.CLIENT)
        self._events: asyncio.Queue[dict[str, Any] | SocketClosed] = asyncio.Queue(WAITING_EVENTS)
        self._text: list[str] = []
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pings = 0
        self.closed = False

    async def __aenter__(self) -> WebSocketClient:
        self._reader, self._writer = await open_stream(self._target, "http/1.1")
        self._writer.write(self._wire.send(Upgrade(host=self._target.authority, target=self._path)))
        self._reading = asyncio.ensure_future(self._read())
        try:
            async with asyncio.timeout(30):
                await self._opened
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def say(self, event: dict[str, Any]) -> None:
        self._writer.write(self._wire.send(TextMessage(json.dumps(event))))

    async def hear(self, within_s: float = 10.0) -> dict[str, Any]:
        """The next event; raises `SocketClosed` at the end and TimeoutError when none came."""
        async with asyncio.timeout(within_s):
            heard = await self._events.get()
        if isinstance(heard, SocketClosed):
            raise heard
        return heard

    async def _read(self) -> None:
        ending = SocketClosed(1006, "no close frame")
        try:
            while not self.closed:
                received = await self._reader.read(READ_SIZE)
                self._wire.receive_data(received or None)
                for event in self._wire.events():
                    ending = self._on(event) or ending
                if not received:
                    break
        except (OSError, wsproto.utilities.RemoteProtocolError) as exc:
            ending = SocketClosed(1006, str(exc))
        self.closed = True
        if not self._opened.done():
            self._opened.set_exception(ConnectionError(str(ending)))
        await self._events.put(ending)

    def _on(self, event: Event) -> SocketClosed | None:
        if isinstance(event, AcceptConnection):
            self._opened.set_result(None)
        elif isinstance(event, RejectConnection):
            self._opened.set_exception(ConnectionError(f"upgrade refused with {event.status_code}"))
        elif isinstance(event, Ping):
            self.pings += 1
            self._writer.write(self._wire.send(event.response()))
        elif isinstance(event, TextMessage):
            self._text.append(event.data)
            if event.message_finished:
                self._events.put_nowait(json.loads("".join(self._text)))
                self._text.clear()
        elif isinstance(event, CloseConnection):
            self.closed = True
            return SocketClosed(event.code, event.reason or "")
        return None

    async def _stop(self) -> None:
        self._reading.cancel()
        self._writer.transport.abort()
        with contextlib.suppress(OSError, ssl.SSLError):
            await self._writer.wait_closed()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        if self._opened.done() and not self._opened.cancelled():
            self._opened.exception()
