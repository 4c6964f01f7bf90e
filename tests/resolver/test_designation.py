"""A client of our plain DNS is told of our encrypted DNS, and of nobody else's (D21)."""

from __future__ import annotations

import dns.message
import dns.rdatatype
import pytest

from config.model import Listen
from resolver.answer import reply
from resolver.designation import designations
from resolver.question import Question, parse
from resolver.zones import Zones

OURS = [
    Listen("udp", "127.0.0.1", 5353),
    Listen("tls", "127.0.0.1", 8853),
    Listen("quic", "127.0.0.1", 8853),
    Listen("https", "127.0.0.1", 8443),
    Listen("h3", "127.0.0.1", 8443),
    Listen("tls", "::1", 8853),
    Listen("http", "127.0.0.1", 8080),
]


def asked(name: str, rdtype: str, records: list[Listen] = OURS, proved: str = "localhost") -> dns.message.Message:
    query = dns.message.make_query(name, rdtype)
    question = parse(query.to_wire())
    assert isinstance(question, Question)
    answer = Zones((), designations(records, proved, "/dns-query")).stays(question)
    assert answer is not None
    return dns.message.from_wire(reply(answer, question, 0, 65535))


def test_each_way_is_named_once_with_its_port_and_path() -> None:
    (rrset,) = asked("_dns.resolver.arpa", "SVCB").answer
    assert sorted(record.to_text() for record in rrset) == [
        '1 localhost. alpn="dot" port="8853" ipv4hint="127.0.0.1" ipv6hint="::1"',
        '2 localhost. alpn="doq" port="8853" ipv4hint="127.0.0.1"',
        '3 localhost. alpn="h3,h2" port="8443" ipv4hint="127.0.0.1" dohpath="/dns-query{?dns}"',
    ]


def test_h3_and_https_on_different_ports_are_two_services() -> None:
    two = [Listen("https", "127.0.0.1", 8443), Listen("h3", "127.0.0.1", 9443)]
    (rrset,) = asked("_dns.resolver.arpa", "SVCB", two).answer
    ways = sorted((record.priority, record.params[1].ids, record.params[3].port) for record in rrset)
    assert ways == [(1, (b"h3",), 9443), (2, (b"h2",), 8443)]


def test_a_wildcard_is_no_hint() -> None:
    (rrset,) = asked("_dns.resolver.arpa", "SVCB", [Listen("tls", "0.0.0.0", 853)], "dns.home.example").answer
    assert [r.to_text() for r in rrset] == ['1 dns.home.example. alpn="dot" port="853"']


@pytest.mark.parametrize(("listens", "proved"), [([Listen("udp", "127.0.0.1", 53)], "localhost"), (OURS, "")])
def test_without_a_secret_way_or_a_proved_name_there_is_no_data(listens: list[Listen], proved: str) -> None:
    said = asked("_dns.resolver.arpa", "SVCB", listens, proved)
    assert said.rcode() == 0 and not said.answer and said.authority


@pytest.mark.parametrize("name", ["resolver.arpa", "_dns.resolver.arpa", "below._dns.resolver.arpa", "x.resolver.arpa"])
@pytest.mark.parametrize("rdtype", ["A", "AAAA", "DS", "HTTPS", "SVCB"])
def test_everything_else_of_the_zone_is_no_data(name: str, rdtype: str) -> None:
    if (name, rdtype) == ("_dns.resolver.arpa", "SVCB"):
        return
    said = asked(name, rdtype)
    assert said.rcode() == 0 and not said.answer
