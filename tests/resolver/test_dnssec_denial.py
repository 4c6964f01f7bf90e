"""Proofs of absence, held against zones that know what exists: nothing there is ever denied, nothing proven by less."""

from __future__ import annotations

import functools

import dns.dnssec
import dns.name
import dns.rdatatype
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resolver.dnssec_denial import Cut, Denials, Proof, nsec3_hash
from resolver.dnssec_signatures import Budget
from tests.peers.signed import SignedZone, Tree

T = dns.rdatatype
LINES = """\
www A 192.0.2.1
a.b.ent A 192.0.2.2
*.wild A 192.0.2.3
x.wild A 192.0.2.4
alias CNAME www
tree DNAME elsewhere.test."""
LABELS = ["www", "a", "b", "ent", "wild", "x", "alias", "tree", "cut", "safe", "zz", "0", "*"]
KINDS = ["nsec", "nsec3", "optout"]


@functools.cache
def zone(denial: str, iterations: int = 0) -> SignedZone:
    made = SignedZone("z.test.", LINES, denial=denial, iterations=iterations)
    Tree([SignedZone("."), made, SignedZone("cut.z.test.", signed=False), SignedZone("safe.z.test.")])
    return made


def name(text: str) -> dns.name.Name:
    return dns.name.from_text(text, dns.name.from_text("z.test."))


def all_denials(of: SignedZone, without: int = -1) -> Denials:
    denials = Denials(of.origin, Budget(hashes=10_000))
    kind = T.NSEC if of.denial == "nsec" else T.NSEC3
    for index, owner in enumerate(of.denials):
        if index != without:
            denials.add(owner, of.sets[owner, kind][0])
    return denials


names = st.lists(st.sampled_from(LABELS), min_size=1, max_size=4).map(lambda labels: name(".".join(labels)))


def is_there(of: SignedZone, owner: dns.name.Name) -> bool:
    """By itself, by a wildcard, below a DNAME or in a zone of its own: no denial of `z.test` may say otherwise."""
    return (
        of.exists(owner)
        or of.wildcard(owner) is not None
        or owner.is_subdomain(name("tree"))
        or of.cut(owner) is not None
    )


@settings(max_examples=300)
@given(names, st.sampled_from(KINDS))
def test_a_whole_zone_proves_absent_exactly_what_is_absent(owner: dns.name.Name, denial: str) -> None:
    of = zone(denial)
    expected = {Proof.MISSING} if is_there(of, owner) else {Proof.PROVEN}
    if denial == "optout":
        # Opt-out leaves unsigned delegations out, so what it denies is never sure and may be one of them.
        there = is_there(of, owner) and of.cut(owner) != name("cut")
        expected = {Proof.MISSING} if there else {Proof.PROVEN, Proof.OPT_OUT, Proof.MISSING}
    assert all_denials(of).name_absent(owner) in expected


@settings(max_examples=200)
@given(names, st.sampled_from(["nsec", "nsec3"]), st.sampled_from([1, 5, 16, 28]))
def test_a_type_is_proven_absent_only_where_the_zone_does_not_have_it(
    owner: dns.name.Name, denial: str, rdtype: int
) -> None:
    of = zone(denial)
    proof = all_denials(of).type_absent(owner, rdtype)
    if proof is Proof.PROVEN:
        source = owner if of.exists(owner) else of.wildcard(owner)
        assert source is not None
        assert (source, rdtype) not in of.sets and (source, T.CNAME) not in of.sets and of.cut(owner) is None


@pytest.mark.parametrize("denial", KINDS)
@pytest.mark.parametrize("text", ["nx", "nx.ent", "q.b.ent", "a.nx"])
def test_no_part_of_a_proof_can_be_left_out(denial: str, text: str) -> None:
    of = zone(denial)
    whole = all_denials(of).name_absent(name(text))
    assert whole in (Proof.PROVEN, Proof.OPT_OUT)
    needed = [i for i in range(len(of.denials)) if all_denials(of, without=i).name_absent(name(text)) is Proof.MISSING]
    assert 1 <= len(needed) <= 3


@pytest.mark.parametrize("denial", ["nsec", "nsec3"])
@pytest.mark.parametrize(
    ("text", "cut"),
    [("cut", Cut.UNSIGNED), ("safe", Cut.MISSING), ("www", Cut.INSIDE), ("ent", Cut.INSIDE), ("nx", Cut.INSIDE)],
)
def test_the_absence_of_a_ds_says_whether_a_zone_begins(denial: str, text: str, cut: Cut) -> None:
    assert all_denials(zone(denial)).no_ds(name(text)) is cut


def test_below_opt_out_an_uncovered_name_may_be_an_unsigned_zone() -> None:
    assert all_denials(zone("optout")).no_ds(name("cut")) is Cut.UNSIGNED
    assert all_denials(zone("optout")).no_ds(name("nx")) is Cut.UNSIGNED
    assert all_denials(zone("optout")).no_ds(name("safe")) is Cut.MISSING


@pytest.mark.parametrize("denial", ["nsec", "nsec3"])
def test_a_wildcard_answer_needs_that_nothing_is_closer(denial: str) -> None:
    denials = all_denials(zone(denial))
    assert denials.no_closer(name("q.wild"), name("wild")) is Proof.PROVEN
    assert denials.no_closer(name("x.wild"), name("wild")) is Proof.MISSING
    assert denials.no_closer(name("a.b.ent"), name("wild").parent()) is Proof.MISSING


def test_more_iterations_than_150_are_not_computed() -> None:
    denials = all_denials(zone("nsec3", 151))
    assert denials.name_absent(name("nx")) is Proof.TOO_MANY and denials.budget.hashes == 10_000
    assert denials.no_ds(name("nx")) is Cut.TOO_MANY
    assert all_denials(zone("nsec3", 150)).name_absent(name("nx")) is Proof.PROVEN


def test_a_second_set_of_parameters_is_not_mixed_in() -> None:
    denials = all_denials(zone("nsec3"))
    before = len(denials.nsec3)
    other = zone("nsec3", 5)
    denials.add(other.denials[0], other.sets[other.denials[0], T.NSEC3][0])
    assert len(denials.nsec3) == before


@given(names, st.integers(0, 20), st.binary(max_size=8))
def test_hashes_are_those_of_dnspython(owner: dns.name.Name, iterations: int, salt: bytes) -> None:
    text = dns.dnssec.nsec3_hash(owner, salt, iterations, 1)
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUV"
    number = functools.reduce(lambda n, c: n << 5 | digits.index(c), text, 0)
    assert nsec3_hash(owner, salt, iterations) == number.to_bytes(20)


@pytest.mark.parametrize("denial", ["nsec", "nsec3"])
def test_a_zone_cannot_deny_its_own_ds_which_stands_above_it(denial: str) -> None:
    of = zone(denial)
    assert all_denials(of).type_absent(of.origin, T.DS) is Proof.MISSING
    assert all_denials(of).no_ds(of.origin) is Cut.MISSING
    assert all_denials(of).type_absent(name("www"), T.DS) is Proof.PROVEN
