"""Keep an answer in a form that serves every client, and write the reply that one client gets.

Theory: what is kept has no id, no OPT, no client's letter case, and its TTLs are already inside our bounds. What a
client sees of *itself* (id, question bytes, RD, CD, EDNS) comes from its own query, so that one stored answer serves
all who share a cache key. A cached OPT is the classic bug of forwarders: it sends one client's buffer size and cookies
to another.

      upstream's message --take()--> Answer --reply()--> this client's message
      our own records ---compose()-->

Rules for editing: 1. bytes of records pass unchanged, unknown types too (RFC 3597); only TTLs and the owner's letter
case are written, in place, so compression pointers stay true; 2. a reply that is too long loses whole records, never
its question or its OPT.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from resolver import wire as w
from resolver.errors import Malformed
from resolver.question import Question, opt_record

STALE_TTL_S = 30
"""What a stale record may be kept by the client (RFC 8767 4)."""
LONGEST_CHAIN = 16
"""CNAMEs that are followed: BIND's figure; real chains of CDNs have 3 to 8."""
PADDED_TO = 468
"""Block size of padded replies over TLS (RFC 8467 4.1)."""

_ASKED = b"\xc0\x0c"  # a compression pointer to the question's name
_TTL = struct.Struct("!I")
_pack_into = struct.Struct("!HH").pack_into
_pack_header = struct.Struct("!HHHHHH").pack
_pack_fixed = struct.Struct("!HHIH").pack


@dataclass(frozen=True, slots=True)
class Bounds:
    """What TTLs are held to when an answer is stored, in seconds."""

    min_ttl_s: int = 0
    max_ttl_s: int = 86_400
    max_negative_ttl_s: int = 3600


@dataclass(slots=True)
class Answer:
    """One answer, ready for anyone who asks the same question. Nobody changes one; to freeze it costs a miss 1 us.

    `wire` is a whole message with id 0 and without OPT, `ttl_at` the offsets of its TTLs. `ttl_s` says how long it may
    be kept: the smallest of its TTLs, for a negative answer RFC 2308 5; 0 means not at all. `denies` is true when the
    name asked for does not exist, so that nothing below it does (RFC 8020). `unfinished` is the name where a CNAME
    chain stopped without data, empty for a whole answer. `reason` is an EDNS option for everyone who gets it (RFC 8914).
    """

    wire: bytes
    ttl_at: tuple[int, ...]
    ttl_s: int
    rcode: int
    denies: bool = False
    unfinished: bytes = b""
    reason: bytes = b""

    @property
    def authenticated(self) -> bool:
        return bool(self.wire[3] & w.AD)

    def with_ad(self) -> Answer:
        proven = bytearray(self.wire)
        proven[3] |= w.AD
        return replace(self, wire=bytes(proven))

    def without_ad(self) -> Answer:
        """The same for an upstream whose word on DNSSEC cannot be trusted: plain UDP is anyone's word."""
        plain = bytearray(self.wire)
        plain[3] &= ~w.AD & 255
        return replace(self, wire=bytes(plain))


class Rr(NamedTuple):
    """A record of our own: uncompressed owner, empty for the name that was asked."""

    owner: bytes
    type: int
    ttl_s: int
    rdata: bytes


def take(wire: bytes, question: Question, bounds: Bounds, *, trusted: bool, layout: w.Scan | None = None) -> Answer:
    """What an upstream said, in the form that is kept. AD survives only from a `trusted` (encrypted) upstream.

    `layout` is the scan of `wire` where there is one already. Raises Malformed when the message is no whole answer to
    the question, or its CNAMEs loop or exceed LONGEST_CHAIN.
    """
    found = layout or w.scan(wire)
    if not found.flags & w.QR or found.flags & w.TC:
        raise Malformed(f"flags {found.flags:#06x}: not a whole reply")
    asked = wire[w.HEADER : found.question_end]
    # Only the name has letters: type 65 (HTTPS) is the byte of an "A", and lower-casing would make it type 97.
    if asked[:-4].lower() != question.name or asked[-4:] != question.section[-4:]:
        raise Malformed("reply to another question")
    return _plain(wire, found, question, bounds, trusted) or _taken(wire, found, question, bounds, trusted)


def _plain(wire: bytes, found: w.Scan, question: Question, bounds: Bounds, trusted: bool) -> Answer | None:
    """The answer, when it is nothing but records of its question, each under a pointer to it, with TTLs inside the bounds.

    Most answers are, and need none of the passes of the others: no chain, no letters, no TTL to write.
    """
    records = found.records
    if len(records) != found.answers or not records or found.rcode:
        return None
    asked, shortest, longest = question.type, bounds.min_ttl_s, bounds.max_ttl_s
    smallest, ttl_at = longest, []
    for start, rdtype, _, ttl_s, rdata_at, _ in records:
        if rdtype != asked or wire[start] != 0xC0 or wire[start + 1] != w.HEADER or not shortest <= ttl_s <= longest:
            return None
        if ttl_s < smallest:
            smallest = ttl_s
        ttl_at.append(rdata_at - 6)
    head = _pack_header(0, w.QR | w.RA | (found.flags & w.AD if trusted else 0), 1, found.answers, 0, 0)
    name, end = question.name, found.opt.start if found.opt else found.end
    return Answer(head + name + wire[w.HEADER + len(name) : end], tuple(ttl_at), smallest, w.NOERROR)


