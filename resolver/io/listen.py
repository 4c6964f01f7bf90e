"""Listen for DNS on UDP, TCP and TLS sockets (RFC 1035 4.2, RFC 7766, RFC 7858).

Theory: a datagram that can be answered from memory costs one wake-up's share, one look-up and one send: no transport
object, no task. Measured with the same cached answer: `loop.add_reader` on the socket, drained up to 64 datagrams for
each wake-up, 63 k queries a second; asyncio's datagram endpoint 17-21 k. The cap keeps other callbacks alive in a flood.

A stream connection takes messages in any number and answers each when it is known (RFC 7766 7). All answers of one loop
turn leave in one write, each with its length in front.

Who closes a connection: its own timer (idle, or a message that does not end), a client that does not read, the limit on
connections (the one that is longest without a question), `drain` and `close`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from typing import cast

from config.model import Listen
from resolver.io.service import DATAGRAM_LIMIT, STREAM_LIMIT, ResolverService

log = logging.getLogger("headrace.resolver")

DRAIN = 64
"""Datagrams read for each wake-up."""
LARGEST_QUERY = 4096
IDLE_S = 10.0
"""RFC 7766 6.2.3 asks for seconds, not minutes; also the time a message may take from its first byte to its last."""
MOST_PENDING = 256
"""Questions of one connection that wait for an answer; reading stops above it."""
HIGH_WATER, MOST_UNREAD = 64 * 1024, 1024 * 1024
"""Bytes a client has not taken: above the first no more questions are read, above the second it is dropped."""
MOST_CONNECTIONS = 4096


class UdpListener:
    """One bound socket. Replies that the kernel has no room for are lost, as datagrams are."""

    def __init__(self, listen: Listen, sock: socket.socket, service: ResolverService) -> None:
        self.listen = listen
        self._sock = sock
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._on_readable)

    def _on_readable(self) -> None:
        receive, send, cached = self._sock.recvfrom, self._sock.sendto, self._service.answer_cached
        for _ in range(DRAIN):
            try:
                wire, peer = receive(LARGEST_QUERY)
            except BlockingIOError:
                return
            except OSError:
                # Linux reports an ICMP error of an earlier reply here; the socket is fine.
                continue
            limit = self._service.rate_limit
            if limit is not None and not limit.admits(peer[0], self._service.now()):
                reply: bytes | None = self._service.refuse_rate(wire)
            else:
                reply = cached(wire, DATAGRAM_LIMIT)
            if reply is None:
                self._service.ask(wire, DATAGRAM_LIMIT, partial(self._answer, peer))
            elif reply:
                try:
                    send(reply, peer)
                except OSError:
                    continue

    def _answer(self, peer: tuple[str, int], reply: bytes, _source: str) -> None:
        if not reply or self._sock.fileno() < 0:
            return
        try:
            self._sock.sendto(reply, peer)
        except OSError as exc:
            log.debug("reply to %s not sent: %s", peer[0], exc)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()


class StreamConnection(asyncio.Protocol):
    """One client over TCP, or TLS when `sealed`."""

    def __init__(self, service: ResolverService, idle_s: float, *, sealed: bool, open_ones: Connections) -> None:
        self._service = service
        self._idle_s = idle_s
        self._sealed = sealed
        self._open = open_ones
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._out: list[bytes] = []
        self._pending = 0
        self._flushing = False
        self._stuck = False  # the client does not take what we wrote
        self._reading = True
        self._ending = False  # no more questions; close when the last answer is written
        self._last = self._loop.time()  # of the last whole message or answer
        self._begun: float | None = None  # when the first byte of an unfinished message came
        self._timer = self._loop.call_later(idle_s, self._on_timer)

    # --- what the transport says ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._peer: str = transport.get_extra_info("peername")[0]
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        self._open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._ending = True
        self._buffer.clear()
        self._open.discard(self)

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        if not self._buffer:
            self._begun = self._loop.time()
        self._buffer += data
        self._take_messages()
        self._flush()

    def eof_received(self) -> bool:
        """A client may close its side and still wait (RFC 7766 6.2.3 lets it); over TLS there is no such half."""
        self._ending = True
        keep = bool(self._pending or self._out) and not self._sealed
        if not keep:
            self._timer.cancel()
        return keep

    def pause_writing(self) -> None:
        self._stuck = True
        self._steer()

    def resume_writing(self) -> None:
        self._stuck = False
        self._take_messages()
        self._flush()

    # --- messages ---------------------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        buffer, at = self._buffer, 0
        while self._pending < MOST_PENDING and not self._stuck and len(buffer) - at >= 2:
            size = buffer[at] << 8 | buffer[at + 1]
            if len(buffer) - at - 2 < size:
                break
            at += 2 + size
            self._take(bytes(buffer[at - size : at]))
        if at:
            del buffer[:at]
            self._last = self._loop.time()
            self._begun = self._last if buffer else None
        self._steer()

    def _take(self, wire: bytes) -> None:
        """A message too short for an id gets no answer, as over UDP; the connection stays in step either way."""
        limit = self._service.rate_limit
        if limit is not None and not limit.admits(self._peer, self._service.now()):
            reply: bytes | None = self._service.refuse_rate(wire)
        else:
            reply = self._service.answer_cached(wire, STREAM_LIMIT, sealed=self._sealed, keepalive_s=self._idle_s)
        if reply is None:
            self._pending += 1
            self._service.ask(wire, STREAM_LIMIT, self._answer, sealed=self._sealed, keepalive_s=self._idle_s)
        elif reply:
            self._out.append(reply)

    def _answer(self, reply: bytes, _source: str) -> None:
        self._pending -= 1
        self._last = self._loop.time()
        if reply:
            self._out.append(reply)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._on_turn_end)

    def _on_turn_end(self) -> None:
        self._flushing = False
        if self._buffer and not self._ending:
            self._take_messages()
        self._flush()
        if self._ending and not self._pending:
            self._transport.close()

    def _flush(self) -> None:
        """One write for all that is ready: for TLS that is one record and one system call."""
        if not self._out:
            return
        out, self._out = self._out, []
        if self._transport.is_closing():
            return
        self._transport.write(b"".join([part for reply in out for part in (len(reply).to_bytes(2, "big"), reply)]))
        if self._transport.get_write_buffer_size() > MOST_UNREAD:
            self._transport.abort()

    def _steer(self) -> None:
        """Reads only while there is room for answers: a client that asks and never reads costs a bounded amount."""
        reading = not self._stuck and self._pending < MOST_PENDING and not self._ending
        if reading != self._reading and not self._transport.is_closing():
            self._reading = reading
            (self._transport.resume_reading if reading else self._transport.pause_reading)()

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def idle_since(self) -> float:
        """When it last did something; infinite while somebody waits for an answer on it."""
        return float("inf") if self._pending else self._last

    def _on_timer(self) -> None:
        now = self._loop.time()
        # A byte now and then keeps no connection open: an unfinished message counts from its first byte.
        oldest = self._begun if self._begun is not None and self._reading else self._last
        due = (now if self._pending else oldest) + self._idle_s
        if due <= now:
            self._close_idle()
        else:
            self._timer = self._loop.call_later(due - now, self._on_timer)

    def _close_idle(self) -> None:
        """A client that has not read what it asked for is reset; everybody else sees an orderly end."""
        if self._stuck or self._begun is not None:
            self._transport.abort()
        else:
            self._transport.close()

    def drain(self) -> None:
        """No more questions; closes when those that came are answered."""
        self._ending = True
        if not self._pending and not self._out:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


class Connections:
    """The open stream connections of all listeners, bounded: room is made by closing the one longest idle."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._all: set[StreamConnection] = set()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: StreamConnection) -> None:
        if len(self._all) >= self.most:
            min(self._all, key=lambda c: c.idle_since).abort()
        self._all.add(connection)

    def discard(self, connection: StreamConnection) -> None:
        self._all.discard(connection)

    def all(self) -> list[StreamConnection]:
        return list(self._all)


