"""What leaves on an HTTP/2 connection when many streams speak in one turn: every byte, in order, within every window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from proxy import h2_frames as wire
from proxy.h2_sender import PUMP_BYTES
from proxy.h2_server import ServerStream
from proxy.messages import Abort, Cause, Party, ResponseHead, Stage
from tests.proxy.h2_wire import Seen, Served, credit, frame, settings

HEAD = ResponseHead(200, [])
CANCEL = Abort(Party.EDGE, Stage.BODY, Cause.LOST)
PING = frame(wire.PING, 0, 0, b"8 bytes!")
WINDOW = 65_535


def speaking(count: int, *, window: int = 1 << 24) -> tuple[Served, list[ServerStream]]:
    """`count` answers whose heads have left; the connection's window is still the default."""
    served = Served(hello=wire.PREFACE + settings(initial_window_size=window))
    streams = [served.ask(2 * number + 1)[0] for number in range(count)]
    for stream in streams:
        stream.head(HEAD)
    served.heard()
    return served, streams


def data_of(seen: list[Seen]) -> list[tuple[int, bytes, bool]]:
    return [(s.stream_id, s.value, s.end) for s in seen if s.kind == "Data"]


def test_tokens_of_many_streams_are_a_frame_each_in_the_order_they_came() -> None:
    served, (one, two) = speaking(2)
    for stream, token in [(one, b"a"), (two, b"bb"), (one, b"ccc"), (two, b"d" * 300)]:
        stream.data(token)
    assert data_of(served.heard()) == [(1, b"a", False), (3, b"bb", False), (1, b"ccc", False), (3, b"d" * 300, False)]
    assert served.wakes == 3, "the hello's turn, the heads' and this one"


def test_tokens_fill_the_connections_window_to_the_byte_and_wait_for_more() -> None:
    served, streams = speaking(3)
    for number in range(300):
        streams[number % 3].data(b"%0300d" % number)
        if number % 7 == 0:
            served.say(PING)
    first = served.heard()
    assert sum(len(value) for _, value, _ in data_of(first)) == WINDOW
    assert sum(1 for seen in first if seen.kind == "Ping") == 43
    assert served.h2.sender.window == 0
    served.say(credit(0, 1 << 20))
    rest = served.heard()
    for stream in streams:
        text = b"".join(value for stream_id, value, _ in data_of(first + rest) if stream_id == stream.id)
        assert text == b"".join(b"%0300d" % number for number in range(300) if streams[number % 3] is stream)


def test_tokens_do_not_pass_their_streams_window() -> None:
    served, (one, two) = speaking(2, window=10)
    for token in (b"1234", b"5678", b"9abc"):
        one.data(token)
        two.data(b"x")
    sent = data_of(served.heard())
    assert b"".join(value for stream_id, value, _ in sent if stream_id == 1) == b"123456789a"
    assert b"".join(value for stream_id, value, _ in sent if stream_id == 3) == b"xxx"


def test_tokens_of_one_turn_stop_where_a_turn_stops() -> None:
    served, (stream,) = speaking(1)
    served.say(credit(0, 1 << 24))
    for _ in range(4000):
        stream.data(b"x" * 100)
    size = sum(len(value) for _, value, _ in data_of(served.heard()))
    assert PUMP_BYTES - 20_000 < size <= PUMP_BYTES + 100
    assert served.h2.sender.awake, "the rest waits for nobody"


def test_a_chunk_behind_a_token_is_no_larger_frame_than_the_peer_takes() -> None:
    served, (stream,) = speaking(1)
    stream.data(b"x")
    stream.data(b"y" * 20_000)
    assert [len(value) for _, value, _ in data_of(served.heard())] == [1, 16_384, 3_616]


def test_a_token_does_not_pass_what_waits_of_its_stream() -> None:
    served, (one, two) = speaking(2, window=0)
    served.say(credit(3, 100))
    one.data(b"first")
    two.data(b"x")
    served.say(credit(1, 100))
    one.data(b"second")
    assert b"".join(value for stream_id, value, _ in data_of(served.heard()) if stream_id == 1) == b"firstsecond"


def test_frames_after_smaller_ones_were_asked_for_are_smaller() -> None:
    served, (stream,) = speaking(1)
    served.say(settings(max_frame_size=1 << 16))
    stream.data(b"x")
    served.say(settings(max_frame_size=1 << 14))
    stream.data(b"y" * 20_000)
    assert [len(value) for _, value, _ in data_of(served.heard())] == [1, 16_384, 3_616]


def test_nothing_is_sent_past_a_reset() -> None:
    served, (one, two) = speaking(2)
    one.data(b"a")
    two.data(b"b")
    one.abort(CANCEL)
    two.data(b"d")
    one.data(b"c")
    assert [(s.kind, s.stream_id) for s in served.heard()] == [("Data", 1), ("Data", 3), ("RstStream", 1), ("Data", 3)]


