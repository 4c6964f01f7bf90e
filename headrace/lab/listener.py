"""hypercorn on a TLS (or plain) TCP listener whose connections can be frozen, reset and counted.

hypercorn's own `serve` keeps its transports to itself. A lab must be able to die in the middle of an answer, so each
accepted connection is run by hypercorn's connection class while its transport stays in our hand, as `Connection`.
An application finds it under `scope["state"]["connection"]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import Iterable
from typing import Any, SupportsIndex, cast

from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.typing import AppWrapper

from headrace.lab.asgi import Application, wrapped

LOG = logging.getLogger("headrace.lab")
STOP_WITHIN_S = 1.0
STOP_TRIES = 4
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close sends RST and drops what is buffered


class WatchedReader(asyncio.StreamReader):
    """A reader that knows when bytes came: pings never reach an ASGI application, but they pass here."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._clock = loop.time
        self.last_read_at = loop.time()
        self.reads = 0

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.last_read_at = self._clock()
        self.reads += 1
        super().feed_data(data)


class Connection:
    """One accepted TCP connection."""

    def __init__(self, reader: WatchedReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._transport = cast(asyncio.Transport, writer.transport)
        self._socket: socket.socket = writer.get_extra_info("socket")

    @property
    def silent_for_s(self) -> float:
        """Seconds since the peer's last byte, control frames and acknowledgements of h2 included."""
        return asyncio.get_running_loop().time() - self._reader.last_read_at

    @property
    def reads(self) -> int:
        return self._reader.reads

    def freeze(self) -> None:
        """Read nothing more: the peer sees an open connection that never answers, not even to a PING."""
        # A closing transport refuses; there is nothing left to freeze then.
        with contextlib.suppress(RuntimeError):
            self._transport.pause_reading()

    def thaw(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._transport.resume_reading()

    def cut(self) -> None:
        """Die as a killed process does: RST, whatever was being sent."""
        if self._socket.fileno() >= 0:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        # A TLS transport of Python 3.11.2 that was closed twice has forgotten what there is to abort.
        with contextlib.suppress(AttributeError):
            self._transport.abort()


class HypercornConnection(TCPServer):
    """hypercorn's connection, without the timer that keeps a closed one for the rest of its keep-alive time."""

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()


class TcpListener:
    """Serves one application over h1 and h2 on one listening socket."""

    def __init__(self, app: Application, *, tls: ssl.SSLContext | None, alt_svc: str = "") -> None:
        self._app = cast(AppWrapper, wrapped(app))
        self._tls = tls
        self._context = WorkerContext(None)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections: set[Connection] = set()
        self.accepted = 0
        self._config = _hypercorn_config(alt_svc)

    async def start(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._context = WorkerContext(None)
        self._server = await loop.create_server(self._new_protocol, sock=listening, ssl=self._tls, backlog=256)

    async def stop(self) -> None:
        """Close the listener and reset what is connected. Returns when every connection's task has ended."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for connection in tuple(self.connections):
            connection.cut()
        # A reset ends a connection's task by itself. To cancel it first would end hypercorn's sender while its streams
        # wait for it to drain: they would wait for ever, and only a second cancel would reach them.
        for _ in range(STOP_TRIES):
            if not self._tasks:
                break
            _, late = await asyncio.wait(tuple(self._tasks), timeout=STOP_WITHIN_S)
            for task in late:
                task.cancel()

    def _new_protocol(self) -> asyncio.StreamReaderProtocol:
        loop = asyncio.get_running_loop()
        reader = WatchedReader(loop)

        def run(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._server is None:
                # Its handshake was under way when the listener died.
                writer.transport.abort()
                return
            task = loop.create_task(self._run(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return asyncio.StreamReaderProtocol(reader, run, loop)

    async def _run(self, reader: WatchedReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self.connections.add(connection)
        self.accepted += 1
        loop = asyncio.get_running_loop()
        state: Any = {"connection": connection}
        try:
            await HypercornConnection(self._app, loop, self._config, self._context, state, reader, writer)
        except* (OSError, ssl.SSLError) as lost:
            LOG.debug("connection lost: %s", lost.exceptions)
        finally:
            self.connections.discard(connection)
            connection.cut()


def _hypercorn_config(alt_svc: str) -> Config:
    config = Config()
    config.errorlog = LOG
    config.include_server_header = False
    config.keep_alive_timeout = 120.0
    config.h2_max_concurrent_streams = 256
    if alt_svc:
        config.alt_svc_headers = [alt_svc]
    return config