class DnsListeners:
    """What `listen_dns` opened. `addresses` name the real ports where 0 was asked for."""

    def __init__(self) -> None:
        self.datagrams: list[UdpListener] = []
        self.servers: list[asyncio.Server] = []
        self.addresses: list[Listen] = []
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.connections = Connections(MOST_CONNECTIONS if soft < 0 else max(16, min(MOST_CONNECTIONS, soft // 2)))

    def drain(self) -> None:
        """Takes no new connection and no new question on streams; UDP goes on until `close`."""
        for server in self.servers:
            server.close()
        for connection in self.connections.all():
            connection.drain()

    async def close(self) -> None:
        for listener in self.datagrams:
            listener.close()
        for server in self.servers:
            server.close()
        for connection in self.connections.all():
            connection.abort()
        for server in self.servers:
            await server.wait_closed()


async def listen_dns(
    listens: Sequence[Listen], service: ResolverService, *, tls: ssl.SSLContext | None, idle_s: float = IDLE_S
) -> DnsListeners:
    """Opens every `udp`, `tcp` and `tls` address, or none: raises OSError whose text names the address that failed.

    Other schemes are not ours and are passed over. `tls` is needed when there is a `tls` address.
    """
    opened = DnsListeners()
    try:
        for listen in listens:
            if listen.scheme == "udp":
                _open_udp(opened, listen, service)
            elif listen.scheme in ("tcp", "tls"):
                await _open_stream(opened, listen, service, tls if listen.scheme == "tls" else None, idle_s)
    except BaseException:
        await opened.close()
        raise
    return opened


def _open_udp(opened: DnsListeners, listen: Listen, service: ResolverService) -> None:
    sock = _bind(listen, socket.SOCK_DGRAM)
    opened.datagrams.append(UdpListener(listen, sock, service))
    opened.addresses.append(_actual(listen, sock))


async def _open_stream(
    opened: DnsListeners, listen: Listen, service: ResolverService, tls: ssl.SSLContext | None, idle_s: float
) -> None:
    if listen.scheme == "tls" and tls is None:
        raise ValueError(f"{listen}: no certificate for a TLS listener")
    sock = _bind(listen, socket.SOCK_STREAM)

    def connection() -> StreamConnection:
        return StreamConnection(service, idle_s, sealed=tls is not None, open_ones=opened.connections)

    loop = asyncio.get_running_loop()
    timeout_s = idle_s if tls is not None else None
    server = await loop.create_server(connection, sock=sock, ssl=tls, backlog=512, ssl_handshake_timeout=timeout_s)
    opened.servers.append(server)
    opened.addresses.append(_actual(listen, sock))


def _bind(listen: Listen, kind: socket.SocketKind) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK)
    try:
        if kind == socket.SOCK_STREAM:
            # For TCP it only skips TIME_WAIT. For UDP it would let two processes share a port and steal each other's.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((listen.host, listen.port))
    except OSError as exc:
        sock.close()
        raise OSError(exc.errno, f"cannot listen on {listen}: {exc.strerror}") from exc
    return sock


def _actual(listen: Listen, sock: socket.socket) -> Listen:
    return Listen(listen.scheme, listen.host, sock.getsockname()[1])
