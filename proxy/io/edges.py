"""Keep the edges of all pools through reloads, probe them, and say whom to try.

Theory: decisions are pure and live elsewhere (`health`, `weights`, `limiter`, `failover`); `edge_state` holds their state
for each edge; this file holds the edges of each pool and gives the relay one question: whom to try now.

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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from config.model import Edge, Pool
from proxy.failover import RetryBudget
from proxy.health import State, Transition
from proxy.io.dial import Resolves, Rims
from proxy.io.edge_state import EdgeState, EdgeView
from proxy.io.probes import probe_forever
from proxy.limiter import FULL
from proxy.priority import PathPriorities
from proxy.reach import Reach
from proxy.weights import Prior, candidates, live_weights, nth_draw, out_of_service, prior_of
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


@dataclass(frozen=True, slots=True)
class Shed:
    """Why `choose` found nobody, for a 503: when to try again, in whole seconds of 1 to 30."""

    reason: str
    retry_after_s: int


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
        said = PathPriorities(config.default_priority, config.priorities)
        self.priorities = said if said else None
        self._states = tuple(self.edges.values())
        self._standings = [state.standing for state in self._states]
        self._sole = self._states[0] if len(self._states) == 1 else None
        self._prior_until = 0.0
        for state in self.edges.values():
            state.may_eject = self._may_eject

    def only(self, now: float) -> EdgeState | None:
        """The one edge of a pool of one while it takes requests and nothing is due: choose() would say the same."""
        sole = self._sole
        if sole is None or now - self._looked_at >= LOOK_S:
            return None
        standing = sole.standing
        return None if standing.badness or standing.full or standing.weight <= 0 else sole

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

    def last_resort(self) -> list[str]:
        """Whom to try when none of the candidates could be reached: an edge that was out may be back before we know."""
        return out_of_service(self._standings) if self.config.all_down == "best-effort" else []

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
        self.budget.settle()
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
                    state.connections.prepare()
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


def _whole_seconds(seconds: float) -> int:
    return min(max(int(seconds + 0.999), 1), MAX_RETRY_AFTER_S)


__all__ = ["EdgeSet", "EdgeState", "EdgeView", "PoolState", "Shed"]
