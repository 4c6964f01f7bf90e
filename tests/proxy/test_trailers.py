"""Trailers mean the same whatever version they came in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proxy.h1_bodies import ChunkedReader, write_last_chunk
from proxy.h2_heads import read_trailers
from proxy.io.quic_heads import trailer_fields
from proxy.messages import Fields


def over_h1(fields: Fields) -> Fields:
    reader = ChunkedReader()
    reader.feed(write_last_chunk(fields), 0, lambda _: None)
    assert reader.done
    return reader.trailers


@pytest.mark.parametrize("read", [over_h1, read_trailers, trailer_fields])
def test_framing_and_routing_fields_are_left_out_and_all_others_kept(read: Callable[[Fields], Fields]) -> None:
    sent = [(b"x-t", b"1"), (b"content-length", b"5"), (b"host", b"evil.test"), (b"te", b"trailers"), (b"x-t", b"2")]
    assert read([*sent, (b"expect", b"100-continue"), (b"grpc-status", b"0")]) == [
        (b"x-t", b"1"),
        (b"x-t", b"2"),
        (b"grpc-status", b"0"),
    ]
