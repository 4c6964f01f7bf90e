"""The client's half of HTTP/2 as transcripts: what the relay says, what leaves, what an edge's frames mean to a request."""

from __future__ import annotations

from typing import Any

import pytest

from proxy import h2_frames as wire
from proxy.h2_errors import Code
from proxy.h2_limits import H2Limits
from proxy.messages import Abort, Cause, Party, RequestHead, ResponseHead, Stage
from tests.peers.fakeleg import Recorder
from tests.proxy.h2_wire import OK, Edge, Seen, body, frame, headers, reset, settings, word

CANCEL = Abort(Party.CLIENT, Stage.HEAD, Cause.CANCELLED)


def goaway(last_id: int, code: int = 0) -> bytes:
    return frame(wire.GOAWAY, 0, 0, word(last_id) + word(code))


def abort_of(told: Recorder) -> Abort:
    word_heard, abort = told.heard[-1]
    assert word_heard == "abort"
    assert isinstance(abort, Abort)
    return abort


def test_preface_settings_and_first_request_are_one_write() -> None:
    edge = Edge(hello=b"")
    assert edge.hello_seen == [
        Seen("Settings", 0, {2: 0, 3: 0, 4: 1 << 20, 6: 65536}),
        Seen("WindowUpdate", 0, (32 << 20) - 65535),
    ]
    edge.ask()
    assert [s.kind for s in edge.heard()] == ["Headers"]


def test_a_request_leaves_with_its_pseudo_fields_first_and_in_lower_case() -> None:
    edge = Edge()
    leg = edge.h2.open()
    leg.head(
        RequestHead(
            b"POST", b"/v1/x?y=%2F", b"https", b"api.test", length=2,
            fields=[(b"Content-Length", b"2"), (b"Connection", b"x"), (b"Host", b"b.test"), (b"TE", b"trailers"),
                    (b"X-A", b"b")],
        )
    )  # fmt: skip
    leg.data(b"hi")
    leg.end()
    head, data = edge.heard()
    assert head.value == [
        (b":method", b"POST"), (b":scheme", b"https"), (b":authority", b"api.test"), (b":path", b"/v1/x?y=%2F"),
        (b"content-length", b"2"), (b"te", b"trailers"), (b"x-a", b"b"),
    ]  # fmt: skip
    assert data == Seen("Data", 1, b"hi", end=True)


def test_te_leaves_only_as_trailers() -> None:
    edge = Edge()
    edge.ask(fields=[(b"TE", b"gzip, trailers")])
    assert b"te" not in dict(edge.heard()[0].value)


def test_an_answer_arrives_with_interims_body_and_trailers() -> None:
    edge = Edge()
    _, told = edge.ask()
    edge.say(
        headers(1, [(b":status", b"103"), (b"link", b"</a>")]),
        headers(1, [*OK, (b"x", b"y")]),
        body(1, b"one"),
        headers(1, [(b"t", b"u")], end=True),
    )
    assert told.heard == [
        ("interim", ResponseHead(103, [(b"link", b"</a>")])),
        ("head", ResponseHead(200, [(b"x", b"y")])),
        ("data", b"one"),
        ("trailers", [(b"t", b"u")]),
        ("end", None),
    ]
    assert edge.h2.active == 0


@pytest.mark.parametrize(
    ("method", "status", "fields", "expected"),
    [
        (
            b"HEAD",
            b"200",
            [(b"content-length", b"99")],
            ResponseHead(200, [(b"content-length", b"99")], 99, no_body=True),
        ),
        (
            b"GET",
            b"304",
            [(b"content-length", b"99")],
            ResponseHead(304, [(b"content-length", b"99")], 99, no_body=True),
        ),
        (b"GET", b"204", [], ResponseHead(204, [], 0, no_body=True)),
        (b"GET", b"200", [], ResponseHead(200, [], 0)),
    ],
)
def test_answers_without_a_body(method: bytes, status: bytes, fields: list[Any], expected: ResponseHead) -> None:
    edge = Edge()
    _, told = edge.ask(method)
    edge.say(headers(1, [(b":status", status), *fields], end=True))
    assert told.heard == [("head", expected), ("end", None)]


