"""Keep what is known of one edge, and feed it with what the relay and the probes tell.

Theory: an edge's state is five parts with one reason each: its connections, its health, its limit, its standing (what the
choice looks at), its counters. This file only carries events to them:

      begin, note_status, finish ──► standing, limiter, health
      probed ──────────────────────► standing (round trip, TLS), health
      health ──────────────────────► Transition ──► `changed`, and how bad it stands

Rules for editing: 1. begin, note_status and finish are on the path of each request; 2. nothing here decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from config.model import Edge, Pool
from proxy.health import EdgeHealth, Outcome, State, Transition, retry_after_s
from proxy.io.dial import Resolves, Rims
from proxy.io.outbound import EdgeConnections
from proxy.io.probes import Prober, ProbeResult, edge_fields
from proxy.limiter import Limiter
from proxy.messages import Abort, ResponseHead
from proxy.reach import Reach
from proxy.weights import Standing

BADNESS = {State.HEALTHY: 0, State.DEGRADED: 0, State.EJECTED: 2, State.DOWN: 3, State.DRAINING: 4}


@dataclass(frozen=True, slots=True)
class EdgeView:
    """One line of `headrace edges`. None: not measured yet."""

    id: str
    pool: str
    url: str
    protocol: str  # as configured
    version: str  # as last spoken, "" before the first connection
    rtt_ms: float | None
    tls_ms: float | None
    ttfb_ms: float | None
    active: int
    limit: int
    weight: float
    live_weight: float
    state: str
    reason: str
    since_s: float  # how long it has been in this state
    standby: bool
    idle: int
    requests: int
    failures: int
    dials: int
    probes: int


@dataclass(frozen=True, slots=True)
class Place:
    """What each request to an edge names, worked out once."""

    scheme: bytes
    authority: bytes
    base_path: bytes

    @classmethod
    def of(cls, edge: Edge) -> Place:
        return cls(b"https" if edge.is_tls else b"http", edge.authority.encode(), edge.base_path.encode())


class EdgeState:
    """One edge: what the relay tells of it and what is known of it."""

    def __init__(
        self,
        edge: Edge,
        pool: Pool,
        *,
        resolver: Resolves,
        reach: Reach,
        clock: Callable[[], float],
        rims: Rims | None,
        changed: Callable[[Transition], None],
    ) -> None:
        now = clock()
        self.id = edge.id
        self.name = edge.id.encode("latin-1", "replace")
        self.config = edge
        self.header_fields = edge_fields(edge)
        self.place = Place.of(edge)
        self.connections = EdgeConnections(
            edge,
            resolver=resolver,
            reach=reach,
            clock=clock,
            connect_s=pool.timeouts.connect_s,
            rims=rims,
            on_new=self._on_new_leg,
        )
        self.prober = Prober(edge, resolver=resolver, reach=reach, clock=clock, rims=rims)
        self.health = EdgeHealth(edge.id, fall=pool.probe.fall, rise=pool.probe.rise, now=now)
        self.limiter = Limiter(edge.max_active)
        self.standing = Standing(edge.id, edge.weight, edge.standby)
        self.may_eject: Callable[[], bool] = bool  # the pool's say: no
        self.requests = self.failures = self.dials = self.probes = 0
        self._reach = reach
        self._changed = changed
        self._hears_ttfb = False
        self._may_speak_h3 = edge.protocol == "auto" and edge.scheme == "https"
        self._legs_new = 0  # since the last look
        self._legs_seen = 0  # of all that its connections ever gave out, at the last look

    def __repr__(self) -> str:
        return f"<EdgeState {self.id} {self.state.value} {self.standing.inflight}/{self.limiter.limit}>"

    @property
    def state(self) -> State:
        return self.health.state

    @property
    def reason(self) -> str:
        return self.health.reason

    # ---------------------------------------------------------------- from the relay

    def begin(self, now: float) -> None:
        """A request is about to be sent to this edge. Each begin has its finish."""
        standing = self.standing
        self.requests += 1
        standing.inflight += 1
        if not standing.waiting:
            standing.silent_since = now
        standing.waiting += 1
        limiter, inflight = self.limiter, standing.inflight
        standing.full = inflight >= limiter.limit
        limiter.begun(inflight, now)

    def note_status(self, head: ResponseHead, now: float, ttfb_s: float | None = None) -> None:
        """The final head arrived, `ttfb_s` after the request could leave. Costs, cooling and health hear of it at once:
        the end of a stream may be minutes away."""
        standing = self.standing
        standing.waiting = max(standing.waiting - 1, 0)
        standing.silent_since = now
        if ttfb_s is not None:
            self._hears_ttfb = True
            self._measured(ttfb_s, now)
        # The usual answer of a usual edge changes nothing, and is spared the 5 us of being judged.
        if head.status == 429 or head.status >= 500 or not self.health.is_spotless:
            wait_s = retry_after_s(head.fields, time.time()) if head.status in (429, 503) else None
            self._judge(Outcome(head.status, retry_after_s=wait_s), now)
        if self._may_speak_h3 and (alternatives := head.get(b"alt-svc")) is not None:
            self._reach.heard_alt_svc(self.config.host, self.config.port, alternatives, now)

    def finish(self, abort: Abort | None, ttfb_s: float | None, now: float, *, reused: bool = False) -> None:
        """The request is over, cleanly (None) or not. `reused`: its connection had carried an earlier one."""
        standing = self.standing
        standing.inflight = max(standing.inflight - 1, 0)
        if ttfb_s is None:
            standing.waiting -= 1
        elif not self._hears_ttfb and ttfb_s >= 0:
            self._measured(ttfb_s, now)
        standing.waiting = min(max(standing.waiting, 0), standing.inflight)
        if abort is not None:
            self._judge(Outcome(abort=abort, reused=reused), now)
        standing.full = not self.limiter.admits(standing.inflight)

    def served(self, head: ResponseHead, now: float, ttfb_s: float) -> None:
        """Both note_status and finish, for an answer that came whole in one read on a reused connection."""
        health = self.health
        if head.status == 429 or head.status >= 500 or not health.is_spotless or self._may_speak_h3:
            self.note_status(head, now, ttfb_s)
            self.finish(None, ttfb_s, now, reused=True)
            return
        standing = self.standing
        standing.silent_since = now
        standing.inflight = inflight = max(standing.inflight - 1, 0)
        standing.waiting = min(max(standing.waiting - 1, 0), inflight)
        self._hears_ttfb = True
        standing.ttfb.add(ttfb_s, now)
        self.limiter.answered(ttfb_s, now)
        standing.full = inflight >= self.limiter.limit

    def _measured(self, ttfb_s: float, now: float) -> None:
        self.standing.ttfb.add(ttfb_s, now)
        self.limiter.answered(ttfb_s, now)

    def _judge(self, outcome: Outcome, now: float) -> None:
        was = self.health.failures
        self.note(self.health.on_outcome(outcome, now, may_eject=self.may_eject()), now)
        if self.health.failures > was or outcome.status == 429:
            self.failures += self.health.failures - was
            self.limiter.failed(now)

    def _on_new_leg(self) -> None:
        self._legs_new += 1
        self.dials += 1

    # ---------------------------------------------------------------- from the edge set

    def looked_at(self, now: float) -> None:
        """Once a second: fold what was counted since into the averages."""
        legs = self.connections.legs
        if legs > self._legs_seen:
            self.standing.p_new.add(self._legs_new / (legs - self._legs_seen), now)
            self._legs_new, self._legs_seen = 0, legs
        self.standing.slow_start = self.health.slow_start(now)

    def probed(self, result: ProbeResult, now: float) -> None:
        self.probes += 1
        if result.rtt_s is not None:
            self.standing.rtt.add(result.rtt_s, now)
        if result.tls_s is not None:
            self.standing.tls.add(result.tls_s, now)
        if result.version and not self.connections.version:
            self.connections.version = result.version
        self.note(self.health.on_probe(result.ok, result.reason, now), now)

    def note(self, transition: Transition | None, now: float) -> None:
        """Bring the standing in line with the health, and tell of the transition when there was one."""
        health, standing = self.health, self.standing
        standing.badness = 1 if health.is_cooling and health.state is State.EJECTED else BADNESS[health.state]
        standing.back_in_s = health.back_in_s(now) or 0.0
        if transition is not None:
            self._changed(transition)

    def reconfigure(self, edge: Edge, pool: Pool, now: float) -> None:
        """Take over what may change without losing connections or measures."""
        self.config = edge
        self.header_fields = edge_fields(edge)
        self.place = Place.of(edge)
        self.prober.edge = edge
        self.connections.connect_s = pool.timeouts.connect_s
        self.health.fall, self.health.rise = pool.probe.fall, pool.probe.rise
        self.standing.weight, self.standing.standby = edge.weight, edge.standby
        if edge.max_active != self.limiter.fixed:
            self.limiter = Limiter(edge.max_active)
        self.note(self.health.drain("" if edge.weight > 0 else "weight 0", now), now)

    def retire(self, now: float) -> None:
        self.connections.retire()
        self.note(self.health.drain("removed from the configuration", now), now)

    @property
    def is_gone(self) -> bool:
        """Nothing of it is in progress any more."""
        return self.standing.inflight == 0 and self.connections.is_empty

    def view(self, pool: str, live_weight: float, now: float) -> EdgeView:
        standing, config = self.standing, self.config
        return EdgeView(
            id=self.id,
            pool=pool,
            url=f"{config.scheme}://{config.authority}{config.base_path}",
            protocol=config.protocol,
            version=self.connections.version,
            rtt_ms=_ms(standing.rtt.value),
            tls_ms=_ms(standing.tls.value),
            ttfb_ms=_ms(standing.ttfb.value),
            active=standing.inflight,
            limit=self.limiter.limit,
            weight=config.weight,
            live_weight=round(live_weight, 1),
            state=self.state.value,
            reason=self.reason,
            since_s=round(now - self.health.since, 1),
            standby=config.standby,
            idle=self.connections.counts.idle,
            requests=self.requests,
            failures=self.failures,
            dials=self.dials,
            probes=self.probes,
        )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
