"""A tunnel between two fake legs: what each peer is sent, when it is asked for life, and how each ending is told."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from config.model import WebSocket
from proxy.io import websocket_tunnel
from proxy.io.websocket_tunnel import TunnelEnd, WebSocketTunnel
from proxy.messages import Abort, Cause, Party, Stage
from proxy.websocket import MAX_KEPT, Op, close_frame, frame, masked
from tests.patience import HANG_S
from tests.peers.fakeleg import FakeLeg

MASK = b"\x0a\x0b\x0c\x0d"
LOST = Abort(Party.EDGE, Stage.BODY, Cause.LOST, "connection reset")
GONE = Abort(Party.CLIENT, Stage.BODY, Cause.LOST, "connection reset")
SLOW = WebSocket(ping_interval_s=20.0, pong_timeout_s=45.0)
QUICK = WebSocket(ping_interval_s=0.04, pong_timeout_s=0.1)


def text(payload: bytes, *, fin: bool = True, op: Op = Op.TEXT, from_client: bool = False) -> bytes:
    head = bytes([fin << 7 | op, len(payload) | from_client << 7])
    return head + (MASK + masked(payload, MASK) if from_client else payload)


@dataclass(frozen=True)
class Seen:
    op: int
    payload: bytes
    was_masked: bool

    @property
    def code(self) -> int:
        return int(struct.unpack("!H", self.payload[:2])[0])


def frames(raw: bytes) -> list[Seen]:
    """Every frame of less than 126 bytes in what a leg was sent; the rest must be nothing."""
    seen, at = [], 0
    while at < len(raw):
        size, mask = raw[at + 1] & 0x7F, b""
        at, first, has_mask = at + 2, raw[at], raw[at + 1] & 0x80
        if has_mask:
            mask, at = raw[at : at + 4], at + 4
        payload = raw[at : at + size]
        assert len(payload) == size, "a frame was cut"
        seen.append(Seen(first & 15, masked(payload, mask) if mask else payload, bool(has_mask)))
        at += size
    return seen


class Answering(FakeLeg):
    """A peer that answers each ping, a loop turn later."""

    from_client = False

    def data(self, chunk: bytes) -> None:
        super().data(chunk)
        for seen in frames(chunk):
            if seen.op == Op.PING:
                pong = text(seen.payload, op=Op.PONG, from_client=self.from_client)
                asyncio.get_running_loop().call_soon(lambda pong=pong: self.receiver.on_data(pong))


class AnsweringClient(Answering):
    from_client = True


@dataclass
class Joined:
    """A tunnel, its legs, and how it ended."""

    config: WebSocket = SLOW
    reconnects: bool = False
    clock: Callable[[], float] | None = None
    client: FakeLeg = field(default_factory=FakeLeg)
    edge: FakeLeg = field(default_factory=FakeLeg)
    ends: list[TunnelEnd] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        more = {"clock": self.clock} if self.clock else {}
        self.tunnel = WebSocketTunnel(
            self.client,
            self.edge,
            self.config,
            on_finished=self.ends.append,
            reconnect=self.on_reconnect if self.reconnects else None,
            **more,
        )

    def on_reconnect(self) -> None:
        self.asked += 1

    def client_says(self, *chunks: bytes) -> None:
        for chunk in chunks:
            self.client.receiver.on_data(chunk)

    def edge_says(self, *chunks: bytes) -> None:
        for chunk in chunks:
            self.edge.receiver.on_data(chunk)

    def leave(self) -> None:
        """Both peers' connections end, so that no timer outlives the test."""
        for leg in (self.edge, self.client):
            leg.receiver.on_abort(LOST)


@pytest.fixture
async def joined() -> Joined:
    return Joined()


async def until(true: Callable[[], object], within_s: float = HANG_S) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.005)


def closes_in(raw: bytes) -> list[int]:
    return [seen.code for seen in frames(raw) if seen.op == Op.CLOSE]


def closes(leg: FakeLeg) -> list[int]:
    return closes_in(leg.body)


def pings(leg: FakeLeg) -> list[Seen]:
    return [seen for seen in frames(leg.body) if seen.op == Op.PING]


