"""Go on with an exchange whose edge said 101: the tunnel, and another edge when a silent WebSocket lost its own.

Theory: from the 101 on the tunnel has both legs and ends them itself. What stays here is the exchange's part: the record,
the drain, and the search for another edge. The client was told 101 and must not notice that search, so an edge will do only
when it accepts the same subprotocol and extensions as the first. A WebSocket handshake is a GET without body: it may always
be asked again.

Owner: the exchange. This is the Opening and the Receiver of the search: it has one leg at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy import headers
from proxy.failover import Dial
from proxy.io.rims import DialMarks
from proxy.io.upgrades import PlainTunnel, Tunnel, WebSocketJoint
from proxy.messages import NOBODY, Abort, Cause, Fields, Leg, Party, ResponseHead, Stage
from proxy.priority import Priority

if TYPE_CHECKING:
    from proxy.io.exchange import Exchange

SAME = (b"sec-websocket-protocol", b"sec-websocket-extensions")
LOST_EDGE = Abort(Party.EDGE, Stage.CONNECT, Cause.LOST, "lost before its first message", unprocessed=True)


class Switched:
    """The exchange after its 101. Passes the 101 on and starts the tunnel that fits the protocol."""

    def __init__(self, exchange: Exchange, accepted: ResponseHead) -> None:
        leg = exchange.leg
        assert leg is not None
        self._x = exchange
        self._accepted = accepted
        self._leg: Leg | None = None
        self._joint: WebSocketJoint | None = None
        exchange.deadline = exchange.total_deadline = float("inf")  # a tunnel has its own keepalive
        fields = headers.response_fields(accepted, server_timing=b"", loopback=False)
        exchange.client.head(ResponseHead(101, fields, reason=accepted.reason))
        self._tunnel: Tunnel
        if exchange.head.protocol == b"websocket":
            reconnect = None if exchange.offers_redirect else self._search
            websocket = exchange.pool.config.websocket
            self._tunnel = self._joint = WebSocketJoint(exchange.client, leg, websocket, self._over, reconnect)
        else:
            self._tunnel = PlainTunnel(exchange.client, leg, self._over)

    def drain(self) -> None:
        self._tunnel.drain()

    def close_now(self) -> None:
        self._tunnel.close_now()

    def forget(self) -> None:
        """The exchange is over: a search that still runs ends."""
        if self._leg is not None:
            self._drop(self._leg, "the client left")

    def _over(self, abort: Abort | None, bytes_in: int, bytes_out: int) -> None:
        """The tunnel has ended both legs by itself; `abort` when it was not a clean end."""
        x = self._x
        x.bytes_in += bytes_in
        x.bytes_out += bytes_out
        x.abort = abort
        x.leg = None
        x.over()

    # ---------------------------------------------------------------- the search for another edge

    def _search(self) -> None:
        self._failed(LOST_EDGE)

    def _failed(self, abort: Abort) -> None:
        x = self._x
        command = x.next_after(abort, reused=False)
        if isinstance(command, Dial):
            x.ask_for_leg(x.pool.edges[command.edge_id], self, fresh=command.fresh)
        elif self._joint is not None:
            self._joint.give_up(command.abort)

    def on_open(self, leg: Leg, marks: DialMarks) -> None:
        x = self._x
        if x.switched is not self:
            leg.abort(Abort(Party.CLIENT, Stage.CONNECT, Cause.CANCELLED, "no longer wanted"))
            return
        x.took_leg(marks)
        self._leg = leg
        leg.receiver = self
        leg.head(x.edge_head())

    def on_open_failed(self, abort: Abort) -> None:
        if self._x.switched is self:
            self._failed(abort)

    def on_head(self, head: ResponseHead) -> None:
        leg = self._leg
        if leg is None or self._joint is None:
            return
        if head.status == 101 and all(head.get(name) == self._accepted.get(name) for name in SAME):
            self._leg = None
            self._joint.attach(leg)
            return
        self._drop(leg, "answered another way than the first edge")
        detail = f"upgrade answered {head.status}"
        self._failed(Abort(Party.EDGE, Stage.CONNECT, Cause.REFUSED, detail, unprocessed=True))

    def on_abort(self, abort: Abort) -> None:
        self._leg = None
        self._failed(Abort(Party.EDGE, Stage.CONNECT, abort.cause, abort.detail, unprocessed=True))

    def on_end(self) -> None:
        if self._leg is not None:
            self.on_abort(Abort(Party.EDGE, Stage.HEAD, Cause.LOST, "ended before an answer"))

    def _drop(self, leg: Leg, why: str) -> None:
        self._leg = None
        leg.receiver = NOBODY
        leg.abort(Abort(Party.US, Stage.HEAD, Cause.CANCELLED, why))

    def on_interim(self, head: ResponseHead) -> None: ...
    def on_data(self, chunk: bytes) -> None: ...
    def on_trailers(self, fields: Fields) -> None: ...
    def on_full(self) -> None: ...
    def on_drained(self) -> None: ...
    def on_priority(self, priority: Priority) -> None: ...
