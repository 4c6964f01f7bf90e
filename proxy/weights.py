"""Put the edges of a pool in the order in which a request should try them.

Theory: each edge has a cost, the seconds until a first byte that one more request may expect there:

      cost = (ttfb + p_new * (rtt + tls) + prefill * uncached_chars) * (inflight + queue + 1) / (weight * slow_start)

`ttfb`, `rtt` and `tls` are averages that forget, `p_new` is the share of requests that had to dial, `inflight` is our
own count and reacts at once, `queue` is scraped. A stale queue is None and counts as the peers' mean: read as zero it would
draw everything to the edge that stopped telling. When all take the minimum they herd: between two measurements every
request goes to one place. So two edges are drawn and the cheaper one leads (power of two choices, Mitzenmacher 2001);
the others follow by cost, for the failover.

What was measured long ago is believed less: an estimate drifts to a little below the best one in the pool. Without that
an edge that was slow once is never asked again, and never shows that it recovered. An edge where requests wait in
silence costs at least the length of that silence, long before any of them has timed out.

Rules for editing: 1. the draw is an argument, so is now; 2. a new strategy is an entry of LEADS, its promise a line
in the tests; 3. `Standing` is mutable and has no `now` of its own: whoever owns it keeps it current.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import exp2
from typing import Literal

Strategy = Literal["adaptive", "weighted", "least-requests", "failover", "hash"]

TTFB_UNKNOWN_S = 0.2
RTT_UNKNOWN_S = 0.03
TLS_UNKNOWN_S = 0.03
BELIEF_HALF_LIFE_S = 60.0
OPTIMISM = 0.9
MIN_SHARE = 0.1  # of a sample in an average, however soon it follows the one before
MIN_SHARE_FOR = -math.log2(1 - MIN_SHARE)  # half-lives within which a sample has no more than that
COST_FLOOR_S = 1e-4  # loopback measures zeros

GOLDEN = (math.sqrt(5) - 1) / 2


def nth_draw(n: int) -> float:
    """The n-th of a sequence in [0, 1) that fills every interval evenly (multiples of the golden ratio).

    With it, and a draw read as a place on the line of weights, any run of consecutive requests spreads by weight to
    within one or two: random draws need hundreds of requests for that.
    """
    return (n * GOLDEN) % 1.0


@dataclass(slots=True)
class Ewma:
    """An average that forgets: a sample weighs the more, the longer the one before is ago."""

    half_life_s: float = 20.0
    value: float | None = None
    at: float = 0.0

    def add(self, sample: float, now: float) -> None:
        if self.value is None:
            self.value = sample
        else:
            lives = (now - self.at) / self.half_life_s
            share = MIN_SHARE if lives <= MIN_SHARE_FOR else 1 - exp2(-lives)
            self.value += share * (sample - self.value)
        self.at = now

    def drifted(self, prior: float, now: float) -> float:
        """The average, on its way to `prior` since the last sample; `prior` when there was none."""
        if self.value is None:
            return prior
        return prior + (self.value - prior) * exp2(min(self.at - now, 0.0) / BELIEF_HALF_LIFE_S)


@dataclass(slots=True)
class Standing:
    """What is known of an edge at this moment. Seconds, counts; `badness` orders the unusable ones: 0 usable,
    1 cooling, 2 ejected, 3 down, 4 never to be taken."""

    edge_id: str
    weight: float = 100.0
    standby: bool = False
    badness: int = 0
    back_in_s: float = 0.0  # of an unusable one, until it may return
    full: bool = False
    slow_start: float = 1.0
    inflight: int = 0
    waiting: int = 0  # of them, those without a first byte
    silent_since: float = 0.0  # last first byte, or the first request that waits; only while waiting
    queue: float | None = None
    ttfb: Ewma = field(default_factory=Ewma)
    rtt: Ewma = field(default_factory=lambda: Ewma(60.0))
    tls: Ewma = field(default_factory=lambda: Ewma(60.0))
    p_new: Ewma = field(default_factory=lambda: Ewma(60.0))
    prefill_s_per_char: float = 0.0

    @property
    def takes_traffic(self) -> bool:
        return self.badness == 0 and self.weight > 0 and not self.full


@dataclass(frozen=True, slots=True)
class Prior:
    """What to expect of an edge that has not been measured: a little less than the best that a peer shows, so that it
    gets its try even from one request at a time."""

    ttfb_s: float = TTFB_UNKNOWN_S
    rtt_s: float = RTT_UNKNOWN_S
    tls_s: float = TLS_UNKNOWN_S
    queue: float = 0.0


def prior_of(standings: Sequence[Standing]) -> Prior:
    queues = [s.queue for s in standings if s.queue is not None]
    return Prior(
        OPTIMISM * min((s.ttfb.value for s in standings if s.ttfb.value is not None), default=TTFB_UNKNOWN_S),
        min((s.rtt.value for s in standings if s.rtt.value is not None), default=RTT_UNKNOWN_S),
        min((s.tls.value for s in standings if s.tls.value is not None), default=TLS_UNKNOWN_S),
        sum(queues) / len(queues) if queues else 0.0,
    )


def cost(standing: Standing, now: float, prior: Prior, uncached_chars: int = 0) -> float:
    """Expected seconds to a first byte, spread over the weight; infinite for weight 0."""
    if standing.weight <= 0:
        return math.inf
    ttfb_s = standing.ttfb.drifted(prior.ttfb_s, now)
    if standing.waiting and now - standing.silent_since > ttfb_s:
        ttfb_s = now - standing.silent_since
    dial_s = 0.0
    if p_new := standing.p_new.value:
        rtt_s, tls_s = standing.rtt.value, standing.tls.value
        dial_s = p_new * ((prior.rtt_s if rtt_s is None else rtt_s) + (prior.tls_s if tls_s is None else tls_s))
    alone_s = max(ttfb_s + dial_s + standing.prefill_s_per_char * uncached_chars, COST_FLOOR_S)
    queue = prior.queue if standing.queue is None else standing.queue
    return alone_s * (standing.inflight + queue + 1) / (standing.weight * standing.slow_start)


def live_weights(standings: Sequence[Standing], strategy: Strategy, now: float) -> dict[str, float]:
    """What people see: how the pool's weight is shared now, in the unit of the configured weights.

    By 1/cost for the strategies that look at cost, by weight and slow start for `weighted` and `hash`. Edges that take
    nothing have 0; the others' sum is the sum of their configured weights. Standby edges share only among themselves.
    """
    shares: dict[str, float] = dict.fromkeys((s.edge_id for s in standings), 0.0)
    active = [s for s in standings if s.takes_traffic and not s.standby]
    group = active or [s for s in standings if s.takes_traffic]
    prior = prior_of(standings)
    raw = [s.weight * s.slow_start if strategy in ("weighted", "hash") else 1 / cost(s, now, prior) for s in group]
    scale = sum(s.weight for s in group) / sum(raw) if group else 0.0
    shares.update({s.edge_id: share * scale for s, share in zip(group, raw, strict=True)})
    return shares


def candidates(
    standings: Sequence[Standing],
    *,
    strategy: Strategy,
    now: float,
    draw: float,
    key: bytes = b"",
    all_down: Literal["best-effort", "reject"] = "best-effort",
    uncached_chars: int = 0,
    prior: Prior | None = None,
) -> list[str]:
    """Edge ids, best first. Same standings, draw and now: same order. `prior`: of these standings, when it is known.

    Usable active edges, led as the strategy says, then usable standby ones: they are reached only when every active
    edge failed this request, or none is usable. When no edge is usable: the least bad first with "best-effort",
    empty with "reject". Empty also when the usable ones are all full: load is shed, not pushed onto a dead edge.
    """
    usable = [s for s in standings if s.badness == 0 and not s.full and s.weight > 0]
    if len(usable) == 1:
        return [usable[0].edge_id]
    if usable:
        active = [s for s in usable if not s.standby]
        spare = [s for s in usable if s.standby] if len(active) < len(usable) else []
        known = prior or prior_of(standings)

        def by_cost(s: Standing) -> float:
            return cost(s, now, known, uncached_chars)

        order = LEADS[strategy]
        return [s.edge_id for group in (active, spare) for s in order(group, draw, key, by_cost)]
    if all_down == "reject" or any(s.badness == 0 and s.weight > 0 for s in standings):
        return []
    return out_of_service(standings)


def out_of_service(standings: Sequence[Standing]) -> list[str]:
    """Edge ids of those that are out for their own failures, the least bad first; those that drain are left alone."""
    return [s.edge_id for s in sorted(standings, key=_least_bad) if 0 < s.badness < 4 and s.weight > 0]


def _least_bad(s: Standing) -> tuple[bool, int, float]:
    # Standby last here too: while nobody is known to work, the configured preference is all there is.
    return s.badness == 3, s.badness + s.standby, s.back_in_s


Costing = Callable[[Standing], float]


def _adaptive(group: list[Standing], draw: float, key: bytes, by_cost: Costing) -> list[Standing]:
    ranked = sorted(group, key=by_cost)
    n = len(ranked)
    if n > 2:
        # One draw names an unordered pair out of n(n-1)/2; in a ranked list the pair's lower index leads.
        pair = int(draw * (n * (n - 1) // 2))
        first = 0
        while pair >= n - 1 - first:
            pair -= n - 1 - first
            first += 1
        ranked.insert(0, ranked.pop(first))
    return ranked


def _weighted(group: list[Standing], draw: float, key: bytes, by_cost: Costing) -> list[Standing]:
    place = draw * sum(s.weight * s.slow_start for s in group)
    for index, s in enumerate(group):
        place -= s.weight * s.slow_start
        if place < 0:
            return [s, *sorted(group[:index] + group[index + 1 :], key=by_cost)]
    return group


def _least_requests(group: list[Standing], draw: float, key: bytes, by_cost: Costing) -> list[Standing]:
    # Ties go round by the draw: an idle pool would otherwise wear out its first edge.
    turn = int(draw * len(group))
    turned = group[turn:] + group[:turn]
    return sorted(turned, key=lambda s: (s.inflight + 1) / (s.weight * s.slow_start))


def _failover(group: list[Standing], draw: float, key: bytes, by_cost: Costing) -> list[Standing]:
    return group


def _hash(group: list[Standing], draw: float, key: bytes, by_cost: Costing) -> list[Standing]:
    """Weighted rendezvous: an edge that leaves moves its own keys only, an edge that comes takes its share only."""
    return sorted(group, key=lambda s: -_score(s, key)) if key else _adaptive(group, draw, key, by_cost)


def _score(s: Standing, key: bytes) -> float:
    digest = blake2b(key, key=s.edge_id.encode()[:64], digest_size=8).digest()
    # Slow start is left out: a key that visits another edge for 15 s finds a cold cache twice.
    return -s.weight / math.log((int.from_bytes(digest, "big") + 1) / (2**64 + 2))


LEADS: dict[Strategy, Callable[[list[Standing], float, bytes, Costing], list[Standing]]] = {
    "adaptive": _adaptive,
    "weighted": _weighted,
    "least-requests": _least_requests,
    "failover": _failover,
    "hash": _hash,
}
