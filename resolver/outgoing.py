"""Write the query that goes upstream, and judge what comes back: the answer, somebody else's message, or a failure.

Theory: nothing of the client's message goes on but its question, RD, AD, CD, DO and, where configured, its subnet. The
rest is ours: id, letter case (0x20), EDNS size, padding. That strips cookies, foreign options and a client's own
padding by construction. On the way back the caller's id and letter case are put in place; names keep their length, so
compression pointers stay right.
Rules for editing: 1. random bits are arguments; 2. over UDP only `Match.YES` may end the wait (RFC 5452 9.1): every
other verdict goes on listening.
"""

from __future__ import annotations

import re
import struct
from enum import Enum
from typing import NamedTuple

from resolver import wire as w
from resolver.errors import Malformed

OUR_SIZE = 1232
PADDED_BLOCK = 128  # RFC 8467 4.1, for queries
OPT_BYTES = 11

_pack_header = struct.Struct("!HHHHHH").pack
_pack_opt = struct.Struct("!BHHIH").pack
_LETTERS = bytes(0x20 if chr(c).isascii() and chr(c).isalpha() else 0 for c in range(256))
_KEEPALIVE_ASKED = w.option(w.KEEPALIVE, b"")


class Outgoing(NamedTuple):
    """What the caller wants to know. `question` is the section as the caller wrote it, name, type and class."""

    id: int
    flags: int  # RD, AD and CD of the caller; RD is always set
    question: bytes
    do: bool = False
    subnet: bytes = b""  # the ECS option's value, empty unless it may be passed on

    @property
    def folded(self) -> bytes:
        return fold(self.question)


def read(query: bytes, *, pass_subnet: bool = False) -> Outgoing:
    """What of a client's message goes on. Raises Malformed for what is no query with one question."""
    if len(query) < w.HEADER + 5 or query[4:6] != b"\0\1":
        raise Malformed(f"{len(query)} bytes with other than one question cannot be asked upstream")
    ident, flags = struct.unpack_from("!HH", query)
    flags = w.RD | flags & (w.AD | w.CD)
    found = w.scan(query)
    do, subnet = False, b""
    if found.opt is not None:
        do = found.opt.do
        if pass_subnet:
            subnet = next((value for code, value in w.options(found.opt.options) if code == w.ECS), b"")
    return Outgoing(ident, flags, query[w.HEADER : found.question_end], do, subnet)


def fold(question: bytes) -> bytes:
    """A question section with its name in lower case. The type must not be touched: HTTPS (65) is the letter A."""
    return question[:-4].lower() + question[-4:]


def mix_case(question: bytes, draw: bytes) -> bytes:
    """The question with each letter's case decided by a bit of `draw` (0x20); `draw` is as long as the name or longer.

    One big-integer operation: 0.6 us for a usual name, where a loop over the letters takes 4.
    """
    name = question[:-4]
    flips = int.from_bytes(name.translate(_LETTERS)) & int.from_bytes(draw[: len(name)])
    return (int.from_bytes(name) ^ flips).to_bytes(len(name)) + question[-4:]


def compose(
    out: Outgoing,
    ident: int,
    question: bytes,
    *,
    edns: bool = True,
    padded: bool = False,
    keepalive: bool = False,
) -> bytes:
    """The message to send: `question` in the case chosen, EDNS 1232, padded to 128 bytes on encrypted transports.

    Without `edns` DO and everything else that needs an OPT is left out (for peers that answer FORMERR to it).
    """
    if not edns:
        return _pack_header(ident, out.flags, 1, 0, 0, 0) + question
    options = w.option(w.ECS, out.subnet) if out.subnet else b""
    if keepalive:
        options += _KEEPALIVE_ASKED
    if padded:
        bare = w.HEADER + len(question) + OPT_BYTES + len(options) + 4
        options += w.option(w.PADDING, bytes(-bare % PADDED_BLOCK))
    opt = _pack_opt(0, w.OPT, OUR_SIZE, 0x8000 if out.do else 0, len(options)) + options
    return _pack_header(ident, out.flags, 1, 0, 0, 1) + question + opt


