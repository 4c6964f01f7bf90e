"""Hosts, records, zones, special names, blocklists and private addresses: which names are answered here, and how."""

from __future__ import annotations

import time

import dns.message
import dns.rcode
import pytest

from config.model import DnsUpstream, Record, Zone
from resolver import wire as w
from resolver.answer import Bounds, reply, take
from resolver.blocklist import Blocklist
from resolver.hosts import LocalNames
from resolver.question import Question, parse
from resolver.rebinding import is_private, private_address, service_parameters
from resolver.zones import Zones, any_refused
from tests.resolver.scripted import answer as scripted


def asking(name: str, rdtype: str = "A") -> Question:
    asked = parse(dns.message.make_query(name, rdtype).to_wire())
    assert isinstance(asked, Question)
    return asked


def local(names: LocalNames, name: str, rdtype: str = "A") -> list[str] | None:
    asked = asking(name, rdtype)
    answer = names.answer(asked)
    if answer is None:
        return None
    message = dns.message.from_wire(reply(answer, asked, 0, 65535))
    return sorted(text for rrset in message.answer for text in rrset.to_text().splitlines())


HOSTS = """
# comment
192.0.2.10  box.lan Box  # the box
2001:db8::10 box6.lan
127.0.0.1 localhost
fe80::1%lo0 link.lan
not-an-address broken.lan
192.0.2.11
"""


def test_a_hosts_line_answers_all_its_names_and_its_address() -> None:
    names = LocalNames([HOSTS])
    assert local(names, "BOX.lan") == ["BOX.lan. 60 IN A 192.0.2.10"]
    assert local(names, "box") == ["box. 60 IN A 192.0.2.10"]
    assert local(names, "10.2.0.192.in-addr.arpa", "PTR") == ["10.2.0.192.in-addr.arpa. 60 IN PTR box.lan."]
    assert local(names, "link.lan", "AAAA") == ["link.lan. 60 IN AAAA fe80::1"]


@pytest.mark.parametrize("rdtype", ["AAAA", "HTTPS", "TXT"])
def test_a_name_with_an_address_only_has_nothing_else_and_is_not_forwarded(rdtype: str) -> None:
    assert local(LocalNames([HOSTS]), "box.lan", rdtype) == []


def test_names_that_are_not_written_are_not_ours() -> None:
    names = LocalNames([HOSTS])
    assert local(names, "other.lan") is None
    assert local(names, "broken.lan") is None
    assert local(names, "sub.box.lan") is None
    assert local(names, "localhost") is None, "RFC 6761 decides, not a hosts file"


def test_records_win_over_hosts_and_follow_aliases_and_wildcards() -> None:
    records = (
        Record("box.lan", "A", "192.0.2.99", 5),
        Record("alias.lan", "CNAME", "box.lan."),
        Record("out.lan", "CNAME", "www.example.com."),
        Record("*.dev.lan", "A", "192.0.2.50"),
        Record("svc.lan", "HTTPS", "1 . alpn=h3"),
    )
    names = LocalNames([HOSTS], records)
    assert local(names, "box.lan") == ["box.lan. 5 IN A 192.0.2.99"]
    assert local(names, "alias.lan") == ["alias.lan. 60 IN CNAME box.lan.", "box.lan. 5 IN A 192.0.2.99"]
    assert local(names, "a.b.dev.lan") == ["a.b.dev.lan. 60 IN A 192.0.2.50"]
    assert local(names, "svc.lan", "HTTPS") == ['svc.lan. 60 IN HTTPS 1 . alpn="h3"']
    leaving = names.answer(asking("out.lan"))
    assert leaving is not None and leaving.unfinished == w.name_from_text("www.example.com")


def test_a_loop_of_local_aliases_ends() -> None:
    records = (Record("a.lan", "CNAME", "b.lan."), Record("b.lan", "CNAME", "a.lan."))
    assert LocalNames((), records).answer(asking("a.lan")) is not None


