"""Drive one QUIC connection: datagrams in, events to its owner, datagrams out, timers.

Theory: aioquic is four calls: receive, what to send, when to wake, wake. This is the loop around them, the same for a
client's and an edge's connection.
- Nothing is sent while a socket is being drained: the socket's owner calls `flush()` once for all its datagrams
  (2.5 times the upload of a flush for each, since ACKs are packets too). Whoever speaks outside of a drain calls
  `wake()`, and all of a loop turn goes out together.
- The timer is left alone when it would fire too early: firing early costs a look at the clock, cancelling costs more,
  and aioquic moves its deadline with every packet.
- A path is dead when there was work and nothing was heard: after `ping_after_s` it is asked, a second later it is
  `suspect` (new exchanges had better take another one), after `lost_after_s` it is lost. A slow model's connection
  answers pings; one whose NAT entry or Wi-Fi went away does not.
- An edge's answer stops in the middle when a NAT on the way forgot us and gave us another port: the edge cannot know until
  it hears from there, and who only listens has nothing to say. So silence in a stream is asked about after `ask_after_s`
  already; when pings alone are answered (the model thinks), the next question waits twice as long, up to `ping_after_s`.

Who may end it: the owner by `close()`, the peer, the watch, and a fault of aioquic (which must not take the others along).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from aioquic.quic import events

from proxy.io.quic_codes import NO_ERROR, TRANSPORT_INTERNAL_ERROR, ConnectionFault
from proxy.io.quic_flow import LOOPBACK_DATAGRAM_BYTES, FlowConnection, is_loopback
from resolver.io.quic_door import Address

logger = logging.getLogger(__name__)

SUSPECT_AFTER_S = 1.0  # of a ping's silence

Send = Callable[[bytes, Address], None]


class Owner(Protocol):
    """What a connection does with what its link hears. May raise ConnectionFault from the first three."""

    def on_stream(self, stream_id: int, chunk: bytes, fin: bool) -> None: ...

    def on_stream_reset(self, stream_id: int, code: int) -> None: ...

    def on_stream_stopped(self, stream_id: int, code: int) -> None: ...

    def on_handshake(self, done: events.HandshakeCompleted) -> None: ...

    def on_lost(self, code: int, reason: str, *, by_peer: bool) -> None:
        """The connection is over, once: whatever is in progress has failed. Nothing follows but on_gone."""

    def on_flushed(self) -> None:
        """Packets left or were acknowledged: send buffers may be lower."""

    def on_gone(self) -> None:
        """The transport forgot everything, closing period included."""

    def on_id_issued(self, cid: bytes) -> None: ...

    def on_id_retired(self, cid: bytes) -> None: ...

    @property
    def active(self) -> int:
        """Exchanges in progress: while there are any, silence is watched."""


class QuicLink:
    """The loop around one connection. `ping_after_s` < `lost_after_s`, both seconds of silence while there is work;
    `ask_after_s`: of silence after stream bytes, where it is worth asking sooner."""

    def __init__(
        self,
        quic: FlowConnection,
        send: Send,
        owner: Owner,
        *,
        ping_after_s: float,
        lost_after_s: float,
        ask_after_s: float | None = None,
    ) -> None:
        self.quic = quic
        self._send = send
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._ping_after_s = ping_after_s
        self._lost_after_s = lost_after_s
        self._ask_after_s = self._asks_at_s = min(ask_after_s or ping_after_s, ping_after_s)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._quiet_from = 0.0
        self._pinged = False
        self.suspect = False
        self._wake: asyncio.Handle | None = None
        self._lost = False
        self._gone = False
        self._farewell: list[tuple[bytes, Address]] = []  # CONNECTION_CLOSE, said again to a peer that missed it
        self._strays = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.StreamDataReceived: self._stream_brought,
            events.StreamReset: lambda e: owner.on_stream_reset(e.stream_id, e.error_code),
            events.StopSendingReceived: lambda e: owner.on_stream_stopped(e.stream_id, e.error_code),
            events.HandshakeCompleted: self._handshake_completed,
            events.ConnectionTerminated: self._terminated,
            events.ConnectionIdIssued: lambda e: owner.on_id_issued(e.connection_id),
            events.ConnectionIdRetired: lambda e: owner.on_id_retired(e.connection_id),
        }

    # -- in -----------------------------------------------------------------------------------------------------------

    def receive(self, datagram: bytes, address: Address) -> None:
        """Take a datagram and tell the owner what it brought. The caller calls flush() after its last one."""
        if self._lost:
            self._repeat_farewell()
            return
        now = self._quiet_from = self._loop.time()
        self._pinged = self.suspect = False
        try:
            self.quic.receive_datagram(datagram, address, now)
        except Exception:
            logger.exception("quic: a datagram of %d bytes was not digested; its connection is closed", len(datagram))
            self.quic.close(TRANSPORT_INTERNAL_ERROR, frame_type=0, reason_phrase="")
        self._dispatch()

    def _dispatch(self) -> None:
        next_event, handlers = self.quic.next_event, self._handlers
        while (event := next_event()) is not None:
            handler = handlers.get(type(event))
            if handler is None or (self._lost and type(event) is not events.ConnectionTerminated):
                continue
            try:
                handler(event)
            except ConnectionFault as fault:
                self.close(fault.code, fault.detail)
        ending = self.quic.ending
        if ending is not None and not self._lost:
            self._lose(ending.error_code, ending.reason_phrase, by_peer=True)

    def _stream_brought(self, event: events.StreamDataReceived) -> None:
        if self._asks_at_s > self._ask_after_s:
            self._asks_at_s = self._ask_after_s
            self._look_in(self._ask_after_s)
        self._owner.on_stream(event.stream_id, event.data, event.end_stream)

    def _handshake_completed(self, event: events.HandshakeCompleted) -> None:
        address = self.quic.get_peer_address()
        if address and is_loopback(address[0]):
            limit = self.quic.peer_datagram_limit
            self.quic.grow_datagrams(min(LOOPBACK_DATAGRAM_BYTES, limit))
        self._owner.on_handshake(event)

    def _terminated(self, event: events.ConnectionTerminated) -> None:
        if not self._lost:
            self._lose(event.error_code, event.reason_phrase, by_peer=True)
        self._gone = True
        self.dispose()
        self._owner.on_gone()

    # -- out ----------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Send what is ready when this loop turn is over."""
        if self._wake is None and not self._gone:
            self._wake = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what is ready, now, and set the timer."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if self._gone or not self.quic.has_path:
            return
        self._transmit(self._loop.time())

    def _transmit(self, now: float) -> None:
        closing = self.quic.ending is not None and not self.quic.silent
        datagrams = self.quic.datagrams_to_send(now)
        if closing:
            self._farewell = datagrams
        for datagram, address in datagrams:
            self._send(datagram, address)
        self._arm(now)
        if not self._lost:
            self._owner.on_flushed()

    def _repeat_farewell(self) -> None:
        """RFC 9000 10.2.1: to a peer that still sends, the close is said again, ever more rarely."""
        self._strays += 1
        if self._strays & (self._strays - 1) == 0:
            for datagram, address in self._farewell:
                self._send(datagram, address)

    def close(self, code: int, reason: str = "", *, transport: bool = False) -> None:
        """Close with a code; the owner hears on_lost before this returns (unless it heard it before)."""
        if self._lost:
            return
        self.quic.close(code, frame_type=0 if transport else None, reason_phrase=reason[:200])
        self._lose(code, reason, by_peer=False)
        self.wake()

    def _lose(self, code: int, reason: str, *, by_peer: bool) -> None:
        self._lost = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._owner.on_lost(code, reason, by_peer=by_peer)

    def dispose(self) -> None:
        """Let go of every timer. Nothing is sent after this."""
        self._gone = True
        for handle in (self._timer, self._watch, self._wake):
            if handle is not None:
                handle.cancel()
        self._timer = self._watch = self._wake = None

    # -- time ---------------------------------------------------------------------------------------------------------

    def _arm(self, now: float) -> None:
        at = self.quic.get_timer()
        if self._timer is not None:
            if at is not None and self._timer_at <= at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer_at = at
            self._timer = self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        # A loop may fire within its own resolution before the time: the time that was asked for counts.
        now = max(self._timer_at, self._loop.time())
        at = self.quic.get_timer()
        if at is not None and at <= now:
            self.quic.handle_timer(now)
            self._dispatch()
            if self._gone:
                return
            self._transmit(now)
        else:
            self._arm(now)

    def watch(self) -> None:
        """There is work now: see to it that silence is noticed. Cheap when it is watched already."""
        if self._watch is None and not self._lost:
            self._quiet_from = self._loop.time()
            self._pinged = False
            self._asks_at_s = self._ask_after_s
            self._look_in(self._ask_after_s)

    def _look_in(self, delay_s: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._loop.call_later(max(delay_s, 0.01), self._on_watch)

    def _on_watch(self) -> None:
        self._watch = None
        if self._lost or not (self._owner.active or self.suspect):
            return
        quiet = self._loop.time() - self._quiet_from
        if quiet >= self._lost_after_s:
            self.close(NO_ERROR, f"nothing heard for {quiet:.0f} s")
            return
        suspect_after_s = min(self._ping_after_s + SUSPECT_AFTER_S, self._lost_after_s)
        due = self._asks_at_s
        if quiet >= suspect_after_s:
            self.suspect, due = True, self._lost_after_s
        elif quiet >= due:
            if not self._pinged:
                self._pinged = True
                self.quic.send_ping(0)
                self.wake()
                self._asks_at_s = min(2 * due, self._ping_after_s)
            due = min(quiet + self._asks_at_s, suspect_after_s)
        self._look_in(due - quiet)
