"""The small languages of configuration strings, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import values
from config.model import Listen
from config.values import Wrong


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("300ms", 0.3), ("30s", 30.0), ("5m", 300.0), ("1h30m", 5400.0), ("1d", 86400.0), ("0s", 0.0)],
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert values.read_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "s", "-1s", "1 s", "1e3s", "1w", "30S", "inf"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(Wrong):
        values.read_duration(text)


@given(st.integers(0, 10**10))
def test_a_shown_duration_reads_back_the_same(milliseconds: int) -> None:
    assert values.read_duration(values.show_duration(milliseconds / 1000)) == milliseconds / 1000


@given(st.integers(0, 2**50))
def test_a_shown_size_reads_back_the_same(size: int) -> None:
    assert values.read_size(values.show_size(size)) == size


@pytest.mark.parametrize(
    ("text", "size"), [("64KiB", 65536), ("2 MiB", 2 * 1024**2), ("1.5GiB", 3 * 2**29), ("10MB", 10**7), ("7B", 7)]
)
def test_a_size_is_read_in_bytes(text: str, size: int) -> None:
    assert values.read_size(text) == size


def test_a_listen_address_has_scheme_address_and_port() -> None:
    assert values.read_listen("tls://[::1]:8853", ("tls",)) == Listen("tls", "::1", 8853)
    assert str(Listen("tls", "::1", 8853)) == "tls://[::1]:8853"


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:80",
        "http://127.0.0.1",
        "http://127.0.0.1:99999",
        "http://localhost:80",
        "http://x.y:80",
        "http://127.0.0.1:80/path",
        "ftp://127.0.0.1:80",
        "http:127.0.0.1:80",
        "http://[::1:80",
        "http://0:80",
    ],
)
def test_what_is_no_listen_address_is_refused(text: str) -> None:
    with pytest.raises(Wrong):
        values.read_listen(text, ("http",))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("https://api.openai.com", ("https", "api.openai.com", 443, "")),
        ("https://API.OpenAI.com./v1", ("https", "api.openai.com", 443, "/v1")),
        ("http://[::1]:8000/", ("http", "::1", 8000, "")),
        ("h3://edge.test:9", ("h3", "edge.test", 9, "")),
    ],
)
def test_a_url_is_read_into_its_parts_and_back(text: str, read: tuple[str, str, int, str]) -> None:
    assert values.read_url(text, ("https", "http", "h3")) == read
    assert values.read_url(values.show_url(*read), ("https", "http", "h3")) == read


@pytest.mark.parametrize(
    "text",
    [
        "https://",
        "https:///x",
        "https://a b",
        "https://u:p@host",
        "https://host?x=1",
        "https://host#f",
        "host",
        "https://host:0",
        "https://-host",
        "https://h\u00e4st",
        "https://host\n",
        "https://[1::2::3]",
        "https://a..b",
    ],
)
def test_what_is_no_plain_url_is_refused(text: str) -> None:
    with pytest.raises(Wrong):
        values.read_url(text, ("https",))


@pytest.mark.parametrize("text", ["10.0.0.1/8", "10.0.0.0/33", "net", ""])
def test_a_network_with_host_bits_or_no_network_is_refused(text: str) -> None:
    with pytest.raises(Wrong):
        values.read_network(text)


def test_a_host_pattern_keeps_its_star_in_front_only() -> None:
    assert values.read_host_pattern("*.OpenAI.com") == "*.openai.com"
    for text in ("*", "*.", "a.*.com", "*openai.com", "**.openai.com"):
        with pytest.raises(Wrong):
            values.read_host_pattern(text)
