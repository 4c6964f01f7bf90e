"""Keep the edges of all pools: their connections, health and measures, through reloads and failures.

Theory: decisions are pure and live elsewhere (`health`, `weights`, `limiter`, `failover`); this file holds their state for
each edge, feeds them with what happens, and gives the relay one question: whom to try now.

      probes ─────────► EdgeState.probed ──┐                        ┌─► EdgeHealth ──► Transition ──► log, listeners
      relay.begin ────► EdgeState.begin    ├─ standing, limiter ────┤
      relay.note_status, finish ───────────┘                        └─► candidates() ──► PoolState.choose

Owner: the daemon owns the `EdgeSet`. It owns a probe task for each edge and cancels it in `apply` (edge gone) and `close`;
each `EdgeConnections` owns its own tasks.

Rules for editing: 1. a reload keeps whatever its edge's place did not change for; 2. choose() is on the path of each
request: nothing in it may wait or allocate by the number of requests.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from config.model import Edge, Pool
from proxy.failover import RetryBudget
from proxy.health import EdgeHealth, Outcome, State, Transition, retry_after_s
from proxy.io.dial import Resolves, Rims
from proxy.io.outbound import EdgeConnections
from proxy.io.probes import Prober, ProbeResult, probe_forever
from proxy.io.rims import DialMarks
from proxy.limiter import FULL, Limiter
from proxy.messages import Abort, Fields, ResponseHead
from proxy.reach import Reach
from proxy.weights import Prior, Standing, candidates, live_weights, nth_draw, prior_of
from proxy.weights import cost as cost_of

log = logging.getLogger(__name__)

KEPT_TRANSITIONS = 256
LOOK_S = 1.0  # how often load and slowness are judged
PRIOR_S = 0.1  # how long the pool's best figures are taken for known
SLOW_FACTOR, SLOW_BACK_FACTOR = 3.0, 2.0  # against the best of the pool; two numbers, so that it does not flap
SLOW_TTFB_S, SLOW_RTT_S = 0.25, 0.1  # and at least this much above it
BUSY_MIN = 8  # requests in flight below which a full limit is no load worth a word
WARM_EDGES = 3  # the best edges that hold `keep_warm` connections each
MAX_RETRY_AFTER_S = 30
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
class Shed:
    """Why `choose` found nobody, for a 503: when to try again, in whole seconds of 1 to 30."""

    reason: str
    retry_after_s: int


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
        self.config = edge
        self.header_fields = _fields_of(edge)
        self.connections = EdgeConnections(
            edge,
            resolver=resolver,
            reach=reach,
            clock=clock,
            connect_s=pool.timeouts.connect_s,
            rims=rims,
            on_leg=self._on_leg,
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
        self._legs_new = self._legs_all = 0  # since the last look

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
        standing.full = not self.limiter.admits(standing.inflight)
        self.limiter.begun(standing.inflight, now)

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

    def _measured(self, ttfb_s: float, now: float) -> None:
        self.standing.ttfb.add(ttfb_s, now)
        self.limiter.answered(ttfb_s, now)

    def _judge(self, outcome: Outcome, now: float) -> None:
        was = self.health.failures
        self.note(self.health.on_outcome(outcome, now, may_eject=self.may_eject()), now)
        if self.health.failures > was or outcome.status == 429:
            self.failures += self.health.failures - was
            self.limiter.failed(now)

    def _on_leg(self, marks: DialMarks) -> None:
        self._legs_all += 1
        if not marks.reused:
            self._legs_new += 1
            self.dials += 1

    # ---------------------------------------------------------------- from the edge set

    def looked_at(self, now: float) -> None:
        """Once a second: fold what was counted since into the averages."""
        if self._legs_all:
            self.standing.p_new.add(self._legs_new / self._legs_all, now)
            self._legs_new = self._legs_all = 0
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
        self.header_fields = _fields_of(edge)
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


class _Edges(dict[str, EdgeState]):
    """The edges of a pool by id. One that a reload removed is still found by a request that chose it before: it refuses
    the opening, and the request moves on to its next candidate."""

    def __init__(self, edges: Mapping[str, EdgeState], before: Mapping[str, EdgeState]) -> None:
        super().__init__(edges)
        self._departed = {edge_id: state for edge_id, state in before.items() if edge_id not in edges}

    def __missing__(self, edge_id: str) -> EdgeState:
        return self._departed[edge_id]


class PoolState:
    """The edges of a pool, and whom of them to try."""

    def __init__(self, config: Pool, edges: Mapping[str, EdgeState], rng: random.Random) -> None:
        self.config = config
        self.edges = _Edges(edges, {})
        self.budget = RetryBudget(config.retry.budget)
        self._rng = rng
        self._turn = 0
        self._looked_at = 0.0
        self._prior = Prior()
        self._prior_until = 0.0
        self._take(config)

    def reconfigure(self, config: Pool, edges: Mapping[str, EdgeState]) -> None:
        self.edges = _Edges(edges, self.edges)
        self.budget.ratio = config.retry.budget
        self._take(config)

    def _take(self, config: Pool) -> None:
        self.config = config
        self._states = tuple(self.edges.values())
        self._standings = [state.standing for state in self._states]
        self._prior_until = 0.0
        for state in self.edges.values():
            state.may_eject = self._may_eject

    def choose(self, now: float, key: bytes = b"") -> list[str]:
        """Candidates, best first. Empty when nobody is usable and the pool rejects then, or when all are full: see shed()."""
        self._refresh(now)
        if now >= self._prior_until:
            self._prior, self._prior_until = prior_of(self._standings), now + PRIOR_S
        return candidates(
            self._standings,
            strategy=self.config.strategy,
            now=now,
            draw=self._draw(),
            key=key,
            all_down=self.config.all_down,
            prior=self._prior,
        )

    def shed(self, now: float) -> Shed:
        """Why choose() was empty."""
        if any(s.full and s.badness == 0 for s in self._standings):
            active = sum(s.inflight for s in self._standings)
            wait_s = max((s.ttfb.value or 1.0 for s in self._standings if s.full), default=1.0)
            return Shed(f"every usable edge is full, {active} requests in flight", _whole_seconds(wait_s))
        waits = [s.back_in_s for s in self._standings if s.back_in_s > 0]
        reasons = ", ".join(f"{e.id} {e.state.value}" for e in list(self.edges.values())[:4])
        return Shed(f"no edge is usable: {reasons}", _whole_seconds(min(waits, default=self.config.probe.interval_s)))

    def views(self, now: float) -> list[EdgeView]:
        self._looked_at = 0.0
        self._refresh(now)
        live = live_weights(self._standings, self.config.strategy, now)
        return [state.view(self.config.name, live[edge_id], now) for edge_id, state in self.edges.items()]

    def rewarm(self, now: float) -> None:
        """Hold `keep_warm` connections at the best edges, and dial for it at no other."""
        usable = [s for s in self._standings if s.takes_traffic and not s.standby]
        prior = prior_of(self._standings)
        best = sorted(usable, key=lambda s: cost_of(s, now, prior))[:WARM_EDGES]
        for state in self.edges.values():
            state.connections.warm(self.config.keep_warm if state.standing in best else 0)

    def _draw(self) -> float:
        # Weights are to be felt in a handful of requests; elsewhere an even sequence could fall in step with its clients.
        if self.config.strategy != "weighted":
            return self._rng.random()
        self._turn += 1
        return nth_draw(self._turn)

    def _may_eject(self) -> bool:
        outliers = sum(1 for state in self.edges.values() if state.health.is_outlier)
        return outliers + 1 <= len(self.edges) // 2

    def _refresh(self, now: float) -> None:
        """Let ejections end; once a second judge load and slowness."""
        for state in self._states:
            if 0 < state.standing.badness < 3:
                state.note(state.health.advance(now), now)
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        prior = prior_of(self._standings)
        for state in self.edges.values():
            state.looked_at(now)
            state.note(state.health.on_load(self._load_of(state, prior.rtt_s, now), now), now)

    def _load_of(self, state: EdgeState, best_rtt_s: float, now: float) -> str:
        standing, limit = state.standing, state.limiter.limit
        if standing.inflight >= max(FULL * limit, BUSY_MIN):
            return f"high load: {standing.inflight} of {limit} requests in flight"
        factor = SLOW_BACK_FACTOR if state.state is State.DEGRADED else SLOW_FACTOR
        best = min((s.ttfb.value for s in self._standings if s.ttfb.value is not None), default=0.0)
        ttfb = standing.ttfb.drifted(best, now)
        if ttfb > max(factor * best, best + SLOW_TTFB_S):
            return f"slow: first byte after {ttfb * 1000:.0f} ms, the pool's best {best * 1000:.0f} ms"
        rtt = standing.rtt.value or 0.0
        if rtt > max(factor * best_rtt_s, best_rtt_s + SLOW_RTT_S):
            return f"slow: round trip {rtt * 1000:.0f} ms, the pool's best {best_rtt_s * 1000:.0f} ms"
        return ""


class EdgeSet:
    """All pools. `apply` and the rest are called on the loop; probing begins with `start`."""

    def __init__(
        self,
        *,
        resolver: Resolves,
        clock: Callable[[], float],
        rng: random.Random | None = None,
        rims: Rims | None = None,
    ) -> None:
        self._resolver, self._clock, self._rims = resolver, clock, rims
        # Draws for load spreading and jitter; nothing here is a secret.
        self._rng = rng or random.Random()  # noqa: S311
        self.reach = Reach()
        self.transitions: deque[Transition] = deque(maxlen=KEPT_TRANSITIONS)
        self.listeners: list[Callable[[str, Transition], None]] = []
        """Called with the pool's name and each transition: webhook, metrics."""
        self._pools: dict[str, PoolState] = {}
        self._leaving: list[tuple[str, EdgeState]] = []
        self._probing: dict[EdgeState, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._started = False

    def apply(self, pools: Sequence[Pool]) -> None:
        """Serve by these pools from now on. An edge that is still in the same place keeps health, measures and
        connections; one that is gone finishes what it has. The first call needs a running loop like any other."""
        now = self._clock()
        old = self._pools
        self._pools = {}
        for pool in pools:
            edges = {edge.id: self._edge(old.get(pool.name), edge, pool, now) for edge in pool.edges}
            self._pools[pool.name] = self._pool(old.get(pool.name), pool, edges)
        for name in old.keys() - self._pools.keys():
            for state in old[name].edges.values():
                self._retire(name, state, now)
        if self._started:
            self._probe_all()

    def _pool(self, was: PoolState | None, pool: Pool, edges: dict[str, EdgeState]) -> PoolState:
        if was is None:
            return PoolState(pool, edges, self._rng)
        gone = [state for edge_id, state in was.edges.items() if edges.get(edge_id) is not state]
        was.reconfigure(pool, edges)
        for state in gone:
            self._retire(pool.name, state, self._clock())
        return was

    def _edge(self, was: PoolState | None, edge: Edge, pool: Pool, now: float) -> EdgeState:
        state = was.edges.get(edge.id) if was is not None else None
        if state is None or not _same_place(state.config, edge):
            state = EdgeState(
                edge,
                pool,
                resolver=self._resolver,
                reach=self.reach,
                clock=self._clock,
                rims=self._rims,
                changed=partial(self._on_transition, pool.name),
            )
        state.reconfigure(edge, pool, now)
        return state

    def _retire(self, pool: str, state: EdgeState, now: float) -> None:
        state.retire(now)
        if (probing := self._probing.pop(state, None)) is not None:
            probing.cancel()
        self._leaving.append((pool, state))
        self._sweep()

    def _sweep(self) -> None:
        gone = [entry for entry in self._leaving if entry[1].is_gone]
        self._leaving = [entry for entry in self._leaving if not entry[1].is_gone]
        for _, state in gone:
            closing = asyncio.get_running_loop().create_task(state.connections.close(), name=f"close {state.id}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def start(self) -> None:
        """Begin to probe and to keep connections warm."""
        self._started = True
        self._probe_all()

    async def close(self) -> None:
        """Stop probing and dialling, close what is idle. Exchanges in progress are the relay's to end."""
        self._started = False
        probing, self._probing = list(self._probing.values()), {}
        for task in probing:
            task.cancel()
        states = [state for pool in self._pools.values() for state in pool.edges.values()]
        states += [state for _, state in self._leaving]
        await asyncio.gather(*probing, *self._closing, return_exceptions=True)
        await asyncio.gather(*(state.connections.close() for state in states))

    def pool(self, name: str) -> PoolState:
        """KeyError when no pool has that name: routes and pools are applied together."""
        return self._pools[name]

    @property
    def pools(self) -> Mapping[str, PoolState]:
        return self._pools

    def views(self, now: float | None = None) -> list[EdgeView]:
        """Every edge, in the order of the configuration; those that are leaving last."""
        at = self._clock() if now is None else now
        self._sweep()
        views = [view for pool in self._pools.values() for view in pool.views(at)]
        return views + [state.view(pool, 0.0, at) for pool, state in self._leaving]

    def network_changed(self) -> None:
        """Another network, or awake again: what was learnt of the old one is void, and idle connections are dead."""
        self.reach.forget()
        for pool in self._pools.values():
            for state in pool.edges.values():
                state.connections.drop_idle()
                if (probing := self._probing.pop(state, None)) is not None:
                    probing.cancel()
        if self._started:
            self._probe_all()

    def _probe_all(self) -> None:
        for pool in self._pools.values():
            pool.rewarm(self._clock())
            for state in pool.edges.values():
                if state not in self._probing:
                    self._probing[state] = asyncio.get_running_loop().create_task(
                        self._probe(pool, state), name=f"probe {state.id}"
                    )

    async def _probe(self, pool: PoolState, state: EdgeState) -> None:
        async def once() -> bool:
            state.probed(await state.prober.probe(pool.config.probe), self._clock())
            pool.rewarm(self._clock())
            self._sweep()
            return state.health.is_undecided

        await probe_forever(once, lambda: pool.config.probe.interval_s, self._rng)

    def _on_transition(self, pool: str, transition: Transition) -> None:
        self.transitions.append(transition)
        quiet = transition.new in (State.HEALTHY, State.DEGRADED)
        log.log(
            logging.INFO if quiet else logging.WARNING,
            "edge %s of pool %s: %s -> %s: %s",
            transition.edge_id,
            pool,
            transition.old.value,
            transition.new.value,
            transition.reason,
        )
        for listener in self.listeners:
            listener(pool, transition)


def _same_place(old: Edge, new: Edge) -> bool:
    """Whether connections, health and measures of `old` hold for `new`: all but what steers traffic and requests."""
    steered = replace(
        old,
        weight=new.weight,
        standby=new.standby,
        max_active=new.max_active,
        headers=new.headers,
        base_path=new.base_path,
        metrics=new.metrics,
    )
    return steered == new


def _fields_of(edge: Edge) -> Fields:
    return [(name.encode(), secret.reveal().encode()) for name, secret in edge.headers.items()]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)


def _whole_seconds(seconds: float) -> int:
    return min(max(int(seconds + 0.999), 1), MAX_RETRY_AFTER_S)
