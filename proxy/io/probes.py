"""Ask an edge, every now and then, whether it is there: TCP, TLS, and one request when the configuration names a path.

Theory: a probe is a dial of its own, never a connection from the pool: it measures what a new connection costs, and a
busy pool must not hide a listener that is gone. TCP and TLS are timed apart. It resumes no session, or each probe would
use up the ticket that the next request wants (a ticket is offered once). Without a path nothing is sent at all.

Owner: `probe_forever` runs as one task for each edge, made and cancelled by `EdgeSet`; cancelled midway, the dial and the
connection are closed. Nothing else is started here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from config.model import Edge, Probe
from proxy.io.dial import Dialled, Dialler, QuicDialler, Resolves, Rims
from proxy.io.eyeballs import DialError
from proxy.io.rims import EdgeConnection
from proxy.messages import Abort, Fields, NullReceiver, RequestHead, ResponseHead
from proxy.reach import Reach

FIRST_WITHIN_S = 1.0  # the first probe: soon, but not all edges in one instant
JITTER = 0.1  # of the interval, to both sides
HASTE = 3  # an undecided streak is probed this many times as often: 2 to rise at 30 s is a minute lost
HASTE_MIN_S = 1.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one probe saw. Times in seconds, None for what was not measured; `reason` is "" when `ok`."""

    ok: bool
    reason: str = ""
    rtt_s: float | None = None
    tls_s: float | None = None
    status: int = 0
    version: str = ""


class _Quiet(asyncio.Protocol):
    """A connection on which nothing is said; as much of an EdgeConnection as a dial looks at."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.closed = False
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Answer(NullReceiver):
    """Waits for the final head of a probe's request; the body is of no interest."""

    def __init__(self) -> None:
        self.head: asyncio.Future[ResponseHead] = asyncio.get_running_loop().create_future()

    def on_head(self, head: ResponseHead) -> None:
        if not self.head.done():
            self.head.set_result(head)

    def on_abort(self, abort: Abort) -> None:
        if not self.head.done():
            self.head.set_exception(ConnectionError(abort.detail or abort.cause.value))


class Prober:
    """Probes one edge."""

    def __init__(
        self,
        edge: Edge,
        *,
        resolver: Resolves,
        reach: Reach,
        clock: Callable[[], float],
        rims: Rims | None = None,
    ) -> None:
        self.edge = edge
        speaking = rims or Rims(quic=QuicDialler())
        quiet = Rims(
            h1=lambda: _Quiet("h1"),
            h2=lambda: _Quiet("h2"),
            quic=speaking.quic,
        )
        self._speaking = Dialler(edge, resolver=resolver, reach=reach, clock=clock, rims=speaking, race_quic=False)
        self._quiet = Dialler(edge, resolver=resolver, reach=reach, clock=clock, rims=quiet, race_quic=False)

    async def probe(self, probe: Probe) -> ProbeResult:
        """One probe, over within `probe.timeout_s`. Never raises but asyncio.CancelledError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + probe.timeout_s
        try:
            dialled = await (self._speaking if probe.path else self._quiet).dial(probe.timeout_s)
        except DialError as exc:
            return ProbeResult(False, exc.abort.detail)
        try:
            if not probe.path:
                return self._seen(dialled, True, "", 0)
            return await self._ask(dialled, probe, deadline)
        finally:
            dialled.connection.close()

    async def _ask(self, dialled: Dialled, probe: Probe, deadline: float) -> ProbeResult:
        connection, request = dialled.connection, f"{probe.method} {probe.path}"
        answer = _Answer()
        try:
            async with asyncio.timeout_at(deadline):
                leg = (await _with_room(connection)).open()
                leg.receiver = answer
                leg.head(self._request(probe))
                leg.end()
                status = (await answer.head).status
        except TimeoutError:
            return self._seen(dialled, False, f"{request}: no answer in {probe.timeout_s:g} s", 0)
        except OSError as exc:
            return self._seen(dialled, False, f"{request}: {exc}", 0)
        good = 200 <= status < 400
        return self._seen(dialled, good, "" if good else f"{request}: status {status}", status)

    def _request(self, probe: Probe) -> RequestHead:
        edge = self.edge
        return RequestHead(
            probe.method.encode(),
            (edge.base_path + probe.path).encode(),
            b"https" if edge.is_tls else b"http",
            edge.authority.encode(),
            [(b"user-agent", b"headrace-probe"), (b"accept", b"*/*"), *edge_fields(edge)],
        )

    def _seen(self, dialled: Dialled, ok: bool, reason: str, status: int) -> ProbeResult:
        marks = dialled.marks
        is_quic = dialled.transport is None
        return ProbeResult(
            ok,
            reason,
            rtt_s=None if is_quic else marks.connect_s,
            tls_s=marks.tls_s if self.edge.is_tls else None,
            status=status,
            version=marks.version,
        )


def edge_fields(edge: Edge) -> Fields:
    """What the configuration sets on requests to this edge, named in lower case as in all our heads."""
    return [(name.lower().encode(), secret.reveal().encode()) for name, secret in edge.headers.items()]


async def _with_room(connection: EdgeConnection) -> EdgeConnection:
    """A new connection may need a moment (an h2 peer's settings) before it has room."""
    if connection.room > 0:
        return connection
    changed = asyncio.Event()
    connection.on_change = changed.set
    while connection.room <= 0:
        if connection.closed:
            raise ConnectionError("connection closed")
        changed.clear()
        await changed.wait()
    return connection


def pause_s(interval_s: float, *, undecided: bool, draw: float) -> float:
    """Seconds until the next probe: the interval give or take a tenth, a third of it while a streak is undecided."""
    base = max(interval_s / HASTE, min(interval_s, HASTE_MIN_S)) if undecided else interval_s
    return base * (1 + JITTER * (2 * draw - 1))


async def probe_forever(
    probe_once: Callable[[], Awaitable[bool]], interval_s: Callable[[], float], rng: random.Random
) -> None:
    """Probe until cancelled. `probe_once` says whether a streak is undecided; `interval_s` is read anew each time."""
    await asyncio.sleep(rng.random() * min(FIRST_WITHIN_S, interval_s() / 2))
    while True:
        undecided = await probe_once()
        await asyncio.sleep(pause_s(interval_s(), undecided=undecided, draw=rng.random()))