def _taken(wire: bytes, found: w.Scan, question: Question, bounds: Bounds, trusted: bool) -> Answer:
    # What follows OPT goes: taking OPT out would move it, and additional records are a courtesy.
    records = found.records[: found.opt_index] if found.opt else found.records
    end = _chain_end(wire, found, question)
    has_data, rcode = _has(wire, found, end, question), found.rcode
    negative = None if has_data and rcode == w.NOERROR else _denial(found)
    out = bytearray(wire[: found.opt.start if found.opt else found.end])
    flags = w.QR | w.RA | found.flags & 15 | (found.flags & w.AD if trusted else 0)
    extra = len(records) - found.answers - found.authorities
    out[: w.HEADER] = _pack_header(0, flags, 1, found.answers, found.authorities, extra)
    out[w.HEADER : w.HEADER + len(question.name)] = question.name
    _own_case(out, records, question.name)
    ttl_s = _bound_ttls(out, records, bounds, negative)
    denies = rcode == w.NXDOMAIN and end == question.name
    unfinished = end if negative is None and rcode == w.NOERROR and not has_data else b""
    if unfinished == question.name:
        unfinished = b""  # neither data nor SOA: nothing to ask for and, by RFC 2308 5, nothing to keep
        ttl_s = 0
    if negative is None and rcode != w.NOERROR:
        ttl_s = 0
    return Answer(bytes(out), tuple([r.rdata_at - 6 for r in records]), ttl_s, rcode, denies, unfinished)


def _denial(found: w.Scan) -> w.Record | None:
    """The SOA that makes an answer without data a negative one (RFC 2308 2)."""
    authority = found.records[found.answers : found.answers + found.authorities]
    return next((r for r in authority if r.type == w.SOA and r.rdata_len >= 22), None)


def _chain_end(wire: bytes, found: w.Scan, question: Question) -> bytes:
    """The name at the end of the answer's CNAME chain: the one that was asked, where there is none."""
    name, targets = question.name, {}
    if question.type in (w.CNAME, w.ANY):
        return name
    for record in found.records[: found.answers]:
        if record.type == w.CNAME:
            targets[w.name_at(wire, record.start)] = w.name_at(wire, record.rdata_at)
    for _ in range(LONGEST_CHAIN + 1):
        if name not in targets:
            return name
        name = targets[name]
    raise Malformed(f"CNAME chain loops or has more than {LONGEST_CHAIN} links")


def _has(wire: bytes, found: w.Scan, name: bytes, question: Question) -> bool:
    """Whether the answer holds what was asked under `name`, the end of its chain."""
    for record in found.records[: found.answers]:
        if question.type == w.ANY:
            return True
        if record.type == question.type:
            at = record.start
            # The usual owner is a pointer to the question, which was compared already.
            owner = question.name if wire[at : at + 2] == _ASKED else w.name_at(wire, at)
            if owner == name:
                return True
    return False


def _own_case(out: bytearray, records: Sequence[w.Record], name: bytes) -> None:
    """An owner written out in full comes back in the letter case that *we* asked in (0x20): no client may see that."""
    size = len(name)
    for record in records:
        start = record.start
        if 0 < out[start] < 64 and out[start : start + size].lower() == name:
            out[start : start + size] = name


def _bound_ttls(out: bytearray, records: Sequence[w.Record], bounds: Bounds, soa: w.Record | None) -> int:
    """Writes each TTL inside the bounds; how long the whole may be kept."""
    smallest = longest = bounds.max_ttl_s
    # The floor is for data only: a failure or a denial held up by it would outlive what its zone allows.
    shortest = bounds.min_ttl_s if soa is None else 0
    for record in records:
        # A TTL with its top bit set is a large one (RFC 8767 4), and unsigned reading makes it so.
        ttl_s = record.ttl_s
        if record is soa:
            minimum = _TTL.unpack_from(out, record.rdata_at + record.rdata_len - 4)[0]
            ttl_s = min(ttl_s, minimum, bounds.max_negative_ttl_s)
        if not shortest <= ttl_s <= longest:
            ttl_s = shortest if ttl_s < shortest else longest
        if ttl_s != record.ttl_s:
            _TTL.pack_into(out, record.rdata_at - 6, ttl_s)
        if ttl_s < smallest:
            smallest = ttl_s
    return smallest if records else 0


