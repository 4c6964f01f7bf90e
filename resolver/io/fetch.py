"""Get one answer from upstream, whole and fit to be kept.

Theory: an upstream set gives the first good message; what remains is what no upstream can know: our TTL bounds, the rest
of a CNAME chain that stopped short, and the two judgements on content (private addresses from outside, blocked CNAME
targets). Those are made here, before anything is stored, so that cache, stale answers and saved files never hold what
was refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from config.model import Zone
from resolver import wire as w
from resolver.answer import LONGEST_CHAIN, Answer, Bounds, take
from resolver.blocklist import Blocklist
from resolver.chain import BLOCKED, FILTERED, OTHER
from resolver.errors import Malformed, NotBelieved, ResolverError, UpstreamsFailed
from resolver.outgoing import Outgoing
from resolver.question import Question, opt_record, reason
from resolver.rebinding import private_address
from resolver.scrub import strangers, without_strangers
from resolver.zones import Zones

_MOST_ASKS = 4  # upstream questions for one chain: a recursive upstream needs one

LONGEST_REASON = 206  # bytes of one: see `reason`
UNPROVEN_S = 60
"""How long those who set CD share what was not believed: unbound's figure for bogus data."""

_USABLE = {w.NOERROR, w.NXDOMAIN, 6}  # 6: YXDOMAIN, a DNAME that made the name too long (RFC 6672 2.2)


class ContentRefused(ResolverError):
    """An answer that came and may not be given: a private address from outside, or a blocked CNAME target."""

    def __init__(self, rcode: int, ede: int, text: str) -> None:
        self.rcode = rcode
        self.ede = ede
        super().__init__(text)


class UpstreamReply(Protocol):
    @property
    def wire(self) -> bytes: ...
    @property
    def upstream(self) -> str: ...
    @property
    def encrypted(self) -> bool: ...
    @property
    def layout(self) -> w.Scan | None:
        """The scan of `wire`, where there is one already."""


class Upstreams(Protocol):
    """What is needed of an upstream set. `deadline` is in seconds of the resolver's clock; `avoid` names an upstream that
    is not to be asked."""

    async def ask(self, query: bytes, *, zone: Zone | None, deadline: float, avoid: str = "") -> UpstreamReply: ...

    def begin(
        self, out: Outgoing, *, zone: Zone | None, deadline: float, heard: Callable[[Any], None], avoid: str = ""
    ) -> object:
        """As `ask`, told by a call: `heard` gets an UpstreamReply or UpstreamsFailed, once."""


class Judge(Protocol):
    """Says by DNSSEC whether an answer is to be believed (`resolver/io/validation.py`)."""

    mode: str

    async def validated(
        self, answer: Answer, question: Question, upstream: str, deadline: float, *, avoid: str = ""
    ) -> Answer: ...


class Fetched(NamedTuple):
    answer: Answer
    upstream: str
    shared: bool = False  # asked for one subnet, and good for all (RFC 7871 7.3.1)


