"""One question's way through an upstream set: obeys an `Attempt`, tells it what happened, and who watches may see it.

Watching costs those who are not watched next to nothing: what was asked is noted as it is asked, and told to whoever looks
while the question is on its way, also when it was somebody else's from the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from config.model import DnsUpstream
from resolver import outgoing as o
from resolver import wire as w
from resolver.errors import Malformed, UpstreamsFailed
from resolver.io.channel import Channel, Clock, Done, Failure
from resolver.scrub import only_strangers
from resolver.standing import Fault, Standing
from resolver.upstreams import Answered, Ask, Command, Failed, GiveUp, Group, Ticked, WakeAt

EDE_NO_REACHABLE, EDE_NETWORK_ERROR = 22, 23  # RFC 8914


class Reply(NamedTuple):
    """An upstream's answer, with the caller's id and letters. `layout` is its scan, valid for these bytes."""

    wire: bytes
    upstream: str
    took_s: float
    encrypted: bool
    layout: w.Scan


Heard = Callable[[Reply | UpstreamsFailed], None]


@dataclass(slots=True)
class Member:
    """One upstream. `name` is its URL, with its addresses where another one has the same URL."""

    config: DnsUpstream
    name: str
    channel: Channel
    standing: Standing


@dataclass(slots=True)
class Ring:
    """The upstreams that are asked for one part of the name space."""

    group: Group
    members: dict[str, Member]


@dataclass(frozen=True, slots=True)
class Attempted:
    """An upstream was asked, or (`said` and `took_s`) heard. For people: `headrace query --explain`."""

    upstream: str
    asked_at: float
    said: str = ""
    took_s: float = 0.0


Watcher = Callable[[Attempted], None]
WATCH: ContextVar[Watcher | None] = ContextVar("watch", default=None)
"""Who wants to see the attempts of the questions that begin in this context. It costs others one look-up a miss."""

NOBODY = Ring(Group({}, {}, "failover"), {})


class Owner(Protocol):
    """The upstream set, as its runs see it. `live` are those that somebody waits for."""

    clock: Clock
    draw: Callable[[], float]
    live: set[Run]


class Run:
    """One question's way: obeys an `Attempt` and tells it what happened."""

    __slots__ = (
        "_asked",
        "_attempt",
        "_deadline",
        "_failed",
        "_heard_by",
        "_obeying",
        "_ring",
        "_set",
        "_timer",
        "_todo",
        "_watch",
        "out",
    )

    def __init__(self, of: Owner, ring: Ring, out: o.Outgoing, deadline: float, heard: Heard) -> None:
        self.out = out
        self._set, self._ring, self._deadline = of, ring, deadline
        self._heard_by: Heard | None = heard
        self._timer: asyncio.TimerHandle | None = None
        self._todo: list[Command] = []
        self._obeying = False
        self._asked: list[tuple[str, float]] = []
        self._failed: tuple[Attempted, ...] = ()
        self._watch = WATCH.get()

    def start(self, avoid: str) -> None:
        if self._ring.members.keys() <= {avoid}:
            self._tell(UpstreamsFailed(()))
            return
        self._set.live.add(self)
        now, group = self._set.clock(), self._ring.group
        draw = self._set.draw() if group.strategy == "weighted" else 0.0
        self._attempt = group.plan(now, self._deadline, draw, avoid)
        self._obey(self._attempt.start(now))

    def watch(self, watcher: Watcher) -> None:
        """Tells what was asked and what became of it so far, and goes on telling. A second watcher takes the first one's
        place."""
        failed = {attempt.upstream for attempt in self._failed}
        for attempt in (*self._failed, *(Attempted(*asked) for asked in self._asked if asked[0] not in failed)):
            watcher(attempt)
        self._watch = watcher

    def end(self) -> None:
        """Nobody waits any more: no new upstream is asked, those in flight are still listened to."""
        if self._heard_by is not None:
            self._heard_by = None
            self._set.live.discard(self)
            self._attempt.done = True
            self._forget_timer()

    def _tell(self, result: Reply | UpstreamsFailed) -> None:
        heard, self._heard_by = self._heard_by, None
        self._set.live.discard(self)
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
            self._asked.append((command.url, asked_at))
            if self._watch is not None:
                self._watch(Attempted(command.url, asked_at))
            heard: Done = partial(self._heard, command.url, asked_at)
            self._ring.members[command.url].channel.ask(self.out, self._deadline, heard)
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
                layout = w.scan(result, self.out.question)
                unwilling = o.unwillingness(result, layout)
                if not unwilling and only_strangers(result, layout):
                    unwilling = "answers for other names than the one asked"
            except Malformed as exc:
                unwilling = f"malformed: {exc}"
            if unwilling:
                result = Failure(Fault.UNWILLING, unwilling)
        if self._watch is not None:
            said = result.reason if isinstance(result, Failure) else "answered"
            self._watch(Attempted(name, asked_at, said, now - asked_at))
        if isinstance(result, Failure):
            self._failed += (Attempted(name, asked_at, result.reason, now - asked_at),)
            self._obey(self._attempt.on(Failed(name, result.fault, result.reason, now)))
            return
        commands = self._attempt.on(Answered(name, now - asked_at, now))
        if commands and self._heard_by is not None:
            assert layout is not None
            encrypted = self._ring.members[name].channel.encrypted
            wire = o.give_back(result, self.out)
            self._tell(Reply(wire, name, now - asked_at, encrypted, layout))


_ANSWERED = ("SERVFAIL", "REFUSED", "FORMERR", "NOTIMP", "HTTP", "answers for other names")


def _ede_of(causes: tuple[tuple[str, str], ...]) -> int:
    """What an upstream said of DNSSEC, else 23 when somebody was reached and the network or the peer failed us, 22 when
    nobody could be reached."""
    for _, reason in causes:
        told = o.told_of_dnssec(reason)
        if told:
            return told
    answered = any(reason.startswith(_ANSWERED) for _, reason in causes)
    return EDE_NETWORK_ERROR if answered else EDE_NO_REACHABLE
