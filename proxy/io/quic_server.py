"""The client's side of HTTP/3: one connection, its requests as legs, and its end.

Theory: a connection owns a link (datagrams, timers), the framing, and a leg for each request (`quic_server_leg`). What is
decided here and nowhere else: which requests come too late (a drain), and when a connection has cost enough.

A client that opens and resets streams for sport is closed: MAX_STREAMS does not stop it, because a reset stream gives
its slot back at once (the HTTP/3 form of rapid reset).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol

from aioquic.quic import events

from proxy.io.quic_codes import (
    EXCESSIVE_LOAD,
    ID_ERROR,
    INTERNAL_ERROR,
    NO_ERROR,
    REQUEST_INCOMPLETE,
    REQUEST_REJECTED,
    TRANSPORT_CONNECTION_REFUSED,
    ConnectionFault,
)
from proxy.io.quic_flow import FlowConnection
from proxy.io.quic_h3 import H3Frames
from proxy.io.quic_leg import StreamLeg
from proxy.io.quic_link import QuicLink, Send
from proxy.io.quic_server_leg import ServerLeg
from proxy.io.rims import Origin, Service
from proxy.messages import Abort, Cause, Party, RequestHead, Stage
from proxy.priority import Priority, read
from resolver.io.quic_door import Address

PING_AFTER_S, LOST_AFTER_S = 12.0, 28.0
"""Silence of a client with work in progress. A change of Wi-Fi is over in less; a laptop that left is noticed."""
EARLY = 64
"""Priorities kept for requests that are still to come."""
RESETS_PER_S, RESET_BURST = 50.0, 200.0
"""Streams a client may abort: an agent that cancels a page of completions stays far below."""


class Table(Protocol):
    """The listener, as its connections see it."""

    def established(self, connection: H3ServerConnection, *, resumed: bool) -> None:
        """The handshake is done: it is no longer half open."""

    def issued(self, connection: H3ServerConnection, cid: bytes) -> None: ...

    def retired(self, cid: bytes) -> None: ...

    def forget(self, connection: H3ServerConnection) -> None:
        """The transport is done with it, closing period included."""


class H3ServerConnection:
    """One client's connection."""

    def __init__(self, service: Service, origin: Origin, quic: FlowConnection, send: Send, table: Table) -> None:
        self.service = service
        self.origin = origin
        self.quic = quic
        self.legs: dict[int, ServerLeg] = {}
        self.full: set[StreamLeg] = set()
        self.connected = False  # the gateway knows of it
        self.link = QuicLink(quic, send, self, ping_after_s=PING_AFTER_S, lost_after_s=LOST_AFTER_S)
        self.wake = self.link.wake
        self._loop = asyncio.get_running_loop()
        self._table = table
        self._frames: H3Frames | None = None
        self._early_priorities: dict[int, Priority] = {}
        self._early = replace(origin, early_data=True)
        self._opened: ServerLeg | None = None
        self._next_id = 0  # the lowest request stream that no byte came for
        self._goaway: int | None = None
        self._lost = False
        self._resets, self._resets_at = RESET_BURST, self._loop.time()
        self._headless: dict[StreamLeg, float] = {}
        self._deadline: asyncio.TimerHandle | None = self._loop.call_later(
            service.limits.header_timeout_s, self._on_deadline
        )

    @property
    def h3(self) -> H3Frames:
        """Made when the first stream byte or the handshake's end asks for it: before, there are no keys to write with."""
        if self._frames is None:
            self._frames = H3Frames(self.quic, self, is_client=False, limit=self.service.limits.max_header_bytes)
        return self._frames

    @property
    def active(self) -> int:
        return len(self.legs)

    @property
    def cid(self) -> bytes:
        return self.quic.host_cid

    @property
    def began(self) -> bool:
        return self.quic.began

    def receive(self, datagram: bytes, address: Address) -> None:
        self.link.receive(datagram, address)
        if not self.connected and self.quic.began:
            self._introduce()  # half open as it is it counts, once a packet showed that it is a connection at all

    def flush(self) -> None:
        self.link.flush()

    # -- InboundConnection --------------------------------------------------------------------------------------------

    def drain(self) -> None:
        if self._goaway is None and not self._lost:
            self._goaway = self._next_id
            if self.quic.handshake_done:
                self.h3.send_goaway(self._goaway)
                self.wake()
            self._close_when_done()

    def close_now(self) -> None:
        # The streams end with the connection, none of them by a FIN; NO_ERROR would call a cut answer a good one.
        self.link.close(INTERNAL_ERROR if self.legs else NO_ERROR, "the listener is closing")
        self.link.flush()

    def dispose(self) -> None:
        """Let go of every timer: the listener is gone, or nothing ever came of this connection."""
        self.link.dispose()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_when_done(self) -> None:
        # An answer that was given is not an answer that arrived: request streams leave the transport when acknowledged.
        if self._goaway is not None and not self.legs and not self._lost and not self.quic.open_requests:
            self.link.close(NO_ERROR, "drained")

    # -- legs -----------------------------------------------------------------------------------------------------------

    def accept(self, stream_id: int) -> ServerLeg | None:
        if stream_id & 3:
            return None  # ours, server-initiated and bidirectional: we open none
        if self._goaway is not None and stream_id >= self._goaway:
            self.quic.stop(stream_id, REQUEST_REJECTED)
            self.quic.abandon(stream_id, REQUEST_REJECTED)
            return None
        self._next_id = max(self._next_id, stream_id + 4)
        leg = self.legs[stream_id] = self._opened = ServerLeg(self, stream_id)
        said = self._early_priorities.pop(stream_id, None) if self._early_priorities else None
        if said is not None:
            leg.client_updates(said)
        return leg

    def deliver(self, leg: ServerLeg, head: RequestHead) -> None:
        """A head is whole: the gateway's from here on."""
        if not self.connected and not self._introduce():
            leg.cut(REQUEST_REJECTED)
            return
        self.link.watch()
        self.service.on_request(leg, head, self.origin if self.quic.handshake_done else self._early)
        if leg.updated is not None:
            leg.receiver.on_priority(leg.updated)

    def retire(self, leg: StreamLeg) -> None:
        self.legs.pop(leg.stream_id, None)
        if self._headless:
            self._headless.pop(leg, None)
        if self._goaway is not None:
            self.wake()

    def _introduce(self) -> bool:
        """Tell the gateway of this connection; False when it has too many."""
        if self._lost:
            return False
        self.connected = self.service.on_connected(self)
        if not self.connected:
            self.link.close(TRANSPORT_CONNECTION_REFUSED, "too many connections", transport=True)
        return self.connected

    def _await_head(self, leg: ServerLeg) -> None:
        """A head that came in part has to be whole in time, or a thousand half requests would sit here for free."""
        self._headless[leg] = self._loop.time()
        if self._deadline is None:
            self._deadline = self._loop.call_later(self.service.limits.header_timeout_s, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline = None
        if not self.quic.handshake_done:
            self.link.close(NO_ERROR, "no handshake in time")
            return
        limit, now = self.service.limits.header_timeout_s, self._loop.time()
        for leg, since in list(self._headless.items()):
            if leg.has_head or leg.dead:
                del self._headless[leg]
            elif now - since >= limit:
                leg.cut(REQUEST_INCOMPLETE)
        if self._headless:
            due = min(self._headless.values()) + limit - now
            self._deadline = self._loop.call_later(max(due, 0.01), self._on_deadline)

    # -- what the link says -------------------------------------------------------------------------------------------

    def on_handshake(self, done: events.HandshakeCompleted) -> None:
        self.origin.resumed = self._early.resumed = done.session_resumed
        self.origin.server_name = self._early.server_name = self.quic.client_name
        self._table.established(self, resumed=done.session_resumed)
        if not self.connected and not self._introduce():
            return
        frames = self.h3  # says SETTINGS
        if self._goaway is not None:
            frames.send_goaway(self._goaway)
            self._close_when_done()

    def on_stream(self, stream_id: int, chunk: bytes, fin: bool) -> None:
        if not self.quic.handshake_done:
            self._early.server_name, self._early.resumed = self.quic.client_name, True
        self.h3.receive(stream_id, chunk, fin)
        leg, self._opened = self._opened, None
        if leg is not None and not leg.has_head and not leg.dead:
            self._await_head(leg)

    def on_stream_reset(self, stream_id: int, code: int) -> None:
        self.h3.reset(stream_id)
        leg = self.legs.get(stream_id)
        if leg is not None:
            self._count_reset()
            leg.client_left(code, f"the client reset the stream with {code:#x}")

    def on_stream_stopped(self, stream_id: int, code: int) -> None:
        self.h3.stopped(stream_id)
        leg = self.legs.get(stream_id)
        if leg is not None:
            self._count_reset()
            leg.client_left(code, f"the client stopped the stream with {code:#x}")

    def _count_reset(self) -> None:
        now = self._loop.time()
        self._resets = min(RESET_BURST, self._resets + (now - self._resets_at) * RESETS_PER_S) - 1
        self._resets_at = now
        if self._resets < 0:
            raise ConnectionFault(EXCESSIVE_LOAD, f"more than {RESETS_PER_S:.0f} streams a second were aborted")

    def on_flushed(self) -> None:
        if self.full:
            for leg in list(self.full):
                leg.drained()
        if self._goaway is not None:
            self._close_when_done()

    def on_lost(self, code: int, reason: str, *, by_peer: bool) -> None:
        self._lost = True
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        detail = f"the client's connection ended: {reason or 'no reason given'} ({code:#x})"
        for leg in list(self.legs.values()):
            leg.fail(Abort(Party.CLIENT, Stage.BODY, Cause.CANCELLED, detail, code))
        if self.connected:
            self.service.on_disconnected(self)

    def on_gone(self) -> None:
        self._table.forget(self)

    def on_id_issued(self, cid: bytes) -> None:
        self._table.issued(self, cid)

    def on_id_retired(self, cid: bytes) -> None:
        self._table.retired(cid)

    def on_goaway(self, last_id: int) -> None:
        """A client's GOAWAY speaks of pushes, of which there are none."""

    def on_settings(self) -> None: ...

    def on_priority(self, stream_id: int, value: bytes) -> None:
        if stream_id >= 4 * self.quic.streams_allowed:
            raise ConnectionFault(ID_ERROR, f"a priority for stream {stream_id}, which may not be opened yet")
        said, leg = read(value), self.legs.get(stream_id)
        if said is None:
            return
        if leg is not None:
            leg.client_updates(said)
        elif stream_id >= self._next_id:
            # It may come before its request (RFC 9218 7), and is the later word then.
            self._early_priorities[stream_id] = said
            if len(self._early_priorities) > EARLY:
                del self._early_priorities[next(iter(self._early_priorities))]
        else:
            self.quic.prioritize(stream_id, said)  # its leg is over, and the transport still has much of the answer
