"""DNS over HTTPS by RFC 8484, from method and target to status and freshness, without any HTTP underneath."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import dns.message
import dns.rcode
import pytest

from resolver.io.doh_server import DohReply, DohService
from tests.resolver.scripted import answer
from tests.resolver.service_lab import Lab, addresses, turns

TYPE = b"application/dns-message"


class DohLab(Lab):
    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path)
        self.doh = DohService(self.service, "/dns-query")

    async def request(
        self, method: bytes, target: bytes = b"/dns-query", content_type: bytes | None = TYPE, body: bytes = b""
    ) -> DohReply:
        future: asyncio.Future[DohReply] = asyncio.get_running_loop().create_future()
        self.doh.respond(method, target, content_type, body, future.set_result)
        return await future

    async def get(self, parameters: bytes) -> DohReply:
        return await self.request(b"GET", b"/dns-query" + parameters, None)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[DohLab]:
    made = DohLab(tmp_path)
    yield made
    await made.service.close()


def query(name: str = "a.example", rdtype: str = "A", **options: object) -> bytes:
    return dns.message.make_query(name, rdtype, id=0, **options).to_wire()  # type: ignore[arg-type]


def encoded(wire: bytes) -> bytes:
    return base64.urlsafe_b64encode(wire).rstrip(b"=")


def field(reply: DohReply, name: bytes) -> bytes | None:
    return dict(reply.fields).get(name)


@pytest.mark.parametrize("ident", [0, 0xABCD])
async def test_get_and_post_give_the_same_message_with_the_querys_id(lab: DohLab, ident: int) -> None:
    wire = ident.to_bytes(2, "big") + query()[2:]
    post = await lab.request(b"POST", body=wire)
    get = await lab.get(b"?dns=" + encoded(wire))
    assert (post.status, field(post, b"content-type")) == (200, TYPE)
    assert post.body == get.body and post.body[:2] == wire[:2]
    assert addresses(dns.message.from_wire(post.body)) == ["192.0.2.1"]


async def test_a_cached_answer_is_given_before_the_call_returns(lab: DohLab) -> None:
    await lab.request(b"POST", body=query())
    replies: list[DohReply] = []
    lab.doh.respond(b"POST", b"/dns-query", TYPE, query(), replies.append)
    assert replies[0].status == 200


async def test_an_uncached_answer_comes_later(lab: DohLab) -> None:
    lab.upstreams.held = asyncio.Event()
    replies: list[DohReply] = []
    lab.doh.respond(b"POST", b"/dns-query", TYPE, query(), replies.append)
    await turns()
    assert replies == []
    lab.upstreams.held.set()
    await turns()
    assert [reply.status for reply in replies] == [200]


@pytest.mark.parametrize(
    ("method", "target", "content_type", "body", "status"),
    [
        (b"GET", b"/dns-query", None, b"", 400),
        (b"GET", b"/dns-query?dns=", None, b"", 400),
        (b"GET", b"/dns-query?dns=%%%", None, b"", 400),
        (b"GET", b"/dns-query?dns=a*b*", None, b"", 400),
        (b"GET", b"/dns-query?name=a.example", None, b"", 400),
        (b"GET", b"/dns-query?dns=" + encoded(bytes(11)), None, b"", 400),
        (b"GET", b"/dns-query?dns=" + b"A" * 100_000, None, b"", 414),
        (b"GET", b"/other?dns=" + encoded(query()), None, b"", 404),
        (b"POST", b"/dns-query", TYPE, b"", 400),
        (b"POST", b"/dns-query", TYPE, bytes(11), 400),
        (b"POST", b"/dns-query", TYPE, b"\0\0\x81\x80" + bytes(20), 400),
        (b"POST", b"/dns-query", b"text/plain", query(), 415),
        (b"POST", b"/dns-query", None, query(), 415),
        (b"POST", b"/dns-query", TYPE, query() + bytes(65_536), 413),
        (b"PUT", b"/dns-query", TYPE, query(), 405),
        (b"DELETE", b"/dns-query", None, b"", 405),
    ],
)
async def test_what_is_no_doh_request_gets_the_right_status(
    lab: DohLab, method: bytes, target: bytes, content_type: bytes | None, body: bytes, status: int
) -> None:
    reply = await lab.request(method, target, content_type, body)
    assert reply.status == status
    assert field(reply, b"cache-control") == b"no-store"
    assert (field(reply, b"allow") == b"GET, HEAD, POST") == (status == 405)


@pytest.mark.parametrize("pad", [b"", b"=", b"==", b"%3D"])
async def test_padding_is_tolerated(lab: DohLab, pad: bytes) -> None:
    wire = next(w for n in range(1, 4) if len(w := query("a" * n + ".example")) % 3 == 1)
    assert (await lab.get(b"?x=1&dns=" + encoded(wire) + pad)).status == 200


async def test_content_type_is_compared_as_http_does(lab: DohLab) -> None:
    reply = await lab.request(b"POST", content_type=b"Application/DNS-Message; charset=x", body=query())
    assert reply.status == 200


async def test_a_malformed_query_is_a_formerr_in_a_200(lab: DohLab) -> None:
    reply = await lab.request(b"POST", body=query() + b"\1\2")
    assert reply.status == 200 and reply.body[3] & 15 == dns.rcode.FORMERR
    assert field(reply, b"cache-control") == b"no-store"


async def test_freshness_is_the_smallest_aged_ttl_of_the_answer(lab: DohLab) -> None:
    lab.upstreams.script = lambda asked: answer(asked, "300 CNAME b.example.", "b.example. 60 A 192.0.2.1")
    assert field(await lab.request(b"POST", body=query()), b"cache-control") == b"max-age=60"
    lab.clock.now += 20
    assert field(await lab.request(b"POST", body=query()), b"cache-control") == b"max-age=40"


@pytest.mark.parametrize("rcode", ["NXDOMAIN", "NOERROR"])
async def test_a_denial_is_as_fresh_as_its_soa_allows(lab: DohLab, rcode: str) -> None:
    lab.upstreams.script = lambda asked: answer(asked, rcode=rcode, soa="example. 3600 50")
    assert field(await lab.request(b"POST", body=query()), b"cache-control") == b"max-age=50"


async def test_what_has_no_time_of_its_own_is_not_stored(lab: DohLab) -> None:
    lab.upstreams.script = lambda asked: answer(asked, rcode="NXDOMAIN")
    assert field(await lab.request(b"POST", body=query()), b"cache-control") == b"no-store"
    lab.upstreams.down = True
    failed = await lab.request(b"POST", body=query("b.example", use_edns=0))
    assert failed.status == 200 and field(failed, b"cache-control") == b"no-store"
    assert dns.message.from_wire(failed.body).rcode() == dns.rcode.SERVFAIL


async def test_a_stale_answer_is_fresh_for_thirty_seconds_at_most(lab: DohLab) -> None:
    lab.upstreams.script = lambda asked: answer(asked, "60 A 192.0.2.1")
    await lab.request(b"POST", body=query())
    lab.clock.now += 100
    lab.upstreams.down = True
    assert field(await lab.request(b"POST", body=query()), b"cache-control") == b"max-age=30"


async def test_replies_are_padded_for_those_who_pad(lab: DohLab) -> None:
    reply = await lab.request(b"POST", body=query(use_edns=0, pad=128))
    assert len(reply.body) % 468 == 0


def test_claims_only_its_own_path(tmp_path: Path) -> None:
    doh = DohLab(tmp_path).doh
    assert doh.claims(b"/dns-query?dns=x") and doh.claims(b"/dns-query")
    assert not doh.claims(b"/dns-query/x") and not doh.claims(b"/")