BROKEN_ANSWERS = {
    "less body than announced": headers(1, [*OK, (b"content-length", b"5")]) + body(1, b"abc", end=True),
    "more body than announced": headers(1, [*OK, (b"content-length", b"2")]) + body(1, b"abc"),
    "a body after HEAD's answer": headers(1, [(b":status", b"204")]) + body(1, b"abc"),
    "DATA before the head": body(1, b"abc"),
    "an interim head that ends the stream": headers(1, [(b":status", b"103")], end=True),
    "101": headers(1, [(b":status", b"101")]),
    "no :status": headers(1, [(b"x", b"y")]),
    ":status that is no number": headers(1, [(b":status", b"2xx")]),
    "two :status": headers(1, [*OK, *OK]),
    "a request's pseudo-field": headers(1, [*OK, (b":path", b"/")]),
    "connection": headers(1, [*OK, (b"connection", b"close")]),
    "transfer-encoding": headers(1, [*OK, (b"transfer-encoding", b"chunked")]),
    "CR LF in a value": headers(1, [*OK, (b"x", b"a\r\nb: c")]),
    "an upper-case name": headers(1, [*OK, (b"X", b"y")]),
    "different content-lengths": headers(1, [*OK, (b"content-length", b"1"), (b"content-length", b"2")]),
    "two final heads": headers(1, OK) + headers(1, OK),
    "endless interim heads": headers(1, [(b":status", b"102")]) * 100,
}


@pytest.mark.parametrize("answer", BROKEN_ANSWERS.values(), ids=BROKEN_ANSWERS)
def test_a_broken_answer_is_an_abort_never_an_end(answer: bytes) -> None:
    edge = Edge()
    _, told = edge.ask()
    edge.say(answer)
    abort = abort_of(told)
    assert (abort.by, abort.cause, abort.unprocessed) == (Party.EDGE, Cause.BROKEN, False)
    assert "end" not in told.words
    assert edge.heard()[-1].kind == "RstStream"
    assert edge.h2.failed is None
    edge.ask()
    edge.say(headers(3, OK, end=True))


def test_an_oversized_answer_head_names_the_limit() -> None:
    edge = Edge(H2Limits(max_header_bytes=1000))
    _, told = edge.ask()
    edge.say(headers(1, [*OK, (b"x", b"y" * 1000)]))
    assert "1000 bytes" in abort_of(told).detail
    assert abort_of(told).cause is Cause.BROKEN


# ------------------------------------------------------------------------------------------------ ends


@pytest.mark.parametrize(
    ("code", "cause", "unprocessed"),
    [
        (Code.REFUSED_STREAM, Cause.REFUSED, True),
        (Code.HTTP_1_1_REQUIRED, Cause.REFUSED, True),
        (Code.ENHANCE_YOUR_CALM, Cause.REFUSED, False),
        (Code.CANCEL, Cause.CANCELLED, False),
        (Code.INTERNAL_ERROR, Cause.LOST, False),
        (Code.NO_ERROR, Cause.LOST, False),
        (0x99, Cause.LOST, False),
    ],
)
def test_a_reset_before_the_answer(code: int, cause: Cause, unprocessed: bool) -> None:
    edge = Edge()
    _, told = edge.ask()
    edge.heard()
    edge.say(reset(1, code))
    abort = abort_of(told)
    assert (abort.stage, abort.cause, abort.code, abort.unprocessed) == (Stage.HEAD, cause, code, unprocessed)


def test_a_refusal_after_the_answer_began_vouches_for_nothing() -> None:
    edge = Edge()
    _, told = edge.ask()
    edge.say(headers(1, OK), reset(1, Code.REFUSED_STREAM))
    assert (abort_of(told).stage, abort_of(told).unprocessed) == (Stage.BODY, False)


def test_a_reset_after_the_whole_answer_is_no_abort() -> None:
    # RFC 9113 8.1: the edge answered and does not want the rest of the upload.
    edge = Edge()
    leg, told = edge.ask(b"POST", end=False, length=None)
    edge.say(headers(1, [(b":status", b"401")], end=True), reset(1, Code.NO_ERROR))
    leg.data(b"more")
    leg.end()
    assert told.words == ["head", "end"]
    assert (edge.h2.active, edge.h2.streams) == (0, {})
    assert [s.kind for s in edge.heard()] == ["Headers"]


