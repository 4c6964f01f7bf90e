"""Flow control of HTTP/2: nothing beyond a window, no credit for what was not passed on, no window lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy import h2_frames as wire
from proxy.h2_errors import Code
from proxy.h2_limits import H2Limits
from proxy.h2_sender import CONNECTION_HIGH, PUMP_BYTES, STREAM_HIGH, STREAM_LOW
from proxy.h2_server import ServerStream
from proxy.messages import Abort, Cause, Party, ResponseHead, Stage
from tests.peers.fakeleg import Recorder
from tests.proxy.h2_wire import POST, Seen, Served, body, credit, frame, headers, reset, settings

SMALL = H2Limits(stream_window=1000, connection_window=100_000)
HEAD = ResponseHead(200, [])


def answering(hello: bytes = b"", limits: H2Limits | None = None) -> tuple[Served, ServerStream, Recorder]:
    served = Served(limits or H2Limits(), hello=wire.PREFACE + settings() + hello)
    stream, _, told = served.ask()
    stream.head(HEAD)
    return served, stream, told


def sizes(seen: list[Seen], stream_id: int = 1) -> list[int]:
    return [len(s.value) for s in seen if s.kind == "Data" and s.stream_id == stream_id]


# ------------------------------------------------------------------------------------------------ what we send


def test_a_body_stops_at_the_stream_window_and_goes_on_with_credit() -> None:
    served, stream, _ = answering(settings(initial_window_size=5))
    stream.data(b"1234567890")
    stream.end()
    assert sizes(served.heard()) == [5]
    served.say(credit(1, 3))
    assert sizes(served.heard()) == [3]
    served.say(credit(1, 100))
    assert served.heard() == [Seen("Data", 1, b"90", end=True)]


def test_a_body_stops_at_the_connection_window_and_goes_on_with_credit() -> None:
    served, stream, _ = answering(settings(initial_window_size=1 << 20))
    stream.data(b"x" * 70_000)
    assert sum(sizes(served.heard())) == 65_535
    served.say(credit(0, 1000))
    assert sizes(served.heard()) == [1000]


def test_a_window_below_zero_is_filled_up_first() -> None:
    # RFC 9113 6.9.2, and h2spec 6.9.2/2.
    served, stream, _ = answering(settings(initial_window_size=3))
    stream.data(b"123456")
    assert sizes(served.heard()) == [3]
    served.say(settings(initial_window_size=1), credit(1, 2))
    assert sizes(served.heard()) == []
    served.say(credit(1, 1))
    assert sizes(served.heard()) == [1]
    served.say(settings(initial_window_size=100))
    assert sizes(served.heard()) == [2]


def test_an_end_needs_no_window() -> None:
    served, stream, _ = answering(settings(initial_window_size=0))
    served.heard()
    stream.end()
    assert served.heard() == [Seen("Data", 1, b"", end=True)]


def test_trailers_wait_for_the_body_before_them() -> None:
    served, stream, _ = answering(settings(initial_window_size=2))
    stream.data(b"1234")
    stream.trailers([(b"x", b"y")])
    stream.end()
    assert [s.kind for s in served.heard()] == ["Headers", "Data"]
    served.say(credit(1, 2))
    assert served.heard() == [Seen("Data", 1, b"34"), Seen("Headers", 1, [(b"x", b"y")], end=True)]


def test_frames_are_no_larger_than_the_peer_allows() -> None:
    served, stream, _ = answering(settings(initial_window_size=1 << 20) + credit(0, 1 << 20))
    stream.data(b"x" * 40_000)
    assert sizes(served.heard()) == [16384, 16384, 7232]
    served.say(settings(max_frame_size=1 << 20))
    stream.data(b"x" * 100_000)
    assert max(sizes(served.heard())) == 64 * 1024


def test_small_chunks_that_waited_leave_in_one_frame() -> None:
    served, stream, _ = answering(settings(initial_window_size=0))
    for number in range(100):
        stream.data(b"event %d\n" % number)
    served.heard()
    served.say(settings(initial_window_size=1 << 20))
    assert len(sizes(served.heard())) == 1


def test_streams_that_wait_take_turns() -> None:
    served = Served(hello=wire.PREFACE + settings(initial_window_size=1 << 20))
    for stream_id in (1, 3):
        stream, _, _ = served.ask(stream_id)
        stream.head(HEAD)
    served.say(credit(0, 1))
    served.h2.sender.blocked = True
    for stream, _, _ in served.requests:
        stream.data(b"x" * 30_000)
    served.h2.sender.blocked = False
    assert [s.stream_id for s in served.heard() if s.kind == "Data"] == [1, 3, 1, 3]


def test_one_turn_gives_the_transport_no_more_than_it_should_hold() -> None:
    served, stream, _ = answering(settings(initial_window_size=1 << 30) + credit(0, 1 << 30))
    served.h2.sender.blocked = True
    stream.data(b"x" * 1_000_000)
    served.h2.sender.blocked = False
    assert sum(sizes(served.heard())) <= PUMP_BYTES + 16384
    assert served.h2.sender.awake, "the rest waits for nobody"


def test_a_full_transport_lets_heads_and_resets_pass_and_holds_data() -> None:
    served, stream, _ = answering()
    served.h2.sender.blocked = True
    stream.data(b"x")
    assert [s.kind for s in served.heard()] == ["Headers"]
    served.h2.sender.blocked = False
    served.h2.sender.wake()
    assert sizes(served.heard()) == [1]


def test_a_stream_says_full_once_and_drained_once() -> None:
    served, stream, told = answering(settings(initial_window_size=0) + credit(0, 1 << 24))
    stream.data(b"x" * (STREAM_HIGH - 1))
    assert told.words == ["end"]
    stream.data(b"xx")
    stream.data(b"xx")
    assert told.words == ["end", "full"]
    served.say(credit(1, STREAM_HIGH - STREAM_LOW))
    served.heard()
    assert told.words == ["end", "full"]
    served.say(credit(1, 100))
    served.heard()
    assert told.words == ["end", "full", "drained"]


def test_many_streams_together_are_full_earlier() -> None:
    served = Served(hello=wire.PREFACE + settings(initial_window_size=0))
    fill = STREAM_LOW + 1
    for number in range(CONNECTION_HIGH // fill + 2):
        stream, _, told = served.ask(2 * number + 1)
        stream.head(HEAD)
        stream.data(b"x" * fill)
    assert served.requests[0][2].words == ["end"]
    assert told.words == ["end", "full"]


def test_a_drained_relay_may_send_at_once() -> None:
    served, stream, _ = answering(settings(initial_window_size=0) + credit(0, 1 << 24))

    class More(Recorder):
        def on_drained(self) -> None:
            stream.data(b"more")
            stream.end()

    stream.receiver = More()
    stream.data(b"x" * STREAM_HIGH)
    served.say(credit(1, 1 << 20))
    seen = served.heard() + served.heard() + served.heard()
    assert sum(sizes(seen)) == STREAM_HIGH + 4
    assert seen[-1].end


# ------------------------------------------------------------------------------------------------ what we take


def test_credit_comes_when_half_a_window_was_passed_on() -> None:
    served = Served(SMALL)
    served.ask(1, POST, end=False)
    served.say(body(1, b"x" * 499))
    assert served.heard() == []
    served.say(body(1, b"x"))
    assert served.heard() == [Seen("WindowUpdate", 1, 500)]


def test_padding_is_credited_too() -> None:
    served = Served(SMALL)
    served.ask(1, POST, end=False)
    served.say(frame(wire.DATA, wire.PADDED, 1, b"\xf9" + b"x" * 250 + b"\0" * 249))
    assert served.heard() == [Seen("WindowUpdate", 1, 500)]


def test_a_paused_stream_gives_no_credit_until_it_resumes() -> None:
    served = Served(SMALL)
    stream, _, told = served.ask(1, POST, end=False)
    stream.pause()
    served.say(body(1, b"x" * 1000))
    assert served.heard() == []
    assert told.body == b"x" * 1000
    stream.resume()
    assert served.heard() == [Seen("WindowUpdate", 1, 1000)]


def test_a_pause_from_within_on_data_withholds_that_chunk() -> None:
    served = Served(SMALL)
    stream, _, _ = served.ask(1, POST, end=False)

    class Pausing(Recorder):
        def on_data(self, chunk: bytes) -> None:
            stream.pause()

    stream.receiver = Pausing()
    served.say(body(1, b"x" * 600))
    assert served.heard() == []
    stream.resume()
    assert served.heard() == [Seen("WindowUpdate", 1, 600)]


def test_a_paused_stream_does_not_stop_another() -> None:
    served = Served(SMALL)
    stream, _, _ = served.ask(1, POST, end=False)
    served.ask(3, POST, end=False)
    stream.pause()
    served.say(body(1, b"x" * 1000), body(3, b"x" * 1000))
    assert [s.stream_id for s in served.heard()] == [3]


def test_a_stream_window_that_is_exceeded_resets_the_stream() -> None:
    served = Served(SMALL)
    stream, _, told = served.ask(1, POST, end=False)
    stream.pause()
    served.say(body(1, b"x" * 1000), body(1, b"y"))
    assert served.heard()[-1] == Seen("RstStream", 1, Code.FLOW_CONTROL_ERROR)
    assert told.words == ["data", "abort"]


def test_a_connection_window_that_is_exceeded_ends_the_connection() -> None:
    served = Served(H2Limits(stream_window=70_000, connection_window=66_000))
    stream, _, _ = served.ask(1, POST, end=False)
    stream.pause()
    served.say(*[body(1, b"x" * 16_000)] * 4)
    assert served.h2.failed is None
    served.say(body(1, b"x" * 16_000))
    assert served.heard()[-1] == Seen("GoAway", 0, Code.FLOW_CONTROL_ERROR)


CANCEL = Abort(Party.US, Stage.HEAD, Cause.CANCELLED)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["data", "late", "padded", "pause", "resume", "reset", "abort", "end", "short"]),
            st.integers(0, 400),
        ),
        max_size=60,
    )
)
def test_no_window_is_ever_lost(steps: list[tuple[str, int]]) -> None:
    """Whatever happens to the streams, once all are gone every byte was credited or is owed."""
    served = Served(H2Limits(stream_window=1_000_000, connection_window=1_000_000))
    stream_id, sent = 1, 0
    stream = served.ask(1, POST, end=False)[0]

    def fresh() -> ServerStream:
        nonlocal stream_id
        stream_id += 2
        extra = [(b"content-length", b"3")] if stream_id % 3 == 0 else []
        return served.ask(stream_id, POST + extra, end=False)[0]

    for step, size in steps:
        if not stream.recv_open:
            stream = fresh()
        if step == "data":
            served.say(body(stream.id, b"x" * size))
            sent += size
        elif step == "padded":
            served.say(frame(wire.DATA, wire.PADDED, stream.id, b"\x05" + b"x" * size + b"\0" * 5))
            sent += size + 6
        elif step == "late":
            served.say(reset(stream.id, 8), body(stream.id, b"x" * size))
            sent += size
        elif step == "short":
            served.say(body(stream.id, b"xy", end=True))
            sent += 2
        elif step == "end":
            served.say(body(stream.id, b"", end=True))
        elif step == "reset":
            served.say(reset(stream.id, 8))
        elif step == "abort":
            stream.abort(CANCEL)
        else:
            getattr(stream, step)()
    for open_stream in list(served.h2.streams.values()):
        open_stream.abort(CANCEL)
    assert served.h2.failed is None
    granted = sum(s.value for s in served.heard() if s.kind == "WindowUpdate" and s.stream_id == 0)
    assert served.h2._owed + granted == sent
    assert served.h2._recv_window == 1_000_000 - sent + granted
    assert served.h2.sender.queued == 0


@given(
    st.lists(st.integers(0, 40_000), max_size=12),
    st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(1, 50_000)), max_size=20),
    st.integers(0, 60_000),
)
def test_no_byte_is_lost_repeated_or_sent_beyond_a_window(
    chunks: list[int], amounts: list[tuple[int, int]], window: int
) -> None:
    served, stream, _ = answering(settings(initial_window_size=window))
    text = bytes(range(256)) * 200
    wanted = b"".join(text[: size % len(text)] for size in chunks)
    for size in chunks:
        stream.data(text[: size % len(text)])
    stream.end()
    got, allowed, everywhere = b"", window, 65_535
    for stream_id, amount in [(1, 0), *amounts, (1, 1 << 24), (0, 1 << 24)]:
        if amount:
            served.say(credit(stream_id, amount))
        allowed += amount * (stream_id == 1)
        everywhere += amount * (stream_id == 0)
        while served.h2.sender.awake:
            got += b"".join(s.value for s in served.heard() if s.kind == "Data")
        assert len(got) <= min(allowed, everywhere)
    assert got == wanted
    assert not served.h2.streams


def test_a_request_that_never_gets_credit_costs_what_the_mark_says() -> None:
    served, stream, told = answering(settings(initial_window_size=0))
    stream.data(b"x" * STREAM_HIGH)
    assert "full" in told.words
    assert served.h2.sender.queued == STREAM_HIGH
    served.say(headers(3, POST, end=True), reset(1, 8))
    assert served.h2.sender.queued == 0
