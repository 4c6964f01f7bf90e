"""DNS over HTTPS from prepared answers: the same bytes as the usual way, for exactly as long as they are true."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dns.message
import hpack
import pytest

from config.model import DnsCache, Resolver
from proxy.hpack_encoder import standing_block
from proxy.io.dns_shortcut import DnsShortcut
from resolver.io.doh_server import DohReply, DohService
from resolver.io.service import ResolverService
from tests.resolver.scripted import ScriptedUpstreams, answer

QUIET = Resolver(hosts_files=(), cache=DnsCache(persist=False))


class Lab:
    def __init__(self, tmp_path: Path, config: Resolver) -> None:
        self.now = 1000.0
        self.upstreams = ScriptedUpstreams(lambda query: answer(query, "60 A 192.0.2.1"))
        self.service = ResolverService(config, state_dir=tmp_path, upstreams=self.upstreams, clock=lambda: self.now)
        self.doh = DohService(self.service)
        self.shortcut = DnsShortcut(self.doh)

    def find(self, target: bytes) -> tuple[bytes, bytes] | None:
        return self.shortcut.find(standing_block([(b":path", target)])[1:])

    def usual(self, target: bytes) -> DohReply:
        said: list[DohReply] = []
        self.doh.respond(b"GET", target, None, b"", said.append)
        return said[0]


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    made = Lab(tmp_path, QUIET)
    yield made
    await made.service.close()


def target(name: str = "a.example", **options: object) -> bytes:
    wire = dns.message.make_query(name, "A", id=7, **options).to_wire()  # type: ignore[arg-type]
    return b"/dns-query?dns=" + base64.urlsafe_b64encode(wire).rstrip(b"=")


async def asked(lab: Lab, name: str = "a.example") -> None:
    await lab.service.resolve(name, "A")


async def test_a_prepared_answer_is_the_usual_one_and_ages_with_it(lab: Lab) -> None:
    await asked(lab)
    for lab.now in (1000.0, 1000.9, 1001.0, 1030.5, 1059.9):
        found = lab.find(target())
        assert found is not None
        usual = lab.usual(target())
        fields = hpack.Decoder().decode(found[0], raw=True)
        assert found[1] == usual.body
        assert [tuple(field) for field in fields[1:-1]] == usual.fields
        assert tuple(fields[-1]) == (b"content-length", b"%d" % len(usual.body))
    lab.now = 1060.1
    assert lab.find(target()) is None


async def test_what_was_never_asked_is_not_found_and_nobody_is_asked(lab: Lab) -> None:
    assert lab.find(target()) is None
    assert lab.upstreams.asked == []


async def test_a_new_answer_takes_the_place_of_a_prepared_one(lab: Lab) -> None:
    await asked(lab)
    assert lab.find(target()) is not None
    lab.service.flush("a.example")
    assert lab.find(target()) is None
    lab.upstreams.script = lambda query: answer(query, "60 A 192.0.2.2")
    await asked(lab)
    found = lab.find(target())
    assert found is not None
    assert found[1].endswith(bytes([192, 0, 2, 2]))


async def test_a_prepared_answer_counts_like_any_other(lab: Lab) -> None:
    await asked(lab)
    lab.find(target())
    before = lab.service.stats()["queries"]
    for _ in range(3):
        lab.find(target())
    assert lab.service.stats()["queries"] == before + 3
    assert sum(lab.service.counter("https")) == 4


@pytest.mark.parametrize("path", [b"/dns-query", b"/other?dns=AAAA", b"/dns-query?dns=!", b"/dns-query?dns=AAAA"])
async def test_what_is_no_question_is_left_to_the_usual_way(lab: Lab, path: bytes) -> None:
    assert lab.find(path) is None


async def test_a_shortcut_that_was_retired_finds_nothing(lab: Lab) -> None:
    await asked(lab)
    assert lab.find(target()) is not None
    lab.shortcut.retire()
    assert lab.find(target()) is None


@pytest.mark.parametrize("changed", [{"query_log": "names"}, {"rate_limit_per_s": 1000}])
async def test_a_resolver_that_wants_to_know_who_asks_prepares_nothing(lab: Lab, changed: dict[str, Any]) -> None:
    await asked(lab)
    assert lab.find(target()) is not None
    lab.service.reconfigure(replace(QUIET, **changed))
    assert lab.find(target()) is None
