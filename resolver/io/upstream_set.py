"""Ask the configured upstreams: one decision for each question, one warm channel for each upstream.

Theory: `resolver.upstreams` decides, channels carry, this file obeys. An upstream that stands in several places (the
default set, a zone) has one channel and one standing. `ask` owns nothing but its future: what it started is heard out by
the channels, so that a caller that goes away cancels nobody else's answer and a hedge's loser is measured too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from config.model import DnsUpstream, Resolver, Zone
from resolver import outgoing as o
from resolver.errors import UpstreamsFailed
from resolver.io.addresses import AddressBook
from resolver.io.bootstrap import Bootstrap
from resolver.io.channel import Channel, Clock, Failure
from resolver.io.clock import now as boottime
from resolver.io.doh_channel import doh_channel
from resolver.io.dot import dot_channel
from resolver.io.run import NOBODY, Heard, Member, Reply, Ring, Run, Watcher
from resolver.io.tcp import tcp_channel
from resolver.io.udp import UdpChannel
from resolver.standing import Standing
from resolver.upstreams import Group


@dataclass(frozen=True, slots=True)
class UpstreamView:
    """One upstream for people. `state`: unused, healthy, recovering or down; `reason` is its last failure since it was well."""

    url: str
    state: str
    rtt_s: float | None
    asked: int
    failed: int
    reason: str
    ignored: int = 0  # datagrams that answered nothing: forgeries, or a peer's muddle


class UpstreamSet:
    """Every upstream that the resolver may ask: the default set and each zone's own."""

    def __init__(self, config: Resolver, *, clock: Clock = boottime) -> None:
        self.clock = clock
        self.draw: Callable[[], float] = random.SystemRandom().random
        self._bootstrap = Bootstrap(config.bootstrap, clock)
        self._members: dict[DnsUpstream, Member] = {}
        self._rings: dict[Zone | None, Ring] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self.live: set[Run] = set()
        self._config = config
        self._apply(config)

    async def ask(self, query: bytes, *, zone: Zone | None, deadline: float, avoid: str = "") -> Reply:
        """The first good answer before `deadline` (seconds of the clock), not from `avoid`. Raises UpstreamsFailed, or
        Malformed when the query holds no single question. A cancelled call leaves what it started to the channels."""
        out = o.read(query, pass_subnet=self._config.ecs == "pass")
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def heard(result: Reply | UpstreamsFailed) -> None:
            if future.done():
                return
            if isinstance(result, Reply):
                future.set_result(result)
            else:
                future.set_exception(result)

        run = self.begin(out, zone=zone, deadline=deadline, heard=heard, avoid=avoid)
        try:
            return await future
        finally:
            run.end()

    def begin(self, out: o.Outgoing, *, zone: Zone | None, deadline: float, heard: Heard, avoid: str = "") -> Run:
        """As `ask`, without a task or a future: `heard` is called once, before this returns when nobody can be asked.

        A miss that waits by await cost four wake-ups of the loop and a third of its time.
        """
        ring = self._rings.get(zone) or NOBODY
        run = Run(self, ring, out, deadline, heard)
        run.start(avoid)
        return run

    def watch(self, question: bytes, watcher: Watcher) -> None:
        """Shows the attempts of whoever asks this question right now, those made already and those to come. `question` is a
        section with its name in lower case."""
        for run in list(self.live):
            if run.out.folded == question:
                run.watch(watcher)

    async def each(self, query: bytes, *, deadline: float) -> list[tuple[str, float, bytes | Failure]]:
        """(upstream, seconds, reply or failure) of every upstream of the default set, each asked alone and all at once.
        For people who compare them: it teaches the standings nothing. Raises Malformed as `ask` does."""
        out = o.read(query)
        members = self._rings[None].members if self._rings else {}
        return list(await asyncio.gather(*(self._ask_alone(member, out, deadline) for member in members.values())))

    async def _ask_alone(self, member: Member, out: o.Outgoing, deadline: float) -> tuple[str, float, bytes | Failure]:
        begin = self.clock()
        heard: asyncio.Future[bytes | Failure] = asyncio.get_running_loop().create_future()
        member.channel.ask(out, deadline, lambda result: None if heard.done() else heard.set_result(result))
        result = await heard
        if not isinstance(result, Failure):
            result = o.give_back(result, out)
        return member.name, self.clock() - begin, result

    def reconfigure(self, config: Resolver) -> None:
        """Apply another configuration. Unchanged upstreams keep their connections and what was learned about them; the
        others' questions in flight have the old time-out left to be answered."""
        patience_s = self._config.timeout_s
        if config.bootstrap != self._config.bootstrap:
            self._leave(self._bootstrap, patience_s)
            self._bootstrap = Bootstrap(config.bootstrap, self.clock)
        gone = set(self._members) - set(_all_of(config))
        for upstream in gone:
            self._leave(self._members.pop(upstream).channel, patience_s)
        self._config = config
        self._apply(config)

    def snapshot(self) -> list[UpstreamView]:
        now = self.clock()
        return [_view(member, now) for member in self._members.values()]

    def network_changed(self) -> None:
        """Every connection may be dead and every route another: start anew at once, without waiting for time-outs."""
        self._bootstrap.forget()
        for member in self._members.values():
            member.channel.drop()
            member.standing.forgive()

    async def close(self) -> None:
        """End all connections; questions in flight fail."""
        for leaving in list(self._leaving):
            leaving.cancel()
        members, self._members, self._rings = list(self._members.values()), {}, {}
        await asyncio.gather(self._bootstrap.close(), *(member.channel.close() for member in members))
        if self._leaving:
            await asyncio.wait(self._leaving)

    def _apply(self, config: Resolver) -> None:
        for upstream in _all_of(config):
            if upstream not in self._members:
                channel = open_channel(upstream, self._lookup, self.clock)
                self._members[upstream] = Member(upstream, self._name(upstream), channel, Standing())
        self._rings = {None: self._ring(config.upstreams)}
        self._rings |= {zone: self._ring(zone.upstreams) for zone in config.zones}

    async def _lookup(self, host: str) -> Sequence[str]:
        return await self._bootstrap.addresses(host)

    def _name(self, upstream: DnsUpstream) -> str:
        taken = any(member.name == upstream.url for member in self._members.values())
        return f"{upstream.url} ({len(self._members) + 1})" if taken else upstream.url

    def _ring(self, upstreams: Iterable[DnsUpstream]) -> Ring:
        members = {self._members[upstream].name: self._members[upstream] for upstream in upstreams}
        standings = {name: member.standing for name, member in members.items()}
        weights = {name: member.config.weight for name, member in members.items()}
        return Ring(Group(standings, weights, self._config.strategy), members)

    def _leave(self, leaver: Channel | Bootstrap, patience_s: float) -> None:
        task = asyncio.ensure_future(_close_after(leaver, patience_s))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def open_channel(upstream: DnsUpstream, lookup: Callable[[str], Awaitable[Sequence[str]]], clock: Clock) -> Channel:
    """The channel for an upstream's scheme; nothing is sent and no name is looked up before the first question."""
    book = AddressBook(upstream.host, upstream.addresses, lookup, clock)
    name, ca_file = upstream.server_name, upstream.ca_file
    match upstream.scheme:
        case "udp":
            return UdpChannel(book, upstream.port, tcp_channel(book, upstream.port, clock=clock), clock=clock)
        case "tcp":
            return tcp_channel(book, upstream.port, clock=clock)
        case "tls":
            return dot_channel(book, upstream.port, server_name=name, ca_file=ca_file, clock=clock)
        case "https":
            path = upstream.path or "/dns-query"
            return doh_channel(book, upstream.port, path=path, server_name=name, ca_file=ca_file, clock=clock)
        case "quic" | "h3":
            return _open_quic(upstream, book, clock)
        case scheme:
            raise ValueError(f"{upstream.url}: no transport for {scheme!r}")


def _open_quic(upstream: DnsUpstream, book: AddressBook, clock: Clock) -> Channel:
    # The QUIC library costs 0.1 s to import: only those who configured it pay.
    from resolver.io.doh3 import doh3_channel
    from resolver.io.doq import doq_channel

    name, ca_file = upstream.server_name, upstream.ca_file
    if upstream.scheme == "quic":
        return doq_channel(book, upstream.port, server_name=name, ca_file=ca_file, clock=clock)
    path = upstream.path or "/dns-query"
    return doh3_channel(book, upstream.port, path=path, server_name=name, ca_file=ca_file, clock=clock)


def _all_of(config: Resolver) -> list[DnsUpstream]:
    return [*config.upstreams, *(upstream for zone in config.zones for upstream in zone.upstreams)]


def _view(member: Member, now: float) -> UpstreamView:
    standing = member.standing
    ignored = member.channel.ignored if isinstance(member.channel, UdpChannel) else 0
    return UpstreamView(
        member.name, standing.state(now), standing.rtt_s, standing.asked, standing.failed, standing.reason, ignored
    )


async def _close_after(leaver: Channel | Bootstrap, patience_s: float) -> None:
    try:
        await asyncio.sleep(patience_s)
    finally:
        await leaver.close()
