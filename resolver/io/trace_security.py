"""Say for each hop of a walk whether DNSSEC vouches for it, with keys fetched from the very servers that the walk met.

Theory: the walk comes first and is judged afterwards, so that a broken chain never hides where it leads. A referral is
as good as the zone that it leads to; an answer as good as its signatures. What cannot be fetched leaves a hop without a
word: a dead server is not a forged one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import dns.exception
import dns.name
import dns.rdatatype

from resolver.dnssec_answer import Security, judge
from resolver.dnssec_chain import Bogus, Insecure, Missing, Need, Secure, Trust, Walk
from resolver.dnssec_records import DS_TYPE, rdata_wire, read
from resolver.dnssec_signatures import Exhausted, Flaw
from resolver.errors import Malformed
from resolver.io.fetch import question_for
from resolver.io.steps import drive
from resolver.trace import Hop

Exchange = Callable[[str, Need], Awaitable[bytes | None]]
"""Asks the server at an address."""
Asked = tuple[str, str, bytes]
"""Name, type and reply of a hop; the reply is empty where none came."""


class TraceSecurity:
    """`served`: the address that answered for each zone of the walk. `now` and `wall` as in `Walk`."""

    def __init__(
        self, trust: Trust, exchange: Exchange, served: Mapping[dns.name.Name, str], now: float, wall: float
    ) -> None:
        self._trust, self._exchange, self._served = trust, exchange, served
        self._now, self._wall = now, wall

    async def of(self, hop: Hop, asked: Asked) -> Hop:
        """The hop with its verdict."""
        try:
            security, why = await self._verdict(hop, asked)
        except (Missing, Malformed, Exhausted, dns.exception.DNSException) as exc:
            return replace(hop, why=f"not judged: {exc}")
        return replace(hop, security=security.value, why=why.text if why is not None else "")

    async def _verdict(self, hop: Hop, asked: Asked) -> tuple[Security, Flaw | None]:
        walk = Walk(self._trust, self._now, self._wall)
        if hop.kind == "referral":
            below = dns.name.from_text(hop.records[0].split()[0])
            match await drive(walk.zone_of(below), self._bring):
                case Secure():
                    return Security.SECURE, None
                case Insecure(_, _, why):
                    return Security.INSECURE, why
                case Bogus(_, flaw):
                    return Security.BOGUS, flaw
        name, rdtype, wire = asked
        target = dns.name.from_text(name)
        question = question_for(rdata_wire(target), dns.rdatatype.from_text(rdtype))
        steps = judge(question, target, read(wire), walk, unfinished=hop.kind == "alias")
        verdict = await drive(steps, self._bring)
        return verdict.security, verdict.why

    async def _bring(self, needs: tuple[Need, ...]) -> list[bytes | None]:
        """One after the other: this is a diagnosis, and the server may be slow because it is asked too much."""
        return [await self._exchange(self._server_of(need), need) for need in needs]

    def _server_of(self, need: Need) -> str:
        """Whoever answered for the zone that should know: a DS stands in the parent."""
        place = need.name.parent() if need.type == DS_TYPE and len(need.name) > 1 else need.name
        while place not in self._served and len(place) > 1:
            place = place.parent()
        return self._served.get(place, "")
