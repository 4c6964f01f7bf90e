"""Bytes that somebody changed on the way: never an exception, never a secure answer that says something else."""

from __future__ import annotations

import time

import dns.name
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resolver.answer import Answer, Bounds, take
from resolver.dnssec_answer import Security, Verdict, judge
from resolver.dnssec_chain import Trust
from resolver.dnssec_records import Message, read
from resolver.dnssec_reply import kept
from resolver.errors import Malformed
from resolver.io.fetch import question_for
from resolver.question import Question
from tests.resolver.signed_lab import lab_tree
from tests.resolver.test_dnssec_chain import Run

N = dns.name.from_text
ASKED = [
    ("www.good.test.", 1), ("c0.good.test.", 1), ("nx.good.test.", 1), ("nx.nsec3.test.", 1), ("a.wild.good.test.", 1),
    ("a.wild.nsec3.test.", 28), ("www.tree.nsec3.test.", 1), ("good.test.", 15), ("www.optout.test.", 28),
]  # fmt: skip
TRUST = Trust({N("."): [lab_tree().by_origin[N(".")].ds()]})


def question(name: str, rdtype: int, *, do: bool = True) -> Question:
    return question_for(N(name).to_wire() or b"", rdtype, do=do)


def contents(message: Message) -> set[tuple[object, ...]]:
    """What a client would believe: the data of the answer, and whether the name exists."""
    data = {(s.name, s.type, frozenset(r.to_text() for r in s.rrset)) for s in message.answers.values()}
    return {*data, (message.rcode,)}


def verdict_on(wire: bytes, name: str, rdtype: int) -> tuple[Verdict, Message]:
    run = Run(trust=TRUST, now=time.monotonic())
    message = read(wire)
    steps = judge(question(name, rdtype), N(name), message, run.walk(), unfinished=False)
    verdict = run.drive(steps)
    assert isinstance(verdict, Verdict)
    return verdict, message


@settings(max_examples=400, deadline=None)
@example(("www.tree.nsec3.test.", 1), [(503, 0)])  # a CNAME whose RDATA is no name
@given(st.sampled_from(ASKED), st.lists(st.tuples(st.integers(12, 4000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_changed_message_is_secure_only_if_it_still_says_the_same(
    asked: tuple[str, int], changes: list[tuple[int, int]]
) -> None:
    name, rdtype = asked
    honest = Run().message(N(name), rdtype)
    wire = bytearray(honest)
    for at, value in changes:
        wire[at % len(wire)] = value
    wire[:12] = honest[:12]  # flags and counts are the walker's business
    try:
        verdict, message = verdict_on(bytes(wire), name, rdtype)
    except Malformed:
        return
    if verdict.security is Security.SECURE:
        assert contents(message) <= contents(read(honest))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(ASKED), st.booleans(), st.integers(1, 500))
def test_what_is_kept_of_a_secure_answer_is_still_the_answer(asked: tuple[str, int], do: bool, most_s: int) -> None:
    name, rdtype = asked
    asking = question(name, rdtype, do=do)
    answer = take(Run().message(N(name), rdtype), asking, Bounds(0, most_s, most_s), trusted=False)
    verdict, message = verdict_on(answer.wire, name, rdtype)
    stored = kept(answer, asking, verdict)
    assert stored.authenticated == (verdict.security is Security.SECURE)
    assert contents(read(stored.wire)) == contents(message)
    assert 0 <= stored.ttl_s <= answer.ttl_s
    assert _ttls(stored) and max(_ttls(stored)) <= most_s
    if do and stored.authenticated:
        again, _ = verdict_on(stored.wire, name, rdtype)
        assert again.security is Security.SECURE  # whoever validates behind us finds every proof


def _ttls(answer: Answer) -> list[int]:
    return [int.from_bytes(answer.wire[at : at + 4]) for at in answer.ttl_at]
