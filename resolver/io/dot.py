"""DNS over TLS upstreams: the stream of `tcp` inside a verified, resumed TLS connection (RFC 7858, RFC 8310)."""

from __future__ import annotations

from resolver.io.addresses import AddressBook, dial
from resolver.io.channel import Clock
from resolver.io.tcp import stream_link
from resolver.io.tls_client import ResumingContext, client_context
from resolver.io.warm import DIAL_TIMEOUT_S, Link, WarmChannel
from resolver.quirks import IdleLimit

ALPN = ["dot"]


def dot_channel(book: AddressBook, port: int, *, server_name: str, ca_file: str, clock: Clock) -> WarmChannel:
    """One warm connection; the certificate must be valid for `server_name` ("" means the host's own name)."""
    kept: list[ResumingContext] = []

    def context() -> ResumingContext:
        # Made at the first dial, not at start-up: a missing CA file is then this upstream's reason to fail and no other's.
        if not kept:
            kept.append(client_context(ca_file, ALPN))
        return kept[0]

    async def connect(channel: WarmChannel) -> Link:
        tls, name = context(), server_name or book.host
        return await dial(book, lambda address: stream_link(channel, address, port, clock, tls, name), DIAL_TIMEOUT_S)

    return WarmChannel(connect, encrypted=True, clock=clock, idle=IdleLimit())