# ------------------------------------------------------------------------------------------ passing


async def test_bytes_pass_both_ways_unchanged_and_at_once(joined: Joined) -> None:
    up, down = text(b"question", from_client=True), text(b"answer")
    joined.client_says(up[:5], up[5:])
    joined.edge_says(down + down)
    assert joined.edge.body == up and joined.client.body == down + down


async def test_slow_reader_stops_the_reads_on_the_other_side(joined: Joined) -> None:
    joined.client.receiver.on_full()
    assert joined.edge.paused and not joined.client.paused
    joined.client.receiver.on_drained()
    assert not joined.edge.paused


async def test_peers_ping_is_passed_for_the_peer_to_answer(joined: Joined) -> None:
    ping, pong = text(b"theirs", op=Op.PING, from_client=True), text(b"theirs", op=Op.PONG)
    joined.client_says(ping)
    joined.edge_says(pong)
    assert joined.edge.body == ping and joined.client.body == pong


# ------------------------------------------------------------------------------------------ asking for life


async def test_both_legs_are_pinged_and_the_answers_stay_with_us() -> None:
    joined = Joined(QUICK, client=AnsweringClient(), edge=Answering())
    await until(lambda: len(pings(joined.client)) >= 5 and len(pings(joined.edge)) >= 5)
    assert not joined.ends, "five intervals are twice the limit: only the answers kept it up"
    assert {seen.op for seen in frames(joined.client.body) + frames(joined.edge.body)} == {Op.PING}
    assert not pings(joined.client)[0].was_masked and pings(joined.edge)[0].was_masked
    joined.leave()


async def test_silent_edge_closes_both_legs_with_1011() -> None:
    joined = Joined(QUICK, client=AnsweringClient())
    await until(lambda: closes(joined.client))
    assert closes(joined.client) == closes(joined.edge) == [1011]
    joined.client_says(text(struct.pack("!H", 1011), op=Op.CLOSE, from_client=True))
    joined.client.receiver.on_end()
    joined.edge.receiver.on_end()
    (end,) = joined.ends
    assert (end.by, end.cause, end.code) == (Party.EDGE, Cause.TIMED_OUT, 1011)
    assert "finish" in joined.client.words and "end" in joined.edge.words


async def test_silent_client_closes_both_legs_with_1011() -> None:
    joined = Joined(QUICK)

    def edge_talks_on() -> list[int]:
        joined.edge_says(text(b"token"))
        return closes(joined.client)

    await until(edge_talks_on)
    assert closes(joined.client) == closes(joined.edge) == [1011]
    joined.leave()


async def test_ping_waits_for_the_end_of_a_frame_that_is_under_way() -> None:
    joined = Joined(WebSocket(ping_interval_s=0.03, pong_timeout_s=30.0))
    long = text(b"x" * 100)
    joined.edge_says(long[:50])
    await until(lambda: len(pings(joined.edge)) > 1)
    assert joined.client.body == long[:50]
    joined.edge_says(long[50:] + long[:10])
    assert joined.client.body.startswith(long) and joined.client.body.endswith(long[:10])
    (between,) = frames(joined.client.body[len(long) : -10])
    assert between.op == Op.PING
    joined.leave()


async def test_ping_that_waits_is_dropped_behind_the_close_it_would_follow() -> None:
    joined = Joined(WebSocket(ping_interval_s=0.03, pong_timeout_s=30.0))
    long = text(b"x" * 100)
    joined.edge_says(long[:50])
    await until(lambda: len(pings(joined.edge)) > 1)
    joined.edge_says(long[50:] + close_frame(1000, ""))
    assert [seen.op for seen in frames(joined.client.body)] == [Op.TEXT, Op.CLOSE]
    joined.leave()


async def test_leg_that_never_comes_to_a_boundary_is_judged_by_silence_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_tunnel, "CLOSE_WAIT_S", 0.05)
    joined = Joined(QUICK)
    begun = text(b"x" * 100, from_client=True)[:50]
    joined.client_says(begun)
    await until(lambda: joined.ends)
    assert joined.edge.body == begun and joined.edge.words[-1] == "abort"
    assert closes(joined.client) == [1011]


