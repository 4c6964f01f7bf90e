"""Find addresses of private space in an answer that came from outside (DNS rebinding).

Theory: a page from anywhere may name a host whose answer points into the user's own network; the browser then believes
it to be same-origin. An answer that holds one such address is refused whole: beside a public one it is the attack's
second step. HTTPS and SVCB hints are addresses too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import ip_address

from resolver import wire as w
from resolver.errors import Malformed

_V4_HINT, _V6_HINT = 4, 6

_V4_FIRST = frozenset({0, 10, 127})
_LOOPBACK_V6 = (bytes(16), bytes(15) + b"\1")
_EMBEDS_V4 = (bytes(12), bytes(10) + b"\xff\xff", b"\0\x64\xff\x9b" + bytes(8), b"\0\x64\xff\x9b\0\1" + bytes(6))


def is_private(packed: bytes) -> bool:
    """Loopback, link-local, RFC 1918, RFC 6598, ULA and "this host", also inside mapped, NAT64 and 6to4 addresses.

    Bytes rather than `ipaddress`: every answer from outside passes here, and 20 networks cost 20 us there.
    """
    if len(packed) == 4:
        return _is_private_v4(packed[0], packed[1])
    if packed in _LOOPBACK_V6 or packed[0] & 0xFE == 0xFC or (packed[0] == 0xFE and packed[1] >= 0x80):
        return True  # ::, ::1, fc00::/7, fe80::/10 and the old site-local fec0::/10
    if packed[:12] in _EMBEDS_V4 or packed[:6] == _EMBEDS_V4[3][:6]:
        return _is_private_v4(packed[12], packed[13])
    return packed[:2] == b"\x20\x02" and _is_private_v4(packed[2], packed[3])


def _is_private_v4(first: int, second: int) -> bool:
    return (
        first in _V4_FIRST
        or (first == 192 and second == 168)
        or (first == 172 and 16 <= second < 32)
        or (first == 169 and second == 254)
        or (first == 100 and 64 <= second < 128)
    )


def private_address(wire: bytes, records: Sequence[w.Record] | None = None) -> str:
    """The first private address of an answer in text form; empty when there is none. `records` of it, if known."""
    for record in w.scan(wire).records if records is None else records:
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