def test_an_end_at_once_is_said_by_the_last_frame() -> None:
    served, (one, two) = speaking(2)
    one.data(b"a")
    two.data(b"b")
    two.end()
    assert data_of(served.heard()) == [(1, b"a", False), (3, b"b", True)]


def test_ends_are_said_by_the_heads_that_have_not_left_whoever_spoke_between() -> None:
    served = Served()
    streams = [served.ask(2 * number + 1)[0] for number in range(3)]
    for stream in streams:
        stream.head(HEAD)
    for stream in streams:
        stream.end()
    assert [(s.kind, s.stream_id, s.end) for s in served.heard()] == [
        ("Headers", stream.id, True) for stream in streams
    ]


def test_an_end_behind_a_head_and_what_waited_of_its_body_is_said_by_neither() -> None:
    served = Served()
    one, _, told = served.ask(1)
    two = served.ask(3)[0]
    told.on_drained = one.end  # type: ignore[method-assign]
    one.head(HEAD)
    served.h2.sender.blocked = True
    one.data(b"x" * 60_000)
    one.full = True
    two.head(HEAD)
    served.h2.sender.blocked = False
    seen = [(s.kind, s.stream_id, s.end) for s in served.heard() if s.stream_id == 1]
    assert seen == [("Headers", 1, False), *[("Data", 1, False)] * 4, ("Data", 1, True)]


def test_an_end_after_somebody_elses_frame_is_a_frame_of_its_own() -> None:
    served, (one, two) = speaking(2)
    one.data(b"a")
    two.data(b"b")
    one.end()
    served.say(PING)
    two.end()
    assert data_of(served.heard()) == [(1, b"a", False), (3, b"b", False), (1, b"", True), (3, b"", True)]


def test_each_stream_that_waited_ends_with_its_last_frame() -> None:
    served, streams = speaking(3, window=0)
    for stream in streams:
        stream.data(b"x" * 100)
        stream.end()
    served.say(*[credit(stream.id, 100) for stream in streams])
    assert data_of(served.heard()) == [(stream.id, b"x" * 100, True) for stream in streams]


STEPS = st.one_of(
    st.tuples(st.just("data"), st.integers(0, 3), st.one_of(st.integers(0, 400), st.integers(0, 40_000))),
    st.tuples(st.just("end"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("take"), st.just(0), st.just(0)),
    st.tuples(st.just("ping"), st.just(0), st.just(0)),
    st.tuples(st.just("credit"), st.integers(-1, 3), st.integers(1, 30_000)),
    st.tuples(st.just("window"), st.just(0), st.integers(0, 60_000)),
    st.tuples(st.just("block"), st.integers(0, 1), st.just(0)),
)


@hypothesis_settings(max_examples=300)
@given(st.lists(STEPS, max_size=60), st.integers(0, 60_000))
def test_whatever_is_said_in_a_turn_every_byte_leaves_once_and_within_the_windows(
    steps: list[tuple[str, int, int]], window: int
) -> None:
    served, streams = speaking(4, window=window)
    wanted = {stream.id: b"" for stream in streams}
    got = dict.fromkeys(wanted, b"")
    ended: set[int] = set()
    allowed, everywhere, initial = dict.fromkeys(wanted, window), WINDOW, window

    def take() -> None:
        for stream_id, value, end in data_of(served.heard()):
            assert stream_id not in ended
            got[stream_id] += value
            if end:
                ended.add(stream_id)
        assert sum(map(len, got.values())) <= everywhere

    for step, which, size in steps:
        if step == "data":
            if streams[which].send_open and not streams[which].ending:
                text = bytes([which + 1]) * (size // 2) + bytes([size % 251]) * (size - size // 2)
                wanted[streams[which].id] += text
                streams[which].data(text)
        elif step == "end":
            streams[which].end()
        elif step == "take":
            before = {stream.id: len(got[stream.id]) for stream in streams}
            take()
            for stream_id, limit in allowed.items():
                assert len(got[stream_id]) in (before[stream_id], *range(limit + 1))
        elif step == "ping":
            served.say(PING)
        elif step == "block":
            served.h2.sender.blocked = bool(which)
        elif step == "window":
            take()  # what lies in the output was allowed when it went there
            served.say(settings(initial_window_size=size))
            for stream_id in allowed:
                allowed[stream_id] += size - initial
            initial = size
        elif which < 0:
            served.say(credit(0, size))
            everywhere += size
        else:
            served.say(credit(streams[which].id, size))
            allowed[streams[which].id] += size
    served.h2.sender.blocked = False
    served.say(credit(0, 1 << 24), *[credit(stream.id, 1 << 24) for stream in streams if stream.send_open])
    everywhere += 1 << 24
    for stream in streams:
        stream.end()
    while served.h2.sender.awake:
        take()
    assert got == wanted
    assert ended == set(wanted)
    assert served.h2.sender.window == everywhere - sum(map(len, got.values()))
