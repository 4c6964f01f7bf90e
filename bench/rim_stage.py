"""A rim without a socket: a transport that takes everything, somebody at the other end of each leg, and the rules of both.

`Watched` is a receiver that holds a leg to its contract (`proxy.messages.Receiver`) while it listens, and can say to the leg
whatever the relay might say at this moment.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import deque
from typing import Any

from proxy.io.rims import EdgeConnection, InboundConnection, Limits, Origin
from proxy.messages import Abort, Cause, Fields, Leg, Party, RequestHead, ResponseHead, Stage
from proxy.priority import Priority

CANCEL = Abort(Party.US, Stage.BODY, Cause.CANCELLED, "fuzz")
MAX_HEAD = 8192
LIMITS = Limits(max_header_bytes=MAX_HEAD)


class Transport(asyncio.Transport):
    """Takes everything and notes it. Closing is heard of a loop turn later, as from a real one."""

    def __init__(self, protocol: asyncio.Protocol, *, half_closes: bool = True) -> None:
        super().__init__()
        self.protocol = protocol
        self.sent = bytearray()
        self.reading = True
        self.closing = self.lost = self.ended = False
        self._half_closes = half_closes

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.lose, None)

    abort = close

    def lose(self, exc: Exception | None) -> None:
        if not self.lost:
            self.lost = self.closing = True
            self.protocol.connection_lost(exc)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.closing:
            assert not self.ended, "written after the end"
            self.sent += data

    def can_write_eof(self) -> bool:
        return self._half_closes

    def write_eof(self) -> None:
        self.ended = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Watched:
    """Listens to one leg and holds it to its contract; `over` once neither side owes the other anything."""

    def __init__(self, leg: Leg, head: RequestHead, *, is_client: bool) -> None:
        self.leg, self.head, self.is_client = leg, head, is_client
        self.heads = 0
        self.ended = self.aborted = self.trailed = False  # by the peer
        self.said_head = self.said_end = self.said_abort = False  # by us
        self.tunnel = False
        self.bytes = 0

    @classmethod
    def asking(cls, rim: EdgeConnection, head: RequestHead, *, open_end: bool) -> Watched:
        """A request on a new leg, ended at once unless `open_end` or a tunnel is wanted."""
        watched = cls(rim.open(), head, is_client=False)
        watched.leg.receiver = watched
        watched.ask()
        if not open_end and not head.protocol:
            watched.said_end = True
            watched.leg.end()
        return watched

    def __repr__(self) -> str:
        said = [name for name, value in vars(self).items() if value is True]
        return f"<{type(self.leg).__name__} {self.head.method!r} {' '.join(said)}>"

    @property
    def over(self) -> bool:
        if self.said_abort or self.aborted:
            return True
        if self.is_client and not self.tunnel:
            return self.said_end
        return self.ended and (self.said_end or not self.tunnel)

    # ---------------------------------------------------------------- what the leg says

    def _must(self, rule: bool, said: str) -> None:
        assert rule, f"{said} from {self!r}"

    def on_head(self, head: ResponseHead) -> None:
        self._must(not self.is_client and not self.heads and not self.ended and not self.aborted, "on_head")
        self.heads += 1
        self.tunnel = head.status == 101

    def on_interim(self, head: ResponseHead) -> None:
        self._must(not self.is_client and not self.heads and not self.aborted and head.status != 101, "on_interim")

    def on_data(self, chunk: bytes) -> None:
        self._must(not (self.ended or self.aborted or self.trailed) and bool(chunk), "on_data")
        self._must(self.is_client or bool(self.heads), "on_data before on_head")
        self.bytes += len(chunk)

    def on_trailers(self, fields: Fields) -> None:
        self._must(not (self.ended or self.aborted or self.trailed), "on_trailers")
        self.trailed = True

    def on_end(self) -> None:
        if self.head.method == b"CONNECT" and self.leg.version == "h1" and not self.tunnel:
            return  # of the request; the tunnel's own is still to come
        self._must(not (self.ended or self.aborted), "on_end")
        self._must(self.is_client or bool(self.heads), "on_end before on_head")
        length = self.head.length
        if self.is_client and length is not None and not self.head.protocol and self.head.method != b"CONNECT":
            self._must(self.bytes == length, f"on_end after {self.bytes} of {length} bytes")
        self.ended = True

    def on_abort(self, abort: Abort) -> None:
        self._must(not self.aborted, "on_abort")
        self.aborted = True

    def on_full(self) -> None:
        self._must(not self.aborted, "on_full")

    def on_drained(self) -> None:
        self._must(not self.aborted, "on_drained")

    def on_priority(self, priority: Priority) -> None:
        self._must(self.is_client, "on_priority")

    # ---------------------------------------------------------------- what we say to it

    def act(self, dice: random.Random) -> None:
        """Something that the relay may do now; often nothing."""
        way = dice.randrange(8)
        if self.over or way == 0:
            return
        if way == 1 and not dice.randrange(4):
            self.said_abort = True
            self.leg.abort(CANCEL)
        elif way == 2:
            self.leg.pause()
            if dice.randrange(4):
                self.leg.resume()
        elif self.is_client and not self.said_head:
            self._answer(dice)
        elif not self.said_end and (self.is_client or self.said_head):
            self._go_on(dice, way)

    def ask(self) -> None:
        """An edge's leg: send the head."""
        self.said_head = True
        self.leg.head(self.head)

    def _answer(self, dice: random.Random) -> None:
        way = dice.randrange(4)
        if way == 0:
            self.leg.interim(ResponseHead(103, [(b"link", b"a")]))
            return
        self.said_head = True
        if self.head.protocol and way > 1:
            self.tunnel = True
            self.leg.head(ResponseHead(101, []))
        elif self.head.method == b"CONNECT":
            self.tunnel = True
            self.leg.head(ResponseHead(200, []))
        elif self.head.method == b"HEAD" or way == 1:
            no_body = self.head.method == b"HEAD"
            self.leg.head(ResponseHead(200, [(b"content-length", b"2")], length=2, no_body=no_body))
            if not no_body:
                self.leg.data(b"ok")
            self.said_end = True
            self.leg.end()
        else:
            self.leg.head(ResponseHead(200, []))

    def _go_on(self, dice: random.Random, way: int) -> None:
        left = self.head.length
        if way < 6 and not (not self.is_client and left == 0 and not self.tunnel):
            self.leg.data(b"x" * dice.choice((1, 5, 3000)))
            return
        if way == 6 and not self.tunnel and not self.head.protocol:
            self.leg.trailers([(b"x-sum", b"1")])
        if not self.head.protocol or self.tunnel:
            self.said_end = True
            self.leg.end()


