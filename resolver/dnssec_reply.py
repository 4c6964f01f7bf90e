"""Make of a judged answer the one that is kept: AD, TTLs, and no more DNSSEC records than were asked for.

Theory: upstream is always asked with DO, so what came back has signatures that a client without DO must not get (RFC
4035 3.2.1). Leaving records out moves what follows, so names are written out in full instead of copied with pointers
that would lead astray. A secure answer keeps what was judged and nothing else: a name server's unsigned courtesies must
not ride under an AD bit (RFC 4035 3.2.3).
Rules for editing: 1. RDATA passes byte for byte but for names that RFC 1035 let servers compress.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from resolver import wire as w
from resolver.answer import Answer, Rr, compose
from resolver.dnssec_answer import Security, Verdict
from resolver.dnssec_records import NSEC3_TYPE, NSEC_TYPE, RRSIG_TYPE, Key, rdata_wire
from resolver.question import Question, reason
from resolver.rewriting import plain_rdata

_PROOFS = frozenset((RRSIG_TYPE, NSEC_TYPE, NSEC3_TYPE))
_KEPT_OF_AUTHORITY = frozenset((w.SOA, *_PROOFS))


def kept(answer: Answer, question: Question, verdict: Verdict) -> Answer:
    """The answer for those who ask as `question` does, DO or not. Not for a bogus one."""
    told = b"" if verdict.why is None else reason(verdict.why.ede, verdict.why.text)
    if verdict.security is Security.SECURE:
        return _rewritten(answer, question, verdict.ttls, only_judged=True).with_ad()
    plain = answer.without_ad()
    if not question.do and _has_proofs(answer.wire, question.type):
        plain = _rewritten(plain, question, {}, only_judged=False)
    return replace(plain, reason=told)


def _has_proofs(wire: bytes, asked: int) -> bool:
    return any(r.type in _PROOFS and r.type != asked for r in w.scan(wire).records)


def _rewritten(answer: Answer, question: Question, ttls: Mapping[Key, int], *, only_judged: bool) -> Answer:
    wire = answer.wire
    found = w.scan(wire)
    limits = {(rdata_wire(name), rdtype): ttl_s for (name, rdtype), ttl_s in ttls.items()}
    answers = found.records[: found.answers]
    authorities = found.records[found.answers : found.answers + found.authorities]
    if only_judged:
        authorities = [r for r in authorities if r.type in _KEPT_OF_AUTHORITY]
    first = [*_written(wire, answers, question, limits)]
    second = [*_written(wire, authorities, question, limits)]
    made = compose(question, answer.rcode, first, second)
    ttl_s = min([answer.ttl_s, *(rr.ttl_s for rr in (*first, *second))])
    return replace(answer, wire=made.wire, ttl_at=made.ttl_at, ttl_s=ttl_s)


def _written(
    wire: bytes, records: Sequence[w.Record], question: Question, limits: Mapping[tuple[bytes, int], int]
) -> Iterator[Rr]:
    for record in records:
        if record.type in _PROOFS and not question.do and record.type != question.type:
            continue
        owner = w.name_at(wire, record.start)
        # A signature lives as long as what it covers.
        covered = w.read_u16(wire, record.rdata_at)[0] if record.type == RRSIG_TYPE else record.type
        ttl_s = min(record.ttl_s, limits.get((owner, covered), record.ttl_s))
        written = owner if owner == question.name else w.written_name_at(wire, record.start)
        yield Rr(written, record.type, ttl_s, plain_rdata(wire, record))
