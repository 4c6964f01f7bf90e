"""A gateway in one namespace, edges in the other, each on a loop and thread of its own; the line between is bad on demand."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from bench.soak import Hearing, Plan, send, until
from bench.soak_stage import VERSIONS, Clients, KillableEdge, listen
from config.model import Config, Edge, Pool, Probe, Timeouts
from headrace.lab.ca import ThrowAwayCa
from headrace.network import NetworkWatch
from proxy.io.edges import EdgeSet
from proxy.io.gateway import Gateway
from proxy.waterfall import RequestRecord
from resolver.endpoints import Endpoints
from resolver.io.clock import now
from tests.net.lossy_link import ADDRESS6_B, ADDRESS_B, LossyLink, enter

T = TypeVar("T")
QUIET_S = 0.1


class Side:
    """A thread with a loop inside a namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name=namespace, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        enter(self._namespace)
        self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T], within_s: float = 20.0) -> T:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, within_s), self._loop).result(within_s + 5)

    def close(self) -> None:
        # A transport whose peer is deaf lingers for two seconds before it is cut; only the loop's own pipe stays.
        self.run(until(lambda: len(self._loop._selector.get_map()) <= 1, 4))  # type: ignore[attr-defined]
        # One whose reading is paused is in no selector, and would be found unclosed in the middle of some other test.
        self.run(self._cut_what_is_left())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _cut_what_is_left(self) -> None:
        for transport in list(self._loop._transports.values()):  # type: ignore[attr-defined]
            transport.abort()
        await asyncio.sleep(0.01)  # they report their loss on the next turns


class Names:
    """The resolver of a network: both families, IPv6 first, and an HTTPS record that promises HTTP/3."""

    def __init__(self, *, ipv6: bool) -> None:
        self._addresses = (ADDRESS6_B, ADDRESS_B) if ipv6 else (ADDRESS_B,)

    async def endpoints(self, host: str, port: int) -> Endpoints:
        return Endpoints(self._addresses, port, ("h3", "h2"), 60.0)


@dataclass(frozen=True, slots=True)
class Told:
    """How a request went for its client."""

    status: int
    ending: str
    exact: bool
    took_s: float
    first_s: float
    version: str
    longest_gap_s: float


class Listening(Hearing):
    """Notes when things came. `pieces`: what happens QUIET_S after so many pieces came, when their ACK is on its way too."""

    def __init__(self, plan: Plan, pieces: dict[int, Callable[[], None]]) -> None:
        super().__init__(plan)
        self.times: list[float] = []
        self._pieces = pieces

    def on_data(self, chunk: bytes) -> None:
        self.times.append(time.monotonic())
        if len(self.times) in self._pieces:
            asyncio.get_running_loop().call_later(QUIET_S, self._pieces[len(self.times)])
        super().on_data(chunk)


class Near:
    """The workstation: the gateway and its clients."""

    def __init__(
        self, gateway: Gateway, edge_set: EdgeSet, clients: dict[str, Clients], pools: tuple[Pool, ...]
    ) -> None:
        self.gateway, self.edge_set, self.clients, self.pools = gateway, edge_set, clients, pools
        self.records: list[RequestRecord] = []
        self._number = 0

    async def ask(
        self,
        down: str,
        pool: str,
        *,
        chunks: int = 3,
        size: int = 200,
        gap_ms: int = 5,
        upload: int = 0,
        pieces: dict[int, Callable[[], None]] | None = None,
    ) -> Told:
        self._number += 1
        plan = Plan(self._number, down, pool, chunks, size, gap_ms, upload, None)
        hearing = Listening(plan, pieces or {})
        started = time.monotonic()
        leg = (await self.clients[down].connection()).open()
        leg.receiver = hearing
        send(plan, leg)
        await hearing.over.wait()
        took_s = time.monotonic() - started
        await asyncio.sleep(0.01)  # the record is written in the turn of the last byte
        record = next((r for r in self.records if r.path.startswith(f"/s/{plan.number}/")), None)
        first_s = hearing.times[0] - started if hearing.times else 0.0
        gaps = [later - sooner for sooner, later in zip(hearing.times, hearing.times[1:], strict=False)]
        version = record.edge_version if record is not None else ""
        return Told(hearing.status, hearing.ending, hearing.is_exact, took_s, first_s, version, max(gaps, default=0.0))

    async def forget_connections(self) -> None:
        """The next request dials; what was learnt of the network stays."""
        for pool in self.edge_set.pools.values():
            for edge in pool.edges.values():
                await edge.connections.close()
        self.edge_set.apply(())
        self.edge_set.apply(self.pools)


