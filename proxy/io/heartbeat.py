"""Keep a client waiting for a slow model from taking silence for a dead connection: a client's leg that speaks by itself.

Theory: it stands between the relay and the client's leg of one exchange, in pools that ask for it, and passes every word on.
After an edge's head that begins an event stream it adds a line whenever nothing went out for the pool's time. What the edge
owes is not touched: its deadlines run, and a stream that failed ends as it always does, so that a heartbeat never hides a
dead edge.

Owner: the exchange. The one timer ends with the words that end the answer, and looks at the exchange before it speaks:
a client that left tells only the exchange.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.exchange import Phase
from proxy.heartbeat import Gaps, takes_heartbeats
from proxy.messages import Abort, Fields, Head, Leg, Receiver, ResponseHead
from proxy.priority import Priority

if TYPE_CHECKING:
    from proxy.io.exchange import Exchange


class HeartbeatLeg:
    """A client's leg, and a heartbeat after every `interval_s` of silence; see `proxy.messages.Leg`."""

    def __init__(self, leg: Leg, interval_s: float) -> None:
        self._leg = leg
        self._interval_s = interval_s
        self._exchange: Exchange | None = None
        self._gaps = Gaps()
        self._loop = asyncio.get_running_loop()
        self._quiet_from = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def belongs_to(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def receiver(self) -> Receiver:
        return self._leg.receiver

    @receiver.setter
    def receiver(self, receiver: Receiver) -> None:
        self._leg.receiver = receiver

    @property
    def reused(self) -> bool:
        return self._leg.reused

    @reused.setter
    def reused(self, reused: bool) -> None:
        self._leg.reused = reused

    @property
    def version(self) -> str:
        return self._leg.version

    @version.setter
    def version(self, version: str) -> None:
        self._leg.version = version

    def head(self, head: Head) -> None:
        self._leg.head(head)
        if isinstance(head, ResponseHead) and takes_heartbeats(head):
            self._quiet_from = self._loop.time()
            self._timer = self._loop.call_later(self._interval_s, self._on_timer)

    def interim(self, head: ResponseHead) -> None:
        self._leg.interim(head)

    def data(self, chunk: bytes) -> None:
        if self._timer is not None:
            self._gaps.passed(chunk)
            self._quiet_from = self._loop.time()
        self._leg.data(chunk)

    def trailers(self, fields: Fields) -> None:
        self._leg.trailers(fields)

    def end(self) -> None:
        self._stop()
        self._leg.end()

    def finish(self) -> None:
        self._stop()
        self._leg.finish()

    def abort(self, abort: Abort) -> None:
        self._stop()
        self._leg.abort(abort)

    def pause(self) -> None:
        self._leg.pause()

    def resume(self) -> None:
        self._leg.resume()

    def prioritize(self, priority: Priority) -> None:
        self._leg.prioritize(priority)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        exchange, now = self._exchange, self._loop.time()
        self._timer = None
        if exchange is None or exchange.phase is not Phase.ANSWERING:
            return
        due = self._quiet_from + self._interval_s
        # A client that reads nothing needs no sign of life, and its buffer is full.
        if now + 0.001 >= due and not exchange.client_full and (words := self._gaps.heartbeat(exchange.dialect)):
            self._leg.data(words)
        if now + 0.001 >= due:
            self._quiet_from, due = now, now + self._interval_s
        self._timer = self._loop.call_at(due, self._on_timer)