async def test_peer_that_we_do_not_read_is_not_given_up() -> None:
    joined = Joined(QUICK, client=AnsweringClient())
    joined.client.receiver.on_full()
    await until(lambda: len(pings(joined.client)) > 5)
    assert joined.edge.paused and not closes(joined.client)
    joined.leave()


async def test_slept_machine_asks_before_it_judges() -> None:
    slept = 0.0

    def clock() -> float:
        return asyncio.get_running_loop().time() + slept

    joined = Joined(QUICK, clock=clock)
    await until(lambda: pings(joined.client) and pings(joined.edge))
    asked = len(pings(joined.edge))
    slept = 3600.0
    await until(lambda: len(pings(joined.edge)) > asked)
    assert not closes(joined.client)
    joined.leave()


# ------------------------------------------------------------------------------------------ closing


@pytest.mark.parametrize("code", [1000, 1001, 3000])
async def test_close_of_a_peer_passes_with_code_and_text_and_both_end(joined: Joined, code: int) -> None:
    said = close_frame(code, "maximum duration of 60 minutes")
    answer = frame(Op.CLOSE, struct.pack("!H", code), MASK)
    joined.edge_says(said)
    joined.client_says(answer)
    assert joined.client.body == said and joined.edge.body == answer
    assert joined.client.words == joined.edge.words == ["data", "finish"]
    joined.edge.receiver.on_end()
    joined.client.receiver.on_end()
    assert joined.ends == [TunnelEnd(Party.EDGE, None, code, "", len(answer), len(said))]


async def test_close_that_is_never_answered_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_tunnel, "CLOSE_WAIT_S", 0.05)
    joined = Joined()
    joined.client_says(frame(Op.CLOSE, struct.pack("!H", 1000), MASK))
    await until(lambda: joined.ends)
    assert joined.client.words == ["abort"] and joined.edge.words == ["data", "abort"]


async def test_edge_that_drops_the_connection_on_a_close_is_answered_for(joined: Joined) -> None:
    joined.client_says(frame(Op.CLOSE, struct.pack("!H", 1000), MASK))
    joined.edge.receiver.on_end()
    assert closes(joined.client) == [1000] and joined.client.words == ["data", "finish"]
    joined.client.receiver.on_end()
    assert [(end.by, end.cause, end.code) for end in joined.ends] == [(Party.CLIENT, None, 1000)]


async def test_drain_says_1001_to_both_and_nothing_after_it(joined: Joined) -> None:
    joined.tunnel.drain()
    joined.edge_says(text(b"too late"))
    joined.client_says(text(b"too late", from_client=True))
    assert closes(joined.client) == closes(joined.edge) == [1001]
    assert len(frames(joined.client.body)) == len(frames(joined.edge.body)) == 1
    joined.leave()


async def test_drain_for_a_restart_says_1012_at_the_end_of_the_frame_under_way(joined: Joined) -> None:
    long = text(b"x" * 100)
    joined.edge_says(long[:50])
    joined.tunnel.drain(1012)
    assert joined.client.body == long[:50]
    joined.edge_says(long[50:])
    joined.edge_says(text(b"not this"))
    assert [seen.op for seen in frames(joined.client.body)] == [Op.TEXT, Op.CLOSE]
    assert closes(joined.client) == [1012]
    joined.leave()


# ------------------------------------------------------------------------------------------ losses


async def test_lost_edge_is_told_with_1011_at_once(joined: Joined) -> None:
    joined.edge_says(text(b"hi"))
    joined.edge.receiver.on_abort(LOST)
    assert closes(joined.client) == [1011] and "abort" not in joined.client.words
    joined.client_says(frame(Op.CLOSE, struct.pack("!H", 1011), MASK))
    assert joined.client.words[-1] == "finish"
    joined.client.receiver.on_end()
    assert [(end.by, end.cause, end.code) for end in joined.ends] == [(Party.EDGE, Cause.LOST, 1011)]


async def test_edge_lost_inside_a_frame_aborts_the_client(joined: Joined) -> None:
    joined.edge_says(text(b"hello")[:4])
    joined.edge.receiver.on_abort(LOST)
    assert joined.client.words == ["data", "abort"] and len(joined.ends) == 1


