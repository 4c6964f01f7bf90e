"""A NAT for one UDP client: passes datagrams both ways, and gives the client a new port on demand."""

from __future__ import annotations

import asyncio
from typing import Any, Self


class _Outside(asyncio.DatagramProtocol):
    def __init__(self, nat: Nat) -> None:
        self._nat = nat

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if self._nat.client is not None:
            self._nat.inside.sendto(data, self._nat.client)


class Nat(asyncio.DatagramProtocol):
    """In front of a server on loopback. `port` is where the client sends; an async context manager."""

    def __init__(self, server_port: int) -> None:
        self.client: Any = None
        self._server = ("127.0.0.1", server_port)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.inside, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        self.port: int = self.inside.get_extra_info("sockname")[1]
        self._outside, _ = await loop.create_datagram_endpoint(lambda: _Outside(self), local_addr=("127.0.0.1", 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.inside.abort()
        self._outside.abort()
        await asyncio.sleep(0)

    async def rebind(self) -> None:
        """Forget the mapping: what still comes for the old port is lost."""
        old, loop = self._outside, asyncio.get_running_loop()
        self._outside, _ = await loop.create_datagram_endpoint(lambda: _Outside(self), local_addr=("127.0.0.1", 0))
        old.abort()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.client = addr
        self._outside.sendto(data, self._server)