def test_a_record_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"edge\.test A"):
        LocalNames((), (Record("edge.test", "A", "not-an-address"),))


UPSTREAM = DnsUpstream("udp", "10.0.0.53", 53)


def zone(name: str) -> Zone:
    return Zone(name, (UPSTREAM,))


def test_the_longest_suffix_of_whole_labels_wins() -> None:
    zones = Zones([zone("corp.example"), zone("dev.corp.example.")])

    def of(name: str) -> str:
        _, found = zones.zone_of(w.name_from_text(name))
        return found.name if found else ""

    assert of("a.corp.example") == "corp.example"
    assert of("corp.example") == "corp.example"
    assert of("a.dev.corp.example") == "dev.corp.example."
    assert of("notcorp.example") == ""
    assert of("example") == ""


@pytest.mark.parametrize(
    ("name", "rdtype", "rcode", "answers"),
    [
        ("localhost", "A", "NOERROR", ["127.0.0.1"]),
        ("a.LocalHost", "AAAA", "NOERROR", ["::1"]),
        ("localhost", "HTTPS", "NOERROR", []),
        ("example.onion", "A", "NXDOMAIN", []),
        ("x.invalid", "A", "NXDOMAIN", []),
        ("printer.local", "A", "NXDOMAIN", []),
        ("nas.home.arpa", "A", "NXDOMAIN", []),
        ("home.arpa", "A", "NOERROR", []),
        ("1.0.0.10.in-addr.arpa", "PTR", "NXDOMAIN", []),
        ("1.1.16.172.in-addr.arpa", "PTR", "NXDOMAIN", []),
        ("1.1.31.172.in-addr.arpa", "PTR", "NXDOMAIN", []),
        ("1.1.168.192.in-addr.arpa", "PTR", "NXDOMAIN", []),
        ("1.1.254.169.in-addr.arpa", "PTR", "NXDOMAIN", []),
        ("1.2.0.192.in-addr.arpa", "PTR", "NXDOMAIN", []),
        ("1.1.64.100.in-addr.arpa", "PTR", "NXDOMAIN", []),
        ("1.0.0.127.in-addr.arpa", "PTR", "NOERROR", ["localhost."]),
        ("0.0.d.f.ip6.arpa", "PTR", "NXDOMAIN", []),
        ("0.8.e.f.ip6.arpa", "PTR", "NXDOMAIN", []),
        ("_dns.resolver.arpa", "SVCB", "NOERROR", []),
        ("x.resolver.arpa", "A", "NOERROR", []),
    ],
)
def test_special_names_stay_here(name: str, rdtype: str, rcode: str, answers: list[str]) -> None:
    asked = asking(name, rdtype)
    answer = Zones().stays(asked)
    assert answer is not None
    message = dns.message.from_wire(reply(answer, asked, 0, 65535))
    assert dns.rcode.to_text(message.rcode()) == rcode
    assert [rdata.to_text() for rrset in message.answer for rdata in rrset] == answers
    assert bool(message.authority) == (not answers), "a denial carries its SOA"


@pytest.mark.parametrize(
    "name", ["1.1.32.172.in-addr.arpa", "example.com", "onion.example", "localhost.example", "arpa"]
)
def test_other_names_may_leave(name: str) -> None:
    assert Zones().stays(asking(name)) is None


def test_a_zone_says_otherwise_for_the_special_names_inside_it() -> None:
    zones = Zones([zone("10.in-addr.arpa"), zone("home.arpa"), zone(".")])
    assert zones.stays(asking("1.0.0.10.in-addr.arpa", "PTR")) is None
    assert zones.stays(asking("nas.home.arpa")) is None
    assert zones.stays(asking("example.onion")) is not None, "the root zone is no word about .onion"


def test_any_gets_one_small_hinfo() -> None:
    asked = asking("example.com", "ANY")
    message = dns.message.from_wire(reply(any_refused(asked), asked, 0, 512))
    assert [rrset.to_text() for rrset in message.answer] == ['example.com. 3600 IN HINFO "RFC8482" ""']


