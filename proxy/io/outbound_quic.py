"""Dial an edge over QUIC and send it requests over HTTP/3.

Theory: a dial is one connected UDP socket, so that the kernel tells of a refused port at once and a stranger's datagrams
never arrive. The connection is usable when its handshake is done and the certificate checked; there is no way around the
check. Afterwards it is the mirror of `quic_server`: a leg for each request, the peer's MAX_STREAMS is the room.

A response that breaks a rule fails its own exchange (RFC 9114 4.1.2). What vouches that a request was not processed
(GOAWAY below its id, REQUEST_REJECTED) is told as `unprocessed`, so that it may go elsewhere whatever its method.
A WebSocket goes out as an extended CONNECT (RFC 9220) where the edge's SETTINGS say that it takes them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Hashable

from aioquic.quic import events

from proxy.io.quic_codes import (
    NO_ERROR,
    REQUEST_CANCELLED,
    STREAM_CREATION_ERROR,
    ConnectionFault,
)
from proxy.io.quic_edge_leg import MAX_SECTION, EdgeLeg
from proxy.io.quic_flow import Bounds, FlowConnection
from proxy.io.quic_h3 import H3Frames
from proxy.io.quic_leg import StreamLeg
from proxy.io.quic_link import QuicLink
from proxy.io.quic_tls import QuicSessions, client_configuration
from proxy.io.quic_wire import SETTING_CONNECT
from proxy.messages import Abort, Cause, Leg, Party
from resolver.io.quic_door import Address

logger = logging.getLogger(__name__)

PING_AFTER_S, LOST_AFTER_S = 5.0, 10.0
"""Silence of an edge with work in progress: a slow model answers PING, a dead path does not."""
ASK_AFTER_S = 0.4
"""Silence in the middle of an answer: at 5 s a new port at the NAT was a pause of 5 s, at 0.4 s it is one of 0.4 s and two
round trips. Token streams have gaps of tens of milliseconds; a question is one packet each way."""
IDLE_TIMEOUT_S = 120.0
MAX_OPEN = 256  # exchanges at once, where the edge would allow more
DRAIN = 64  # datagrams a wake-up
MAX_DATAGRAM = 65_535
SOCKET_BUFFER = 4 * 1024 * 1024
CRYPTO_ERROR = 0x100  # RFC 9000 20.1: plus the TLS alert
CERTIFICATE_ALERTS = frozenset({42, 43, 44, 45, 46, 48})


class H3EdgeConnection:
    """One QUIC connection to an edge."""

    version = "h3"

    def __init__(self, sock: socket.socket, quic: FlowConnection, peer: Address) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.closed = False
        self.quic = quic
        self.full: set[StreamLeg] = set()
        self.resumed = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolved when requests may be sent; fails with an OSError. Awaited by the dial alone."""
        self.link = QuicLink(
            quic, self._send, self, ping_after_s=PING_AFTER_S, lost_after_s=LOST_AFTER_S, ask_after_s=ASK_AFTER_S
        )
        self.wake = self.link.wake
        self._sock = sock
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._legs: dict[int, EdgeLeg] = {}  # at most MAX_OPEN
        self._frames: H3Frames | None = None
        self._leaving = False  # we close, or the edge said GOAWAY
        self._carried = False
        self._told = 0
        self._blocked = False
        self._loop.add_reader(sock, self._readable)

    def start(self) -> None:
        """Begin the handshake."""
        self.quic.connect(self._peer, self._loop.time())
        self.link.flush()

    @property
    def h3(self) -> H3Frames:
        assert self._frames is not None, "before the handshake was done"
        return self._frames

    # -- EdgeConnection -----------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        if self.closed or self._leaving or self._frames is None or self.link.suspect:
            return 0
        return max(0, min(self.quic.streams_left, MAX_OPEN - len(self._legs)))

    @property
    def active(self) -> int:
        return len(self._legs)

    @property
    def is_settled(self) -> bool:
        """Whether the edge's SETTINGS came: before, nothing is known of what it takes."""
        return self._frames is not None and self._frames.settings is not None

    @property
    def allows_websocket(self) -> bool:
        """Whether the edge said that it takes extended CONNECTs (RFC 9220)."""
        settings = self._frames.settings if self._frames is not None else None
        return settings is not None and settings.get(SETTING_CONNECT) == 1

    def open(self) -> Leg:
        assert self.room > 0, "open() on a connection without room"
        stream_id = self.quic.open_request()
        leg = self._legs[stream_id] = EdgeLeg(self, stream_id, reused=self._carried)
        self._carried = True
        self.h3.attach(stream_id, leg)
        self.link.watch()
        return leg

    def close(self) -> None:
        if not self.closed:
            self._leaving = True
            self._close_when_done()
            self._tell()

    def _close_when_done(self) -> None:
        if self._leaving and not self._legs and not self.closed:
            self.link.close(NO_ERROR, "")
            self._let_go()

    def _let_go(self) -> None:
        """Say the last word and close the socket. No closing period: a late datagram meets a closed port, which says it."""
        if self._sock.fileno() >= 0:
            self.link.flush()
            self.link.dispose()
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def retire(self, leg: StreamLeg) -> None:
        self._legs.pop(leg.stream_id, None)
        self._tell()
        if self._leaving:
            # Not inside the words of a leg: its receiver is still to hear the last of them.
            self._loop.call_soon(self._close_when_done)

    def _tell(self) -> None:
        self._told = self.room
        self.on_change()

    # -- the socket ---------------------------------------------------------------------------------------------------

    def _send(self, datagram: bytes, _address: Address) -> None:
        try:
            self._sock.send(datagram)
        except BlockingIOError:
            pass  # lost like on any path: the kernel's buffer holds more than a congestion window allows
        except OSError as exc:
            self._refused(exc)

    def _readable(self) -> None:
        receive = self._sock.recv
        for _ in range(DRAIN):
            try:
                datagram = receive(MAX_DATAGRAM)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as exc:
                self._refused(exc)
                return
            if self.quic.is_reset(datagram):
                self.link.close(NO_ERROR, "stateless reset: the edge does not know this connection")
                break
            self.link.receive(datagram, self._peer)
            if self.closed:
                break
        self.link.flush()

    def _refused(self, exc: OSError) -> None:
        """ICMP says that nobody listens, or that there is no way: no use in waiting for a timeout."""
        if not self.ready.done():
            self.ready.set_exception(exc)
            self._loop.call_soon(self.abandon)
        elif isinstance(exc, ConnectionRefusedError):
            self._loop.call_soon(self.link.close, NO_ERROR, "the edge's port is closed")
        else:
            logger.debug("quic: to the edge: %s", exc)

    def abandon(self) -> None:
        """Give up at once; what is in progress fails."""
        self.link.close(NO_ERROR, "given up")
        self._let_go()

    # -- what the link says -------------------------------------------------------------------------------------------

    def on_handshake(self, done: events.HandshakeCompleted) -> None:
        self.resumed = done.session_resumed
        self._frames = H3Frames(self.quic, self, is_client=True, limit=MAX_SECTION)
        if not self.ready.done():
            self.ready.set_result(None)

    def on_stream(self, stream_id: int, chunk: bytes, fin: bool) -> None:
        self.h3.receive(stream_id, chunk, fin)

    def on_stream_reset(self, stream_id: int, code: int) -> None:
        self.h3.reset(stream_id)
        leg = self._legs.get(stream_id)
        if leg is not None:
            leg.edge_reset(code)

    def on_stream_stopped(self, stream_id: int, code: int) -> None:
        self.h3.stopped(stream_id)
        leg = self._legs.get(stream_id)
        if leg is not None:
            # The edge reads no more of the request; its answer may be on its way and counts (RFC 9114 4.1.1).
            leg.mute()

    def on_flushed(self) -> None:
        if self.full:
            for leg in list(self.full):
                leg.drained()
        if not self._told and self.room:
            self._tell()

    def on_lost(self, code: int, reason: str, *, by_peer: bool) -> None:
        self.closed = True
        detail = f"h3 connection lost: {reason or 'no reason given'} ({code:#x})"
        if not self.ready.done():
            self.ready.set_exception(dial_failure(code, reason))
        for leg in list(self._legs.values()):
            leg.connection_lost(code, detail)
        self._tell()
        self._loop.call_soon(self._let_go)

    def on_gone(self) -> None:
        """The socket went with on_lost."""

    def on_id_issued(self, cid: bytes) -> None: ...

    def on_id_retired(self, cid: bytes) -> None: ...

    # -- what the frames say ------------------------------------------------------------------------------------------

    def accept(self, stream_id: int) -> EdgeLeg | None:
        if stream_id & 1:
            raise ConnectionFault(STREAM_CREATION_ERROR, f"the edge opened bidirectional stream {stream_id}")
        return None

    def on_goaway(self, last_id: int) -> None:
        self._leaving = True
        detail = f"h3 goaway: requests from stream {last_id} on were not processed"
        for leg in [leg for stream_id, leg in self._legs.items() if stream_id >= last_id]:
            receiver, stage = leg.receiver, leg.stage
            leg.cut(REQUEST_CANCELLED)
            receiver.on_abort(Abort(Party.EDGE, stage, Cause.REFUSED, detail, NO_ERROR, unprocessed=True))
        self._tell()
        self._loop.call_soon(self._close_when_done)

    def on_settings(self) -> None:
        # Not from inside the frames: who waits for a connection that takes WebSockets may be given one now, and speak.
        self._loop.call_soon(self._settled)

    def _settled(self) -> None:
        if not self.closed:
            self._tell()

    def on_priority(self, stream_id: int, value: bytes) -> None:
        """Only clients send it; from an edge it has closed the connection already."""


