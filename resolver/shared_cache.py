"""Write an upstream's answer for a store that a fleet shares, and believe of what comes back only what can be checked.

Theory: what is shared is the upstream's message, not our verdict on it: whoever reads it judges it as if an upstream had
just said it (bounds, rebinding, blocklists, DNSSEC). The store is not trusted with more than an upstream is: a value has to
be of this format, dated, young enough, a whole message, and the answer to this very question.

    value: "hr1" 0, the millisecond of writing by the wall clock (8), for how many seconds it may be kept (4), message

Rules for editing: 1. pure: `wall` is an argument; 2. what does not pass is a miss, never an error.
"""

from __future__ import annotations

import hashlib
import struct

from resolver import wire as w
from resolver.errors import Malformed
from resolver.outgoing import Outgoing, aged, fold, give_back

MAGIC = b"hr1\0"
LONGEST_S = 86_400
LARGEST = 16 * 1024  # bytes of a message that is worth sharing
_FUTURE_S = 5.0  # clocks of a fleet differ a little
_head = struct.Struct("!4sQI")


def key_for(out: Outgoing, zone: str) -> bytes:
    """Names in a store are a diary of its users: the key is a hash. DO, CD and the zone are part of it."""
    flags = bytes([out.do << 1 | bool(out.flags & w.CD)])
    return (
        b"headrace:dns:1:"
        + hashlib.blake2b(flags + fold(out.question) + zone.encode(), digest_size=16).hexdigest().encode()
    )


def may_share(out: Outgoing) -> bool:
    """An answer for one subnet is nobody else's (RFC 7871 11.1)."""
    return not out.subnet


def kept_for_s(wire: bytes, found: w.Scan) -> int:
    """How long others may use it: the smallest TTL, for a negative answer RFC 2308 5; 0, not at all."""
    if found.rcode not in (w.NOERROR, w.NXDOMAIN) or len(wire) > LARGEST or found.flags & w.TC:
        return 0
    answers = found.records[: found.answers]
    times = [record.ttl_s for record in found.records]
    soas = [r for r in found.records[found.answers :] if r.type == w.SOA and r.rdata_len >= 22]
    if not answers or found.rcode == w.NXDOMAIN:
        if not soas:
            return 0
        times += [struct.unpack_from("!I", wire, soa.rdata_at + soa.rdata_len - 4)[0] for soa in soas]
    return min(min(times, default=0), LONGEST_S)


def pack(wire: bytes, keep_s: int, wall: float) -> bytes:
    return _head.pack(MAGIC, int(wall * 1000), keep_s) + wire


def unpack(value: bytes, out: Outgoing, wall: float) -> bytes | None:
    """The message for this caller (id, letters, aged TTLs); None for anything that cannot be believed."""
    if len(value) < _head.size + w.HEADER:
        return None
    magic, written_ms, keep_s = _head.unpack_from(value)
    age_s = wall - written_ms / 1000
    if magic != MAGIC or keep_s > LONGEST_S or age_s < -_FUTURE_S or age_s >= keep_s:
        return None
    wire = value[_head.size :]
    question = wire[w.HEADER : w.HEADER + len(out.question)]
    try:
        found = w.scan(wire)
        if found.end != len(wire) or not found.flags & w.QR or found.questions != 1:
            return None
        if found.question_end != w.HEADER + len(out.question) or fold(question) != fold(out.question):
            return None
        # Nobody's word makes a record live longer than the value says: its own TTLs may lie.
        if kept_for_s(wire, found) < keep_s:
            return None
        return give_back(aged(wire, max(0, int(age_s))), out)
    except Malformed:
        return None