@dataclass(slots=True)
class Fetcher:
    """The way upstream for one configuration; a reload makes a new one."""

    upstreams: Upstreams
    zones: Zones
    bounds: Bounds
    rebind_protection: bool
    blocklist: Blocklist
    judge_by_dnssec: Judge | None = None

    async def fetch(self, question: Question, zone: Zone | None, deadline: float) -> Fetched:
        """Raises UpstreamsFailed, or ContentRefused; never returns an answer with an unfinished chain."""
        return await self.go_on(await self._ask(question, zone, deadline), question, zone, deadline)

    def begin(self, question: Question, zone: Zone | None, deadline: float, heard: Callable[[Any], None]) -> None:
        """The first ask of a question, told by a call: `heard` gets what `read` takes."""
        self.upstreams.begin(outgoing_for(question), zone=zone, deadline=deadline, heard=heard)

    def read(self, heard: UpstreamReply | UpstreamsFailed, question: Question, zone: Zone | None) -> Fetched:
        """What an upstream said. Raises UpstreamsFailed or ContentRefused; an `unfinished` answer is still to `go_on`."""
        if isinstance(heard, UpstreamsFailed):
            raise heard
        fetched, layout = self._taken(heard, question)
        if not fetched.answer.unfinished:
            self.judge(fetched.answer, zone, layout)
        return fetched

    async def go_on(self, fetched: Fetched, question: Question, zone: Zone | None, deadline: float) -> Fetched:
        """Follows an unfinished chain to its end. Raises as `fetch` does."""
        asks = 1
        while fetched.answer.unfinished and asks < _MOST_ASKS:
            fetched = await self._continue(fetched, question, deadline)
            asks += 1
        if fetched.answer.unfinished:
            raise UpstreamsFailed(((fetched.upstream, f"CNAME chain without an end after {asks} questions"),), ede=0)
        self.judge(fetched.answer, zone)
        return fetched

    async def finish(self, begun: Answer, question: Question, deadline: float) -> Fetched:
        """A local CNAME that leads outside: what its target says, under the name asked."""
        fetched = await self._continue(Fetched(begun, "local"), question, deadline)
        if fetched.answer.unfinished:
            raise UpstreamsFailed(((fetched.upstream, "CNAME chain without an end"),), ede=0)
        return fetched

    async def _ask(self, question: Question, zone: Zone | None, deadline: float) -> Fetched:
        if self.judge_by_dnssec is None:
            return self.take(await self.upstreams.ask(query_for(question), zone=zone, deadline=deadline), question)
        return await Opinion(self, self.judge_by_dnssec, question, zone, deadline).best()

    def take(self, reply: UpstreamReply, question: Question) -> Fetched:
        """Raises UpstreamsFailed for what cannot be an answer."""
        return self._taken(reply, question)[0]

    def _taken(self, reply: UpstreamReply, question: Question) -> tuple[Fetched, w.Scan]:
        """With the layout of the answer's records."""
        try:
            wire, layout = reply.wire, reply.layout or w.scan(reply.wire)
            if strangers(wire, layout, question.name):
                wire = without_strangers(wire, layout, question)
                layout = w.scan(wire)
            answer = take(wire, question, self.bounds, trusted=reply.encrypted, layout=layout)
        except Malformed as exc:
            raise UpstreamsFailed(((reply.upstream, str(exc)),), ede=OTHER) from exc
        if answer.rcode not in _USABLE:
            raise UpstreamsFailed(((reply.upstream, f"rcode {answer.rcode}"),), ede=23)
        shared = bool(question.ecs) and not _subnet_scope(reply.wire)
        return Fetched(answer, reply.upstream, shared), layout

    async def _continue(self, begun: Fetched, question: Question, deadline: float) -> Fetched:
        target = begun.answer.unfinished
        further = question_for(target, question.type, do=question.do, cd=question.cd)
        if self.zones.stays(further) is not None:
            raise ContentRefused(w.NXDOMAIN, BLOCKED, f"CNAME to {w.name_to_text(target)}, which never leaves")
        _, zone = self.zones.zone_of(target)
        rest = await self._ask(further, zone, deadline)
        self.judge(rest.answer, zone)
        joined = _join(begun.answer, rest.answer)
        try:
            answer = take(
                joined, question, self.bounds, trusted=begun.answer.authenticated and rest.answer.authenticated
            )
        except Malformed as exc:
            raise UpstreamsFailed(((rest.upstream, str(exc)),), ede=OTHER) from exc
        answer = replace(answer, reason=both_reasons(begun.answer.reason, rest.answer.reason))
        return Fetched(answer, rest.upstream, begun.shared and rest.shared)

    def judge(self, answer: Answer, zone: Zone | None, layout: w.Scan | None = None) -> None:
        """Raises ContentRefused. A zone is the user's own network: its private addresses are what it is for.

        `layout` is the scan of the message that the answer was taken from: its records lie where they lay there.
        """
        if self.rebind_protection and zone is None:
            address = private_address(answer.wire, layout.records[: len(answer.ttl_at)] if layout else None)
            if address:
                raise ContentRefused(w.REFUSED, FILTERED, f"private address {address} from outside (DNS rebinding)")
        if len(self.blocklist):
            blocked = blocked_target(answer, self.blocklist)
            if blocked:
                raise ContentRefused(w.NXDOMAIN, BLOCKED, f"CNAME to the blocked name {w.name_to_text(blocked)}")


