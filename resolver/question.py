"""Read a query and judge it: a question that can be looked up, a refusal ready to send, or silence.

Theory: what reaches a listener is hostile until proven otherwise. `parse` gives one of three things, and its order is
the order in which a resolver may speak at all:

    < 12 bytes, or QR=1       silence   two resolvers must never loop, and there is no id to answer with
    opcode is not QUERY       NOTIMP    its body may follow other rules
    breaks RFC 1035, 6891     FORMERR   same id, the question only when it could be read
    EDNS version above 0      BADVERS   with our OPT of version 0 (RFC 6891 6.1.3)
    class or type not served  REFUSED

Rules for editing: 1. no verdict may need more than this one message; 2. never raise, and never log: garbage is free for
whoever sends it and must be nearly free for us.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from resolver import wire as w
from resolver.errors import Malformed

OUR_SIZE = 1232
"""Bytes of UDP that we take and send: fits every path of 1280 bytes (the DNS flag day's figure)."""
SMALLEST_SIZE = 512

SILENCE = b""

_pack_header = struct.Struct("!HHHHHH").pack
_ONE_QUESTION = b"\0\1\0\0\0\0\0"  # counts: one question, no records, at most 255 additional


@dataclass(slots=True)
class Question:
    """A query that may be answered.

    `name` is in lower case for look-ups, `section` is the question as sent, for the reply. `size` is what the client
    takes over UDP, at least 512. `ecs` is the client's subnet option, empty without one.
    """

    id: int
    flags: int
    name: bytes
    type: int
    section: bytes
    edns: bool = False
    size: int = SMALLEST_SIZE
    do: bool = False
    ecs: bytes = b""
    padded: bool = False
    keepalive: bool = False
    proven: bool = False  # DNSSEC is validated here: such answers are kept apart from those taken on trust
    repeatable: bool = True  # the same bytes will come again: no option that differs each time (cookies)
    keys: tuple[bytes, bytes, bytes] | None = field(default=None, init=False, repr=False, compare=False)
    """The cache's own, made at the first look: no other field may change after it. A copy (`replace`) starts without."""

    @property
    def cd(self) -> bool:
        return bool(self.flags & w.CD)

    @property
    def wants_ad(self) -> bool:
        """RFC 6840 5.7: AD=1 in a query asks for the bit, and so does DO."""
        return self.do or bool(self.flags & w.AD)

    def text(self) -> str:
        return f"{w.name_to_text(self.name)} {w.type_to_text(self.type)}"


def parse(wire: bytes) -> Question | bytes:
    """The question of a query, or the reply that refuses it; `SILENCE` when nothing may be said."""
    if len(wire) < w.HEADER or wire[2] & 0x80:
        return SILENCE
    if wire[2] & 0x78:
        return _refusal(wire, w.NOTIMP)
    if wire[4:11] != _ONE_QUESTION:
        return _refusal(wire, w.FORMERR)
    name_end = _name_end(wire)
    if not name_end or name_end + 4 > len(wire):
        return _refusal(wire, w.FORMERR)
    (ident, flags), (rdtype, rdclass) = _two(wire, 0), _two(wire, name_end)
    section = wire[w.HEADER : name_end + 4]
    question = Question(ident, flags, wire[w.HEADER : name_end].lower(), rdtype, section)
    if wire[11] or len(wire) > name_end + 4:
        refusal = _read_additional(wire, question)
        if refusal is not None:
            return refusal
    if rdclass != w.IN or w.TSIG <= rdtype < w.ANY or rdtype in (0, w.OPT):
        # Transfers, meta types and other classes (version.bind) are nobody's business here.
        return refuse(question, w.REFUSED)
    return question


_two = struct.Struct("!HH").unpack_from


def _name_end(wire: bytes) -> int:
    """Offset behind the question's name; 0 when it is no plain name: the first name of a message has nothing to point to."""
    at = w.HEADER
    try:
        while 0 < (n := wire[at]) < 64:
            at += n + 1
    except IndexError:
        return 0
    return 0 if n or at + 1 - w.HEADER > w.LONGEST_NAME else at + 1


def _read_additional(wire: bytes, question: Question) -> bytes | None:
    """Takes EDNS into `question`; the refusal when the rest of the message breaks a rule."""
    try:
        found = w.scan(wire)
        if found.end != len(wire):
            return refuse(question, w.FORMERR)
        if found.opt is not None:
            return _read_opt(found.opt, question)
    except Malformed:
        return refuse(question, w.FORMERR)
    return None


def _read_opt(opt: w.Opt, question: Question) -> bytes | None:
    question.edns = True
    question.do = opt.do
    question.size = max(opt.size, SMALLEST_SIZE)  # RFC 6891 6.2.3: less than 512 means 512
    if opt.version:
        return refuse(question, w.BADVERS)
    for code, value in w.options(opt.options) if opt.options else ():
        if code == w.ECS:
            question.ecs = value
        elif code == w.PADDING:
            question.padded = True
        elif code == w.KEEPALIVE:
            question.keepalive = True
        else:
            question.repeatable = False
    return None


def _refusal(wire: bytes, rcode: int) -> bytes:
    """A bare header: the message could not be read far enough to say more. Opcode and RD come back as they were."""
    flags = w.QR | w.RA | (wire[2] << 8 & 0x7900) | rcode
    return _pack_header(wire[0] << 8 | wire[1], flags, 0, 0, 0, 0)


def refuse(question: Question, rcode: int, *, ede: int | None = None, text: str = "") -> bytes:
    """An answer without records: header, question and, for clients that speak EDNS, OPT with the reason (RFC 8914)."""
    flags = w.QR | w.RA | question.flags & (w.RD | w.CD) | rcode & 15
    opt = opt_record(question, rcode >> 4, reason(ede, text)) if question.edns else b""
    return _pack_header(question.id, flags, 1, 0, 0, 1 if opt else 0) + question.section + opt


def reason(ede: int | None, text: str = "") -> bytes:
    """The extended error as an EDNS option, its text at most 200 bytes so that it never causes truncation."""
    return b"" if ede is None else w.option(w.EDE, struct.pack("!H", ede) + text.encode()[:200])


def opt_record(question: Question, high_rcode: int = 0, options: bytes = b"") -> bytes:
    """Our OPT: our size and version 0, the client's DO (RFC 3225 3), never anything an upstream put into its own."""
    ttl = high_rcode << 24 | (0x8000 if question.do else 0)
    return struct.pack("!BHHIH", 0, w.OPT, OUR_SIZE, ttl, len(options)) + options
