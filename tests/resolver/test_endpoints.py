"""Where a host can be reached: which HTTPS record counts, and in what order addresses are tried."""

from __future__ import annotations

import dns.rrset

from resolver.endpoints import choose, interleave, query_name

OWNER = b"\x03api\x07example\x00"


def https(*records: str) -> list[dns.rrset.RRset]:
    return [dns.rrset.from_text("api.example.", 60, "IN", "HTTPS", *records)]


def test_an_alias_leads_to_its_target_even_beside_a_service() -> None:
    assert choose(https("1 . alpn=h2", "0 other.example."), OWNER) == b"\x05other\x07example\x00"


def test_an_alias_to_the_root_says_that_there_is_no_service() -> None:
    assert choose(https("0 ."), OWNER) is None


def test_the_lowest_priority_that_can_be_used_wins() -> None:
    found = choose(https("2 . alpn=h2 port=2", "1 . mandatory=key65400 key65400=x", "3 . alpn=h2 port=3"), OWNER)
    assert found is not None and not isinstance(found, bytes)
    assert (found.target, found.port, found.alpn) == (OWNER, 2, ("h2", "http/1.1"))


def test_families_take_turns_and_none_is_left_out() -> None:
    assert interleave(["::1", "::2"], ["10.0.0.1"]) == ("::1", "10.0.0.1", "::2")
    assert interleave([], ["10.0.0.1"]) == ("10.0.0.1",)


def test_only_another_port_than_443_has_an_owner_of_its_own() -> None:
    assert query_name(OWNER, 443) == OWNER
    assert query_name(OWNER, 8443) == b"\x05_8443\x06_https" + OWNER