def compose(
    question: Question, rcode: int, answers: Sequence[Rr] = (), authorities: Sequence[Rr] = (), *, ttl_s: int = 0
) -> Answer:
    """An answer of our own. An owner that was written before, the name asked included, becomes a pointer to it."""
    out = bytearray(_pack_header(0, w.QR | w.RA | rcode & 15, 1, len(answers), len(authorities), 0))
    out += question.name + question.section[-4:]
    ttl_at = []
    written = {b"": w.HEADER, question.name: w.HEADER}
    for rr in (*answers, *authorities):
        at = written.setdefault(rr.owner, len(out))
        out += (0xC000 | at).to_bytes(2) if at < len(out) and at < 0x4000 else rr.owner
        ttl_at.append(len(out) + 4)
        out += _pack_fixed(rr.type, w.IN, rr.ttl_s, len(rr.rdata)) + rr.rdata
    return Answer(bytes(out), tuple(ttl_at), ttl_s, rcode)


def denial_below(answer: Answer, question: Question) -> Answer:
    """The denial of a name below the one that `answer` denies: its SOA under the new question (RFC 8020 2).

    The records cannot be taken over as they lie: the question has another length, and pointers would lead astray.
    """
    wire = answer.wire
    found = w.scan(wire)
    record = next(r for r in found.records[found.answers :] if r.type == w.SOA)
    mname, rname = w.name_at(wire, record.rdata_at), w.name_at(wire, w.skip_name(wire, record.rdata_at))
    rdata_end = record.rdata_at + record.rdata_len
    rdata = mname + rname + wire[rdata_end - 20 : rdata_end]
    authority = Rr(w.name_at(wire, record.start), w.SOA, record.ttl_s, rdata)
    made = compose(question, w.NXDOMAIN, (), [authority], ttl_s=answer.ttl_s)
    # What proves that a name does not exist proves it for all below: no opt-out, no wildcard comes in between.
    return made.with_ad() if answer.authenticated else made


def reply(
    answer: Answer,
    question: Question,
    age_s: int,
    limit: int,
    *,
    options: bytes = b"",
    stale: bool = False,
    sealed: bool = False,
) -> bytes:
    """The message for one client, at most `limit` bytes; longer ones lose whole records and say TC.

    TTLs are those stored minus `age_s`, each by itself, or STALE_TTL_S at most when `stale`. `options` go into OPT and
    are dropped for clients without EDNS. `sealed` says that the way to the client is encrypted, so padding makes sense.
    """
    out = bytearray(answer.wire)
    flags = answer.wire[2] << 8 | answer.wire[3] | question.flags & (w.RD | w.CD)
    _pack_into(out, 0, question.id, flags if question.wants_ad else flags & ~w.AD)
    section = question.section
    out[w.HEADER : w.HEADER + len(section)] = section
    if stale:
        _write_ttls(out, answer.ttl_at, 0, STALE_TTL_S)
    elif age_s > 0:
        _write_ttls(out, answer.ttl_at, age_s, 0xFFFFFFFF)
    return finish(out, question, answer.rcode >> 4, limit, options, sealed=sealed)


def finish(
    out: bytearray, question: Question, high_rcode: int, limit: int, options: bytes, *, sealed: bool = False
) -> bytes:
    """Adds our OPT where the client speaks EDNS, and holds the whole to `limit`."""
    if not question.edns:
        return bytes(out) if len(out) <= limit else _shorten(out, b"", limit)
    if sealed and question.padded:
        options += _padding(len(out) + 11 + len(options), limit)
    opt = opt_record(question, high_rcode, options)
    if len(out) + len(opt) > limit:
        return _shorten(out, opt, limit)
    out[11] += 1  # ARCOUNT: _shorten counts for itself, and above 254 additional records there is a carry
    if not out[11]:
        out[10] += 1  # pragma: no cover
    return bytes(out + opt)


def _write_ttls(out: bytearray, ttl_at: tuple[int, ...], age_s: int, most_s: int) -> None:
    for at in ttl_at:
        left_s = _TTL.unpack_from(out, at)[0] - age_s
        _TTL.pack_into(out, at, min(left_s, most_s) if left_s > 0 else 0)


def _padding(length: int, limit: int) -> bytes:
    """The option that brings a message of `length` bytes to the next multiple of 468 (RFC 7830 3)."""
    fill = -(length + 4) % PADDED_TO
    return w.option(w.PADDING, bytes(fill)) if length + 4 + fill <= limit else b""


def _shorten(out: bytearray, opt: bytes, limit: int) -> bytes:
    """Keeps the records that fit whole. Losing only additional ones is no truncation (RFC 2181 9)."""
    found = w.scan(out)
    room = limit - len(opt)
    ends = [r.rdata_at + r.rdata_len for r in found.records]
    kept = next((i for i, end in enumerate(ends) if end > room), len(ends))
    answers = min(kept, found.answers)
    authorities = min(kept - answers, found.authorities)
    if kept < found.answers + found.authorities:
        out[2] |= w.TC >> 8
    counts = struct.pack("!HHH", answers, authorities, kept - answers - authorities + bool(opt))
    out[6:12] = counts
    return bytes(out[: ends[kept - 1] if kept else found.question_end] + opt)
