"""`python -m bench.dns_origin PORT [--delay MS] [--tls PORT CERT KEY]`: an upstream that answers every question with one
address, over UDP and TCP, and TLS where asked; at once, or after a delay that stands for a round trip.

It must never be what is measured: one socket, no parse, the same 16 bytes appended to each question.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import ssl
from collections.abc import Callable

ANSWER = b"\xc0\x0c\0\1\0\1\0\1\x51\x80\0\4\xc6\x33\x64\1"  # A 198.51.100.1, TTL one day
BURST = 128


def answer(query: bytes) -> bytes:
    """NOERROR with one A record, whatever was asked; OPT is left out, as an old server would."""
    at = 12
    while query[at]:
        at += query[at] + 1
    return query[:2] + b"\x81\x80\0\1\0\1\0\0\0\0" + query[12 : at + 5] + ANSWER


class Later:
    """Calls after the delay, in order, by one timer: a timer for each question would cost the origin its core."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Callable[[], None]] = []

    def call(self, what: Callable[[], None]) -> None:
        if not self.delay_s:
            what()
            return
        if not self._waiting:
            self._loop.call_soon(self._send_off)
        self._waiting.append(what)

    def _send_off(self) -> None:
        batch, self._waiting = self._waiting, []
        self._loop.call_later(self.delay_s, lambda: [what() for what in batch])


class Stream(asyncio.Protocol):
    def __init__(self, later: Later) -> None:
        self.later, self.unread = later, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.unread += data
        replies = b""
        while len(self.unread) > 2 and len(self.unread) >= (end := 2 + int.from_bytes(self.unread[:2])):
            reply = answer(self.unread[2:end])
            self.unread = self.unread[end:]
            replies += len(reply).to_bytes(2) + reply
        if replies:
            self.later.call(lambda: self.transport.write(replies))  # type: ignore[attr-defined]


def drain(sock: socket.socket, later: Later) -> None:
    for _ in range(BURST):
        try:
            query, source = sock.recvfrom(4096)
        except BlockingIOError:
            return
        later.call(lambda query=query, source=source: sock.sendto(answer(query), source))  # type: ignore[misc]


async def main(options: argparse.Namespace) -> None:
    loop, later = asyncio.get_running_loop(), Later(options.delay / 1000)
    sock = socket.socket(type=socket.SOCK_DGRAM)
    sock.setblocking(False)
    sock.bind(("127.0.0.1", options.port))
    loop.add_reader(sock, drain, sock, later)
    if options.tls:
        port, cert, key = options.tls
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        await loop.create_server(lambda: Stream(later), "127.0.0.1", int(port), ssl=context)
    server = await loop.create_server(lambda: Stream(later), "127.0.0.1", options.port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--delay", type=float, default=0.0, help="ms")
    parser.add_argument("--tls", nargs=3, metavar=("PORT", "CERT", "KEY"))
    asyncio.run(main(parser.parse_args()))
