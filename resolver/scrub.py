"""Leave out of an answer what was not asked: records that do not lie on the way from the question to its end.

Theory: an upstream, or whoever spoke in its place, can put any name's records beside the ones asked for, and somebody
behind us may keep them. So only what the question leads to passes: its own name, the names its CNAMEs lead to in whatever
order they stand, and the DNAMEs above those. Nearly every record is owned by a pointer to the question: those cost one
comparison, and only an answer that holds a stranger is written anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from resolver import wire as w
from resolver.answer import Rr, compose
from resolver.question import Question
from resolver.rewriting import plain_rdata

_OF_TREES = (w.DNAME, 46)  # a DNAME and what signs it stand above the name that was asked
_ASKED = b"\xc0\x0c"  # a compression pointer to the question's name


def strangers(wire: bytes, found: w.Scan, name: bytes) -> list[int]:
    """Where in the answer section records stand that nobody asked for. `name` is the question's, in lower case."""
    answers = found.records[: found.answers]
    for record in answers:
        if wire[record.start : record.start + 2] != _ASKED:
            break
    else:
        return []
    known = {_ASKED: name}
    owners = [_owner(wire, record.start, known) for record in answers]
    way = _way(wire, answers, owners, name)
    return [
        at
        for at, (record, owner) in enumerate(zip(answers, owners, strict=True))
        if owner not in way and not (record.type in _OF_TREES and _above(owner, way))
    ]


def _owner(wire: bytes, at: int, known: dict[bytes, bytes]) -> bytes:
    """The name at `at`, read once for all that point to the same place."""
    pointer = wire[at : at + 2]
    if pointer[0] < 0xC0:
        return w.name_at(wire, at)
    name = known.get(pointer)
    if name is None:
        name = known[pointer] = w.name_at(wire, at)
    return name


def only_strangers(wire: bytes, found: w.Scan) -> bool:
    """Whether there are answers, and none of them answers. Costs one comparison where the first one does."""
    if not found.answers or wire[found.records[0].start : found.records[0].start + 2] == _ASKED:
        return False
    return len(strangers(wire, found, w.name_at(wire, w.HEADER))) == found.answers


def without_strangers(wire: bytes, found: w.Scan, question: Question) -> bytes:
    """The same message with the rest of its answers and its authority; what is additional is a courtesy and goes."""
    gone = set(strangers(wire, found, question.name))
    answers = [r for at, r in enumerate(found.records[: found.answers]) if at not in gone]
    authorities = found.records[found.answers : found.answers + found.authorities]
    kept = ([_plain(wire, r, question.name) for r in section] for section in (answers, authorities))
    return compose(question, found.rcode, *kept).wire


def _way(wire: bytes, answers: Sequence[w.Record], owners: Sequence[bytes], name: bytes) -> set[bytes]:
    """The question's name and all that its CNAMEs lead to; a loop ends where it began."""
    leads = {
        owner: w.name_at(wire, record.rdata_at)
        for record, owner in zip(answers, owners, strict=True)
        if record.type == w.CNAME
    }
    way = {name}
    while (name := leads.get(name, name)) not in way:
        way.add(name)
    return way


def _above(owner: bytes, way: set[bytes]) -> bool:
    return any(owner in w.suffixes(name) for name in way)


def _plain(wire: bytes, record: w.Record, asked: bytes) -> Rr:
    owner = w.name_at(wire, record.start)
    written = owner if owner == asked else w.written_name_at(wire, record.start)
    return Rr(written, record.type, record.ttl_s, plain_rdata(wire, record))