def test_a_cancel_resets_the_stream_and_late_frames_are_ignored() -> None:
    edge = Edge()
    leg, told = edge.ask()
    edge.heard()
    leg.abort(CANCEL)
    leg.abort(CANCEL)
    edge.say(headers(1, OK), body(1, b"late", end=True))
    assert edge.heard() == [Seen("RstStream", 1, Code.CANCEL)]
    assert (told.heard, edge.h2.active) == ([], 0)


def test_a_lost_connection_is_an_abort_for_each_by_how_far_it_was() -> None:
    edge = Edge()
    _, answered = edge.ask()
    _, asked = edge.ask()
    edge.heard()
    edge.say(headers(1, OK))
    _, unsent = edge.ask()
    edge.h2.lose("edge connection lost")
    assert [(abort_of(t).stage, abort_of(t).cause, abort_of(t).unprocessed) for t in (answered, asked, unsent)] == [
        (Stage.BODY, Cause.LOST, False),
        (Stage.HEAD, Cause.LOST, False),
        (Stage.CONNECT, Cause.LOST, True),
    ]
    assert (edge.h2.room, edge.h2.active) == (0, 0)


def test_goaway_parts_what_was_processed_from_what_was_not() -> None:
    edge = Edge()
    _, first = edge.ask(b"POST")
    _, second = edge.ask(b"POST")
    edge.heard()
    edge.say(goaway(wire.MAX_WINDOW), goaway(1))
    assert edge.h2.room == 0
    abort = abort_of(second)
    assert (abort.unprocessed, abort.stage) == (True, Stage.HEAD)
    edge.say(headers(1, OK), body(1, b"x", end=True))
    assert first.words == ["head", "data", "end"]
    assert edge.h2.active == 0


def test_a_goaway_may_not_take_back_a_refusal() -> None:
    edge = Edge()
    edge.ask()
    edge.say(goaway(0), goaway(1))
    assert edge.h2.failed is not None


def test_a_leg_whose_head_comes_after_goaway_was_not_processed() -> None:
    edge = Edge()
    leg, told = edge.h2.open(), Recorder()
    leg.receiver = told
    edge.say(goaway(0))
    leg.head(RequestHead(b"POST", b"/", b"https", b"a.test", []))
    assert abort_of(told).unprocessed
    assert edge.h2.active == 0


@pytest.mark.parametrize(
    "frames",
    [frame(wire.PUSH_PROMISE, 4, 1, word(2)), settings(enable_push=1), headers(2, OK), headers(99, OK), body(99, b"x"),
     frame(wire.PRIORITY_UPDATE, 0, 0, word(1)), frame(wire.SETTINGS, 0, 0, b"x")],
    ids=["push", "push allowed by a server", "an even stream", "an idle stream", "DATA on an idle stream", "priority update",
         "settings"],
)  # fmt: skip
def test_a_broken_connection_breaks_every_request(frames: bytes) -> None:
    edge = Edge()
    _, told = edge.ask()
    edge.heard()
    edge.say(frames)
    assert edge.heard()[-1].kind == "GoAway"
    assert abort_of(told).cause is Cause.BROKEN
    assert not abort_of(told).unprocessed


# ------------------------------------------------------------------------------------------------ places


def test_room_follows_the_peers_word() -> None:
    edge = Edge(hello=b"")
    assert edge.h2.room == 100
    edge.say(settings(max_concurrent_streams=2))
    legs = [edge.ask()[0] for _ in range(2)]
    assert (edge.h2.room, edge.h2.active) == (0, 2)
    legs[0].abort(CANCEL)
    assert (edge.h2.room, edge.h2.active) == (1, 1)
    edge.say(settings(max_concurrent_streams=0))
    assert edge.h2.room == 0


def test_a_leg_that_is_given_back_unused_frees_its_place() -> None:
    edge = Edge()
    leg = edge.h2.open()
    assert edge.h2.active == 1
    leg.abort(CANCEL)
    leg.abort(CANCEL)
    assert (edge.h2.active, edge.heard()) == (0, [])


