"""Find addresses of private space in an answer that came from outside (DNS rebinding).

Theory: a page from anywhere may name a host whose answer points into the user's own network; the browser then believes
it to be same-origin. An answer that holds one such address is refused whole: beside a public one it is the attack's
second step. HTTPS and SVCB hints are addresses too.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from resolver import wire as w
from resolver.errors import Malformed

_V4_HINT, _V6_HINT = 4, 6

_V4 = [
    IPv4Network(n)
    for n in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
        "192.168.0.0/16",
    )
]  # fmt: skip
_V6 = [IPv6Network(n) for n in ("::/127", "fe80::/10", "fec0::/10", "fc00::/7")]
_NAT64 = [
    IPv6Network("64:ff9b::/96"),
    IPv6Network("64:ff9b:1::/48"),
    IPv6Network("::/96"),
    IPv6Network("::ffff:0:0/96"),
]
_6TO4 = IPv6Network("2002::/16")


def is_private(packed: bytes) -> bool:
    """Loopback, link-local, RFC 1918, RFC 6598, ULA and "this host", also inside mapped, NAT64 and 6to4 addresses."""
    address = ip_address(packed)
    if isinstance(address, IPv4Address):
        return any(address in network for network in _V4)
    return any(address in network for network in _V6) or _embeds_private(address)


def _embeds_private(address: IPv6Address) -> bool:
    if any(address in network for network in _NAT64):
        return is_private(address.packed[12:])
    return address in _6TO4 and is_private(address.packed[2:6])


def private_address(wire: bytes) -> str:
    """The first private address of an answer in text form; empty when there is none."""
    found = w.scan(wire)
    for record in found.records:
        for packed in _addresses(wire, record):
            if is_private(packed):
                return str(ip_address(packed))
    return ""


def _addresses(wire: bytes, record: w.Record) -> Iterator[bytes]:
    rdata = wire[record.rdata_at : record.rdata_at + record.rdata_len]
    if (record.type, len(rdata)) in ((w.A, 4), (w.AAAA, 16)):
        yield rdata
    elif record.type in (w.SVCB, w.HTTPS):
        for key, value in service_parameters(rdata):
            width = {_V4_HINT: 4, _V6_HINT: 16}.get(key)
            if width:
                yield from (value[at : at + width] for at in range(0, len(value) - width + 1, width))


def service_parameters(rdata: bytes) -> Iterator[tuple[int, bytes]]:
    """SvcParams of an HTTPS or SVCB record (RFC 9460 2.2); ends at the first that is cut."""
    try:
        at = w.skip_name(rdata, 2) if len(rdata) > 2 else len(rdata)
    except (IndexError, Malformed):
        return
    while at + 4 <= len(rdata):
        key, length = int.from_bytes(rdata[at : at + 2], "big"), int.from_bytes(rdata[at + 2 : at + 4], "big")
        if at + 4 + length > len(rdata):
            return
        yield key, rdata[at + 4 : at + 4 + length]
        at += 4 + length
