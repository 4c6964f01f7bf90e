"""The chain of trust as a transcript: what is asked for, what is sent in, what the machine makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import dns.dnssec
import dns.message
import dns.name
import dns.rdata
import dns.rdatatype
import pytest
from dns.rdtypes.ANY.DNSKEY import DNSKEY

from resolver.dnssec_answer import Security, Verdict, judge
from resolver.dnssec_chain import (
    BOGUS_S,
    LONGEST_S,
    MOST_ZONES,
    Ask,
    Bogus,
    Insecure,
    Inside,
    Missing,
    Need,
    Pause,
    Secure,
    State,
    Trust,
    Walk,
)
from resolver.dnssec_records import Message, read
from resolver.dnssec_signatures import MOST_AT_ONCE, Budget, Exhausted, Flaw, keys_of, verify
from resolver.errors import Malformed
from resolver.io.fetch import question_for
from tests.peers.signed import SignedZone, Tree
from tests.resolver.signed_lab import lab_tree

DNSKEY_, DS = 48, 43
N = dns.name.from_text


def need(name: str, rdtype: int) -> Need:
    return Need(N(name), rdtype)


@dataclass
class Run:
    """Drives a machine with the tree's messages and keeps what it asked for."""

    tree: Tree = field(default_factory=lab_tree)
    trust: Trust = field(default_factory=lambda: Trust({N("."): [lab_tree().by_origin[N(".")].ds()]}))
    now: float = 100.0
    wall: float = field(default_factory=time.time)
    budget: Budget = field(default_factory=Budget)
    asked: list[tuple[Need, ...]] = field(default_factory=list)
    pauses: int = 0
    lose: Callable[[Need], bool] = lambda _: False

    def walk(self) -> Walk:
        return Walk(self.trust, self.now, self.wall, self.budget)

    def drive(self, steps: object) -> object:
        replies: list[bytes | None] | None = None
        try:
            while True:
                command = next(steps) if replies is None else steps.send(replies)  # type: ignore[call-overload, attr-defined]
                if isinstance(command, Pause):
                    self.pauses += 1
                    replies = []
                    continue
                assert isinstance(command, Ask)
                self.asked.append(command.needs)
                replies = [None if self.lose(one) else self.message(one.name, one.type) for one in command.needs]
        except StopIteration as done:
            return done.value

    def message(self, name: dns.name.Name, rdtype: int) -> bytes:
        query = dns.message.make_query(name, dns.rdatatype.RdataType.make(rdtype), want_dnssec=True)
        return self.tree.recurse(query).to_wire(max_size=65535)

    def zone_of(self, name: str, *, signer: bool = False) -> State:
        state = self.drive(self.walk().zone_of(N(name), signer=signer))
        assert isinstance(state, Secure | Insecure | Bogus)
        return state

    def judge(self, name: str, rdtype: int = 1) -> Verdict:
        message: Message = read(self.message(N(name), rdtype))
        question = question_for(N(name).to_wire() or b"", rdtype)
        verdict = self.drive(judge(question, N(name), message, self.walk(), unfinished=False))
        assert isinstance(verdict, Verdict)
        return verdict


def test_a_signer_is_reached_in_two_rounds_the_second_holding_all_that_is_between() -> None:
    run = Run()
    state = run.zone_of("good.test.", signer=True)
    assert isinstance(state, Secure) and state.zone == N("good.test.")
    assert run.asked == [
        (need(".", DNSKEY_),),
        (need("test.", DS), need("good.test.", DS), need("good.test.", DNSKEY_)),
        (need("test.", DNSKEY_),),
    ]


def test_what_is_known_is_not_asked_again_until_its_time_is_over() -> None:
    run = Run()
    run.zone_of("good.test.", signer=True)
    run.asked.clear()
    run.zone_of("good.test.", signer=True)
    assert run.asked == []
    run.now += LONGEST_S + 1
    run.zone_of("good.test.", signer=True)
    assert run.asked[0] == (need(".", DNSKEY_),)


def test_without_a_signer_each_label_is_looked_at_until_a_proof_ends_the_walk() -> None:
    run = Run()
    state = run.zone_of("a.b.www.plain.test.")
    assert isinstance(state, Insecure) and state.zone == N("plain.test.")
    assert [needs for needs in run.asked if needs[0].type == DS] == [(need("test.", DS),), (need("plain.test.", DS),)]


def test_a_name_that_is_no_zone_leaves_its_parent_in_charge() -> None:
    run = Run()
    state = run.zone_of("x.www.good.test.")
    assert isinstance(state, Secure) and state.zone == N("good.test.")
    assert isinstance(run.trust.find(N("www.good.test."), run.now), Inside)


@pytest.mark.parametrize(
    ("zone", "ede"), [("wrongds.test.", 9), ("expired.test.", 7), ("future.test.", 8), ("stripped.test.", 10)]
)
def test_a_broken_zone_is_bogus_with_its_reason_and_only_for_seconds(zone: str, ede: int) -> None:
    run = Run()
    state = run.zone_of(zone, signer=True)
    assert isinstance(state, Bogus) and state.flaw.ede == ede and state.until == run.now + BOGUS_S


@pytest.mark.parametrize(("zone", "ede"), [("unknown.test.", 1), ("digest.test.", 2), ("plain.test.", 0)])
def test_a_zone_that_nothing_known_signs_is_insecure(zone: str, ede: int) -> None:
    state = Run().zone_of(zone)
    assert isinstance(state, Insecure) and (state.why.ede if state.why else 0) == ede