def test_each_place_that_frees_is_told() -> None:
    edge = Edge()
    edge.ask()
    before = edge.changes
    edge.say(headers(1, OK, end=True))
    assert edge.changes > before


def test_only_the_first_leg_is_on_a_fresh_connection() -> None:
    edge = Edge()
    assert [edge.ask()[0].reused for _ in range(3)] == [False, True, True]


def test_ids_follow_the_order_of_heads_not_of_legs() -> None:
    edge = Edge()
    late, early = edge.h2.open(), edge.h2.open()
    for leg in (early, late):
        leg.head(RequestHead(b"GET", b"/", b"https", b"a.test", []))
    assert (early.id, late.id) == (1, 3)


def test_the_last_stream_id_ends_the_room() -> None:
    edge = Edge()
    edge.h2._next_id = wire.MAX_WINDOW
    assert edge.h2.room == 0


# ------------------------------------------------------------------------------------------------ tunnels

UPGRADE = {
    "protocol": b"websocket",
    "fields": [(b"Sec-WebSocket-Key", b"k"), (b"Sec-WebSocket-Version", b"13")],
    "end": False,
}


def test_a_websocket_is_an_extended_connect_and_its_200_a_101() -> None:
    edge = Edge(hello=settings(enable_connect_protocol=1))
    leg, told = edge.ask(**UPGRADE)
    edge.say(headers(1, [*OK, (b"sec-websocket-protocol", b"realtime")]), body(1, b"\x81\x00"))
    leg.data(b"\x81\x80")
    sent = edge.heard()
    assert dict(sent[0].value) == {
        b":method": b"CONNECT", b":protocol": b"websocket", b":scheme": b"https", b":authority": b"a.test", b":path": b"/",
        b"sec-websocket-version": b"13",
    }  # fmt: skip
    assert sent[1] == Seen("Data", 1, b"\x81\x80")
    assert told.heard == [
        ("head", ResponseHead(101, [(b"sec-websocket-protocol", b"realtime")])),
        ("data", b"\x81\x00"),
    ]
    leg.end()
    edge.say(body(1, b"bye", end=True))
    assert told.words[-2:] == ["data", "end"]
    assert edge.h2.active == 0


def test_a_websocket_waits_for_the_edges_settings() -> None:
    edge = Edge(hello=b"")
    leg, told = edge.ask(**UPGRADE)
    assert edge.heard() == []
    edge.say(settings(enable_connect_protocol=1))
    assert [s.kind for s in edge.heard()] == ["Settings", "Headers"]
    assert told.heard == []
    leg.abort(CANCEL)
    assert edge.h2.active == 0


@pytest.mark.parametrize("hello", [b"", settings()], ids=["before its settings", "after them"])
def test_an_edge_that_knows_no_extended_connect_got_nothing(hello: bytes) -> None:
    edge = Edge(hello=hello)
    _, told = edge.ask(**UPGRADE)
    edge.say(settings())
    assert abort_of(told).unprocessed
    assert abort_of(told).stage is Stage.CONNECT
    assert edge.h2.active == 0


def test_a_refused_websocket_is_an_ordinary_answer() -> None:
    edge = Edge(hello=settings(enable_connect_protocol=1))
    _, told = edge.ask(**UPGRADE)
    edge.say(headers(1, [(b":status", b"403"), (b"content-length", b"2")]), body(1, b"no", end=True))
    assert told.words == ["head", "data", "end"]
    assert told.heard[0][1].status == 403
    edge.heard()
    assert (edge.h2.active, edge.h2.streams) == (0, {})  # nobody ends a request that was to become a tunnel


def test_the_open_half_of_a_tunnel_hears_that_the_connection_is_lost() -> None:
    edge = Edge(hello=settings(enable_connect_protocol=1))
    leg, told = edge.ask(**UPGRADE)
    edge.say(headers(1, OK), body(1, b"bye", end=True))
    leg.data(b"still here")
    edge.h2.lose("edge connection lost")
    assert told.words == ["head", "data", "end", "abort"]
