"""Find another edge for a WebSocket whose edge was lost before it said anything.

Theory: the client was told 101 and must not notice. The upgrade is asked of the next candidates; an edge will do when it
accepts the same subprotocol and extensions as the first, because the client was told those. Then the tunnel says the
client's opening again and goes on. A WebSocket handshake is a GET without body: it may always be asked again.

Owner: the exchange. While this works, it holds the exchange's edge; `give_up` hands the last failure to the tunnel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from proxy.failover import Dial, GiveUp
from proxy.io.rims import DialMarks
from proxy.messages import NOBODY, Abort, Cause, Fields, Leg, Party, ResponseHead, Stage

if TYPE_CHECKING:
    from proxy.io.relay import Exchange

SAME = (b"sec-websocket-protocol", b"sec-websocket-extensions")


class Reopenable(Protocol):
    def attach(self, edge: Leg) -> None: ...
    def give_up(self, abort: Abort) -> None: ...


class Reopening:
    """One exchange's search for another edge. Opening and receiver at once: it has one leg at a time."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._leg: Leg | None = None
        self.tunnel: Reopenable | None = None
        self.accepted: ResponseHead | None = None

    def begin(self) -> None:
        """The tunnel lost its edge."""
        self._failed(Abort(Party.EDGE, Stage.CONNECT, Cause.LOST, "lost before its first message", unprocessed=True))

    def _failed(self, abort: Abort) -> None:
        command = self._exchange.next_edge(abort)
        if isinstance(command, Dial):
            self._exchange.open_edge(command, self)
        else:
            self._give_up(command)

    def _give_up(self, command: GiveUp) -> None:
        if self.tunnel is not None:
            self.tunnel.give_up(command.abort)

    def on_open(self, leg: Leg, marks: DialMarks) -> None:
        if self._exchange.is_over:
            leg.abort(Abort(Party.CLIENT, Stage.CONNECT, Cause.CANCELLED, "no longer wanted"))
            return
        self._leg = leg
        leg.receiver = self
        self._exchange.ask(leg, marks)

    def on_open_failed(self, abort: Abort) -> None:
        if not self._exchange.is_over:
            self._failed(abort)

    def on_head(self, head: ResponseHead) -> None:
        leg = self._leg
        if leg is None or self.tunnel is None or self.accepted is None:
            return
        if head.status == 101 and all(head.get(name) == self.accepted.get(name) for name in SAME):
            self._leg = None
            self.tunnel.attach(leg)
            return
        self._drop(leg, "answered another way than the first edge")
        self._failed(
            Abort(Party.EDGE, Stage.CONNECT, Cause.REFUSED, f"upgrade answered {head.status}", unprocessed=True)
        )

    def on_abort(self, abort: Abort) -> None:
        self._leg = None
        self._failed(Abort(Party.EDGE, Stage.CONNECT, abort.cause, abort.detail, unprocessed=True))

    def on_end(self) -> None:
        if self._leg is not None:
            self.on_abort(Abort(Party.EDGE, Stage.HEAD, Cause.LOST, "ended before an answer"))

    def cancel(self) -> None:
        """The exchange is over."""
        if self._leg is not None:
            self._drop(self._leg, "the client left")

    def _drop(self, leg: Leg, why: str) -> None:
        self._leg = None
        leg.receiver = NOBODY
        leg.abort(Abort(Party.US, Stage.HEAD, Cause.CANCELLED, why))

    def on_interim(self, head: ResponseHead) -> None: ...
    def on_data(self, chunk: bytes) -> None: ...
    def on_trailers(self, fields: Fields) -> None: ...
    def on_full(self) -> None: ...
    def on_drained(self) -> None: ...
