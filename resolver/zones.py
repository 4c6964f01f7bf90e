"""Decide where a name may go: to a zone's own upstreams, to the public ones, or nowhere.

Theory: two tables, both matched by the longest suffix of whole labels. The user's zones say who is asked; the special
names of the RFCs say what never leaves. A zone wins over a special name that it lies inside or equals: whoever writes
`10.in-addr.arpa` or `home.arpa` into the configuration has a server for it.
`test.` is not among the special ones: RFC 6761 6.2 has only authoritative servers in mind and people use it in labs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from config.model import Zone
from resolver import wire as w
from resolver.answer import Answer, Rr, compose
from resolver.hosts import soa
from resolver.question import Question


class Special(Enum):
    """How a name is answered that must not leave."""

    LOOPBACK = "loopback"  # 127.0.0.1 and ::1 at it and below (RFC 6761 6.3)
    NOTHING = "nothing"  # neither it nor anything below exists (RFC 6761 6.4, 7686 2, 6762 22.1)
    EMPTY = "empty"  # a zone with only an apex (RFC 6303 3)
    NO_DATA = "no data"  # exists, and says nothing, at every depth (RFC 9462 6.4)


def _private_reverse() -> list[str]:
    """RFC 6303 4, with RFC 7793 for 100.64/10 and RFC 4193's whole fc00::/7."""
    v4 = ["10", "168.192", "254.169", "127", "0", "2.0.192", "100.51.198", "113.0.203", "255.255.255.255"]
    v4 += [f"{n}.172" for n in range(16, 32)] + [f"{n}.100" for n in range(64, 128)]
    v6 = ["0." * 31 + "0", "1." + "0." * 30 + "0", "c.f", "d.f", "8.e.f", "9.e.f", "a.e.f", "b.e.f", "8.b.d.0.1.0.0.2"]
    return [f"{p}.in-addr.arpa" for p in v4] + [f"{p}.ip6.arpa" for p in v6]


SPECIAL: dict[bytes, Special] = {
    w.name_from_text("localhost"): Special.LOOPBACK,
    w.name_from_text("onion"): Special.NOTHING,
    w.name_from_text("invalid"): Special.NOTHING,
    w.name_from_text("local"): Special.NOTHING,
    w.name_from_text("home.arpa"): Special.EMPTY,
    w.name_from_text("resolver.arpa"): Special.NO_DATA,
    **{w.name_from_text(name): Special.EMPTY for name in _private_reverse()},
}

# One look at the end spares nearly every name a walk through its parents.
_SPECIAL_ENDS = tuple({list(w.suffixes(name))[-2] for name in SPECIAL})
_LOCALHOST = w.name_from_text("localhost")
_POINTERS = {w.name_from_text("1.0.0.127.in-addr.arpa"), w.name_from_text("1." + "0." * 31 + "ip6.arpa")}
_DDR = w.name_from_text("_dns.resolver.arpa")
SPECIAL_TTL_S = 3600


class Zones:
    """The routes of one configuration. `designated` are the SVCB records of `_dns.resolver.arpa`, none: no data."""

    def __init__(self, zones: Sequence[Zone] = (), designated: Sequence[Rr] = ()) -> None:
        self._zones = {w.name_from_text(zone.name): zone for zone in zones}
        self._designated = tuple(designated)

    def zone_of(self, name: bytes) -> tuple[bytes, Zone | None]:
        """The zone that a name belongs to and its name on the wire, which is also the cache's scope; b"" for the public."""
        if self._zones:
            for suffix in w.suffixes(name):
                zone = self._zones.get(suffix)
                if zone is not None:
                    return suffix, zone
        return b"", None

    def stays(self, question: Question) -> Answer | None:
        """The answer of a name that never leaves; None when it may be asked of somebody."""
        if not question.name.endswith(_SPECIAL_ENDS):
            return None
        for suffix in w.suffixes(question.name):
            if suffix in self._zones:
                return None
            special = SPECIAL.get(suffix)
            if special is not None:
                return self._special(special, suffix, question)
        return None

    def _special(self, special: Special, suffix: bytes, question: Question) -> Answer:
        if special is Special.LOOPBACK:
            return loopback(question, suffix)
        if question.name in _POINTERS and question.type == w.PTR:
            return compose(question, w.NOERROR, [Rr(b"", w.PTR, SPECIAL_TTL_S, _LOCALHOST)])
        if question.name == _DDR and question.type == w.SVCB and self._designated:
            return compose(question, w.NOERROR, self._designated)
        authority = soa(suffix, SPECIAL_TTL_S)
        if suffix == question.name and special is Special.EMPTY and question.type == w.SOA:
            return compose(question, w.NOERROR, [authority])
        exists = special is Special.NO_DATA or (special is Special.EMPTY and suffix == question.name)
        exists = exists or question.name in _POINTERS
        return compose(question, w.NOERROR if exists else w.NXDOMAIN, (), [authority])


def loopback(question: Question, suffix: bytes = _LOCALHOST) -> Answer:
    addresses = {w.A: bytes([127, 0, 0, 1]), w.AAAA: bytes(15) + b"\1"}
    if question.type in addresses:
        return compose(question, w.NOERROR, [Rr(b"", question.type, SPECIAL_TTL_S, addresses[question.type])])
    return compose(question, w.NOERROR, (), [soa(suffix, SPECIAL_TTL_S)])


def any_refused(question: Question) -> Answer:
    """RFC 8482 4.2: one small made-up HINFO, so that ANY amplifies nothing and teaches the cache nothing."""
    return compose(question, w.NOERROR, [Rr(b"", w.HINFO, SPECIAL_TTL_S, b"\7RFC8482\0")])