@dataclass(frozen=True, slots=True)
class Opinion:
    """One question that DNSSEC has a say in: an upstream's answer, and another's where the first is not believed.

    A poisoned cache, a box that strips signatures, a copy of a zone that was not signed anew: each is one upstream's, and
    the next one need not have it. Two upstreams are asked, no more: a zone that is broken is broken everywhere.
    """

    fetcher: Fetcher
    judge: Judge
    question: Question
    zone: Zone | None
    deadline: float

    async def best(self) -> Fetched:
        """Raises NotBelieved where no upstream is believed, UpstreamsFailed where the chain of keys could not be had; under
        CD neither: who sets it judges for himself (RFC 4035 3.2.2), and gets the data that came, without AD and with the
        reason."""
        first = await self._ask("")
        try:
            return await self._judged(first, "")
        except NotBelieved as bogus:
            failure: UpstreamsFailed = bogus
        except UpstreamsFailed as exc:
            if self.question.cd:
                return _unproven(first, exc)
            raise
        try:
            return await self._judged(await self._ask(first.upstream), first.upstream)
        except UpstreamsFailed as exc:
            if self.question.cd:
                return _unproven(first, failure)
            raise NotBelieved(failure.causes + exc.causes, ede=failure.ede) from exc

    async def _ask(self, avoid: str) -> Fetched:
        # CD: an upstream that validates would keep from us what we are to judge, and the reason (RFC 6840 5.9). To log
        # is not to judge: there the upstream's protection stays.
        cd = w.CD if self.judge.mode == "validate" else 0
        query = query_for(replace(self.question, do=True, flags=self.question.flags | cd))
        reply = await self.fetcher.upstreams.ask(query, zone=self.zone, deadline=self.deadline, avoid=avoid)
        return self.fetcher.take(reply, self.question)

    async def _judged(self, fetched: Fetched, avoid: str) -> Fetched:
        answer = await self.judge.validated(fetched.answer, self.question, fetched.upstream, self.deadline, avoid=avoid)
        return fetched._replace(answer=answer)


def _unproven(fetched: Fetched, why: UpstreamsFailed) -> Fetched:
    answer = fetched.answer.without_ad()
    kept_s = min(answer.ttl_s, UNPROVEN_S)
    return fetched._replace(answer=replace(answer, ttl_s=kept_s, reason=reason(why.ede, str(why))))


def both_reasons(first: bytes, second: bytes) -> bytes:
    """The extended errors of two halves of a chain, each once; a third would crowd records out of a datagram."""
    return first + second if len(first) <= LONGEST_REASON and second not in (b"", first) else first


def _subnet_scope(wire: bytes) -> int:
    """The prefix that an answer is good for; 0, everybody, also when the upstream says nothing (RFC 7871 7.2.1)."""
    opt = w.scan(wire).opt
    try:
        values = [value for code, value in w.options(opt.options) if code == w.ECS] if opt else []
    except Malformed:
        return 128
    return values[0][3] if values and len(values[0]) >= 4 else 0


def blocked_target(answer: Answer, blocklist: Blocklist) -> bytes:
    """The first CNAME target of the answer that is blocked; empty when there is none."""
    found = w.scan(answer.wire)
    targets = (w.name_at(answer.wire, r.rdata_at) for r in found.records[: found.answers] if r.type == w.CNAME)
    return next((target for target in targets if blocklist.blocks(target)), b"")


def question_for(name: bytes, rdtype: int, *, do: bool = False, cd: bool = False) -> Question:
    """A question of our own, with EDNS so that reasons come back."""
    section = name + struct.pack("!HH", rdtype, w.IN)
    return Question(0, w.RD | w.AD | (w.CD if cd else 0), name, rdtype, section, edns=True, size=1232, do=do)


def query_for(question: Question) -> bytes:
    """What is asked upstream. AD is always asked for (RFC 6840 5.7): those who share the answer may want the bit."""
    options = w.option(w.ECS, question.ecs) if question.ecs else b""
    flags = w.RD | w.AD | question.flags & w.CD
    section = question.name + question.section[-4:]
    return struct.pack("!HHHHHH", 0, flags, 1, 0, 0, 1) + section + opt_record(question, options=options)


def outgoing_for(question: Question) -> Outgoing:
    """The same as `query_for` in the form that needs no reading."""
    flags = w.RD | w.AD | question.flags & w.CD
    return Outgoing(0, flags, question.name + question.section[-4:], question.do, question.ecs)


def _join(begun: Answer, rest: Answer) -> bytes:
    """One message of both answers. Rare, so dnspython may expand the names that were compressed against another question."""
    import dns.exception
    import dns.message

    try:
        first = dns.message.from_wire(begun.wire, one_rr_per_rrset=True)
        second = dns.message.from_wire(rest.wire, one_rr_per_rrset=True)
    except dns.exception.DNSException as exc:
        raise UpstreamsFailed((("upstream", f"records of a chain: {exc}"),), ede=OTHER) from exc
    if len(first.answer) + len(second.answer) > 4 * LONGEST_CHAIN:
        raise UpstreamsFailed((("upstream", f"chain of {len(first.answer)} and more records"),), ede=OTHER)
    first.answer.extend(second.answer)
    first.authority = second.authority
    first.set_rcode(second.rcode())
    return first.to_wire()
