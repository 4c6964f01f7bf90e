"""What the gateway's words become at a stock HTTP/3 client: answers, cancels of either side, back-pressure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from proxy.io.quic_flow import STREAM_WINDOW
from proxy.io.quic_server import H3ServerConnection
from proxy.io.rims import HIGH_WATER
from proxy.messages import Abort, Cause, Party, ResponseHead, Stage
from tests.patience import timed
from tests.peers.h3peers import Answer, Client, Exchanged, Gateway, listening, say


def stop(client: Client, answer: Answer, code: int = 0x10C) -> None:
    client.quic.stop_stream(answer.stream_id, code)
    client.protocol.transmit()


def reset(client: Client, answer: Answer, code: int = 0x10C) -> None:
    client.quic.reset_stream(answer.stream_id, code)
    client.protocol.transmit()


# -- the answer as the client gets it


async def test_interim_heads_final_head_body_and_trailers_arrive_in_order(ca: str, pem: str) -> None:
    def answer_all(x: Exchanged) -> None:
        assert x.leg is not None
        x.leg.interim(ResponseHead(100, []))
        x.leg.interim(ResponseHead(103, [(b"Link", b"</a>")]))
        x.leg.head(ResponseHead(200, [(b"Content-Type", b"text/plain"), (b"Connection", b"keep-alive")]))
        x.leg.data(b"one")
        x.leg.data(b"two")
        x.leg.trailers([(b"X-Sum", b"6")])
        x.leg.end()

    async with listening(Gateway(answer_all), pem) as listener, Client(listener.address[1], ca) as client:
        answer = await client.ask().whole()
    assert answer.statuses == [b"100", b"103", b"200"]
    assert answer.sections[1][1:] == [(b"link", b"</a>")]
    assert answer.sections[2][1:] == [(b"content-type", b"text/plain")]
    assert answer.sections[3] == [(b"x-sum", b"6")]
    assert answer.body == b"onetwo"


async def test_head_leaves_before_there_is_a_body(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = await client.ask().until(lambda a: a.sections)
        assert not answer.ended


async def test_each_event_of_a_stream_leaves_on_its_own(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask()
        exchange = await gateway.request()
        assert exchange.leg is not None
        for number in range(5):
            exchange.leg.data(b"data: %d\n\n" % number)
            await answer.until(lambda a, n=number: a.body.endswith(b"data: %d\n\n" % n), 0.5)


async def test_answer_to_head_announces_a_length_and_has_no_body(ca: str, pem: str) -> None:
    def announce(x: Exchanged) -> None:
        assert x.leg is not None
        x.leg.head(ResponseHead(200, [(b"content-length", b"42")], 42, no_body=True))
        x.leg.end()

    async with listening(Gateway(announce), pem) as listener, Client(listener.address[1], ca) as client:
        client.http._check_content_length = lambda _: None  # type: ignore[method-assign]  # it knows no HEAD
        answer = client.ask("HEAD")
        await answer.until(lambda a: a.sections)
        assert answer.sections[0][1] == (b"content-length", b"42")


async def test_whole_answer_during_an_upload_stops_the_upload_without_error(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg, 413, b"too much"))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False, body=b"x" * 100)
        await answer.whole()
        await answer.until(lambda a: a.stopped is not None)
        assert (answer.status, answer.body, answer.reset, answer.stopped) == (413, b"too much", None, 0x100)


@pytest.mark.parametrize(
    ("abort", "code"),
    [
        (Abort(Party.EDGE, Stage.BODY, Cause.LOST), 0x102),
        (Abort(Party.EDGE, Stage.BODY, Cause.BROKEN), 0x102),
        (Abort(Party.EDGE, Stage.HEAD, Cause.TIMED_OUT), 0x102),
        (Abort(Party.US, Stage.BODY, Cause.CANCELLED), 0x10C),
        (Abort(Party.US, Stage.CONNECT, Cause.REFUSED, unprocessed=True), 0x10B),
        (Abort(Party.US, Stage.HEAD, Cause.REFUSED), 0x107),
        (Abort(Party.CLIENT, Stage.HEAD, Cause.BROKEN), 0x10E),
    ],
)
async def test_failed_stream_is_reset_never_ended(ca: str, pem: str, abort: Abort, code: int) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False)
        exchange = await gateway.request()
        assert exchange.leg is not None
        exchange.leg.head(ResponseHead(200, []))
        exchange.leg.data(b"partial")
        exchange.leg.abort(abort)
        exchange.leg.end()
        await answer.until(lambda a: a.reset is not None and a.stopped is not None)
        assert (answer.reset, answer.stopped, answer.ended) == (code, code, False)
        assert (answer.status, answer.body) == (200, b"partial"), "a reset takes nothing back that was passed on"
        assert "abort" not in exchange.words


# -- cancels


async def within(exchange: Exchanged, act: Callable[[], None], limit_s: float = 0.1) -> Abort:
    """The abort that follows an act, and that it came in time."""
    began = time.monotonic()
    act()
    abort: Abort = await exchange.heard_word("abort")
    assert time.monotonic() - began < limit_s
    return abort


@pytest.mark.parametrize("act", [stop, reset])
@pytest.mark.parametrize("begun", [False, True])
@timed
async def test_clients_cancel_is_heard_within_100_ms(
    ca: str, pem: str, act: Callable[[Client, Answer], None], begun: bool
) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=act is stop, body=b"x")
        exchange = await gateway.request()
        assert exchange.leg is not None
        if begun:
            exchange.leg.head(ResponseHead(200, []))
            exchange.leg.data(b"token")
            await answer.until(lambda a: a.body)
        abort = await within(exchange, lambda: act(client, answer))
        assert (abort.by, abort.cause, abort.code) == (Party.CLIENT, Cause.CANCELLED, 0x10C)
        assert exchange.words.count("abort") == 1
        exchange.leg.data(b"into the void")
        exchange.leg.end()
        assert (await gateway_answers(client, gateway)).status == 200


async def gateway_answers(client: Client, gateway: Gateway) -> Answer:
    gateway.answer = lambda x: say(x.leg)
    return await client.ask("GET", "/next").whole()


@timed
async def test_closed_connection_cancels_its_requests_within_100_ms(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        client.ask("POST", end=False)
        client.ask("GET")
        first, second = await gateway.request(0), await gateway.request(1)
        # Given a long path: the library's own word comes three probe timeouts later
        connection = gateway.connections[0]
        assert isinstance(connection, H3ServerConnection)
        connection.quic._loss._rtt_smoothed = 1.0
        abort = await within(first, lambda: client.protocol.close(0x100))
        assert (abort.by, abort.cause) == (Party.CLIENT, Cause.CANCELLED)
        assert second.words[-1] == "abort"
        await gateway.until(lambda g: len(g.lost) == 1)


async def test_finished_request_is_no_cancel(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", body=b"all")
        exchange = await gateway.request()
        await exchange.heard_word("end")
        say(exchange.leg, 200, b"fine")
        assert (await answer.whole()).body == b"fine"
        assert exchange.words == ["data", "end"]


async def test_client_that_resets_for_sport_is_closed(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        for _ in range(600):
            answer = client.ask()
            stop(client, answer)
            if client.closed:
                break
            await asyncio.sleep(0)
        await client.until(lambda c: c.closed)
        assert client.closed is not None and client.closed.error_code == 0x107
        assert len(gateway.exchanges) < 450


# -- back-pressure


async def test_paused_upload_stays_within_one_window(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.pause() if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False)
        client.send(answer, bytes(4 * STREAM_WINDOW))
        exchange = await gateway.request()
        await exchange.until(lambda x: len(x.body) > STREAM_WINDOW // 2)
        # A second stream's round trips prove that the connection is alive and nothing more came for the first.
        gateway.answer = lambda x: say(x.leg)
        for _ in range(5):
            await client.ask().whole()
        assert len(exchange.body) <= STREAM_WINDOW + 64
        assert exchange.leg is not None
        exchange.leg.resume()
        await exchange.until(lambda x: len(x.body) == 4 * STREAM_WINDOW)


async def test_many_paused_uploads_leave_the_connection_usable(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.pause() if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        for _ in range(8):
            answer = client.ask("POST", end=False)
            client.send(answer, bytes(STREAM_WINDOW // 4))
        await gateway.request(7)
        gateway.answer = lambda x: say(x.leg)
        assert (await client.ask().whole()).status == 200


async def test_unread_answer_says_full_once_and_drained_when_it_is_read(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    window = 64 * 1024
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca, max_stream_data=window) as client:
        # Given a client that gives no more credit than its first window
        client.quic._write_stream_limits = lambda **_: None  # type: ignore[method-assign]
        answer = client.ask()
        exchange = await gateway.request()
        leg = exchange.leg
        assert leg is not None
        while "full" not in exchange.words:
            leg.data(bytes(16 * 1024))
        await answer.until(lambda a: len(a.body) > window // 2)
        connection = gateway.connections[0]
        assert isinstance(connection, H3ServerConnection)
        held = connection.quic.unsent(answer.stream_id)
        assert HIGH_WATER - window - 16 * 1024 <= held <= HIGH_WATER + 32 * 1024
        assert exchange.words == ["end", "full"]
        # When it gives credit again
        del client.quic._write_stream_limits  # type: ignore[misc]
        client.quic._streams[answer.stream_id].max_stream_data_local = 1 << 24
        client.protocol.transmit()
        await exchange.heard_word("drained")
        assert exchange.words == ["end", "full", "drained"]
