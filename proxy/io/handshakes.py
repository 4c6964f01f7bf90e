"""Accept TLS connections and see their handshakes through, counted from the first moment.

Theory: a connection that shakes hands is the cheapest to make and the dearest to serve, so `max_connections` is for it first
of all. The loop's own way to listen with TLS tells nobody of a connection before its handshake is done, nor that one failed;
so connections are accepted here, take a place in the count or are sent away at once, and are given to the loop one by one.
A task a handshake costs nothing beside the handshake.

Owner: the listener owns the door; a `Handshake` owns its task, which ends with it: done, failed, too slow (the header
timeout), or cancelled by `drain` or `close_now`. The protocol calls `arrived()` before it takes a place of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import struct
from collections.abc import Callable

from proxy.io.rims import Service

logger = logging.getLogger(__name__)

ACCEPTS = 64
"""Connections taken a wake-up; the loop's other sockets get their turn in between."""
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
NO_ROOM_PAUSE_S = 1.0
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: no TIME_WAIT for who was never let in


class Handshake:
    """One connection until its version is known: an InboundConnection that has asked for nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._task: asyncio.Task[object] | None = None
        self._unwanted = False
        self._counted = service.on_connected(self)

    def begin(self, sock: socket.socket, tls: ssl.SSLContext, made: Callable[[Handshake], asyncio.Protocol]) -> None:
        """Shake hands, if there was a place for it."""
        if self._unwanted or not self._counted:
            self.arrived()
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            sock.close()
            return
        loop = asyncio.get_running_loop()
        shaking = loop.connect_accepted_socket(
            lambda: made(self), sock, ssl=tls, ssl_handshake_timeout=self._service.limits.header_timeout_s
        )
        self._task = loop.create_task(shaking)
        self._task.add_done_callback(lambda task: self._ended(task, sock))

    def _ended(self, task: asyncio.Task[object], sock: socket.socket) -> None:
        self.arrived()
        if task.cancelled():
            sock.close()  # its transport's by now, if there is one: then this does nothing
        elif (failure := task.exception()) is not None:
            if not isinstance(failure, OSError):  # SSLError is one; anything else is a fault of ours
                logger.error("tls: a handshake failed", exc_info=failure)
            sock.close()

    def arrived(self) -> None:
        """Give the place in the count back, once: to the rim, or to whoever comes next."""
        if self._counted:
            self._counted = False
            self._service.on_disconnected(self)

    def drain(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        self._unwanted = True  # a gateway that drains says so inside on_connected
        if self._task is not None:
            self._task.cancel()


class TlsDoor:
    """Accepts on a bound socket, which it owns, until `close`. `made` gives a connection its protocol once TLS stands."""

    def __init__(
        self,
        sock: socket.socket,
        backlog: int,
        service: Service,
        tls: ssl.SSLContext,
        made: Callable[[Handshake], asyncio.Protocol],
    ) -> None:
        self._sock = sock
        self._service, self._tls, self._made = service, tls, made
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        sock.listen(backlog)
        self._open()

    def _open(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._acceptable)

    def _acceptable(self) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, _ = self._sock.accept()
            except OSError as exc:
                if exc.errno in NO_ROOM:
                    self._wait_for_room(exc)
                if not isinstance(exc, ConnectionAbortedError):
                    return
                continue
            sock.setblocking(False)
            Handshake(self._service).begin(sock, self._tls, self._made)

    def _wait_for_room(self, exc: OSError) -> None:
        logger.error("cannot accept: %s; trying again in %.0f s", exc.strerror, NO_ROOM_PAUSE_S)
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(NO_ROOM_PAUSE_S, self._open)

    def close(self) -> None:
        """Accept nothing more. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
