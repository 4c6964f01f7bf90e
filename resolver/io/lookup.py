"""Read replies for the proxy and for people, and gather what is needed to dial a host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from resolver import wire as w
from resolver.endpoints import Endpoints, Service, addresses_of, choose, interleave, query_name
from resolver.errors import NoAddress

if TYPE_CHECKING:
    import dns.rrset

MOST_ALIASES = 8
SETTLE_S = 0.05
"""After the first addresses came, the other family and the HTTPS record get so long (RFC 8305 3, resolution delay)."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """An answer for people: `rcode` and `reasons` (extended errors) as text; `ttl_s` the smallest of the answer, or 0."""

    rcode: str
    rrsets: tuple[dns.rrset.RRset, ...]
    ttl_s: int
    source: str
    took_s: float
    reasons: tuple[str, ...] = ()
    authority: tuple[dns.rrset.RRset, ...] = ()

    def of_type(self, rdtype: int) -> tuple[dns.rrset.RRset, ...]:
        return tuple(rrset for rrset in self.rrsets if rrset.rdtype == rdtype)


Resolve = Callable[[bytes, int], Awaitable[Resolved]]


def read_reply(message: bytes, source: str, took_s: float) -> Resolved:
    import dns.edns  # 25 ms of a start, which serves addresses and its own names without
    import dns.message
    import dns.rcode

    parsed = dns.message.from_wire(message)
    rcode = dns.rcode.to_text(parsed.rcode())
    sections = parsed.answer or parsed.authority
    reasons = tuple(option.to_text() for option in parsed.options if isinstance(option, dns.edns.EDEOption))
    ttl_s = min((rrset.ttl for rrset in sections), default=0)
    return Resolved(rcode, tuple(parsed.answer), ttl_s, source, took_s, reasons, tuple(parsed.authority))


async def dial_endpoints(resolve: Resolve, host: str, port: int) -> Endpoints:
    """Addresses, port and ALPN of a host. An address stands for itself. Raises NoAddress."""
    literal = host.removeprefix("[").removesuffix("]")
    try:
        return Endpoints((str(ip_address(literal)),), port, (), float("inf"))
    except ValueError:
        pass
    try:
        name = w.name_from_text(host)
    except ValueError as exc:
        raise NoAddress(host, "NXDOMAIN", str(exc)) from exc
    record = asyncio.ensure_future(_service(resolve, name, port))
    try:
        plain = await _addresses(resolve, name)
        # The record may only make things better: a slow or missing one never holds the dial up (RFC 9460 3.1).
        await asyncio.wait([record], timeout=SETTLE_S if plain[0] or plain[1] else None)
        service = record.result() if record.done() and not record.cancelled() else None
    finally:
        record.cancel()
    return await _combine(resolve, host, name, port, plain, service)


_Plain = tuple[list[str], list[str], float, str, str]  # v6, v4, ttl, rcode, detail


async def _combine(
    resolve: Resolve, host: str, name: bytes, port: int, plain: _Plain, service: Service | None
) -> Endpoints:
    if service is not None:
        v6, v4, ttl_s, _, _ = plain if service.target == name else await _addresses(resolve, service.target)
        found = interleave(v6 or service.v6_hints, v4 or service.v4_hints)
        if found:
            return Endpoints(found, service.port or port, service.alpn, min(ttl_s, service.ttl_s))
    v6, v4, ttl_s, rcode, detail = plain
    if not v6 and not v4:
        raise NoAddress(host, rcode, detail)
    return Endpoints(interleave(v6, v4), port, (), ttl_s)


async def _addresses(resolve: Resolve, name: bytes) -> _Plain:
    """Both families; the slower one gets SETTLE_S once the other has something to dial."""
    tasks = [asyncio.ensure_future(resolve(name, rdtype)) for rdtype in (w.AAAA, w.A)]
    try:
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            usable = any(addresses_of(task.result().rrsets) for task in done)
            await asyncio.wait(waiting, timeout=SETTLE_S if usable else None)
        answers = [task.result() for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
    found = list(dict.fromkeys(address for answer in answers for address in addresses_of(answer.rrsets)))
    ttl_s = min((answer.ttl_s for answer in answers if answer.rrsets), default=0)
    v6, v4 = [a for a in found if ":" in a], [a for a in found if ":" not in a]
    worst = next((a for a in answers if a.rcode != "NOERROR"), answers[0])
    return v6, v4, float(ttl_s), worst.rcode, "; ".join(worst.reasons)


async def _service(resolve: Resolve, name: bytes, port: int) -> Service | None:
    """The HTTPS record to use, AliasMode followed; None when there is none that we can use (RFC 9460 3)."""
    owner = query_name(name, port)
    for _ in range(MOST_ALIASES):
        answer = await resolve(owner, w.HTTPS)
        chosen = choose(answer.of_type(w.HTTPS), name if owner != name else owner)
        if isinstance(chosen, bytes):
            owner = name = chosen
            continue
        return chosen
    return None
