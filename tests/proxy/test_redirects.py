"""Where an edge's redirect leads: to an edge of the pool, or out of it."""

from __future__ import annotations

import pytest

from config.model import Edge, Pool
from proxy.messages import ResponseHead
from proxy.redirects import Redirection, follow

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
    ],
)
def test_everything_else_is_the_clients_business(location: str | None) -> None:
    assert led(location) is None


def test_a_port_of_other_digits_is_no_port() -> None:
    location = b"https://b.test:\xb2/v1"  # a superscript two, which isdigit() takes and int() does not
    assert follow(ResponseHead(307, [(b"location", location)]), POOL, A) is None


def test_a_plain_edge_may_lead_to_a_secure_one() -> None:
    assert led("https://a.test/x", PLAIN) == Redirection("a", b"/x")
