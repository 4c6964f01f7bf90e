"""Which pool a request belongs to, and who is turned away."""

from __future__ import annotations

import pytest

from config.model import Edge, Pool
from proxy.messages import Fields, RequestHead
from proxy.routing import TRACE, Refusal, Route, RouteTable, host_of

EDGE = Edge(id="e", scheme="https", host="api.test", port=443)
POOLS = (
    Pool("openai", (EDGE,), hosts=("openai.localhost",), path="/openai"),
    Pool("beta", (EDGE,), path="/openai/beta"),
    Pool("slash", (EDGE,), path="/slash/"),
)
TABLE = RouteTable(POOLS, own_names=["work.test"], allowed_origins=["https://app.test", "http://localhost:3000"])


def get(target: str, host: str = "localhost:8080", method: str = "GET", **fields: str) -> Route | Refusal:
    given: Fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    return TABLE.route(RequestHead(method.encode(), target.encode(), b"http", host.encode(), given))


@pytest.mark.parametrize(
    ("sent", "pool", "wanted"),
    [
        ("/openai/v1/models", "openai", "/v1/models"),
        ("/openai//v1/models", "openai", "//v1/models"),
        ("/openai/v1/models/org%2Fm", "openai", "/v1/models/org%2Fm"),
        ("/openai/v1/", "openai", "/v1/"),
        ("/openai", "openai", "/"),
        ("/openai?x=1", "openai", "/?x=1"),
        ("/openai/beta/x", "beta", "/x"),
        ("/openai/betas", "openai", "/betas"),
        ("/openai/openai/x", "openai", "/openai/x"),
        ("/slash/x", "slash", "/x"),
    ],
)
def test_the_longest_prefix_wins_and_is_stripped_once(sent: str, pool: str, wanted: str) -> None:
    assert get(sent) == Route(pool, wanted.encode())


def test_a_virtual_host_keeps_every_path() -> None:
    assert get("/openai/x", host="OpenAI.localhost:1") == Route("openai", b"/openai/x")


def test_trace_is_refused_everywhere() -> None:
    assert [get("/openai/x", method="TRACE"), get("/", host="openai.localhost", method="TRACE")] == [TRACE, TRACE]


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "[::1]:8080", "127.0.0.9", "work.test", "LOCALHOST."])
def test_own_names_serve_prefixes(host: str) -> None:
    assert isinstance(get("/openai/v1", host=host), Route)


@pytest.mark.parametrize(
    "host",
    [
        "evil.test",
        "localhost.attacker.test",
        "127.0.0.1.evil.test",
        "openai.localhost.evil.test",
        "other.localhost",
        "[::2]",
        "10.0.0.1",
    ],
)
def test_a_foreign_host_is_misdirected(host: str) -> None:
    answer = get("/openai/v1", host=host)
    assert isinstance(answer, Refusal)
    assert answer.status == 421


def test_no_host_is_refused() -> None:
    answer = get("/openai/v1", host="")
    assert isinstance(answer, Refusal)
    assert answer.status == 400


@pytest.mark.parametrize("target", ["/", "/openaix", "/other", "*"])
def test_a_path_of_no_pool_is_misdirected(target: str) -> None:
    answer = get(target)
    assert isinstance(answer, Refusal)
    assert answer.status == 421


@pytest.mark.parametrize("origin", ["null", "https://evil.test", "http://localhost:9", "http://127.0.0.1:8080"])
def test_other_sites_are_refused(origin: str) -> None:
    answer = get("/openai/v1", method="POST", origin=origin)
    assert isinstance(answer, Refusal)
    assert answer.status == 403


@pytest.mark.parametrize("origin", ["http://localhost:8080", "https://APP.test", "http://localhost:3000"])
def test_own_and_listed_origins_pass(origin: str) -> None:
    assert isinstance(get("/openai/v1", method="POST", origin=origin), Route)


def test_a_cross_site_post_without_origin_is_refused_and_a_read_passes() -> None:
    assert isinstance(get("/openai/v1", method="POST", sec_fetch_site="cross-site"), Refusal)
    assert isinstance(get("/openai/v1", method="GET", sec_fetch_site="cross-site"), Route)
    assert isinstance(get("/openai/v1", method="POST", sec_fetch_site="same-origin"), Route)


def test_host_of_takes_the_port_off() -> None:
    assert [host_of(h) for h in (b"A.b:1", b"[::1]:2", b"x.", b"")] == ["a.b", "::1", "x", ""]
