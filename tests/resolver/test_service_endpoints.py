"""What the proxy asks of the service: addresses, ports and protocols to dial, and plain look-ups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import pytest

from resolver.errors import NoAddress
from tests.patience import no_hang
from tests.resolver.scripted import answer
from tests.resolver.service_lab import Lab

# --- for the proxy ----------------------------------------------------------------------------------------------------


def serving(zone: dict[tuple[str, str], tuple[str, ...]]) -> Callable[[dns.message.Message], bytes]:
    def script(query: dns.message.Message) -> bytes:
        question = query.question[0]
        records = zone.get((question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)), ())
        return answer(query, *records) if records else answer(query, soa="example. 60 60")

    return script


async def test_endpoints_alternate_families_and_tell_what_the_https_record_promises(lab: Lab) -> None:
    lab.upstreams.script = serving(
        {
            ("api.example", "A"): ("60 A 192.0.2.1", "60 A 192.0.2.2"),
            ("api.example", "AAAA"): ("50 AAAA 2001:db8::1",),
            ("api.example", "HTTPS"): ("40 HTTPS 1 . alpn=h3,h2 ipv4hint=192.0.2.7",),
        }
    )
    found = await lab.service.endpoints("api.example", 443)
    assert found.addresses[0] == "2001:db8::1"
    assert sorted(found.addresses[1:]) == ["192.0.2.1", "192.0.2.2"]
    assert (found.port, found.alpn, found.ttl_s) == (443, ("h3", "h2", "http/1.1"), 40)


@pytest.mark.parametrize(
    ("records", "alpn", "addresses"),
    [
        (("40 HTTPS 1 . alpn=h3 no-default-alpn mandatory=alpn",), ("h3",), ("192.0.2.1",)),
        (
            ("40 HTTPS 1 . alpn=h3 key65400=x mandatory=key65400", "40 HTTPS 2 . alpn=h2"),
            ("h2", "http/1.1"),
            ("192.0.2.1",),
        ),
        (("40 HTTPS 1 . alpn=h3 key65400=x mandatory=key65400",), (), ("192.0.2.1",)),
        (("40 HTTPS 1 . alpn=foo no-default-alpn",), (), ("192.0.2.1",)),
        (("40 HTTPS 1 svc.example. alpn=h2",), ("h2", "http/1.1"), ("192.0.2.55",)),
        (("40 HTTPS 1 hinted.example. alpn=h2 ipv4hint=192.0.2.7",), ("h2", "http/1.1"), ("192.0.2.7",)),
        (("40 HTTPS 0 alias.example.",), ("h3", "http/1.1"), ("192.0.2.66",)),
        (("40 HTTPS 0 .",), (), ("192.0.2.1",)),
    ],
)
async def test_https_records_by_the_rules_of_rfc_9460(
    lab: Lab, records: tuple[str, ...], alpn: tuple[str, ...], addresses: tuple[str, ...]
) -> None:
    lab.upstreams.script = serving(
        {
            ("api.example", "A"): ("60 A 192.0.2.1",),
            ("api.example", "HTTPS"): records,
            ("svc.example", "A"): ("60 A 192.0.2.55",),
            ("alias.example", "A"): ("60 A 192.0.2.66",),
            ("alias.example", "HTTPS"): ("60 HTTPS 1 . alpn=h3",),
        }
    )
    found = await lab.service.endpoints("api.example", 443)
    assert (found.alpn, found.addresses) == (alpn, addresses)


async def test_another_port_has_its_own_https_record(lab: Lab) -> None:
    lab.upstreams.script = serving(
        {
            ("api.example", "A"): ("60 A 192.0.2.1",),
            ("_8443._https.api.example", "HTTPS"): ("9 HTTPS 1 . alpn=h2 port=9443",),
        }
    )
    found = await lab.service.endpoints("api.example", 8443)
    assert (found.port, found.alpn, found.addresses) == (9443, ("h2", "http/1.1"), ("192.0.2.1",))


async def test_a_slow_https_record_does_not_hold_the_dial_up(lab: Lab) -> None:
    held = asyncio.Event()

    async def script(query: dns.message.Message) -> bytes:
        if query.question[0].rdtype == 65:
            await held.wait()
        return answer(query, "60 A 192.0.2.1") if query.question[0].rdtype == 1 else answer(query, soa="example. 60 60")

    lab.upstreams.script = script
    async with no_hang():  # the record stays away
        found = await lab.service.endpoints("api.example", 443)
    assert (found.addresses, found.alpn) == (("192.0.2.1",), ())
    held.set()


async def test_an_address_stands_for_itself(lab: Lab) -> None:
    assert (await lab.service.endpoints("[2001:db8::1]", 8443)).addresses == ("2001:db8::1",)
    assert lab.upstreams.asked == []


@pytest.mark.parametrize(("down", "rcode"), [(True, "SERVFAIL"), (False, "NXDOMAIN")])
async def test_no_address_says_why(lab: Lab, down: bool, rcode: str) -> None:
    lab.upstreams.down = down
    lab.upstreams.script = lambda query: answer(query, rcode="NXDOMAIN", soa="example. 60 60")
    with pytest.raises(NoAddress) as caught:
        await lab.service.endpoints("api.example", 443)
    assert caught.value.rcode == rcode
    assert ("connection refused" in str(caught.value)) == down


async def test_resolve_tells_source_ttl_and_rcode(lab: Lab) -> None:
    first, second = await lab.service.resolve("a.example", "A"), await lab.service.resolve("A.example.", "a")
    assert (first.source, second.source) == ("tls://peer", "cache")
    assert (second.rcode, second.ttl_s) == ("NOERROR", 60)
    assert [rrset.to_text() for rrset in second.rrsets] == ["a.example. 60 IN A 192.0.2.1"]
