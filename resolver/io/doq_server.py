"""Answer DNS over QUIC: a stream for each question, its answer on the same stream, then FIN (RFC 9250).

Theory: streams tell questions apart, so the id is 0 and nothing waits in line. A client that breaks a rule of section 4
loses its connection with DOQ_PROTOCOL_ERROR: id not 0, two messages or none on a stream, a FIN before the message's end or
no FIN at all, keepalive (5.5.2), a unidirectional stream. STOP_SENDING and RESET_STREAM mean that nobody waits any more.

0-RTT (4.5): only QUERY is looked at before the handshake is done; anything else waits for its end. A replayed flight finds
no ticket (`quic_tickets`), so a query is answered from 0-RTT once.

What a client can cost: aioquic grants 128 streams at a time, UNREAD bounds the bytes of unfinished messages, PATIENCE_S
how long they may stay unfinished. Which timers there are: aioquic's, and one that looks for what is overdue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from aioquic.quic import events
from aioquic.quic.connection import QuicConnectionState

from resolver import wire as w
from resolver.io.quic_door import Address, reset_token
from resolver.io.quic_tickets import TicketedConnection
from resolver.io.service import STREAM_LIMIT, ResolverService
from resolver.question import Question, parse

NO_ERROR, INTERNAL_ERROR, PROTOCOL_ERROR, EXCESSIVE_LOAD = 0x0, 0x1, 0x2, 0x4  # RFC 9250 8.4
TRANSPORT_INTERNAL_ERROR = 0x1  # RFC 9000 20.1
PATIENCE_S = 10.0
"""For a handshake, and for a message and its FIN from their first byte."""
UNREAD = 256 * 1024
"""Bytes of messages that are not whole yet, over all streams of a connection."""
_KEEPALIVE = w.KEEPALIVE.to_bytes(2)

log = logging.getLogger("headrace.resolver")


class DoqTransport(TicketedConnection):
    """aioquic's connection, with ids that a successor of this process can reset (RFC 9000 10.3)."""

    def __init__(self, *, reset_key: bytes, **rest: Any) -> None:
        super().__init__(**rest)
        self._reset_key = reset_key
        self._host_cids[0].stateless_reset_token = reset_token(reset_key, self.host_cid)

    def _replenish_connection_ids(self) -> None:
        known = len(self._host_cids)
        super()._replenish_connection_ids()
        for cid in self._host_cids[known:]:
            cid.stateless_reset_token = reset_token(self._reset_key, cid.cid)

    @property
    def began(self) -> bool:
        return self._state is not QuicConnectionState.FIRSTFLIGHT

    @property
    def handshake_done(self) -> bool:
        return self._handshake_complete

    @property
    def ending(self) -> bool:
        """Whether either side has closed; aioquic itself tells three PTOs later."""
        return self._close_event is not None

    @property
    def unacknowledged(self) -> int:
        """Streams of questions whose answer has not arrived yet, as far as we know."""
        return sum(1 for stream_id in self._streams if not stream_id & 2)


class Door(Protocol):
    """The listener, as its connections see it."""

    def established(self, guest: DoqConnection, *, resumed: bool) -> None: ...
    def issued(self, guest: DoqConnection, cid: bytes) -> None: ...
    def retired(self, cid: bytes) -> None: ...
    def forget(self, guest: DoqConnection) -> None: ...