def test_records_that_cannot_be_brought_end_the_walk_and_decide_nothing() -> None:
    run = Run(lose=lambda one: one == need("good.test.", DNSKEY_))
    with pytest.raises(Missing, match="DNSKEY of good"):
        run.zone_of("good.test.", signer=True)
    assert run.trust.find(N("good.test."), run.now) is None


def test_the_closest_of_anchor_and_insecure_name_decides() -> None:
    root, island = [], []  # type: ignore[var-annotated]
    trust = Trust({N("."): root, N("isle.corp.test."): island}, frozenset({N("corp.test.")}))
    assert trust.start(N("www.test.")) == N(".")
    assert trust.start(N("www.corp.test.")) is None
    assert trust.start(N("www.isle.corp.test.")) == N("isle.corp.test.")


def test_what_is_kept_of_zones_has_a_bound() -> None:
    trust = Trust({})
    for number in range(MOST_ZONES + 50):
        trust.keep(N(f"z{number}.test."), Inside(1e9))
    assert len(trust) == MOST_ZONES and trust.find(N("z0.test."), 0) is None


# --- work that a hostile zone can cause -----------------------------------------------------------------------------


def colliding(zone: SignedZone) -> list[DNSKEY]:
    """Other keys of the same tag: it is a sum of 16-bit words, and does not see their order (RFC 4034 B)."""
    key = zone.dnskey
    return [key.replace(key=key.key[at:] + key.key[:at]) for at in range(2, len(key.key), 2)]


def test_many_keys_of_one_tag_and_many_signatures_cost_a_bounded_number_of_checks() -> None:
    zone = lab_tree().by_origin[N("forged.test.")]
    signed = read(Run().message(N("www.forged.test."), 1)).answers[N("www.forged.test."), 1]
    signed.signatures = [signed.signatures[0].replace(signature=bytes([number] * 64)) for number in range(200)]
    keys = keys_of(zone.origin, [*colliding(zone), zone.dnskey])
    assert len(keys.by_tag[zone.dnskey.key_id(), 13]) == 32
    budget = Budget()
    with pytest.raises(Exhausted):
        verify(signed, keys, time.time(), budget)
    assert Budget().checks - budget.checks <= 8


def test_a_flood_of_keys_is_not_even_read() -> None:
    keys = "\n".join(f"@ DNSKEY 256 3 13 {number:088d}" for number in range(200))
    tree = Tree([SignedZone("."), SignedZone("z.", keys)])
    with pytest.raises(Malformed, match=r"20. records"):
        Run(tree, Trust({N("."): [tree.by_origin[N(".")].ds()]})).zone_of("z.", signer=True)


def test_an_answer_whose_budget_is_spent_is_bogus() -> None:
    verdict = Run(budget=Budget(checks=2)).judge("www.good.test.")
    assert verdict.security is Security.BOGUS and verdict.why is not None and "more signatures" in verdict.why.text


def test_hashes_are_bounded_and_a_deep_name_in_a_hashed_zone_is_bogus_not_slow() -> None:
    name = ".".join("a" * 1 for _ in range(100)) + ".nx.iter150.test."
    verdict = Run().judge(name)
    assert verdict.security is Security.BOGUS and verdict.why is not None and "hashes" in verdict.why.text


def test_a_long_chain_of_signatures_lets_others_run() -> None:
    run = Run()
    assert run.judge("c0.good.test.").security is Security.SECURE
    assert run.pauses >= (Budget().checks - run.budget.checks) // MOST_AT_ONCE - 1 > 1


def test_a_flaw_that_says_more_wins_over_an_unknown_key() -> None:
    zone = lab_tree().by_origin[N("expired.test.")]
    signed = read(Run().message(N("www.expired.test."), 1)).answers[N("www.expired.test."), 1]
    foreign = signed.signatures[0].replace(key_tag=1)
    signed.signatures = [foreign, *signed.signatures]
    found = verify(signed, keys_of(zone.origin, [zone.dnskey]), time.time(), Budget())
    assert isinstance(found, Flaw) and found.ede == 7


@pytest.mark.parametrize("rcode", [6, 2, 9])
def test_an_rcode_that_nothing_proves_is_bogus_in_a_signed_zone_and_nothing_special_elsewhere(rcode: int) -> None:
    def judged(name: str) -> Security:
        verdict = Run().drive(
            judge(
                question_for(N(name).to_wire() or b"", 1),
                N(name),
                Message(rcode, {}, {}, False),
                Run().walk(),
                unfinished=False,
            )
        )
        assert isinstance(verdict, Verdict)
        return verdict.security

    assert judged("www.good.test.") is Security.BOGUS
    assert judged("www.plain.test.") is Security.INSECURE


def test_a_name_that_a_signed_dname_made_too_long_is_secure_and_a_shorter_one_is_not() -> None:
    far = ".".join(["b" * 60] * 3)
    tree = Tree([SignedZone("."), SignedZone("z.", f"tree DNAME {far}.")])
    trust = Trust({N("."): [tree.by_origin[N(".")].ds()]})
    dname = read(Run(tree).message(N("tree.z."), 39)).answers[N("tree.z."), 39]
    for label, expected in (("a" * 63, Security.BOGUS), ("a" * 63 + "." + "a" * 20, Security.SECURE)):
        name = N(f"{label}.tree.z.")
        run = Run(tree, trust)
        steps = judge(
            question_for(name.to_wire() or b"", 1),
            name,
            Message(6, {(dname.name, 39): dname}, {}, False),
            run.walk(),
            unfinished=False,
        )
        verdict = run.drive(steps)
        assert isinstance(verdict, Verdict) and verdict.security is expected