@asynccontextmanager
async def gateway_for(edges: list[Edge], ca: ThrowAwayCa, *, ipv6: bool) -> AsyncIterator[Near]:
    """One pool for each edge, under the edge's id; no probes, so that what is seen is what a request saw."""
    edge_set = EdgeSet(resolver=Names(ipv6=ipv6), clock=now, rng=random.Random(1))
    pools = tuple(
        Pool(edge.id, (edge,), hosts=(f"{edge.id}.localhost",), keep_warm=0, probe=Probe(), timeouts=Timeouts())
        for edge in edges
    )
    records: list[RequestRecord] = []
    gateway = Gateway(
        edges=edge_set, resolver=None, doh=None, clock=now, record=lambda one: records.append(one.whole())
    )  # type: ignore[arg-type]
    gateway.apply(Config(state_dir=Path("/nonexistent"), pools=pools))
    edge_set.apply(pools)
    listeners = {version: await listen(version, 0, gateway, ca) for version in VERSIONS}
    clients = {version: Clients(version, listener.address[1], ca) for version, listener in listeners.items()}
    near = Near(gateway, edge_set, clients, pools)
    near.records = records
    watch = NetworkWatch(lambda reason: edge_set.network_changed())  # as the daemon does
    try:
        yield near
    finally:
        watch.close()
        for each in clients.values():
            each.close()
        gateway.abort_all()
        await edge_set.close()
        for listener in listeners.values():
            listener.close()
        await asyncio.sleep(0.05)


@dataclass
class Stage:
    link: LossyLink
    side: Side
    near: Near

    def ask(self, down: str, pool: str, *, within_s: float = 20.0, **how: Any) -> Told:
        return self.side.run(self.near.ask(down, pool, **how), within_s)


@contextmanager
def staged(ca: ThrowAwayCa, *, ipv6: bool = False, **line: Any) -> Iterator[Stage]:
    """Pools h1, h2, h3, h1s, which is h1 over TLS, and `auto`, which speaks h2 and h3 on one port and is found by name."""
    with LossyLink(**line) as link:
        far, side = Side(link.namespace_b), Side(link.namespace_a)
        stack = AsyncExitStack()
        try:
            edges = [KillableEdge(version, version, ca, ADDRESS_B) for version in VERSIONS]
            for edge in edges:
                far.run(edge.start())
            twin, dual6 = KillableEdge("h3", "auto", ca, ADDRESS_B), KillableEdge("h2", "auto", ca, ADDRESS6_B)
            twin.port = dual6.port = edges[1].port
            for edge in (twin, dual6):
                far.run(edge.start())
            auto = replace(edges[1].config(), id="auto", protocol="auto", addresses=())
            over_tls = replace(edges[1].config(), id="h1s", protocol="h1")
            configs = [edge.config() for edge in edges] + [over_tls, auto]
            near = side.run(stack.enter_async_context(gateway_for(configs, ca, ipv6=ipv6)))
            yield Stage(link, side, near)
        finally:
            side.run(stack.aclose())
            far.run(stop([*edges, twin, dual6]))
            side.close()
            far.close()


async def stop(edges: list[KillableEdge]) -> None:
    for edge in edges:
        edge.kill()
    await asyncio.sleep(0.05)
