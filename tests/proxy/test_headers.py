"""What changes between two hops, and that nothing else does."""

from __future__ import annotations

import pytest

from proxy.headers import client_of, is_loop, is_trusted, networks, request_fields, response_fields
from proxy.messages import Fields, RequestHead, ResponseHead

SPOOFED: Fields = [
    (b"x-forwarded-for", b"6.6.6.6"),
    (b"x-forwarded-host", b"evil.test"),
    (b"x-forwarded-proto", b"gopher"),
    (b"forwarded", b"for=6.6.6.6"),
    (b"x-real-ip", b"6.6.6.6"),
    (b"via", b"1.1 evil.test"),
]

TRUSTED = networks(("127.0.0.1", "10.0.0.0/8", "fd00::/8"))


def sent(fields: Fields, *, trusted: bool = False, edge: Fields | None = None) -> Fields:
    head = RequestHead(b"GET", b"/", b"ftp", b"localhost:8080", fields)
    believed = TRUSTED if trusted else ()
    return request_fields(
        head, peer="127.0.0.1", scheme=b"http", trusted=believed, version="h1", edge_fields=edge or []
    )


def test_what_an_untrusted_peer_claims_is_replaced() -> None:
    fields = sent([(b"A", b"1"), *SPOOFED])
    assert not [f for f in fields if b"6.6.6.6" in f[1] or b"evil" in f[1] or b"gopher" in f[1]]
    assert fields[0] == (b"A", b"1")
    assert dict(fields)[b"x-forwarded-for"] == b"127.0.0.1"
    assert dict(fields)[b"x-forwarded-proto"] == b"http", "the listener's scheme, not the one that the client names"


def test_a_trusted_peer_is_believed_and_added() -> None:
    fields = dict(sent(SPOOFED, trusted=True))
    assert fields[b"x-forwarded-for"] == b"6.6.6.6, 127.0.0.1"
    assert fields[b"x-forwarded-host"] == b"evil.test"


@pytest.mark.parametrize(
    ("said", "chain", "client"),
    [
        ([], [], "127.0.0.1"),
        ([b"9.9.9.9"], [b"9.9.9.9"], "9.9.9.9"),
        ([b"6.6.6.6, 9.9.9.9"], [b"9.9.9.9"], "9.9.9.9"),
        ([b"6.6.6.6, 9.9.9.9,10.0.0.7"], [b"9.9.9.9", b"10.0.0.7"], "9.9.9.9"),
        ([b"6.6.6.6", b"9.9.9.9", b"10.0.0.7, 10.0.0.8"], [b"9.9.9.9", b"10.0.0.7", b"10.0.0.8"], "9.9.9.9"),
        ([b"6.6.6.6, [2001:db8::1]:443, [fd00::1]:80"], [b"[2001:db8::1]:443", b"[fd00::1]:80"], "2001:db8::1"),
        ([b"6.6.6.6, 9.9.9.9:4711"], [b"9.9.9.9:4711"], "9.9.9.9"),
        ([b"6.6.6.6, unknown, 10.0.0.7"], [b"unknown", b"10.0.0.7"], "127.0.0.1"),
        ([b"10.0.0.6, 10.0.0.7"], [b"10.0.0.6", b"10.0.0.7"], "10.0.0.6"),
        ([b", ,"], [], "127.0.0.1"),
    ],
)
def test_of_a_chain_only_what_trusted_peers_wrote_is_believed(
    said: list[bytes], chain: list[bytes], client: str
) -> None:
    given = [(b"x-forwarded-for", value) for value in said]
    passed = [value for name, value in sent(given, trusted=True) if name == b"x-forwarded-for"]
    assert passed == [b", ".join([*chain, b"127.0.0.1"])]
    assert client_of("127.0.0.1", given, TRUSTED) == client
    assert client_of("9.9.9.9", given, TRUSTED) == "9.9.9.9"


def test_the_edges_own_fields_replace_the_clients() -> None:
    fields = sent([(b"authorization", b"mine"), (b"X", b"1")], edge=[(b"authorization", b"edge")])
    assert [v for n, v in fields if n.lower() == b"authorization"] == [b"edge"]


@pytest.mark.parametrize(("said", "sent_on"), [(b"5", b"4"), (b"1", b"0"), (b"x", b"x"), (b"9" * 40, b"9" * 40)])
def test_only_options_counts_its_hops(said: bytes, sent_on: bytes) -> None:
    given = [(b"max-forwards", said)]
    for method, wanted in ((b"OPTIONS", sent_on), (b"GET", said)):
        head = RequestHead(method, b"/", b"http", b"h", given)
        fields = request_fields(head, peer="", scheme=b"http", trusted=(), version="h1", edge_fields=[])
        assert dict(fields)[b"max-forwards"] == wanted


def test_credentials_for_a_proxy_go_no_further() -> None:
    assert b"proxy-authorization" not in dict(sent([(b"proxy-authorization", b"Basic x")]))


def test_order_repeats_and_bytes_of_other_fields_stay() -> None:
    given = [(b"B", b"\xe9"), (b"a", b"1"), (b"B", b""), (b"cookie", b"x=1")]
    assert sent(given)[:4] == given


def test_too_many_passes_are_a_loop() -> None:
    assert not is_loop([(b"via", b"1.1 headrace, 2.0 headrace")])
    assert is_loop([(b"via", b", ".join([b"1.1 headrace"] * 8))])


def test_alt_svc_and_loopback_hsts_stay_here_and_timing_is_added() -> None:
    head = ResponseHead(
        200, [(b"alt-svc", b'h3=":443"'), (b"strict-transport-security", b"max-age=1"), (b"server-timing", b"x")]
    )
    fields = response_fields(head, server_timing=b"ours", loopback=True)
    assert fields == [(b"server-timing", b"x"), (b"server-timing", b"ours")]
    assert b"strict-transport-security" in dict(response_fields(head, server_timing=b"", loopback=False))


def test_only_listed_networks_are_trusted() -> None:
    listed = networks(("10.0.0.0/8", "::1"))
    assert is_trusted("10.1.2.3", listed)
    assert is_trusted("::1", listed)
    assert not is_trusted("127.0.0.1", listed)
    assert not is_trusted("", listed)
    assert not is_trusted("10.1.2.3", ())


def test_what_we_add_to_a_message_is_below_512_bytes() -> None:
    added = sum(len(n) + len(v) + 4 for n, v in sent([]))
    timing = response_fields(ResponseHead(200, []), server_timing=b"x" * 250, loopback=True)
    assert added < 512
    assert sum(len(n) + len(v) + 4 for n, v in timing) < 512
