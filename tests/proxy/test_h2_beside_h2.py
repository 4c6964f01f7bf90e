"""Our HTTP/2 against the `h2` package in both roles: same exchanges, whatever the sizes and wherever the reads are cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.h2_client import ClientConnection
from proxy.h2_limits import H2Limits
from proxy.h2_server import ServerConnection, ServerStream
from proxy.messages import RequestHead, ResponseHead
from tests.peers.fakeleg import Recorder

CUTS = st.lists(st.one_of(st.integers(1, 30), st.integers(1, 40_000)), max_size=20).map(lambda cuts: [*cuts, 20_000])
TOKENS = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=20).map(str.encode)
VALUES = st.text("abcDEF012 ;=,", max_size=60).map(lambda text: text.strip().encode())
FIELDS = st.lists(st.tuples(TOKENS.map(lambda name: b"x-" + name), VALUES), max_size=8)
CHUNKS = st.lists(st.integers(1, 40_000), max_size=4)
EXCHANGES = st.lists(st.tuples(FIELDS, CHUNKS, FIELDS, CHUNKS, st.booleans()), min_size=1, max_size=4)
WINDOWS = st.sampled_from([300, 20_000, 65_535, 1_000_000])
LIMITS = H2Limits(stream_window=20_000, connection_window=100_000)


def bytes_of(size: int) -> bytes:
    return (b"%d," % size * (size // 2 + 1))[:size]


def cut(text: bytes, cuts: Iterator[int]) -> Iterator[bytes]:
    at = 0
    while at < len(text):
        size = next(cuts)
        yield text[at : at + size]
        at += size


def forever(cuts: list[int]) -> Iterator[int]:
    while True:
        yield from cuts


class Theirs:
    """One end by the `h2` package, which sends its bodies as its windows allow."""

    def __init__(self, *, client: bool, window: int) -> None:
        config = h2.config.H2Configuration(client_side=client, header_encoding=None)
        self.h2 = h2.connection.H2Connection(config)
        self.h2.initiate_connection()
        self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.waiting: dict[int, bytes] = {}
        self.trailers: dict[int, list[Any]] = {}
        self.heads: dict[int, list[Any]] = {}
        self.bodies: dict[int, bytes] = {}
        self.tails: dict[int, list[Any]] = {}
        self.ended: set[int] = set()

    def send(self, stream_id: int, fields: list[Any], body: bytes, trailers: list[Any]) -> None:
        self.h2.send_headers(stream_id, fields)
        self.waiting[stream_id] = body
        self.trailers[stream_id] = trailers
        self.flush()

    def flush(self) -> None:
        for stream_id in list(self.waiting):
            rest = self.waiting[stream_id]
            while (
                rest
                and (room := min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)) > 0
            ):
                self.h2.send_data(stream_id, rest[:room])
                rest = rest[room:]
            self.waiting[stream_id] = rest
            if not rest:
                del self.waiting[stream_id]
                if self.trailers[stream_id]:
                    self.h2.send_headers(stream_id, self.trailers[stream_id], end_stream=True)
                else:
                    self.h2.end_stream(stream_id)

    def receive(self, text: bytes) -> list[h2.events.Event]:
        events = self.h2.receive_data(text)
        for event in events:
            if isinstance(event, h2.events.RequestReceived | h2.events.ResponseReceived):
                self.heads[event.stream_id] = [tuple(field) for field in event.headers]
            elif isinstance(event, h2.events.DataReceived):
                self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.TrailersReceived):
                self.tails[event.stream_id] = [tuple(field) for field in event.headers]
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)
            assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated), event
        self.flush()
        return events


def exchange(ours: Any, theirs: Theirs, cuts: Iterator[int]) -> None:
    """Carry bytes both ways until neither has any."""
    now = 0.0
    while True:
        now += 0.1
        to_us = theirs.h2.data_to_send()
        for piece in cut(to_us, cuts):
            ours.receive(piece, now)
        to_them = b""
        while ours.sender.awake:
            to_them += ours.sender.take()
        for piece in cut(to_them, cuts):
            theirs.receive(piece)
        if not to_us and not to_them:
            assert ours.failed is None
            return


@settings(max_examples=40, deadline=None)
@given(EXCHANGES, CUTS, WINDOWS)
def test_our_server_serves_their_client(exchanges: list[Any], cuts: list[int], window: int) -> None:
    asked: list[tuple[ServerStream, RequestHead, Recorder]] = []

    def on_request(stream: ServerStream, head: RequestHead) -> None:
        stream.receiver = recorder = Recorder()
        asked.append((stream, head, recorder))

    ours = ServerConnection(LIMITS, lambda: None, on_request=on_request)
    theirs = Theirs(client=True, window=window)
    ours.start()
    where = forever(cuts)
    for number, (fields, chunks, _, _, with_trailers) in enumerate(exchanges):
        pseudo = [
            (b":method", b"POST"),
            (b":scheme", b"https"),
            (b":authority", b"a.test"),
            (b":path", b"/%d" % number),
        ]
        body = b"".join(bytes_of(size) for size in chunks)
        theirs.send(2 * number + 1, [*pseudo, *fields], body, [(b"x-t", b"u")] if with_trailers else [])
    exchange(ours, theirs, where)
    assert [(head.target, head.fields) for _, head, _ in asked] == [(b"/%d" % n, e[0]) for n, e in enumerate(exchanges)]
    for (stream, _, told), (_, chunks, answer, sizes, with_trailers) in zip(asked, exchanges, strict=True):
        assert told.body == b"".join(bytes_of(size) for size in chunks)
        assert told.words[-2:] == (["trailers", "end"] if with_trailers else [*told.words[-2:-1], "end"])
        stream.head(ResponseHead(200, answer))
        for size in sizes:
            stream.data(bytes_of(size))
        if with_trailers:
            stream.trailers([(b"x-t", b"u")])
        stream.end()
    exchange(ours, theirs, where)
    for number, (_, _, answer, sizes, with_trailers) in enumerate(exchanges):
        stream_id = 2 * number + 1
        assert theirs.heads[stream_id] == [(b":status", b"200"), *answer]
        assert theirs.bodies.get(stream_id, b"") == b"".join(bytes_of(size) for size in sizes)
        assert theirs.tails.get(stream_id, []) == ([(b"x-t", b"u")] if with_trailers else [])
        assert stream_id in theirs.ended
    assert not ours.streams and ours.sender.queued == 0


@settings(max_examples=40, deadline=None)
@given(EXCHANGES, CUTS, WINDOWS)
def test_our_client_is_served_by_their_server(exchanges: list[Any], cuts: list[int], window: int) -> None:
    ours = ClientConnection(LIMITS, lambda: None, on_change=lambda: None)
    theirs = Theirs(client=False, window=window)
    ours.start()
    where, told = forever(cuts), []
    # Settled first: the package gives no credit any more for bytes that it took before its own window shrank.
    exchange(ours, theirs, where)
    for number, (fields, chunks, _, _, with_trailers) in enumerate(exchanges):
        leg = ours.open()
        leg.receiver = recorder = Recorder()
        told.append(recorder)
        leg.head(RequestHead(b"POST", b"/%d" % number, b"https", b"a.test", fields, None))
        for size in chunks:
            leg.data(bytes_of(size))
        if with_trailers:
            leg.trailers([(b"x-t", b"u")])
        leg.end()
    exchange(ours, theirs, where)
    for number, (fields, chunks, answer, sizes, with_trailers) in enumerate(exchanges):
        stream_id = 2 * number + 1
        assert theirs.heads[stream_id][:4] == [
            (b":method", b"POST"), (b":scheme", b"https"), (b":authority", b"a.test"), (b":path", b"/%d" % number),
        ]  # fmt: skip
        assert theirs.heads[stream_id][4:] == fields
        assert theirs.bodies.get(stream_id, b"") == b"".join(bytes_of(size) for size in chunks)
        assert theirs.tails.get(stream_id, []) == ([(b"x-t", b"u")] if with_trailers else [])
        assert stream_id in theirs.ended
        body = b"".join(bytes_of(size) for size in sizes)
        theirs.send(stream_id, [(b":status", b"200"), *answer], body, [(b"x-t", b"u")] if with_trailers else [])
    exchange(ours, theirs, where)
    for recorder, (_, _, answer, sizes, with_trailers) in zip(told, exchanges, strict=True):
        word, head = recorder.heard[0]
        assert (word, head.status, head.fields) == ("head", 200, answer)
        assert recorder.body == b"".join(bytes_of(size) for size in sizes)
        assert recorder.words[-1] == "end"
        assert ("trailers" in recorder.words) == with_trailers
    assert (ours.active, ours.streams, ours.sender.queued) == (0, {}, 0)