class Match(Enum):
    """What a message is to a question that was sent."""

    YES = "answers it"
    OTHER_CASE = "answers it in other letters"
    OTHER = "is no answer to it"


def match(reply: bytes, ident: int, question: bytes) -> Match:
    """Whether `reply` belongs to the query sent with this id and question, byte for byte (RFC 5452 9.1)."""
    if len(reply) < w.HEADER or reply[0] << 8 | reply[1] != ident or reply[2] & 0xF8 != 0x80:
        return Match.OTHER
    if reply[5] == 1 and not reply[4]:
        theirs = reply[w.HEADER : w.HEADER + len(question)]
        if theirs == question:
            return Match.YES
        return Match.OTHER_CASE if len(theirs) >= 5 and fold(theirs) == fold(question) else Match.OTHER
    # A peer that did not understand us may send its refusal without the question (RFC 1035 4.1.1, FORMERR).
    is_refusal = reply[3] & 15 in (w.FORMERR, w.NOTIMP) and reply[4:12] == bytes(8)
    return Match.YES if is_refusal else Match.OTHER


def is_truncated(reply: bytes) -> bool:
    return bool(reply[2] & 0x02)


def rcode(reply: bytes) -> int:
    """The lower four bits; the upper ones stand in OPT and are never set by what is matched here."""
    return reply[3] & 15


_UNWILLING = {w.FORMERR: "FORMERR", w.SERVFAIL: "SERVFAIL", w.NOTIMP: "NOTIMP", w.REFUSED: "REFUSED", 9: "NOTAUTH"}


def unwillingness(reply: bytes, found: w.Scan) -> str:
    """Why this reply is a reason to ask somebody else ("" when it is an answer), with the peer's own EDE text."""
    if found.flags & w.TC:
        return "truncated where there is room"  # over UDP, where there is none, TC leads to TCP and never here
    rcode = found.rcode
    if rcode == w.NOERROR or rcode == w.NXDOMAIN:
        return ""
    word = _UNWILLING.get(rcode, "")
    if not word:
        return "BADVERS to EDNS version 0" if rcode == w.BADVERS else ""
    try:
        told = [value for code, value in w.options(found.opt.options) if code == w.EDE] if found.opt else []
    except Malformed:
        told = []
    for value in told:
        if len(value) >= 2:
            text = "".join(c if c.isprintable() else "?" for c in value[2:80].decode("utf-8", "replace"))
            word += f", EDE {value[0] << 8 | value[1]}" + (f" {text}" if text else "")
    return word


_OF_DNSSEC = re.compile(r", EDE ([1-9]|1[0-2])(?![0-9])")


def told_of_dnssec(reason: str) -> int:
    """The first extended error about DNSSEC (RFC 8914 4.2 to 4.13, stale answers aside) in what `unwillingness` said, or 0:
    it tells a client more than that an upstream failed."""
    found = [int(code) for code in _OF_DNSSEC.findall(reason)]
    return next((code for code in found if code not in (3, 4)), 0)


def give_back(reply: bytes, out: Outgoing) -> bytes:
    """The reply as the caller expects it: its id and its letters."""
    return out.id.to_bytes(2) + reply[2 : w.HEADER] + out.question + reply[w.HEADER + len(out.question) :]


def aged(reply: bytes, age_s: int) -> bytes:
    """The reply with every TTL lowered by the time it spent in an HTTP cache (RFC 8484 5.1). Raises Malformed."""
    aged_reply = bytearray(reply)
    for record in w.scan(reply).records:
        ttl_s = 0 if record.ttl_s & 0x8000_0000 else max(0, record.ttl_s - age_s)
        struct.pack_into("!I", aged_reply, record.rdata_at - 6, ttl_s)
    return bytes(aged_reply)


def keepalive_s(found: w.Scan) -> float | None:
    """The idle limit that a peer named over TCP or TLS (RFC 7828 3.1: units of 100 ms), or None."""
    if found.opt is None or not found.opt.options:
        return None
    try:
        named = [value for code, value in w.options(found.opt.options) if code == w.KEEPALIVE and len(value) == 2]
    except Malformed:
        return None
    return int.from_bytes(named[0]) / 10 if named else None