LIST = """\ufeff! title
# comment
[Adblock Plus 2.0]
0.0.0.0 ads.example # note
127.0.0.1 localhost\r
0.0.0.0 one.example two.example
plain.example
dotted.example.
||below.example^
@@||ok.below.example^
*.only-below.example
bücher.example
||third.example^$third-party
/banner[0-9]+/
example.com##.ad
UPPER.example
"""


def blocked(name: str) -> bool:
    blocklist = Blocklist()
    blocklist.add_lines(LIST.splitlines())
    return blocklist.blocks(dns.name.from_text(name).to_wire().lower())


@pytest.mark.parametrize(
    "name",
    ["ads.example", "ADS.example", "one.example", "two.example", "plain.example", "dotted.example", "below.example",
     "a.b.below.example", "x.only-below.example", "xn--bcher-kva.example", "upper.example"],
)  # fmt: skip
def test_listed_names_are_blocked(name: str) -> None:
    assert blocked(name)


@pytest.mark.parametrize(
    "name",
    ["www.ads.example", "localhost", "notbelow.example", "ok.below.example", "a.ok.below.example", "third.example",
     "only-below.example", "example.com", "x.plain.example", r"a\.ads.example"],
)  # fmt: skip
def test_other_names_are_not_blocked(name: str) -> None:
    assert not blocked(name)


def test_rules_we_do_not_have_are_counted() -> None:
    blocklist = Blocklist()
    blocklist.add_lines(LIST.splitlines())
    assert blocklist.skipped == 3


def test_a_list_of_many_names_loads_in_its_share_of_five_seconds() -> None:
    lines = [f"0.0.0.0 host{i}.ads{i % 977}.example" for i in range(50_000)]
    blocklist, begun = Blocklist(), time.process_time()
    blocklist.add_lines(lines)
    assert time.process_time() - begun < 0.25 * 4, "a million in five seconds, with room for a busy machine"
    assert len(blocklist) == 50_000


PRIVATE = [
    "10.0.0.1",
    "127.0.0.2",
    "0.0.0.0",
    "169.254.169.254",
    "100.64.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "::1",
    "::",
    "fe80::1",
    "fd00::1",
    "::ffff:10.0.0.1",
    "64:ff9b::a00:1",
    "2002:a00:1::1",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_answer_with_a_private_address_is_found_out(address: str) -> None:
    rdtype = "AAAA" if ":" in address else "A"
    asked = asking("a.example", rdtype)
    public = "60 A 192.0.2.1" if rdtype == "A" else "60 AAAA 2001:db8::1"
    wire = scripted(dns.message.make_query("a.example", rdtype), public, f"60 {rdtype} {address}")
    kept = take(wire, asked, Bounds(), trusted=True)
    assert private_address(kept.wire)


@pytest.mark.parametrize("hint", ["ipv4hint=192.0.2.1,10.0.0.1", "ipv6hint=fd00::1"])
def test_hints_are_addresses_too(hint: str) -> None:
    wire = scripted(dns.message.make_query("a.example", "HTTPS"), f"60 HTTPS 1 . alpn=h2 {hint}")
    assert private_address(wire)


@pytest.mark.parametrize(
    "address", ["192.0.2.1", "8.8.8.8", "172.32.0.1", "100.128.0.1", "2001:db8::1", "2606:4700::1"]
)
def test_public_addresses_pass(address: str) -> None:
    import ipaddress

    assert not is_private(ipaddress.ip_address(address).packed)


def test_a_service_parameter_that_is_cut_is_none() -> None:
    whole = b"\0\1\0" + b"\0\4\0\4" + bytes((10, 0, 0, 1))
    assert list(service_parameters(whole)) == [(4, bytes((10, 0, 0, 1)))]
    assert list(service_parameters(whole[:-2])) == []
