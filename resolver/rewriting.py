"""Take a record out of its message: names that servers may compress are written out, all other bytes pass as they are."""

from __future__ import annotations

from resolver import wire as w

_COMPRESSED = {
    w.NS: (0, 1), 3: (0, 1), 4: (0, 1), w.CNAME: (0, 1), w.SOA: (0, 2), 7: (0, 1), 8: (0, 1), 9: (0, 1), w.PTR: (0, 1),
    14: (0, 2), 15: (2, 1), 17: (0, 2), 18: (2, 1), 21: (2, 1), 26: (2, 2), 33: (6, 1), 36: (2, 1), w.DNAME: (0, 1),
}  # fmt: skip
"""Types whose RDATA may hold pointers (RFC 3597 4): octets before the names, and how many names."""


def plain_rdata(wire: bytes, record: w.Record) -> bytes:
    """Raises Malformed for names that lead out of the message."""
    at, end = record.rdata_at, record.rdata_at + record.rdata_len
    before, names = _COMPRESSED.get(record.type, (0, 0))
    out = wire[at : at + before]
    at += before
    for _ in range(names):
        out += w.written_name_at(wire, at)
        at = w.skip_name(wire, at)
    return out + wire[at:end]
