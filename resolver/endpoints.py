"""Turn address and HTTPS records into places to dial, in the order to dial them (RFC 9460, RFC 8305)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from resolver import wire as w

if TYPE_CHECKING:
    import dns.rdtypes.svcbbase
    import dns.rrset

_ALPN, _NO_DEFAULT_ALPN, _PORT, _V4_HINT, _V6_HINT = 1, 2, 3, 4, 6
UNDERSTOOD = frozenset({0, _ALPN, _NO_DEFAULT_ALPN, _PORT, _V4_HINT, _V6_HINT})
"""SvcParamKeys we act on; a record with another one in `mandatory` is not for us (RFC 9460 8). `ech` is among those."""
_USED = frozenset({"h3", "h2", "http/1.1"})


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a host can be reached.

    `addresses` alternate between IPv6 and IPv4, IPv6 first (RFC 8305 4), never empty. `port` is the one asked for unless
    the HTTPS record names another. `alpn` holds what the record promises, in its order, with the default `http/1.1`
    unless the record takes it away; empty when there is no usable record. `ttl_s` is the smallest of all that was used.
    """

    addresses: tuple[str, ...]
    port: int
    alpn: tuple[str, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Service:
    """One usable HTTPS record. `port` 0: the one asked for. Hints stand in for addresses that did not come."""

    target: bytes
    port: int
    alpn: tuple[str, ...]
    v4_hints: tuple[str, ...]
    v6_hints: tuple[str, ...]
    ttl_s: float


def query_name(name: bytes, port: int) -> bytes:
    """The owner of a host's HTTPS record: itself at 443, else `_port._https.` before it (RFC 9460 9.1)."""
    if port == 443:
        return name
    prefix = b"_%d" % port
    return bytes([len(prefix)]) + prefix + b"\x06_https" + name


def addresses_of(rrsets: Iterable[dns.rrset.RRset]) -> list[str]:
    return [rdata.address for rrset in rrsets if rrset.rdtype in (w.A, w.AAAA) for rdata in rrset]


def interleave(v6: Sequence[str], v4: Sequence[str]) -> tuple[str, ...]:
    """Families by turns, IPv6 first: a dead family costs one attempt, not all of them."""
    return tuple(a for a in chain.from_iterable(zip_longest(v6, v4)) if a is not None)


def choose(rrsets: Sequence[dns.rrset.RRset], owner: bytes) -> Service | bytes | None:
    """The first usable record by priority, the name that an alias leads to, or None.

    An AliasMode record is obeyed even beside ServiceMode ones (RFC 9460 2.4.1); alias to "." says "no service", which a
    client that knows other ways treats as no record. `owner` is what the target "." of a ServiceMode record means.
    """
    records = sorted(
        ((rdata, float(rrset.ttl)) for rrset in rrsets for rdata in rrset), key=lambda pair: int(pair[0].priority)
    )
    if records and not records[0][0].priority:
        target = _wire_name(records[0][0])
        return None if target == w.ROOT else target
    return next((service for rdata, ttl_s in records if (service := _usable(rdata, ttl_s, owner))), None)


def _wire_name(rdata: dns.rdtypes.svcbbase.SVCBBase) -> bytes:
    return (rdata.target.to_wire() or w.ROOT).lower()


def _usable(rdata: dns.rdtypes.svcbbase.SVCBBase, ttl_s: float, owner: bytes) -> Service | None:
    params = {int(key): value for key, value in rdata.params.items()}
    mandatory = params.get(0)
    if mandatory is not None and not UNDERSTOOD.issuperset(int(key) for key in mandatory.keys):
        return None
    alpn = tuple(token.decode("ascii", "replace") for token in params[_ALPN].ids) if _ALPN in params else ()
    if _NO_DEFAULT_ALPN not in params and "http/1.1" not in alpn:
        alpn += ("http/1.1",)
    if not _USED.intersection(alpn):
        return None
    target = _wire_name(rdata)
    port = params[_PORT].port if _PORT in params else 0
    hints = [tuple(params[key].addresses) if key in params else () for key in (_V4_HINT, _V6_HINT)]
    return Service(owner if target == w.ROOT else target, port, alpn, hints[0], hints[1], ttl_s)
