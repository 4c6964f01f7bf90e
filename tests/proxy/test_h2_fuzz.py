"""Frames in any order, whole or cut, with any bytes: nothing but our own errors, and what we say stays well formed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy import h2_frames as wire
from proxy.h2_limits import H2Limits
from proxy.messages import Abort, Cause, Party, ResponseHead, Stage
from tests.proxy.h2_wire import GET, OK, POST, Edge, Served, coded, frame

IDS = st.sampled_from([0, 1, 1, 3, 3, 5, 7, 2, 99])
BLOCKS = st.one_of(
    st.sampled_from(
        [coded(GET), coded(POST), coded(OK), coded([(b"x", b"y")]), b"\x40\x01a\x01b", b"\xbe", b"\x20", b""]
    ),
    st.binary(max_size=12),
)
WORDS = st.sampled_from([0, 1, 8, 1000, wire.MAX_WINDOW, 1 << 31]).map(lambda value: value.to_bytes(4, "big"))
FRAMES = st.one_of(
    st.builds(frame, st.just(wire.HEADERS), st.sampled_from([0, 1, 4, 5, 5, 5, 0x25, 0x0D]), IDS, BLOCKS),
    st.builds(frame, st.just(wire.CONTINUATION), st.sampled_from([0, 4]), IDS, BLOCKS),
    st.builds(frame, st.just(wire.DATA), st.sampled_from([0, 0, 1, 8, 9]), IDS, st.binary(max_size=300)),
    st.builds(frame, st.just(wire.RST_STREAM), st.just(0), IDS, WORDS),
    st.builds(frame, st.just(wire.WINDOW_UPDATE), st.just(0), IDS, WORDS),
    st.builds(
        lambda key, value: wire.settings({key: value}), st.integers(0, 10), st.sampled_from([0, 1, 16384, 1 << 31])
    ),
    st.builds(frame, st.just(wire.PING), st.sampled_from([0, 1]), st.just(0), st.binary(min_size=8, max_size=8)),
    st.builds(frame, st.just(wire.GOAWAY), st.just(0), st.just(0), st.builds(bytes.__add__, WORDS, WORDS)),
    st.builds(frame, st.integers(0, 20), st.integers(0, 255), IDS, st.binary(max_size=20)),
    st.binary(max_size=20),
)
ABORT = Abort(Party.US, Stage.BODY, Cause.CANCELLED)
LIMITS = H2Limits(stream_window=1000, connection_window=70_000, max_header_bytes=500)
OURS = st.sampled_from(["", "", "head", "data", "end", "abort", "pause", "resume", "trailers", "read"])


def check_endings(words: list[str]) -> None:
    """A receiver hears one end, one abort, and nothing of the body after either."""
    assert words.count("end") <= 1 and words.count("abort") <= 1
    if "abort" in words:
        assert set(words[words.index("abort") :]) <= {"abort"}
    if "end" in words:
        assert set(words[words.index("end") :]) <= {"end", "abort", "full", "drained"}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(FRAMES, OURS), max_size=40))
def test_a_server(steps: list[tuple[bytes, str]]) -> None:
    served = Served(LIMITS)
    for said, ours in steps:
        served.say(said)
        if served.requests:
            stream = served.requests[-1][0]
            if ours == "head":
                stream.head(ResponseHead(200, []))
            elif ours == "data":
                stream.data(b"x" * 500)
            elif ours == "trailers":
                stream.trailers([(b"x", b"y")])
            elif ours == "abort":
                stream.abort(ABORT)
            elif ours in ("end", "pause", "resume"):
                getattr(stream, ours)()
        if ours == "read":
            served.heard()
    served.heard()
    for _, _, told in served.requests:
        check_endings(told.words)
    served.h2.lose("over")
    assert not served.h2.streams
    assert served.h2.sender.queued == 0
    assert served.h2._owed >= 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(FRAMES, OURS), max_size=40))
def test_a_client(steps: list[tuple[bytes, str]]) -> None:
    edge = Edge(LIMITS)
    asked = [edge.ask(b"POST", end=False, length=None)]
    for said, ours in steps:
        edge.say(said)
        leg = asked[-1][0]
        if ours == "head" and edge.h2.room:
            asked.append(edge.ask(end=False))
        elif ours == "data":
            leg.data(b"x" * 500)
        elif ours == "trailers":
            leg.trailers([(b"x", b"y")])
        elif ours == "abort":
            leg.abort(ABORT)
        elif ours in ("end", "pause", "resume"):
            getattr(leg, ours)()
        elif ours == "read":
            edge.heard()
    edge.heard()
    edge.h2.lose("over")
    for _, told in asked:
        check_endings(told.words)
    assert (edge.h2.active, edge.h2.streams, edge.h2.sender.queued) == (0, {}, 0)