class FuzzService:
    """Takes every request."""

    limits = LIMITS

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.taken: list[Watched] = []
        self.connected = 0

    def on_request(self, leg: Leg, head: RequestHead, origin: Origin) -> None:
        watched = Watched(leg, head, is_client=True)
        leg.receiver = watched
        self.taken.append(watched)
        if not self.dice.randrange(3):
            watched.act(self.dice)

    def known(self, head: RequestHead, origin: Origin) -> None: ...

    def shortcut(self, head: RequestHead, origin: Origin) -> None:
        return None

    def on_connected(self, connection: InboundConnection) -> bool:
        self.connected += 1
        return True

    def on_disconnected(self, connection: InboundConnection) -> None:
        self.connected -= 1


def held_bytes(root: object) -> int:
    """Bytes that `root` keeps in its own objects: what a connection's buffers have grown to."""
    seen: set[int] = {id(root)}
    todo, total = [root], 0
    while todo:
        for one in gc.get_referents(todo.pop()):
            kind = type(one)
            if issubclass(kind, (bytes, bytearray, str)):
                if id(one) not in seen:
                    seen.add(id(one))
                    total += len(one)
            elif id(one) not in seen and _is_own(kind):
                seen.add(id(one))
                todo.append(one)
    return total


def _is_own(kind: type) -> bool:
    return kind in (list, tuple, dict, set, deque) or kind.__module__.startswith("proxy.")
