"""One exchange on one HTTP/3 request stream: what the client's side and the edge's side have in common.

Theory: a leg is two half-streams that end on their own (RFC 9114 4.1). Sending ends by `end()`, by a reset, or because the
peer stopped it; receiving ends by FIN, by a reset, or because we stopped it. The leg is finished when both are.
Flow control both ways: `pause()` withholds credit, so at most one window of `on_data` follows; the send buffer is what
the transport has not put into a packet, and crossing its marks is `on_full` and `on_drained`.
Rules for editing: 1. the receiver never hears a word after `dead` is set, except on_full's counterpart; 2. `retire()` is
reached on every way out.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from proxy.io.quic_codes import StreamFault
from proxy.io.quic_flow import FlowConnection
from proxy.io.quic_h3 import H3Frames
from proxy.io.quic_heads import content_length, malformed, outgoing_trailers, trailer_fields
from proxy.io.rims import HIGH_WATER, LOW_WATER
from proxy.messages import NOBODY, Abort, Fields, Receiver
from proxy.priority import Priority


class Connection(Protocol):
    """What a leg needs of its connection."""

    quic: FlowConnection

    @property
    def h3(self) -> H3Frames: ...

    full: set[StreamLeg]
    """Legs whose send buffer is above its mark: looked at after each flush."""

    def wake(self) -> None: ...

    def retire(self, leg: StreamLeg) -> None:
        """The leg is finished."""


class StreamLeg:
    """The common half of both legs; `expected` is the content-length the peer announced, if any."""

    version = "h3"

    def __init__(self, connection: Connection, stream_id: int) -> None:
        self.receiver: Receiver = NOBODY
        self.reused = False
        self.stream_id = stream_id
        self.dead = False  # aborted, by anyone: nothing is said or sent any more
        self.sent_end = False
        self.got_end = False
        self._connection = connection
        self._got_head = False
        self._got_trailers = False
        self._head_sent = False
        self._muted = False  # the peer wants no more of our body, and that is no failure
        self._paused = False
        self._full = False
        self._expected: int | None = None
        self._received = 0
        self._retired = False

    @property
    def has_head(self) -> bool:
        return self._got_head

    # -- Leg ----------------------------------------------------------------------------------------------------------

    def data(self, chunk: bytes) -> None:
        if self.dead or self.sent_end or self._muted or not chunk:
            return
        connection = self._connection
        connection.h3.send_body(self.stream_id, chunk)
        if not self._full and connection.quic.unsent(self.stream_id) > HIGH_WATER:
            self._full = True
            connection.full.add(self)
            self.receiver.on_full()
        connection.wake()

    def trailers(self, fields: Fields) -> None:
        kept = outgoing_trailers(fields)
        if kept and not (self.dead or self.sent_end or self._muted):
            self._connection.h3.send_section(self.stream_id, kept)

    def end(self) -> None:
        if self.dead or self.sent_end:
            return
        self.sent_end = True
        if not self._muted:
            self._connection.quic.write(self.stream_id, b"", fin=True)
        self._connection.wake()
        self._ended()

    def finish(self) -> None:
        self.end()

    def pause(self) -> None:
        if not self._paused and not self.dead and not self.got_end:
            self._paused = True
            self._connection.quic.withhold(self.stream_id)

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._connection.quic.release(self.stream_id)
            self._connection.wake()

    def prioritize(self, priority: Priority) -> None:
        raise NotImplementedError

    def cut(self, code: int, *, within_s: float = 0.0) -> None:
        """Reset both directions, where they are still open. Nothing is said to the receiver.

        `within_s`: how long what was written may take to arrive before our side is reset.
        """
        if self.dead:
            return
        self.dead = True
        connection = self._connection
        connection.h3.detach(self.stream_id)
        connection.quic.stop(self.stream_id, code)
        if within_s:
            connection.quic.part(self.stream_id, code, asyncio.get_running_loop().time() + within_s)
        else:
            connection.quic.abandon(self.stream_id, code)
        connection.wake()
        self._retire()

    # -- what the frames say ------------------------------------------------------------------------------------------

    def wants_body(self) -> bool:
        return self._got_head and not self._got_trailers

    def wants_section(self) -> bool:
        return not self._got_trailers

    def on_body(self, chunk: bytes) -> None:
        self._received += len(chunk)
        if self._expected is not None and self._received > self._expected:
            raise malformed(f"{self._received} body bytes where {self._expected} were announced")
        self.receiver.on_data(chunk)

    def take_trailers(self, section: Fields) -> None:
        self._got_trailers = True
        fields = trailer_fields(section)
        content_length(fields)
        self._check_length()
        self.receiver.on_trailers(fields)

    def _check_length(self) -> None:
        if self._expected is not None and self._received != self._expected:
            raise malformed(f"{self._received} body bytes where {self._expected} were announced")

    def on_finished(self) -> None:
        self._check_length()
        self.got_end = True
        if self._paused:
            self._paused = False
            self._connection.quic.release(self.stream_id)
        self.receiver.on_end()
        if not self.dead:
            self._ended()

    # -- its ends -----------------------------------------------------------------------------------------------------

    def mute(self) -> None:
        """The peer takes no more body: what is given is dropped, and whoever was stopped by on_full may go on."""
        self._muted = True
        self.drained()

    def drained(self) -> None:
        """After a flush: say on_drained when the buffer is below its low mark again."""
        if self._full and (self._muted or self.dead or self._connection.quic.unsent(self.stream_id) <= LOW_WATER):
            self._full = False
            self._connection.full.discard(self)
            if not self.dead:
                self.receiver.on_drained()

    def fail(self, abort: Abort) -> None:
        """The exchange is over on the peer's account: tell the receiver, once."""
        if not self.dead:
            self.dead = True
            self._retire()
            self.receiver.on_abort(abort)

    def _ended(self) -> None:
        if self.sent_end and self.got_end:
            self._retire()

    def _retire(self) -> None:
        if self._retired:
            return
        self._retired = True
        if self._paused:
            self._connection.quic.release(self.stream_id)
        self._connection.full.discard(self)
        self._connection.h3.finished(self.stream_id)
        self._connection.retire(self)

    def on_fault(self, fault: StreamFault) -> None:  # pragma: no cover - each side says what it means
        raise NotImplementedError
