"""A scripted HTTP/1.1 edge on a real socket, and the little that a test needs to talk to edges through a pool."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import cast

from proxy.io.outbound import EdgeConnections
from proxy.io.rims import DialMarks
from proxy.messages import Abort, Fields, Leg, NullReceiver, RequestHead, ResponseHead
from resolver.endpoints import Endpoints
from resolver.errors import NoAddress
from tests.patience import HANG_S, soon

Reply = Callable[["Peer", bytes], bytes | None]


def ok(body: bytes = b"ok", *, status: int = 200, fields: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n%s\r\n%s" % (status, len(body), fields, body)


class Peer(asyncio.Protocol):
    """One connection of an EdgePeer: answers each head with what the script gives; None leaves it unanswered."""

    def __init__(self, edge: EdgePeer) -> None:
        self.edge = edge
        self.seen = b""
        self.served = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.edge.connections.append(self)
        self.edge.accepted += 1
        tls = transport.get_extra_info("ssl_object")
        self.edge.resumed += bool(tls is not None and tls.session_reused)
        self.edge.changed.set()

    def data_received(self, data: bytes) -> None:
        self.seen += data
        while b"\r\n\r\n" in self.seen:
            head, self.seen = self.seen.split(b"\r\n\r\n", 1)
            self.edge.requests.append(head)
            self.served += 1
            reply = self.edge.reply(self, head)
            if reply is not None and self.transport is not None:
                self.transport.write(reply)
        self.edge.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.edge.connections.remove(self)
        self.edge.changed.set()

    def reset(self) -> None:
        assert self.transport is not None
        self.transport.abort()


class EdgePeer:
    """Counts what arrives; `reply` may be changed at any time."""

    def __init__(self) -> None:
        self.reply: Reply = lambda peer, head: ok()
        self.connections: list[Peer] = []
        self.requests: list[bytes] = []
        self.accepted = self.resumed = 0
        self.changed = asyncio.Event()
        self.port = 0

    async def until(self, condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def close_all(self) -> None:
        for peer in list(self.connections):
            assert peer.transport is not None
            peer.transport.close()


@asynccontextmanager
async def edge_peer(
    *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[EdgePeer]:
    edge = EdgePeer()
    server = await asyncio.get_running_loop().create_server(lambda: Peer(edge), host, port, ssl=tls)
    edge.port = server.sockets[0].getsockname()[1]
    try:
        yield edge
    finally:
        server.close()
        edge.close_all()
        await edge.until(lambda: not edge.connections)
        await server.wait_closed()


@asynccontextmanager
async def silent_port(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """A port whose SYNs get no answer: a listener with a full backlog, what a black hole looks like from here."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, port))
    listener.listen(0)
    port = listener.getsockname()[1]
    fillers = []
    for _ in range(4):
        filler = socket.socket(listener.family)
        filler.setblocking(False)
        filler.connect_ex((host, port))
        fillers.append(filler)
    await asyncio.sleep(0)
    try:
        yield port
    finally:
        for sock in (listener, *fillers):
            sock.close()


class Names:
    """A resolver with a table that the test may change; `alpn` is what every HTTPS record promises."""

    def __init__(self, *, ttl_s: float = 60.0, alpn: tuple[str, ...] = (), **hosts: Sequence[str]) -> None:
        self.hosts = dict(hosts)
        self.ttl_s, self.alpn = ttl_s, alpn
        self.asked: list[str] = []

    async def endpoints(self, host: str, port: int) -> Endpoints:
        self.asked.append(host)
        await asyncio.sleep(0)
        if not self.hosts.get(host):
            raise NoAddress(host, "NXDOMAIN")
        return Endpoints(tuple(self.hosts[host]), port, self.alpn, self.ttl_s)


class Wait:
    """An Opening that can be awaited."""

    def __init__(self) -> None:
        self.result: asyncio.Future[tuple[Leg, DialMarks] | Abort] = asyncio.get_running_loop().create_future()

    def on_open(self, leg: Leg, marks: DialMarks) -> None:
        assert not self.result.done(), "told twice"
        self.result.set_result((leg, marks))

    def on_open_failed(self, abort: Abort) -> None:
        assert not self.result.done(), "told twice"
        self.result.set_result(abort)

    @property
    def at_once(self) -> bool:
        return self.result.done()

    async def leg(self) -> tuple[Leg, DialMarks]:
        found = await soon(self.result)
        assert not isinstance(found, Abort), found
        return found

    async def abort(self) -> Abort:
        found = await soon(self.result)
        assert isinstance(found, Abort), "opened"
        return found


def wait_for_leg(pool: EdgeConnections, *, fresh: bool = False, upgrade: bytes = b"") -> Wait:
    wait = Wait()
    pool.open(wait, fresh=fresh, upgrade=upgrade)
    return wait


class Hearing(NullReceiver):
    """The answer to one request, awaited whole."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.body = b""
        self.over: asyncio.Future[Abort | None] = asyncio.get_running_loop().create_future()

    def on_head(self, head: ResponseHead) -> None:
        self.head = head

    def on_data(self, chunk: bytes) -> None:
        self.body += chunk

    def on_end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def on_abort(self, abort: Abort) -> None:
        if not self.over.done():
            self.over.set_result(abort)


def say(leg: Leg, path: bytes = b"/", *, method: bytes = b"GET", fields: Fields | None = None) -> Hearing:
    """Send a request without a body."""
    hearing = Hearing()
    leg.receiver = hearing
    leg.head(RequestHead(method, path, b"http", b"edge.test", fields or []))
    leg.end()
    return hearing


async def ask(pool: EdgeConnections, path: bytes = b"/") -> tuple[Hearing, DialMarks]:
    """A whole exchange through the pool."""
    leg, marks = await wait_for_leg(pool).leg()
    hearing = say(leg, path)
    assert await soon(hearing.over) is None
    return hearing, marks


def seeded() -> random.Random:
    return random.Random(7)
