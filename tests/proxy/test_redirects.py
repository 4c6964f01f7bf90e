"""Where an edge's redirect leads: to an edge of the pool, or out of it."""

from __future__ import annotations

import pytest

from config.model import Edge, Pool
from proxy.messages import ResponseHead
from proxy.redirects import Redirection, follow, for_client

A = Edge(id="a", scheme="https", host="a.test", port=443)
B = Edge(id="b", scheme="https", host="b.test", port=8443, base_path="/base", addresses=("10.0.0.2",))
PLAIN = Edge(id="plain", scheme="http", host="127.0.0.1", port=81)
POOL = Pool("p", (A, B, PLAIN))


def led(location: str | None, edge: Edge = A) -> Redirection | None:
    fields = [] if location is None else [(b"location", location.encode())]
    return follow(ResponseHead(307, fields), POOL, edge)


@pytest.mark.parametrize(
    ("location", "to"),
    [
        ("https://b.test:8443/base/v1?x=1", Redirection("b", b"/v1?x=1")),
        ("https://B.test:8443/base", Redirection("b", b"/")),
        ("https://10.0.0.2:8443/other", Redirection("b", b"/other")),
        ("https://a.test/v1#frag", Redirection("a", b"/v1")),
        ("https://a.test?x", Redirection("a", b"/?x")),
        ("/again", Redirection("a", b"/again")),
        ("//b.test:8443/base/v1", Redirection("b", b"/v1")),
        ("http://a.test/v1/", Redirection("a", b"/v1/")),
        ("http://b.test:8443/v1/", Redirection("b", b"/v1/")),
    ],
)
def test_edges_of_the_pool_are_recognised(location: str, to: Redirection) -> None:
    assert led(location) == to


@pytest.mark.parametrize(
    "location",
    [
        None,
        "",
        "https://b.test/base",
        "https://evil.test/",
        "https://a.test@evil.test/",
        "//evil.test/x",
        "ftp://a.test/",
        "http://127.0.0.1:81/",
        "https://127.0.0.1:81/",
        "http://a.test:81/",
        "http://b.test/",
    ],
)
def test_everything_else_is_the_clients_business(location: str | None) -> None:
    assert led(location) is None


def test_a_port_of_other_digits_is_no_port() -> None:
    location = b"https://b.test:\xb2/v1"  # a superscript two, which isdigit() takes and int() does not
    assert follow(ResponseHead(307, [(b"location", location)]), POOL, A) is None


def test_a_plain_edge_may_lead_to_a_secure_one() -> None:
    assert led("https://a.test/x", PLAIN) == Redirection("a", b"/x")


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("https://b.test:8443/base/v1?x=1#frag", "/p/v1?x=1#frag"),
        ("http://127.0.0.1:81/v1", "/p/v1"),
        ("//10.0.0.2:8443/v1", "/p/v1"),
        ("https://a.test", "/p/"),
        ("/v1//x%2F", "/p/v1//x%2F"),
        ("https://evil.test/v1", "https://evil.test/v1"),
        ("https://b.test/base/v1", "https://b.test/base/v1"),
        ("//evil.test/v1", "//evil.test/v1"),
        ("v1?x", "v1?x"),
        ("?x", "?x"),
        ("", ""),
    ],
)
def test_a_location_in_the_pool_is_told_as_the_path_to_ask_us_for(location: str, told: str) -> None:
    given = [(b"x-a", b"https://a.test/"), (b"location", location.encode()), (b"x-b", b"2")]
    assert for_client(given, POOL, A, b"/p") == [given[0], (b"location", told.encode()), given[2]]


def test_a_path_that_begins_with_two_slashes_names_no_host() -> None:
    given = [(b"location", b"https://a.test//v1")]
    assert for_client(given, POOL, A, b"") == [(b"location", b"/.//v1")]
    assert for_client(given, POOL, A, b"/p") == [(b"location", b"/p//v1")]
