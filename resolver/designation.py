"""Write the SVCB records by which a client of our plain DNS finds our encrypted DNS (RFC 9461, RFC 9462).

Theory: `_dns.resolver.arpa` names the resolver that a client speaks to already, by the certificate's name and with the
listener's port. Without a record of our own the question must end here all the same: forwarded, it would bring the
upstream's designation, and clients would leave us for the upstream.

One record for each way and port, best first: DoT and DoQ are a frame around DNS, DoH carries HTTP besides.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from config.model import Listen
from resolver import wire as w
from resolver.answer import Rr

DESIGNATED_TTL_S = 300
"""A reload may move a port: clients should not follow an old one for long."""
ALPN, PORT, V4_HINT, V6_HINT, DOH_PATH = 1, 3, 4, 6, 7  # SvcParamKeys (RFC 9460 14.3.2, RFC 9461 5)
WAYS = {"tls": b"dot", "quic": b"doq", "h3": b"h3", "https": b"h2"}
"""Schemes of listeners and their ALPN, in the order of preference."""


def designations(listens: Iterable[Listen], name: str, doh_path: str) -> list[Rr]:
    """Records for `Zones(designated=...)`; none without a name that our certificate proves, and none for plain listeners.

    `listens` carry real ports. Addresses become hints, so that nobody must look the name up; wildcards do not.
    """
    if not name:
        return []
    alpns: dict[tuple[str, int], dict[bytes, None]] = {}
    hosts: dict[tuple[str, int], list[str]] = {}
    everyone = list(listens)
    for scheme, alpn in WAYS.items():
        for listen in (each for each in everyone if each.scheme == scheme):
            # h3 and https on one port are one service with two ALPN ids (RFC 9461 4.1).
            service = ("doh" if scheme in ("h3", "https") else scheme, listen.port)
            alpns.setdefault(service, {})[alpn] = None
            hosts.setdefault(service, []).append(listen.host)
    records = []
    for priority, (service, ids) in enumerate(alpns.items(), 1):
        way, port = service
        params = _params(list(ids), port, hosts[service], doh_path if way == "doh" else "")
        rdata = struct.pack("!H", priority) + w.name_from_text(name) + params
        records.append(Rr(b"", w.SVCB, DESIGNATED_TTL_S, rdata))
    return records


def _params(alpns: Sequence[bytes], port: int, hosts: Sequence[str], doh_path: str) -> bytes:
    """SvcParams in ascending order of their keys (RFC 9460 2.2)."""
    addresses = [found for found in map(ip_address, dict.fromkeys(hosts)) if not found.is_unspecified]
    params = {
        ALPN: b"".join(bytes([len(alpn)]) + alpn for alpn in alpns),
        PORT: port.to_bytes(2),
        V4_HINT: b"".join(found.packed for found in addresses if isinstance(found, IPv4Address)),
        V6_HINT: b"".join(found.packed for found in addresses if isinstance(found, IPv6Address)),
        DOH_PATH: f"{doh_path}{{?dns}}".encode() if doh_path else b"",
    }
    return b"".join(struct.pack("!HH", key, len(value)) + value for key, value in params.items() if value)
