"""A slice of bench/fuzz_dns.py, the same every time: no packet makes a listener's parser raise or dawdle."""

from __future__ import annotations

import pytest

from bench.fuzz_dns import fuzz

PARSERS = ("udp", "stream", "doh get", "doh target", "doh post", "reply", "doh reply")


@pytest.mark.parametrize("parser", PARSERS)
async def test_mutated_packets_are_refused_or_answered_at_once(parser: str) -> None:
    (row,) = await fuzz(4_000, 7, [parser])
    assert row["packets"] == 4_000
