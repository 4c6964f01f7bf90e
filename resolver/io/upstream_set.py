"""Ask the configured upstreams: one decision for each question, one warm channel for each upstream.

Theory: `resolver.upstreams` decides, channels carry, this file obeys. An upstream that stands in several places (the
default set, a zone) has one channel and one standing. `ask` owns nothing but its future: what it started is heard out by
the channels, so that a caller that goes away cancels nobody else's answer and a hedge's loser is measured too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from config.model import DnsUpstream, Resolver, Zone
from resolver import outgoing as o
from resolver import wire as w
from resolver.errors import Malformed, UpstreamsFailed
from resolver.io.addresses import AddressBook
from resolver.io.bootstrap import Bootstrap
from resolver.io.channel import Channel, Clock, Done, Failure
from resolver.io.clock import now as boottime
from resolver.io.doh_channel import doh_channel
from resolver.io.dot import dot_channel
from resolver.io.tcp import tcp_channel
from resolver.io.udp import UdpChannel
from resolver.upstreams import (
    Answered,
    Ask,
    Command,
    Failed,
    Fault,
    GiveUp,
    Group,
    Standing,
    Ticked,
    WakeAt,
)

EDE_NO_REACHABLE, EDE_NETWORK_ERROR = 22, 23  # RFC 8914


class Reply(NamedTuple):
    """An upstream's answer, with the caller's id and letters. `layout` is its scan, valid for these bytes."""

    wire: bytes
    upstream: str
    took_s: float
    encrypted: bool
    layout: w.Scan


Heard = Callable[[Reply | UpstreamsFailed], None]


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


@dataclass(slots=True)
class _Member:
    """One upstream. `name` is its URL, with its addresses where another one has the same URL."""

    config: DnsUpstream
    name: str
    channel: Channel
    standing: Standing


@dataclass(slots=True)
class _Ring:
    """The upstreams that are asked for one part of the name space."""

    group: Group
    members: dict[str, _Member]


@dataclass(frozen=True, slots=True)
class Attempted:
    """An upstream was asked, or (`said` and `took_s`) heard. For people: `headrace query --explain`."""

    upstream: str
    asked_at: float
    said: str = ""
    took_s: float = 0.0


WATCH: ContextVar[Callable[[Attempted], None] | None] = ContextVar("watch", default=None)
"""Who wants to see the attempts of the questions that begin in this context. It costs others one look-up a miss."""

_NOBODY = _Ring(Group({}, {}, "failover"), {})


class UpstreamSet:
    """Every upstream that the resolver may ask: the default set and each zone's own."""

    def __init__(self, config: Resolver, *, clock: Clock = boottime) -> None:
        self.clock = clock
        self.draw: Callable[[], float] = random.SystemRandom().random
        self._bootstrap = Bootstrap(config.bootstrap, clock)
        self._members: dict[DnsUpstream, _Member] = {}
        self._rings: dict[Zone | None, _Ring] = {}
        self._leaving: set[asyncio.Task[None]] = set()
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
        ring = self._rings.get(zone) or _NOBODY
        run = Run(self, ring, out, deadline, heard)
        run.start(avoid)
        return run

    async def each(self, query: bytes, *, deadline: float) -> list[tuple[str, float, bytes | Failure]]:
        """(upstream, seconds, reply or failure) of every upstream of the default set, each asked alone and all at once.
        For people who compare them: it teaches the standings nothing. Raises Malformed as `ask` does."""
        out = o.read(query)
        members = self._rings[None].members if self._rings else {}
        return list(await asyncio.gather(*(self._ask_alone(member, out, deadline) for member in members.values())))

    async def _ask_alone(self, member: _Member, out: o.Outgoing, deadline: float) -> tuple[str, float, bytes | Failure]:
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
                self._members[upstream] = _Member(upstream, self._name(upstream), channel, Standing())
        self._rings = {None: self._ring(config.upstreams)}
        self._rings |= {zone: self._ring(zone.upstreams) for zone in config.zones}

    async def _lookup(self, host: str) -> Sequence[str]:
        return await self._bootstrap.addresses(host)

    def _name(self, upstream: DnsUpstream) -> str:
        taken = any(member.name == upstream.url for member in self._members.values())
        return f"{upstream.url} ({len(self._members) + 1})" if taken else upstream.url

    def _ring(self, upstreams: Iterable[DnsUpstream]) -> _Ring:
        members = {self._members[upstream].name: self._members[upstream] for upstream in upstreams}
        standings = {name: member.standing for name, member in members.items()}
        weights = {name: member.config.weight for name, member in members.items()}
        return _Ring(Group(standings, weights, self._config.strategy), members)

    def _leave(self, leaver: Channel | Bootstrap, patience_s: float) -> None:
        task = asyncio.ensure_future(_close_after(leaver, patience_s))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


