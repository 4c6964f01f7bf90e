"""Join two legs after a switch of protocols: bytes both ways, each direction with an end of its own.

Theory: a tunnel owns both legs from the switch on. `end` of one side is a half-close of the other (RFC 9110 9.3.6): the
opposite direction goes on until its own end. WebSocket is the one protocol that is looked into, for its keepalive.

Owner: the exchange or the forward proxy that joined them; it hears once, through `on_over`, that all is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import config.model
from proxy.io.websocket_tunnel import TunnelEnd, WebSocketTunnel
from proxy.messages import NOBODY, Abort, Cause, Fields, Leg, Party, ResponseHead, Stage
from proxy.priority import Priority

OnOver = Callable[[Abort | None, int, int], None]
"""abort or None for a clean end, bytes from the client, bytes to the client."""


class Tunnel(Protocol):
    def drain(self) -> None:
        """We are going: say so in the protocol's own way if it has one."""

    def close_now(self) -> None:
        """End both directions now, not cleanly."""


class PlainTunnel:
    """Bytes both ways, unseen. A slow reader on one side stops the reads on the other."""

    __slots__ = ("_bytes_in", "_bytes_out", "_client", "_edge", "_ends", "_on_over", "_over")

    def __init__(self, client: Leg, edge: Leg, on_over: OnOver) -> None:
        self._client, self._edge = client, edge
        self._on_over = on_over
        self._bytes_in = self._bytes_out = self._ends = 0
        self._over = False
        client.receiver = _Direction(self, client, edge, Party.CLIENT)
        edge.receiver = _Direction(self, edge, client, Party.EDGE)

    def count(self, who: Party, size: int) -> None:
        if who is Party.CLIENT:
            self._bytes_in += size
        else:
            self._bytes_out += size

    def one_ended(self) -> None:
        self._ends += 1
        if self._ends == 2:
            self._finish(None)

    def lost(self, abort: Abort, other: Leg) -> None:
        other.receiver = NOBODY
        other.abort(abort)
        self._finish(abort)

    def drain(self) -> None:
        """Plain bytes have no word for it: the tunnel goes on until the hard stop."""

    def close_now(self) -> None:
        abort = Abort(Party.US, Stage.BODY, Cause.REFUSED, "stopping")
        for leg in (self._client, self._edge):
            leg.receiver = NOBODY
            leg.abort(abort)
        self._finish(abort)

    def _finish(self, abort: Abort | None) -> None:
        if not self._over:
            self._over = True
            self._on_over(abort, self._bytes_in, self._bytes_out)


class _Direction:
    """What one leg of a plain tunnel says becomes what the other leg is told."""

    __slots__ = ("_other", "_tunnel", "_who")

    def __init__(self, tunnel: PlainTunnel, own: Leg, other: Leg, who: Party) -> None:
        self._tunnel, self._other, self._who = tunnel, other, who

    def on_head(self, head: ResponseHead) -> None: ...
    def on_interim(self, head: ResponseHead) -> None: ...
    def on_trailers(self, fields: Fields) -> None: ...
    def on_priority(self, priority: Priority) -> None: ...

    def on_data(self, chunk: bytes) -> None:
        self._tunnel.count(self._who, len(chunk))
        self._other.data(chunk)

    def on_end(self) -> None:
        self._other.end()
        self._tunnel.one_ended()

    def on_abort(self, abort: Abort) -> None:
        self._tunnel.lost(abort, self._other)

    def on_full(self) -> None:
        self._other.pause()

    def on_drained(self) -> None:
        self._other.resume()


class WebSocketJoint:
    """A WebSocket tunnel as a Tunnel. `reconnect` asks for another edge: the answer is `attach` or `give_up`."""

    def __init__(
        self,
        client: Leg,
        edge: Leg,
        websocket: config.model.WebSocket,
        on_over: OnOver,
        reconnect: Callable[[], None] | None,
    ) -> None:
        self._on_over = on_over
        self._tunnel = WebSocketTunnel(client, edge, websocket, on_finished=self._finished, reconnect=reconnect)
        self.attach = self._tunnel.attach
        self.give_up = self._tunnel.give_up

    def drain(self) -> None:
        self._tunnel.drain()

    def close_now(self) -> None:
        """The hard stop, after drain() had its time: whoever has not closed by now is cut."""
        abort = Abort(Party.US, Stage.BODY, Cause.REFUSED, "stopping")
        client = self._tunnel.client
        client.leg.abort(abort)
        client.on_abort(abort)

    def _finished(self, end: TunnelEnd) -> None:
        abort = Abort(end.by, Stage.BODY, end.cause, end.detail, end.code) if end.cause is not None else None
        self._on_over(abort, end.bytes_up, end.bytes_down)
