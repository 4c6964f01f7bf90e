"""One exchange on an HTTP/2 connection: its state, both of its windows, and the words of a leg.

Theory: the state of RFC 9113 5.1 is two flags, `recv_open` and `send_open`; a stream with both down is closed and out of the
connection's table. What we may send is `send_window`; what does not fit waits in `queue` as the slices that came (joined
again and again they would cost quadratic time). What the peer may send is `recv_window`; it is opened again by what the
receiver took: while paused the credit is withheld, and no other stream notices.
"""

from __future__ import annotations

from collections import deque
from struct import Struct
from typing import TYPE_CHECKING

from proxy.h2_errors import Code, H2StreamError
from proxy.messages import NOBODY, Abort, Fields, Head, Receiver, ResponseHead
from proxy.priority import UNSAID, Priority

if TYPE_CHECKING:
    from proxy.h2 import Connection

_short_data = Struct(">xHxxL").pack
"""The header of a DATA frame of less than 64 KiB, without flags: the bytes of FRAME_HEADER that are not 0 anyway."""
EMPTY: deque[bytes | memoryview] = deque(maxlen=0)
"""The queue of the many streams that never wait; it holds nothing, whatever is put into it."""


class Stream:
    """A leg (`proxy.messages.Leg`) over one stream. The two roles add head(), interim() and abort()."""

    __slots__ = (
        "connection", "ending", "expected", "flows", "full", "id", "mark", "mark_turn", "owed", "paused", "peer_ended",
        "priority", "queue", "queued", "receiver", "recv_open", "recv_window", "reused", "seen", "send_open", "send_window",
        "sender", "takes_data", "trailing", "tunnel", "withheld",
    )  # fmt: skip

    version = "h2"

    def __init__(self, connection: Connection, stream_id: int) -> None:
        self.connection = connection
        self.sender = connection.sender
        self.receiver: Receiver = NOBODY
        self.reused = False
        self.id = stream_id  # 0: not opened yet
        self.recv_open = True
        self.send_open = True
        self.peer_ended = False  # cleanly, by END_STREAM
        self.tunnel = False  # an accepted CONNECT: data both ways, end is a half-close
        self.takes_data = False  # a head came that a body may follow
        self.expected: int | None = None  # content-length
        self.seen = 0  # body bytes received
        self.recv_window = connection.limits.stream_window
        self.paused = False
        self.owed = 0  # credit due to the peer, not yet worth a frame
        self.withheld = 0  # bytes passed on while paused
        self.send_window = 0
        self.queue = EMPTY
        self.queued = 0
        self.full = False
        self.priority = UNSAID
        self.ending = False  # END_STREAM follows the queue
        self.trailing: Fields | None = None
        self.flows = False  # sent DATA since its head, and may send more
        self.mark = 0  # until then: where in the sender's output its head lies,
        self.mark_turn = -1  # as long as that turn's output is unsent

    @property
    def state(self) -> str:
        """The name of RFC 9113 5.1, for people and tests."""
        if not self.id:
            return "idle"
        if self.recv_open:
            return "open" if self.send_open else "half-closed (local)"
        return "half-closed (remote)" if self.send_open else "closed"

    # ------------------------------------------------------------------------------------------ a leg's words

    def head(self, head: Head) -> None:
        raise NotImplementedError

    def interim(self, head: ResponseHead) -> None:
        raise NotImplementedError

    def abort(self, abort: Abort) -> None:
        raise NotImplementedError

    def data(self, chunk: bytes) -> None:
        size = len(chunk)
        sender = self.sender
        # While something is lent nothing waits on any stream.
        if size and size <= sender.room and size <= self.send_window and self.flows:
            sender.room -= size
            self.send_window -= size
            sender.last = self
            sender.out += (_short_data(size, self.id), chunk)
        elif size and self.send_open and not self.ending:
            sender.data(self, chunk)

    def trailers(self, fields: Fields) -> None:
        if self.send_open and not self.ending and not self.tunnel:
            self.trailing = fields

    def end(self) -> None:
        if self.send_open and not self.ending:
            self.connection.sender.end(self)

    def finish(self) -> None:
        self.end()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            taken, self.withheld = self.withheld, 0
            if taken:
                self.connection.consumed(self, taken)

    def prioritize(self, priority: Priority) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ what came

    def count(self, size: int) -> None:
        """Note body bytes; raises H2StreamError when there are more than content-length said (RFC 9113 8.1.1)."""
        self.seen += size
        if self.expected is not None and self.seen > self.expected:
            raise H2StreamError(
                Code.PROTOCOL_ERROR, f"{self.seen} body bytes where content-length says {self.expected}"
            )

    def check_whole(self) -> None:
        """The peer ended its side; raises H2StreamError when bytes are missing."""
        if self.expected is not None and self.seen != self.expected:
            raise H2StreamError(
                Code.PROTOCOL_ERROR, f"{self.seen} body bytes where content-length says {self.expected}"
            )

    def on_fault(self, error: H2StreamError) -> None:
        """The peer broke a rule of this stream; it has been reset."""
        raise NotImplementedError

    def on_reset(self, code: int) -> None:
        """The peer reset this stream."""
        raise NotImplementedError

    def on_lost(self, detail: str, code: int | None, *, broken: bool) -> None:
        """The connection is gone; `broken`: because the peer broke a rule."""
        raise NotImplementedError