async def test_edge_lost_after_a_broken_frame_aborts_the_client(joined: Joined) -> None:
    joined.edge_says(text(b"x", op=Op.PING, fin=False))
    joined.edge.receiver.on_abort(LOST)
    assert joined.client.words == ["data", "abort"] and len(joined.ends) == 1


async def test_lost_client_cancels_the_edge_at_once(joined: Joined) -> None:
    joined.client.receiver.on_abort(GONE)
    assert joined.edge.only("abort").by is Party.CLIENT
    assert [(end.by, end.cause) for end in joined.ends] == [(Party.CLIENT, Cause.LOST)]


async def test_half_closed_client_still_hears_the_edge(joined: Joined) -> None:
    joined.client_says(text(b"last words", from_client=True))
    joined.client.receiver.on_end()
    assert joined.edge.words == ["data", "end"]
    joined.edge_says(text(b"tail"), close_frame(1000, ""))
    assert joined.client.body == text(b"tail") + close_frame(1000, "")
    joined.edge.receiver.on_end()
    assert joined.client.words[-1] == "end" and [end.cause for end in joined.ends] == [None]


async def test_half_closed_edge_still_hears_the_client_which_is_told_after_a_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket_tunnel, "GRACE_S", 0.08)
    joined = Joined()
    joined.edge.receiver.on_end()
    joined.client_says(text(b"c0", from_client=True))
    await until(lambda: closes(joined.client))
    joined.client_says(text(b"c1", from_client=True))
    said = [seen.payload for seen in frames(joined.edge.body) if seen.op == Op.TEXT]
    assert said == [b"c0", b"c1"] and closes(joined.client) == [1011]
    assert len(pings(joined.edge)) >= 2, "an edge that is gone is found by two writes"
    joined.leave()


async def test_probe_that_meets_a_reset_tells_the_client_before_the_grace_is_over() -> None:
    joined = Joined()
    joined.edge.receiver.on_end()
    await until(lambda: len(pings(joined.edge)) == 2)
    joined.edge.receiver.on_abort(LOST)
    assert closes(joined.client) == [1011]
    joined.leave()


async def test_half_closed_client_that_died_is_found_by_probes() -> None:
    joined = Joined()
    joined.client.receiver.on_end()
    await until(lambda: len(pings(joined.client)) == 2)
    joined.client.receiver.on_abort(GONE)
    assert "abort" in joined.edge.words and len(joined.ends) == 1


async def test_edge_that_ends_inside_a_frame_aborts_the_client(joined: Joined) -> None:
    joined.edge_says(text(b"hello")[:4])
    joined.edge.receiver.on_end()
    assert joined.client.words == ["data", "abort"] and len(joined.ends) == 1


async def test_start_of_a_frame_at_the_end_is_passed_on(joined: Joined) -> None:
    joined.client_says(b"\x81")
    assert joined.edge.body == b""
    joined.client.receiver.on_end()
    assert joined.edge.body == b"\x81"
    joined.leave()


# ------------------------------------------------------------------------------------------ another edge


async def test_edge_lost_before_its_first_message_is_replaced_unnoticed() -> None:
    joined = Joined(reconnects=True)
    opening = text(b"session.update", from_client=True)
    joined.client_says(opening)
    joined.edge_says(text(b"", op=Op.PING))
    joined.edge.receiver.on_abort(LOST)
    assert joined.asked == 1 and joined.client.paused
    joined.client_says(text(b"late", from_client=True))
    other = FakeLeg()
    joined.tunnel.attach(other)
    assert other.body == opening + text(b"late", from_client=True) and not joined.client.paused
    other.receiver.on_data(text(b"session.updated"))
    assert frames(joined.client.body)[-1].payload == b"session.updated" and not closes(joined.client)
    joined.client.receiver.on_abort(GONE)
    assert [end.reopened for end in joined.ends] == [1]


