"""A Service for rims under test: it keeps every exchange and lets the test answer by hand, or echoes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.io.rims import InboundConnection, Limits, Origin
from proxy.messages import Leg, RequestHead, ResponseHead
from tests.patience import HANG_S
from tests.peers.heard import Heard


class Exchange(Heard):
    """One request as the service saw it."""

    def __init__(self, leg: Leg, head: RequestHead, origin: Origin) -> None:
        super().__init__()
        self.leg, self.head, self.origin = leg, head, origin

    def answer(self, body: bytes = b"ok", status: int = 200) -> None:
        self.leg.head(ResponseHead(status, [(b"content-length", b"%d" % len(body))], length=len(body)))
        self.leg.data(body)
        self.leg.end()


class ByHand:
    """Collects exchanges; `arrived()` waits for the next one."""

    def __init__(self, limits: Limits | None = None, *, accept: bool = True) -> None:
        self.limits = limits or Limits()
        self.exchanges: asyncio.Queue[Exchange] = asyncio.Queue()
        self.connections: set[InboundConnection] = set()
        self.accept = accept
        self.on_exchange: Callable[[Exchange], None] | None = None

    def known(self, head: RequestHead, origin: Origin) -> None: ...

    def shortcut(self, head: RequestHead, origin: Origin) -> None:
        return None

    def on_request(self, leg: Leg, head: RequestHead, origin: Origin) -> None:
        exchange = Exchange(leg, head, origin)
        leg.receiver = exchange
        if self.on_exchange is not None:
            self.on_exchange(exchange)
        self.exchanges.put_nowait(exchange)

    def on_connected(self, connection: InboundConnection) -> bool:
        self.connections.add(connection)
        return self.accept

    def on_disconnected(self, connection: InboundConnection) -> None:
        self.connections.discard(connection)

    async def arrived(self, timeout_s: float = HANG_S) -> Exchange:
        async with asyncio.timeout(timeout_s):
            return await self.exchanges.get()