def dial_failure(code: int, reason: str) -> OSError:
    """What a handshake's end means to who dialled, in the errors of a TLS client over TCP."""
    alert = code - CRYPTO_ERROR
    if alert in CERTIFICATE_ALERTS:
        failure = ssl.SSLCertVerificationError(1, f"certificate verify failed: {reason}")
        failure.verify_message = reason
        return failure
    if 0 <= alert < 256:
        return ssl.SSLError(1, f"tls alert {alert} over quic: {reason}")
    return ConnectionError(f"quic handshake ended with {code:#x}: {reason or 'no reason given'}")


async def dial_quic(
    address: str, port: int, *, server_name: str, ca_file: str, timeout_s: float, sessions: QuicSessions
) -> H3EdgeConnection:
    """A connection whose handshake is done. `address` is a literal.

    Raises TimeoutError, ConnectionRefusedError (as soon as ICMP says so), ssl.SSLError or another OSError. A caller that
    is cancelled leaves nothing behind.
    """
    edge: Hashable = (server_name, port, ca_file)
    bounds = Bounds()
    config = client_configuration(server_name, ca_file, bounds, IDLE_TIMEOUT_S)
    config.session_ticket = sessions.take(edge)
    config.token = sessions.take_token(edge)
    quic = FlowConnection(
        bounds=bounds,
        configuration=config,
        session_ticket_handler=lambda ticket: sessions.keep(edge, ticket),
        token_handler=lambda token: sessions.keep_token(edge, token),
    )
    sock = connected_socket(address, port)
    connection = H3EdgeConnection(sock, quic, sock.getpeername())
    try:
        connection.start()
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(connection.ready)
    except BaseException:
        if not connection.ready.done():
            connection.ready.cancel()
        elif not connection.ready.cancelled():
            connection.ready.exception()  # it is being raised: not "never retrieved" besides
        connection.abandon()
        raise
    return connection


def connected_socket(address: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        sock.connect((address, port))
    except BaseException:
        sock.close()
        raise
    return sock


__all__ = ["H3EdgeConnection", "QuicSessions", "dial_quic"]
