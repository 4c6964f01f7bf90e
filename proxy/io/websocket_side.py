"""One peer of a WebSocket tunnel: what it says goes to the other one, what we owe it goes in at frame boundaries.

Rules for editing: 1. what becomes of the tunnel is decided in `websocket_tunnel`, not here; 2. a peer that was sent a
close frame gets no other bytes (RFC 6455 5.5.1); 3. on_data is the hot path: no timer, no object for a chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from proxy.messages import Abort, Fields, Leg, Party, ResponseHead
from proxy.priority import Priority
from proxy.websocket import FrameScanner, Op, Pulse, close_frame, frame


class Tunnel(Protocol):
    """What a side tells of its peer."""

    clock: Callable[[], float]
    client: Side
    edge: Side

    def pass_on(self, side: Side, passed: bytes, boundary: int) -> None: ...
    def on_close_frame(self, side: Side) -> None: ...
    def on_side_ended(self, side: Side) -> None: ...
    def on_side_lost(self, side: Side, abort: Abort) -> None: ...


class Side:
    """The receiver of one leg. `ours` is how the payload of our pings begins."""

    __slots__ = ("close_sent", "ended_at", "gone", "leg", "owed", "party", "paused", "probes", "pulse", "said_at", "scanner",
                 "shut", "taken", "tunnel")  # fmt: skip

    def __init__(self, tunnel: Tunnel, leg: Leg, party: Party, pulse: Pulse, ours: bytes) -> None:
        self.tunnel, self.leg, self.party, self.pulse = tunnel, leg, party, pulse
        self.scanner = FrameScanner(ours)
        self.said_at = pulse.heard_at  # when bytes came; the pulse may be forgiven, this is not
        self.taken = 0  # bytes that came
        self.owed = b""  # a control frame of ours that waits for a boundary in what goes to this peer
        self.close_sent = False  # a close frame, anyone's, went to this peer
        self.ended_at: float | None = None  # its FIN came
        self.shut = False  # our FIN went
        self.gone = False  # dead
        self.paused = False  # we do not read it
        self.probes = 0
        leg.receiver = self

    @property
    def other(self) -> Side:
        return self.tunnel.edge if self.party is Party.CLIENT else self.tunnel.client

    @property
    def closed(self) -> bool:
        """It sent a close frame."""
        return self.scanner.close_code is not None

    @property
    def done(self) -> bool:
        """Nothing more is expected from this peer."""
        return self.gone or self.ended_at is not None or (self.close_sent and self.closed)

    @property
    def silent_since(self) -> float:
        """Since when neither of the two has said a byte."""
        return max(self.said_at, self.other.said_at)

    @property
    def at_boundary(self) -> bool:
        """What went to this peer ends with a whole frame."""
        return self.other.scanner.at_boundary

    # ---------------------------------------------------------------- what the peer says

    def on_data(self, chunk: bytes) -> None:
        self.taken += len(chunk)
        self.said_at = now = self.tunnel.clock()
        self.pulse.heard(now)
        was_closed = self.closed
        passed = self.scanner.feed(chunk)
        if passed:
            self.tunnel.pass_on(self, passed, self.scanner.boundary)
        if self.closed and not was_closed:
            self.tunnel.on_close_frame(self)

    def on_end(self) -> None:
        self.ended_at = self.tunnel.clock()
        if rest := self.scanner.rest():
            self.tunnel.pass_on(self, rest, -1)
        self.tunnel.on_side_ended(self)

    def on_abort(self, abort: Abort) -> None:
        self.gone = True
        self.tunnel.on_side_lost(self, abort)

    def on_full(self) -> None:
        self.other.pause()

    def on_drained(self) -> None:
        self.pulse.heard(self.tunnel.clock())  # it took bytes: a sign of life
        self.other.resume()

    def on_head(self, head: ResponseHead) -> None: ...
    def on_interim(self, head: ResponseHead) -> None: ...
    def on_trailers(self, fields: Fields) -> None: ...
    def on_priority(self, priority: Priority) -> None: ...

    # ---------------------------------------------------------------- what the peer is told

    @property
    def mute(self) -> bool:
        """It may be sent nothing more."""
        return self.close_sent or self.shut or self.gone

    def send(self, chunk: bytes, boundary: int) -> None:
        """Bytes of the other peer; what is owed goes in at `boundary`, the last frame end in them (-1: none)."""
        if self.mute:
            return
        if not self.owed or boundary < 0:
            self.leg.data(chunk)
            return
        owed, self.owed = self.owed, b""
        if self.other.closed and not _is_close(owed):
            self.leg.data(chunk)  # a ping has no place behind the other's close frame
            return
        self.leg.data(chunk[:boundary] + owed)
        self._on_inserted(owed)
        if not self.close_sent and (rest := chunk[boundary:]):
            self.leg.data(rest)

    def ping(self, payload: bytes) -> None:
        """A ping, now or at the next boundary; nothing while one waits or no frame may be sent."""
        if not (self.mute or self.owed or self.other.scanner.broken):
            self._insert(frame(Op.PING, payload, self._mask()))

    def say_close(self, code: int, reason: str) -> None:
        """Our close frame, now or at the next boundary, instead of whatever else was owed."""
        if not self.mute:
            self.owed = b""
            self._insert(close_frame(code, reason, self._mask()))

    def shut_down(self) -> None:
        """Our FIN."""
        if not (self.shut or self.gone):
            self.shut = True
            if self.closed and self.close_sent:
                self.leg.finish()
            else:
                self.leg.end()

    def abort(self, abort: Abort) -> None:
        if not self.gone:
            self.gone = True
            self.leg.abort(abort)

    def pause(self) -> None:
        self.paused = True
        self.leg.pause()

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self.pulse.heard(self.tunnel.clock())  # unread, it could not be heard
            self.leg.resume()

    def _insert(self, whole: bytes) -> None:
        if self.at_boundary:
            self.leg.data(whole)
            self._on_inserted(whole)
        else:
            self.owed = whole

    def _on_inserted(self, whole: bytes) -> None:
        if _is_close(whole):
            self.close_sent = True
        else:
            self.pulse.pinged(self.tunnel.clock())

    def _mask(self) -> bytes:
        # Towards a server every frame is masked, with a key that cannot be foreseen (RFC 6455 5.3).
        return os.urandom(4) if self.party is Party.EDGE else b""


def _is_close(whole: bytes) -> bool:
    return whole[0] & 0x0F == Op.CLOSE