async def test_client_that_says_too_much_while_there_is_no_edge_is_closed() -> None:
    joined = Joined(reconnects=True)
    joined.edge.receiver.on_abort(LOST)
    for _ in range(2):
        joined.client_says(bytes([0x82, 0xFF]) + struct.pack("!Q", MAX_KEPT - 14) + MASK + bytes(MAX_KEPT - 14))
    assert not closes(joined.client), "a window may follow the pause"
    joined.client_says(text(bytes(64), from_client=True, op=Op.BINARY))
    assert closes(joined.client) == [1011]
    joined.leave()


async def test_edge_that_ends_before_its_first_message_is_replaced_too() -> None:
    joined = Joined(reconnects=True)
    joined.edge.receiver.on_end()
    assert joined.asked == 1 and joined.edge.words == ["abort"]
    joined.leave()


async def test_edge_lost_after_its_first_message_is_not_replaced() -> None:
    joined = Joined(reconnects=True)
    joined.edge_says(text(b"session.created"))
    joined.edge.receiver.on_abort(LOST)
    assert joined.asked == 0 and closes(joined.client) == [1011]
    joined.leave()


async def test_opening_too_long_to_keep_is_not_repeated() -> None:
    joined = Joined(reconnects=True)
    joined.client_says(bytes([0x82, 0xFF]) + struct.pack("!Q", MAX_KEPT) + MASK + bytes(MAX_KEPT))
    joined.edge.receiver.on_abort(LOST)
    assert joined.asked == 0 and closes(joined.client) == [1011]
    joined.leave()


async def test_replay_says_only_the_kept_messages_to_another_edge() -> None:
    joined = Joined(WebSocket(on_edge_failure="replay", replay_messages=1), reconnects=True)
    first, second = (text(said, from_client=True) for said in (b"session.update", b"response.create"))
    joined.client_says(first + second)
    joined.edge_says(text(b"session.updated"))
    joined.edge.receiver.on_abort(LOST)
    other = FakeLeg()
    joined.tunnel.attach(other)
    assert joined.asked == 1 and other.body == first
    joined.leave()


async def test_replay_inside_a_message_is_a_loss() -> None:
    joined = Joined(WebSocket(on_edge_failure="replay", replay_messages=1), reconnects=True)
    joined.client_says(text(b"session.update", from_client=True))
    joined.edge_says(text(b"half a ", fin=False))
    joined.edge.receiver.on_abort(LOST)
    assert joined.asked == 0 and closes(joined.client) == [1011]
    joined.leave()


async def test_client_is_told_when_no_other_edge_can_be_had() -> None:
    joined = Joined(reconnects=True)
    joined.edge.receiver.on_abort(LOST)
    joined.tunnel.give_up(Abort(Party.US, Stage.CONNECT, Cause.LOST, "no candidate is left"))
    assert closes(joined.client) == [1011] and not joined.client.paused
    joined.leave()


async def test_edge_that_comes_after_the_client_left_is_cancelled() -> None:
    joined = Joined(reconnects=True)
    joined.edge.receiver.on_abort(LOST)
    joined.client.receiver.on_abort(GONE)
    late = FakeLeg()
    joined.tunnel.attach(late)
    assert late.words == ["abort"] and len(joined.ends) == 1


async def test_client_that_closes_while_there_is_no_edge_is_answered() -> None:
    joined = Joined(reconnects=True)
    joined.edge.receiver.on_abort(LOST)
    joined.client_says(frame(Op.CLOSE, struct.pack("!H", 1000), MASK))
    assert closes(joined.client) == [1000]
    joined.client.receiver.on_end()
    assert [end.code for end in joined.ends] == [1000]


async def test_reopenings_are_bounded() -> None:
    joined = Joined(reconnects=True)
    joined.edge.receiver.on_abort(LOST)
    for _ in range(5):
        another = FakeLeg()
        joined.tunnel.attach(another)
        another.receiver.on_abort(LOST)
    assert joined.asked == websocket_tunnel.MAX_REOPENINGS and closes(joined.client) == [1011]
    joined.leave()


async def test_finished_tunnel_leaves_no_timer(joined: Joined) -> None:
    joined.leave()
    joined.tunnel.drain()
    assert joined.tunnel._timer is not None and joined.tunnel._timer.cancelled()
    assert len(joined.ends) == 1
