"""`python -m bench.dns_origin PORT`: an upstream that answers every UDP and TCP question with one address at once.

It must never be what is measured: one socket, no parse, the same 16 bytes appended to each question.
"""

from __future__ import annotations

import asyncio
import socket
import sys

ANSWER = b"\xc0\x0c\0\1\0\1\0\1\x51\x80\0\4\xc6\x33\x64\1"  # A 198.51.100.1, TTL one day
BURST = 128


def answer(query: bytes) -> bytes:
    """NOERROR with one A record, whatever was asked; OPT is left out, as an old server would."""
    at = 12
    while query[at]:
        at += query[at] + 1
    return query[:2] + b"\x81\x80\0\1\0\1\0\0\0\0" + query[12 : at + 5] + ANSWER


class Stream(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.unread = transport, b""

    def data_received(self, data: bytes) -> None:
        self.unread += data
        while len(self.unread) > 2 and len(self.unread) >= (end := 2 + int.from_bytes(self.unread[:2])):
            reply = answer(self.unread[2:end])
            self.unread = self.unread[end:]
            self.transport.write(len(reply).to_bytes(2) + reply)  # type: ignore[attr-defined]


def drain(sock: socket.socket) -> None:
    for _ in range(BURST):
        try:
            query, source = sock.recvfrom(4096)
        except BlockingIOError:
            return
        sock.sendto(answer(query), source)


async def main(port: int) -> None:
    loop = asyncio.get_running_loop()
    sock = socket.socket(type=socket.SOCK_DGRAM)
    sock.setblocking(False)
    sock.bind(("127.0.0.1", port))
    loop.add_reader(sock, drain, sock)
    server = await loop.create_server(Stream, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
