"""DNS over one TCP or TLS connection: length-prefixed messages, pipelined, answered in any order (RFC 7766).

Theory: each question in flight has an id of its own, drawn anew, so that two clients with the same id never meet. A
reply that belongs to nothing in flight is an error of the connection: a stream has no spoofers, only a peer that
miscounts, and after that no boundary can be trusted. All that a loop turn submits leaves in one write, prefix and
message together (RFC 7766 8: some peers read the prefix as a message of its own).
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterable
from contextlib import suppress
from typing import cast

from resolver import outgoing as o
from resolver import wire as w
from resolver.errors import Malformed
from resolver.io.addresses import AddressBook, dial
from resolver.io.channel import Clock, words
from resolver.io.tls_client import remember
from resolver.io.warm import DIAL_TIMEOUT_S, MAX_IN_FLIGHT, Errand, Link, WarmChannel
from resolver.quirks import IdleLimit

FORGET_AFTER_S = 10.0  # how long an unanswered id stays reserved behind its deadline


class StreamLink(asyncio.Protocol):
    """One connection; see the module's head. It belongs to a `WarmChannel`."""

    def __init__(self, channel: WarmChannel, clock: Clock, *, padded: bool) -> None:
        self._channel, self._clock, self._padded = channel, clock, padded
        self.heard_at = 0.0
        self.answers = 0
        self._flight: dict[int, Errand] = {}
        self._outbox: list[bytes] = []
        self._unread = b""
        self._transport: asyncio.Transport | None = None
        self._broken = ""

    # --- of the channel ----------------------------------------------------------------------------------------------

    def takes_more(self) -> bool:
        if len(self._flight) >= MAX_IN_FLIGHT:
            self._forget_old()
        return self._transport is not None and not self._broken and len(self._flight) < MAX_IN_FLIGHT

    def errands(self) -> Iterable[Errand]:
        return self._flight.values()

    def submit(self, errand: Errand) -> None:
        ident = int.from_bytes(os.urandom(2))
        while ident in self._flight:
            ident = ident + 1 & 0xFFFF
        self._flight[ident] = errand
        message = o.compose(errand.out, ident, errand.question, padded=self._padded, keepalive=self.answers == 0)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(len(message).to_bytes(2) + message)

    def shut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- of the loop -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.heard_at = self._clock()

    def data_received(self, chunk: bytes) -> None:
        self.heard_at = self._clock()
        if self.answers == 0 and self._transport is not None:
            remember(self._transport)
        unread = self._unread + chunk if self._unread else chunk
        at = 0
        while len(unread) - at >= 2 and not self._broken:
            end = at + 2 + (unread[at] << 8 | unread[at + 1])
            if end > len(unread):
                break
            self._take(unread[at + 2 : end])
            at = end
        self._unread = unread[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._channel.lost(self, self._broken or (words(exc) if exc else "closed before it answered"))

    # --- messages ----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if self._transport is not None and outbox:
            self._transport.write(b"".join(outbox))

    def _take(self, reply: bytes) -> None:
        ident = reply[0] << 8 | reply[1] if len(reply) >= w.HEADER else -1
        errand = self._flight.get(ident)
        if errand is None or o.match(reply, ident, errand.question) is o.Match.OTHER:
            # Kept in flight: the connection's end moves these questions to a fresh one.
            self._broken = f"reply of {len(reply)} bytes matches no question in flight"
            self.shut()
            return
        del self._flight[ident]
        if self.answers == 0:
            self._hear_idle_limit(reply)
        self._channel.answered(self, errand, reply)

    def _hear_idle_limit(self, reply: bytes) -> None:
        with suppress(Malformed):
            named_s = o.keepalive_s(w.scan(reply))
            if named_s is not None:
                self._channel.idle.told(named_s)

    def _forget_old(self) -> None:
        before = self._clock() - FORGET_AFTER_S
        for ident, errand in list(self._flight.items()):
            if errand.finished and errand.deadline < before:
                del self._flight[ident]


async def stream_link(
    channel: WarmChannel,
    address: str,
    port: int,
    clock: Clock,
    tls: ssl.SSLContext | None = None,
    server_name: str | None = None,
) -> StreamLink:
    """A connected link, its TLS handshake done and verified. Raises OSError. Queries over TLS are padded (RFC 8467)."""
    _, link = await asyncio.get_running_loop().create_connection(
        lambda: StreamLink(channel, clock, padded=tls is not None),
        address,
        port,
        ssl=tls,
        server_hostname=server_name,
    )
    return link


def tcp_channel(book: AddressBook, port: int, *, clock: Clock) -> WarmChannel:
    """Plain DNS over TCP, one warm connection."""

    async def connect(channel: WarmChannel) -> Link:
        return await dial(book, lambda address: stream_link(channel, address, port, clock), DIAL_TIMEOUT_S)

    return WarmChannel(connect, encrypted=False, clock=clock, idle=IdleLimit())
