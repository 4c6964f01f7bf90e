"""Keep one HTTP/2 connection to a DoH upstream warm; what is spoken on it is `doh`, loaded at the first dial.

The `h2` package takes 15 ms of a start that may ask no upstream for a long time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resolver.io.addresses import AddressBook, dial
from resolver.io.channel import Clock
from resolver.io.doh_reply import authority_of
from resolver.io.tls_client import ResumingContext, client_context
from resolver.io.warm import DIAL_TIMEOUT_S, Link, WarmChannel
from resolver.quirks import IdleLimit

if TYPE_CHECKING:
    from resolver.io.doh import DohLink

ALPN = ["h2"]


@dataclass(slots=True)
class Allowance:
    """How many streams the upstream allowed last. A fresh connection knows its own limit only a round trip later, and
    what is sent before that beyond the limit is refused."""

    streams: int = 100


def doh_channel(
    book: AddressBook, port: int, *, path: str, server_name: str, ca_file: str, clock: Clock
) -> WarmChannel:
    """One warm h2 connection. `server_name` replaces the host in the certificate check only, never in `:authority`."""
    kept: list[ResumingContext] = []
    allowance = Allowance()
    authority = authority_of(book.host, port)

    def context() -> ResumingContext:
        if not kept:  # at the first dial, as in `dot`
            kept.append(client_context(ca_file, ALPN))
        return kept[0]

    async def link_to(address: str, channel: WarmChannel) -> DohLink:
        from resolver.io.doh import DohLink

        _, link = await asyncio.get_running_loop().create_connection(
            lambda: DohLink(channel, clock, authority, path, allowance),
            address,
            port,
            ssl=context(),
            server_hostname=server_name or book.host,
        )
        return link

    async def connect(channel: WarmChannel) -> Link:
        context()
        return await dial(book, lambda address: link_to(address, channel), DIAL_TIMEOUT_S)

    return WarmChannel(connect, encrypted=True, clock=clock, idle=IdleLimit())