class Run:
    """One question's way: obeys an `Attempt` and tells it what happened."""

    __slots__ = ("_attempt", "_deadline", "_heard_by", "_obeying", "_out", "_ring", "_set", "_timer", "_todo", "_watch")

    def __init__(self, of: UpstreamSet, ring: _Ring, out: o.Outgoing, deadline: float, heard: Heard) -> None:
        self._set, self._ring, self._out, self._deadline = of, ring, out, deadline
        self._heard_by: Heard | None = heard
        self._timer: asyncio.TimerHandle | None = None
        self._todo: list[Command] = []
        self._obeying = False
        self._watch = WATCH.get()

    def start(self, avoid: str) -> None:
        if self._ring.members.keys() <= {avoid}:
            self._tell(UpstreamsFailed(()))
            return
        now, group = self._set.clock(), self._ring.group
        draw = self._set.draw() if group.strategy == "weighted" else 0.0
        self._attempt = group.plan(now, self._deadline, draw, avoid)
        self._obey(self._attempt.start(now))

    def end(self) -> None:
        """Nobody waits any more: no new upstream is asked, those in flight are still listened to."""
        if self._heard_by is not None:
            self._heard_by = None
            self._attempt.done = True
            self._forget_timer()

    def _tell(self, result: Reply | UpstreamsFailed) -> None:
        heard, self._heard_by = self._heard_by, None
        self._forget_timer()
        if heard is not None:
            heard(result)

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _obey(self, commands: list[Command]) -> None:
        # A channel may fail at once, inside `ask`: its commands come after those that are being obeyed.
        todo = self._todo
        todo += commands
        if self._obeying:
            return
        self._obeying = True
        at = 0
        while at < len(todo):
            self._obey_one(todo[at])
            at += 1
        todo.clear()
        self._obeying = False

    def _obey_one(self, command: Command) -> None:
        # Not `match`: its class patterns cost a miss 2 us. Deliver needs nothing: `_heard` has the bytes and tells them.
        if type(command) is Ask:
            asked_at = self._set.clock()
            if self._watch is not None:
                self._watch(Attempted(command.url, asked_at))
            heard: Done = partial(self._heard, command.url, asked_at)
            self._ring.members[command.url].channel.ask(self._out, self._deadline, heard)
        elif type(command) is WakeAt:
            self._wake_at(command.at)
        elif type(command) is GiveUp:
            self._tell(UpstreamsFailed(command.causes, ede=_ede_of(command.causes)))

    def _wake_at(self, at: float) -> None:
        self._forget_timer()
        # At the deadline every channel gives up by itself: with nobody left to ask there is nothing to wake up for.
        if self._heard_by is not None and at < self._deadline:
            delay_s = max(0.0, at - self._set.clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        # A timer may fire a moment early; asking for the same time again would spin.
        self._obey(self._attempt.on(Ticked(self._set.clock() + 0.001)))

    def _heard(self, name: str, asked_at: float, result: bytes | Failure) -> None:
        now = self._set.clock()
        layout: w.Scan | None = None
        if not isinstance(result, Failure):
            try:
                layout = w.scan(result)
                unwilling = o.unwillingness(result, layout)
            except Malformed as exc:
                unwilling = f"malformed: {exc}"
            if unwilling:
                result = Failure(Fault.UNWILLING, unwilling)
        if self._watch is not None:
            said = result.reason if isinstance(result, Failure) else "answered"
            self._watch(Attempted(name, asked_at, said, now - asked_at))
        if isinstance(result, Failure):
            self._obey(self._attempt.on(Failed(name, result.fault, result.reason, now)))
            return
        commands = self._attempt.on(Answered(name, now - asked_at, now))
        if commands and self._heard_by is not None:
            assert layout is not None
            encrypted = self._ring.members[name].channel.encrypted
            wire = o.give_back(result, self._out)
            self._tell(Reply(wire, name, now - asked_at, encrypted, layout))


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


def _ede_of(causes: tuple[tuple[str, str], ...]) -> int:
    """23 when somebody was reached and the network or the peer failed us, 22 when nobody could be reached."""
    answered = any(reason.startswith(("SERVFAIL", "REFUSED", "FORMERR", "NOTIMP", "HTTP")) for _, reason in causes)
    return EDE_NETWORK_ERROR if answered else EDE_NO_REACHABLE


def _view(member: _Member, now: float) -> UpstreamView:
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