class Broken(Exception):
    """The client broke a rule; the connection ends with `code`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(slots=True)
class _Stream:
    since: float
    unread: bytearray = field(default_factory=bytearray)
    asked: bool = False
    answered: bool = False
    ended: bool = False  # the client's FIN came


class DoqConnection:
    """One client. `host` is its address, for the rate limit."""

    def __init__(
        self,
        service: ResolverService,
        quic: DoqTransport,
        send: Callable[[bytes, Address], None],
        host: str,
        door: Door,
    ) -> None:
        self.quic = quic
        self.resumed = False
        self._service = service
        self._send = send
        self._host = host
        self._door = door
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, _Stream] = {}
        self._unread = 0
        self._early: list[tuple[int, bytes]] = []  # what may not be looked at before the handshake is done
        self._draining = self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._wake: asyncio.Handle | None = None
        self.last = self._loop.time()
        self._overdue: asyncio.TimerHandle | None = self._loop.call_later(PATIENCE_S, self._look_overdue)

    # --- Guest -------------------------------------------------------------------------------------------------------

    @property
    def cid(self) -> bytes:
        return self.quic.host_cid

    @property
    def began(self) -> bool:
        return self.quic.began

    @property
    def idle_since(self) -> float:
        """When it last asked; infinite while somebody waits for an answer."""
        return float("inf") if any(not s.answered for s in self._streams.values()) else self.last

    def receive(self, datagram: bytes, address: Address) -> None:
        try:
            self.quic.receive_datagram(datagram, address, now=self._loop.time())
        except Exception:
            log.exception("doq: a datagram of %d bytes was not digested; its connection is closed", len(datagram))
            self.quic.close(TRANSPORT_INTERNAL_ERROR, frame_type=0)
        self._take_events()

    def flush(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if not self.quic._network_paths:
            return
        self._transmit()
        if self._draining:  # aioquic lets go of acknowledged streams when it writes
            self._close_when_done()

    def _transmit(self) -> None:
        for datagram, address in self.quic.datagrams_to_send(now=self._loop.time()):
            self._send(datagram, address)
        self._arm()

    def drain(self) -> None:
        """No more questions; closes when those that came are answered and the answers have arrived."""
        self._draining = True
        self._close_when_done()

    def close_now(self) -> None:
        self.quic.close(INTERNAL_ERROR if self._waiting() else NO_ERROR)
        self.flush()

    def dispose(self) -> None:
        self._over = True
        for handle in (self._timer, self._wake, self._overdue):
            if handle is not None:
                handle.cancel()
        self._timer = self._wake = self._overdue = None
        self._streams.clear()

    # --- events ------------------------------------------------------------------------------------------------------

    def _take_events(self) -> None:
        while (event := self.quic.next_event()) is not None:
            try:
                self._take(event)
            except Broken as exc:
                log.debug("doq: %s is disconnected: %s", self._host, exc)
                self._streams.clear()
                self.quic.close(exc.code)

    def _take(self, event: events.QuicEvent) -> None:
        match event:
            case events.StreamDataReceived():
                if not self.quic.ending:
                    self._hear(event.stream_id, event.data, event.end_stream)
            case events.StopSendingReceived() | events.StreamReset():
                self._cancel(event.stream_id)
            case events.HandshakeCompleted():
                self.resumed = event.session_resumed
                self._door.established(self, resumed=event.session_resumed)
                early, self._early = self._early, []
                for stream_id, wire in early:
                    self._ask(stream_id, wire)
            case events.ConnectionIdIssued():
                self._door.issued(self, event.connection_id)
            case events.ConnectionIdRetired():
                self._door.retired(event.connection_id)
            case events.ConnectionTerminated():
                self.dispose()
                self._door.forget(self)

    def _hear(self, stream_id: int, piece: bytes, ended: bool) -> None:
        if stream_id & 2:
            raise Broken(PROTOCOL_ERROR, "a unidirectional stream")
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = _Stream(self._loop.time())
            self._watch()
        stream.ended = stream.ended or ended
        if stream.asked:
            if piece:
                raise Broken(PROTOCOL_ERROR, "a second message on a stream")
            self._leave(stream_id, stream)
            return
        self._collect(stream, piece)
        came = len(stream.unread)
        size = int.from_bytes(stream.unread[:2]) if came >= 2 else STREAM_LIMIT
        if size == 0 or came > size + 2 or (ended and came != size + 2):
            raise Broken(PROTOCOL_ERROR, f"{came} bytes on a stream for a message of {size}")
        if came == size + 2:
            stream.asked = True
            self._unread -= came
            wire = bytes(stream.unread[2:])
            stream.unread.clear()
            self._check(stream_id, wire)

    def _collect(self, stream: _Stream, piece: bytes) -> None:
        stream.unread += piece
        self._unread += len(piece)
        if self._unread > UNREAD:
            raise Broken(EXCESSIVE_LOAD, f"more than {UNREAD} bytes of unfinished messages")

    def _check(self, stream_id: int, wire: bytes) -> None:
        if len(wire) < w.HEADER or wire[:2] != b"\0\0" or wire[2] & 0x80:
            raise Broken(PROTOCOL_ERROR, "no query with id 0")
        if _KEEPALIVE in wire and _asks_keepalive(wire):
            raise Broken(PROTOCOL_ERROR, "edns-tcp-keepalive (RFC 9250 5.5.2)")
        if not self.quic.handshake_done and wire[2] & 0x78:
            self._early.append((stream_id, wire))
        else:
            self._ask(stream_id, wire)

    def _ask(self, stream_id: int, wire: bytes) -> None:
        self.last = self._loop.time()
        limit = self._service.rate_limit
        if limit is not None and not limit.admits(self._host, self._service.now()):
            reply: bytes | None = self._service.refuse_rate(wire)
        else:
            reply = self._service.answer_cached(wire, STREAM_LIMIT, sealed=True)
        if reply is None:
            self._service.ask(wire, STREAM_LIMIT, partial(self._answer, stream_id), sealed=True)
        else:
            self._answer(stream_id, reply, "")

    def _answer(self, stream_id: int, reply: bytes, source: str) -> None:
        stream = self._streams.get(stream_id)
        if stream is None or self.quic.ending:
            return
        if reply:
            self._service.counter("quic")[reply[3] & 15] += 1
            if self._service.query_log is not None:
                self._service.query_log("quic", self._host, reply, source)
            self.quic.send_stream_data(stream_id, len(reply).to_bytes(2) + reply, end_stream=True)
        else:
            self.quic.reset_stream(stream_id, INTERNAL_ERROR)
        stream.answered = True
        self._leave(stream_id, stream)
        self.wake()

    def _leave(self, stream_id: int, stream: _Stream) -> None:
        if stream.answered and stream.ended:
            self._streams.pop(stream_id, None)

    def _cancel(self, stream_id: int) -> None:
        """Nobody waits: what is on its way for others goes on, this answer is dropped (RFC 9250 4.3.1)."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self._unread -= len(stream.unread)
            self._early = [(early_id, wire) for early_id, wire in self._early if early_id != stream_id]
            if not stream.answered:
                self.quic.reset_stream(stream_id, NO_ERROR)

    # --- ends and time -----------------------------------------------------------------------------------------------

    def _waiting(self) -> bool:
        return any(not stream.answered for stream in self._streams.values())

    def _close_when_done(self) -> None:
        if not self._streams and not self.quic.unacknowledged and not self.quic.ending:
            self.quic.close(NO_ERROR)
            self.wake()

    def wake(self) -> None:
        """Send what is ready when this loop turn is over."""
        if self._wake is None and not self._over:
            self._wake = self._loop.call_soon(self.flush)

    def _arm(self) -> None:
        at = self.quic.get_timer()
        if self._timer is not None:
            if at is not None and self._timer_at <= at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None and not self._over:
            self._timer_at = at
            self._timer = self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        # A loop may fire within its own resolution before the time: the time that was asked for counts.
        now = max(self._timer_at, self._loop.time())
        at = self.quic.get_timer()
        if at is not None and at <= now:
            self.quic.handle_timer(now=now)
            self._take_events()
        if not self._over:
            self.flush()

    def _watch(self) -> None:
        if self._overdue is None and not self._over:
            self._overdue = self._loop.call_later(PATIENCE_S, self._look_overdue)

    def _look_overdue(self) -> None:
        self._overdue = None
        now = self._loop.time()
        if not self.quic.handshake_done:
            self.quic.close(NO_ERROR)
        elif any(not s.ended and now - s.since >= PATIENCE_S for s in self._streams.values()):
            self.quic.close(PROTOCOL_ERROR)
        elif self._streams:
            self._watch()
        self.flush()


def _asks_keepalive(wire: bytes) -> bool:
    asked = parse(wire)
    return isinstance(asked, Question) and asked.keepalive
