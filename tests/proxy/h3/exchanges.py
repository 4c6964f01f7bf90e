"""One exchange on a connection of ours to an HTTP/3 edge, for the tests of the edge rim."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aioquic.h3.connection import H3Connection, Setting

from proxy.io.outbound_quic import H3EdgeConnection, QuicSessions, dial_quic
from proxy.messages import Leg, RequestHead
from tests.peers.h3peers import Exchanged

OK = [(b":status", b"200")]


@asynccontextmanager
async def dialled(port: int, ca: str, sessions: QuicSessions | None = None) -> AsyncIterator[H3EdgeConnection]:
    connection = await dial_quic(
        "127.0.0.1", port, server_name="localhost", ca_file=ca, timeout_s=30, sessions=sessions or QuicSessions()
    )
    try:
        yield connection
    finally:
        connection.abandon()


def head(method: bytes = b"GET", target: bytes = b"/", *fields: tuple[bytes, bytes]) -> RequestHead:
    return RequestHead(method, target, b"https", b"localhost", list(fields), None)


def start(connection: H3EdgeConnection, request: RequestHead | None = None, body: bytes | None = b"") -> Exchanged:
    """Open a leg and send; `body=None` leaves the request open."""
    leg: Leg = connection.open()
    exchange = Exchanged(leg=leg)
    leg.receiver = exchange
    leg.head(request or head())
    if body is not None:
        leg.data(body)
        leg.end()
    return exchange


class Older(H3Connection):
    """Knows nothing of RFC 9220."""

    def _get_local_settings(self) -> dict[int, int]:
        settings = super()._get_local_settings()
        del settings[Setting.ENABLE_CONNECT_PROTOCOL]
        return settings
