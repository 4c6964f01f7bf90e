"""Find the addresses of upstream hosts through plain DNS, and of nothing else.

Theory: `https://dns.example/dns-query` cannot be resolved by itself. The servers of `bootstrap` are asked for A and AAAA
of exactly those hosts; what they say needs no trust, since the certificate of the upstream is verified afterwards. An
answer is kept for its TTL (a minute to a day). When a refresh fails the old addresses stay in use: a dead bootstrap
server must not take a working upstream away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from resolver import outgoing as o
from resolver import wire as w
from resolver.errors import Malformed
from resolver.io.addresses import AddressBook
from resolver.io.channel import Clock, Failure
from resolver.io.tcp import tcp_channel
from resolver.io.udp import UdpChannel

SHORTEST_S, LONGEST_S = 60.0, 86_400.0
TIMEOUT_S = 2.0
MAX_HOSTS = 256


@dataclass(frozen=True, slots=True)
class _Known:
    addresses: tuple[str, ...]
    until: float


class Bootstrap:
    """`servers` are addresses, with a port where it is not 53 (`127.0.0.1:5300`, `[::1]:5300`)."""

    def __init__(self, servers: Sequence[str], clock: Clock) -> None:
        self._clock = clock
        self._channels = [self._channel(*split_port(server)) for server in servers]
        self._known: dict[str, _Known] = {}
        self._lookups: dict[str, asyncio.Task[_Known]] = {}

    def _channel(self, address: str, port: int) -> UdpChannel:
        book = AddressBook(address, (), _no_lookup, self._clock)
        return UdpChannel(book, port, tcp_channel(book, port, clock=self._clock), clock=self._clock)

    async def addresses(self, host: str) -> tuple[str, ...]:
        """The host's addresses. Raises OSError when nobody knows any; questions for one host in flight are joined."""
        known = self._known.get(host)
        if known is not None and known.until > self._clock():
            return known.addresses
        lookup = self._lookups.get(host) or self._begin(host)
        if known is not None:
            return known.addresses  # a dial never waits for a refresh: mostly the addresses are the same
        return (await asyncio.shield(lookup)).addresses

    def _begin(self, host: str) -> asyncio.Task[_Known]:
        def ended(lookup: asyncio.Task[_Known]) -> None:
            self._lookups.pop(host, None)
            if not lookup.cancelled():
                lookup.exception()  # a refresh that failed is nobody's exception: the old addresses stay

        self._lookups[host] = lookup = asyncio.ensure_future(self._find(host))
        lookup.add_done_callback(ended)
        return lookup

    async def _find(self, host: str) -> _Known:
        if not self._channels:
            raise OSError(f"{host} has no addresses and bootstrap is empty")
        problems: list[str] = []
        for channel in self._channels:
            both = await asyncio.gather(*(self._ask(channel, host, rdtype) for rdtype in (w.AAAA, w.A)))
            found = [address for addresses, _, _ in both for address in addresses]
            if found:
                ttl_s = min(ttl for addresses, ttl, _ in both if addresses)
                known = _Known(tuple(found), self._clock() + min(max(ttl_s, SHORTEST_S), LONGEST_S))
                if len(self._known) < MAX_HOSTS:
                    self._known[host] = known
                return known
            problems += [f"{channel.book.host}: {problem}" for _, _, problem in both if problem]
        raise OSError(f"bootstrap found no address of {host}" + (f" ({problems[0]})" if problems else ""))

    async def _ask(self, channel: UdpChannel, host: str, rdtype: int) -> tuple[list[str], float, str]:
        """Addresses, their smallest TTL, and what went wrong."""
        question = w.name_from_text(host) + rdtype.to_bytes(2) + b"\0\1"
        heard: asyncio.Future[bytes | Failure] = asyncio.get_running_loop().create_future()

        def done(result: bytes | Failure) -> None:
            if not heard.done():
                heard.set_result(result)

        channel.ask(o.Outgoing(0, w.RD, question), self._clock() + TIMEOUT_S, done)
        reply = await heard
        if isinstance(reply, Failure):
            return [], 0.0, reply.reason
        try:
            return read_addresses(reply, rdtype)
        except Malformed as exc:
            return [], 0.0, str(exc)

    def forget(self) -> None:
        """The network changed: names may lead elsewhere. The old addresses stay as the fall-back of a failed look-up."""
        self._known = {host: _Known(known.addresses, 0.0) for host, known in self._known.items()}
        for channel in self._channels:
            channel.drop()

    async def close(self) -> None:
        lookups = list(self._lookups.values())
        for lookup in lookups:
            lookup.cancel()
        if lookups:
            await asyncio.wait(lookups)
        for channel in self._channels:
            await channel.close()


def read_addresses(reply: bytes, rdtype: int) -> tuple[list[str], float, str]:
    """The addresses of a reply's answer section, CNAMEs passed over, and their smallest TTL. Raises Malformed."""
    found = w.scan(reply)
    if found.rcode:
        return [], 0.0, f"rcode {found.rcode}"
    records = [r for r in found.records[: found.answers] if r.type == rdtype]
    size = 16 if rdtype == w.AAAA else 4
    addresses = [str(ip_address(reply[r.rdata_at : r.rdata_at + size])) for r in records if r.rdata_len == size]
    return addresses, min((float(r.ttl_s & 0x7FFFFFFF) for r in records), default=0.0), ""


def split_port(server: str, default: int = 53) -> tuple[str, int]:
    """`9.9.9.9`, `9.9.9.9:5353`, `2620:fe::fe`, `[2620:fe::fe]:5353`. Raises ValueError for what is no address."""
    if server.startswith("["):
        address, _, port = server[1:].partition("]")
        return str(ip_address(address)), int(port[1:] or default)
    address, colon, port = server.partition(":")
    if colon and ":" not in port:
        return str(ip_address(address)), int(port)
    return str(ip_address(server)), default


async def _no_lookup(host: str) -> tuple[str, ...]:
    raise OSError(f"{host} is no address")
