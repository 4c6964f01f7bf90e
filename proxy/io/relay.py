"""Keep all exchanges: their clock, deadlines and bounds, and where their records go.

Deadlines: each exchange has one moment at which it is overdue; the relay looks at all of them four times a second. A timer
for each exchange, armed anew for each chunk, would cost more than the chunk.

Owner: the gateway. Who may cancel an exchange: the client's leg (on_abort), a deadline, `abort_all` at the hard stop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from typing import Protocol

from proxy import headers
from proxy.exchange import Phase
from proxy.io.edges import PoolState
from proxy.io.exchange import Exchange
from proxy.io.heartbeat import HeartbeatLeg
from proxy.io.rims import Origin
from proxy.io.switched import Switched
from proxy.messages import Abort, Cause, Leg, Party, RequestHead, ResponseHead, Stage
from proxy.waterfall import Finished

TICK_S = 0.25
CONTINUE_AFTER_S = 0.3
NEVER = float("inf")


class Living(Protocol):
    """Whatever has deadlines and can be stopped: an `Exchange`, or an `Express` that may yet become one."""

    deadline: float
    total_deadline: float

    @property
    def switched(self) -> Switched | None: ...

    def overdue(self, now: float) -> None: ...

    def stop(self, abort: Abort) -> None: ...


class Relay:
    """What all exchanges share: clock, bounds, the set of living exchanges, and where records go."""

    def __init__(self, *, clock: Callable[[], float], record: Callable[[Finished], None]) -> None:
        self.clock = clock
        self.record = record
        self.now = clock()  # the time of the last tick: good enough for deadlines
        self.epoch = time.time() - self.now
        """What makes a time of the clock one of the calendar, as of the last tick."""
        self.exchanges: set[Living] = set()
        self.max_body_bytes = 512 * 1024 * 1024
        self.trusted: tuple[headers.Network, ...] = ()
        self.run = os.urandom(3).hex().encode()
        """Told apart by it: the exchanges of one life of the process, and those of another."""
        self._numbers = itertools.count(1)
        self._ticking: asyncio.TimerHandle | None = None

    def begin(self, leg: Leg, head: RequestHead, origin: Origin, pool: PoolState, target: bytes) -> Exchange:
        """Take over a client's leg: sets its receiver and starts dialling."""
        now = self.clock()
        name = self.id_of(next(self._numbers)).decode()
        if head.protocol and head.protocol != b"websocket" and not _speaks_h1(pool):
            head.protocol = b""  # an Upgrade may always be ignored (RFC 9110 7.8), and only h1 has it
        heart = None
        if pool.config.llm.heartbeat_s and not head.protocol:
            leg = heart = HeartbeatLeg(leg, pool.config.llm.heartbeat_s)
        exchange = Exchange(self, leg, head, origin, pool, target, name, now=now)
        if heart is not None:
            heart.belongs_to(exchange)
        self.exchanges.add(exchange)
        if self._ticking is None:
            self._tick_from(now)
        exchange.start()
        if head.expect_continue:
            asyncio.get_running_loop().call_later(CONTINUE_AFTER_S, self._encourage, exchange)
        return exchange

    def _encourage(self, exchange: Exchange) -> None:
        """Say the 100 that an edge owes, to a client that still waits for it: many servers have no Expect over h2 and h3,
        and curl would wait for a second (RFC 9110 10.1.1). A refusal that came by now has spared the client its body."""
        if exchange.phase is Phase.DIALING:
            asyncio.get_running_loop().call_later(CONTINUE_AFTER_S, self._encourage, exchange)
        elif exchange.phase is Phase.ASKED and not (exchange.continued or exchange.client_ended or exchange.bytes_in):
            exchange.continued = True
            exchange.client.interim(ResponseHead(100, []))

    def enter(self, living: Living, now: float) -> int:
        """Have `living` among the exchanges until it leaves by itself; its number."""
        self.exchanges.add(living)
        if self._ticking is None:
            self._tick_from(now)
        return next(self._numbers)

    def _tick_from(self, now: float) -> None:
        self.now = now
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def id_of(self, number: int) -> bytes:
        """What people call an exchange, for as long as this process lives."""
        return b"%b-%x" % (self.run, number)

    def _tick(self) -> None:
        self.now = now = self.clock()
        self.epoch = time.time() - now
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick) if self.exchanges else None
        for exchange in [x for x in self.exchanges if x.deadline <= now or x.total_deadline <= now]:
            exchange.overdue(now)

    def drain(self) -> None:
        """Tell tunnels that we are going; other exchanges end by themselves or at the hard stop."""
        for exchange in list(self.exchanges):
            if exchange.switched is not None:
                exchange.switched.drain()

    def abort_all(self, detail: str) -> None:
        """The hard stop: every exchange ends now, none of them cleanly."""
        for exchange in list(self.exchanges):
            exchange.stop(Abort(Party.US, Stage.BODY, Cause.REFUSED, detail))


def _speaks_h1(pool: PoolState) -> bool:
    return any(edge.scheme != "h3" and edge.protocol in ("auto", "h1") for edge in pool.config.edges)
