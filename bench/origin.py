"""An origin that keeps up: event streams with time stamps, large bodies down and up, on uvloop with bare protocols.

GET /sse?rate=100  one event each 1/rate s, a token with a time stamp
GET /big?bytes=N   N bytes
POST /up           takes all, says ok
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import cast

EVENT = (
    b'data: {"created":%d,"id":"chatcmpl-1","object":"chat.completion.chunk","model":"bench","choices":[{"index":0,'
    b'"delta":{"content":" token"},"logprobs":null,"finish_reason":null}],"system_fingerprint":"fp_0"}\n\n'
)
BLOCK = bytes(256 * 1024)


class Origin(asyncio.Protocol):
    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None
        self._to_send = 0
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._to_send = 0

    def data_received(self, data: bytes) -> None:
        if self._left:
            self._take(data)
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return
        head, rest = self._head[:end].lower(), self._head[end + 4 :]
        self._head = b""
        self._answer(head, rest)

    def _answer(self, head: bytes, rest: bytes) -> None:
        target = head.split(b" ", 2)[1]
        if target.startswith(b"/sse"):
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            self._pace_s = 1 / int(target.partition(b"rate=")[2] or 100)
            self._next = asyncio.get_running_loop().time()
            self._event()
        elif target.startswith(b"/big"):
            size = int(target.partition(b"bytes=")[2])
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            self._to_send = size
            self._pump()
        else:
            length = head.partition(b"content-length: ")[2].split(b"\r", 1)[0]
            self._left = int(length or 0)
            self._take(rest)

    def _take(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left <= 0:
            self._left = 0
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    def _event(self) -> None:
        event = EVENT % time.monotonic_ns()
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        self._next += self._pace_s
        self._timer = asyncio.get_running_loop().call_at(self._next, self._event)

    def _pump(self) -> None:
        while self._to_send and not self._paused:
            block = BLOCK[: self._to_send]
            self._to_send -= len(block)
            self._transport.write(block)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pump()


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Origin, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(int(sys.argv[1])))
