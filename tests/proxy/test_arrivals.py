"""Connections that have not said anything yet: what they count for, and how they end."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from config.model import Listen
from headrace.lab.ca import ThrowAwayCa
from proxy.io.inbound_tcp import listen_tcp
from proxy.io.rims import InboundConnection, Limits
from tests.patience import no_hang
from tests.peers.services import ByHand

REQUEST = b"GET /x HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Counting(ByHand):
    """A service for at most `room` connections."""

    def __init__(self, room: int, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.room = room
        self.draining = False
        self.changed = asyncio.Event()
        self.on_exchange = lambda exchange: exchange.answer()

    def on_connected(self, connection: InboundConnection) -> bool:
        if len(self.connections) >= self.room:
            return False
        self.changed.set()
        taken = super().on_connected(connection)
        if self.draining:
            connection.drain()
        return taken

    def on_disconnected(self, connection: InboundConnection) -> None:
        assert connection in self.connections, "given back twice"
        super().on_disconnected(connection)
        self.changed.set()

    async def until(self, number: int) -> None:
        async with no_hang():
            while len(self.connections) != number:
                self.changed.clear()
                await self.changed.wait()


class Place:
    """A TLS listener and its clients."""

    def __init__(self, service: Counting, port: int, tls: ssl.SSLContext) -> None:
        self.service, self.port, self.tls = service, port, tls
        self.sockets: list[socket.socket] = []

    async def silent(self) -> socket.socket:
        """A client that says nothing. It need not be accepted yet."""
        sock = socket.socket()
        self.sockets.append(sock)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return sock

    async def ask(self) -> bytes:
        """The status line of an answer over TLS."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.tls, server_hostname="localhost"
        )
        try:
            writer.write(REQUEST)
            return await reader.readline()
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)


@asynccontextmanager
async def place(ca: ThrowAwayCa, room: int, limits: Limits | None = None) -> AsyncIterator[Place]:
    service = Counting(room, limits)
    context = ca.server_context(["h2", "http/1.1"])
    listener = await listen_tcp(Listen("https", "127.0.0.1", 0), service, tls=context)
    made = Place(service, listener.address[1], ca.client_context(["http/1.1"]))
    try:
        yield made
    finally:
        listener.close()
        for sock in made.sockets:
            sock.close()
        for connection in list(service.connections):
            connection.close_now()
        await service.until(0)


async def ended(sock: socket.socket) -> bytes:
    """What a client still gets until its connection is over."""
    got = b""
    async with no_hang():
        try:
            while chunk := await asyncio.get_running_loop().sock_recv(sock, 4096):
                got += chunk
        except ConnectionResetError:
            pass
    return got


async def test_handshakes_in_progress_count_and_their_places_come_free(ca: ThrowAwayCa) -> None:
    async with place(ca, room=2) as made:
        first, _ = await made.silent(), await made.silent()
        await made.service.until(2)
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await made.ask()
        first.close()
        await made.service.until(1)
        assert (await made.ask()).startswith(b"HTTP/1.1 200")


async def test_a_crowd_that_comes_at_once_is_all_let_in(ca: ThrowAwayCa) -> None:
    async with place(ca, room=200) as made:
        for _ in range(150):
            await made.silent()
        await made.service.until(150)


async def test_a_handshake_that_takes_too_long_is_cut(ca: ThrowAwayCa) -> None:
    async with place(ca, room=1, limits=Limits(header_timeout_s=0.1)) as made:
        assert await ended(await made.silent()) == b""
        await made.service.until(0)
        assert (await made.ask()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("said", [REQUEST, b"\x16\x03\x01\x00\x05hello", b"\x00" * 3000])
async def test_what_is_no_handshake_ends_and_its_place_comes_free(said: bytes, ca: ThrowAwayCa) -> None:
    async with place(ca, room=1) as made:
        sock = await made.silent()
        await asyncio.get_running_loop().sock_sendall(sock, said)
        assert b"HTTP" not in await ended(sock)
        await made.service.until(0)


async def test_a_stop_ends_a_handshake_in_progress(ca: ThrowAwayCa) -> None:
    async with place(ca, room=1) as made:
        sock = await made.silent()
        await made.service.until(1)
        (arriving,) = made.service.connections
        arriving.close_now()
        assert await ended(sock) == b""
        await made.service.until(0)


async def test_a_drain_lets_no_handshake_begin(ca: ThrowAwayCa) -> None:
    async with place(ca, room=1) as made:
        made.service.draining = True
        with suppress(ConnectionResetError):  # it may be that early
            assert await ended(await made.silent()) == b""
        assert not made.service.connections


async def handshake_held_back(made: Place) -> tuple[socket.socket, ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    """A client that has everything for the handshake's end and has not sent its last flight."""
    sock, loop = await made.silent(), asyncio.get_running_loop()
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = made.tls.wrap_bio(coming, going, server_hostname="localhost")
    async with no_hang():
        while True:
            try:
                session.do_handshake()
            except ssl.SSLWantReadError:
                await loop.sock_sendall(sock, going.read())
                coming.write(await loop.sock_recv(sock, 65536))
            else:
                return sock, session, coming, going


async def test_a_request_in_the_handshakes_last_flight_is_served(ca: ThrowAwayCa) -> None:
    async with place(ca, room=1) as made:
        sock, session, coming, going = await handshake_held_back(made)
        session.write(REQUEST)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, going.read())
        async with no_hang():
            while True:
                coming.write(await loop.sock_recv(sock, 65536))
                try:
                    assert session.read(4096).startswith(b"HTTP/1.1 200")
                except ssl.SSLWantReadError:
                    continue
                break


async def test_a_client_that_leaves_with_the_handshakes_last_flight_gives_its_place_back(ca: ThrowAwayCa) -> None:
    async with place(ca, room=1) as made:
        sock, session, _, going = await handshake_held_back(made)
        session.write(REQUEST)
        await asyncio.get_running_loop().sock_sendall(sock, going.read())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        sock.close()
        await made.service.until(0)
        assert (await made.ask()).startswith(b"HTTP/1.1 200")
