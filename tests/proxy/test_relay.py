"""The relay between fake legs: every rule of the data path that is not a protocol, as transcripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from config.model import Edge, Pool, Retry, Timeouts, WebSocket
from proxy.failover import RetryBudget
from proxy.io.edge_state import Place
from proxy.io.edges import Shed
from proxy.io.exchange import Exchange
from proxy.io.relay import Relay
from proxy.io.rims import DialMarks, Opening, Origin
from proxy.io.sides import HOLD_BYTES, REPLAY_BYTES
from proxy.messages import Abort, Cause, Fields, Party, RequestHead, ResponseHead, Stage
from proxy.priority import PathPriorities
from proxy.waterfall import RequestRecord
from tests.peers.fakeleg import FakeLeg

LOST = Abort(Party.EDGE, Stage.HEAD, Cause.LOST, "connection reset")
UNREACHABLE = Abort(Party.EDGE, Stage.CONNECT, Cause.LOST, "connection refused", unprocessed=True)
CLIENT_GONE = Abort(Party.CLIENT, Stage.BODY, Cause.CANCELLED, "connection reset")
SSE = [(b"content-type", b"text/event-stream")]


@dataclass
class FakeConnections:
    """Hands out what the test put in: a leg at once, a failure, or nothing yet."""

    ready: list[FakeLeg | Abort] = field(default_factory=list)
    asked: list[tuple[bool, bool]] = field(default_factory=list)
    waiting: list[Opening] = field(default_factory=list)
    cancelled: list[Opening] = field(default_factory=list)

    def open(self, opening: Opening, *, fresh: bool = False, upgrade: bytes = b"") -> None:
        self.asked.append((fresh, bool(upgrade)))
        if not self.ready:
            self.waiting.append(opening)
            return
        answer = self.ready.pop(0)
        if isinstance(answer, Abort):
            opening.on_open_failed(answer)
        else:
            opening.on_open(answer, DialMarks(version="h1", reused=answer.reused))

    def cancel(self, opening: Opening) -> None:
        self.cancelled.append(opening)


@dataclass
class FakeEdge:
    config: Edge
    connections: FakeConnections = field(default_factory=FakeConnections)
    header_fields: Fields = field(default_factory=list)
    begun: int = 0
    statuses: list[int] = field(default_factory=list)
    finished: list[Abort | None] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.config.id

    @property
    def place(self) -> Place:
        return Place.of(self.config)

    def begin(self, now: float) -> None:
        self.begun += 1

    def note_status(self, head: ResponseHead, now: float, ttfb_s: float | None = None) -> None:
        self.statuses.append(head.status)

    def finish(self, abort: Abort | None, ttfb_s: float | None, now: float, *, reused: bool = False) -> None:
        self.finished.append(abort)


class FakePool:
    def __init__(self, config: Pool) -> None:
        self.priorities: PathPriorities | None = None
        self.config = config
        self.edges = {edge.id: FakeEdge(edge) for edge in config.edges}
        self.budget = RetryBudget(1.0)
        self.candidates = [edge.id for edge in config.edges]

    def choose(self, now: float, key: bytes = b"") -> list[str]:
        return self.candidates

    def last_resort(self) -> list[str]:
        return []

    def shed(self, now: float) -> Shed:
        return Shed("every usable edge is full", 7)


class Bench:
    """One relay, one pool of edges a and b, and a clock that a test moves."""

    def __init__(self, pool: Pool) -> None:
        self.now = 100.0
        self.records: list[RequestRecord] = []
        self.relay = Relay(clock=lambda: self.now, record=self.records.append)
        self.pool = FakePool(pool)
        self.client = FakeLeg()

    def edge(self, name: str = "a") -> FakeEdge:
        return self.pool.edges[name]

    def ready(self, *answers: FakeLeg | Abort, on: str = "a") -> None:
        self.edge(on).connections.ready += answers

    def begin(
        self, method: bytes = b"POST", *, length: int | None = None, protocol: bytes = b"", **head: Any
    ) -> Exchange:
        given = RequestHead(
            method, b"/v1/chat/completions", b"http", b"localhost:8080", [(b"X-Mine", b"1")], length, protocol, **head
        )
        origin = Origin("127.0.0.1", 5, "http://127.0.0.1:8080", b"http", "h1")
        return self.relay.begin(self.client, given, origin, self.pool, b"/v1/chat/completions")  # type: ignore[arg-type]

    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.client.body)["error"]
        return error


A = Edge(id="a", scheme="http", host="a.test", port=80, base_path="/base")
B = Edge(id="b", scheme="http", host="b.test", port=80)
POOL = Pool("p", (A, B), timeouts=Timeouts(first_byte_s=10, idle_s=20), retry=Retry(attempts=2), websocket=WebSocket())


@pytest.fixture
async def bench() -> Iterator[Bench]:  # type: ignore[misc]
    made = Bench(POOL)
    yield made
    made.relay.abort_all("test over")
    if made.relay._ticking is not None:
        made.relay._ticking.cancel()


async def test_a_request_passes_and_its_answer_comes_back(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin()
    bench.client.receiver.on_data(b"ab")
    bench.client.receiver.on_trailers([(b"t", b"1")])
    bench.client.receiver.on_end()
    assert leg.words == ["head", "data", "trailers", "end"]
    head = leg.only("head")
    assert (head.target, head.authority) == (b"/base/v1/chat/completions", b"a.test")
    assert head.fields[0] == (b"X-Mine", b"1")

    leg.receiver.on_interim(ResponseHead(103, [(b"link", b"x")]))
    leg.receiver.on_head(ResponseHead(200, [(b"X-Theirs", b"1")]))
    leg.receiver.on_data(b"answer")
    leg.receiver.on_end()
    assert bench.client.words == ["interim", "head", "data", "end"]
    assert bench.client.only("head").fields[0] == (b"X-Theirs", b"1")
    assert bench.client.only("head").get(b"server-timing").startswith(b'headrace;desc="')
    record = bench.records[0]
    assert (record.outcome, record.status, record.bytes_in, record.bytes_out) == ("ok", 200, 2, 6)
    assert sum(record.parts.values()) == pytest.approx(record.wall_s)
    assert not bench.relay.exchanges


async def test_lost_stream_after_first_byte_is_cut_not_retried(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin(length=0)
    bench.client.receiver.on_end()
    leg.receiver.on_head(ResponseHead(200, SSE))
    leg.receiver.on_data(b"data: 1\n\n")
    leg.receiver.on_abort(Abort(Party.EDGE, Stage.BODY, Cause.LOST))
    assert bench.client.words == ["head", "data", "abort"]
    assert bench.edge("b").begun == 0
    assert bench.records[0].outcome == "edge lost"
    assert bench.records[0].incomplete


async def test_a_lost_post_on_a_fresh_connection_is_not_repeated(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin(length=0)
    bench.client.receiver.on_end()
    leg.receiver.on_abort(LOST)
    assert bench.client.only("head").status == 502
    assert bench.client.only("head").get(b"x-should-retry") == b"false"
    assert bench.error()["code"] == "edge_lost"
    assert bench.edge("b").begun == 0


async def test_a_lost_post_on_a_reused_connection_is_sent_once_more_on_a_fresh_one(bench: Bench) -> None:
    stale, fresh = FakeLeg(reused=True), FakeLeg()
    bench.ready(stale, fresh)
    bench.begin()
    bench.client.receiver.on_data(b"body")
    stale.receiver.on_abort(LOST)
    bench.client.receiver.on_end()
    assert bench.edge().connections.asked == [(False, False), (True, False)]
    assert fresh.words == ["head", "data", "end"]
    assert fresh.body == b"body"


async def test_a_body_over_the_replay_bound_is_sent_once(bench: Bench) -> None:
    stale = FakeLeg(reused=True)
    bench.ready(stale)
    bench.begin()
    bench.client.receiver.on_data(bytes(REPLAY_BYTES + 1))
    stale.receiver.on_abort(LOST)
    assert bench.client.only("head").status == 502
    assert bench.edge().begun == 1


async def test_an_unreachable_edge_is_replaced_by_the_next(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(UNREACHABLE)
    bench.ready(leg, on="b")
    bench.begin(length=0)
    bench.client.receiver.on_end()
    assert leg.words == ["head", "end"]
    assert bench.edge().finished == [UNREACHABLE]


async def test_all_unreachable_is_502_that_may_be_retried(bench: Bench) -> None:
    bench.ready(UNREACHABLE)
    bench.ready(UNREACHABLE, on="b")
    bench.begin()
    assert bench.client.only("head").status == 502
    assert bench.client.only("head").get(b"x-should-retry") == b"true"


async def test_a_full_pool_sheds_with_retry_after(bench: Bench) -> None:
    bench.pool.candidates = []
    bench.begin()
    head = bench.client.only("head")
    assert (head.status, head.get(b"retry-after")) == (503, b"7")


async def test_a_client_that_leaves_while_dialling_cancels_the_dial(bench: Bench) -> None:
    bench.begin()
    bench.client.receiver.on_abort(CLIENT_GONE)
    connections = bench.edge().connections
    assert connections.cancelled == connections.waiting
    assert bench.records[0].outcome == "client cancelled"


async def test_a_client_that_leaves_before_the_first_byte_cancels_the_edge(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin(length=0)
    bench.client.receiver.on_end()
    bench.client.receiver.on_abort(CLIENT_GONE)
    assert leg.only("abort").by is Party.CLIENT
    assert bench.edge().finished == [None], "the client's leaving is not the edge's fault"


async def test_the_client_is_paused_while_no_edge_is_open(bench: Bench) -> None:
    bench.begin()
    bench.client.receiver.on_data(bytes(HOLD_BYTES + 1))
    assert bench.client.paused
    leg = FakeLeg()
    bench.edge().connections.waiting[0].on_open(leg, DialMarks())
    assert not bench.client.paused
    assert len(leg.body) == HOLD_BYTES + 1


async def test_a_full_side_pauses_the_other(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin()
    leg.receiver.on_full()
    assert bench.client.paused
    leg.receiver.on_drained()
    assert not bench.client.paused
    bench.client.receiver.on_full()
    assert leg.paused
    bench.client.receiver.on_drained()
    assert not leg.paused


async def test_an_answer_before_the_upload_ended_ends_the_exchange(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin()
    bench.client.receiver.on_data(b"part")
    leg.receiver.on_head(ResponseHead(413, []))
    leg.receiver.on_end()
    assert bench.client.words == ["head", "end"]
    assert leg.words[-1] == "abort"


async def test_no_first_byte_in_time_is_504_and_the_edge_is_cancelled(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin(length=0)
    bench.client.receiver.on_end()
    bench.now += 9.9
    bench.relay._tick()
    assert bench.client.words == []
    bench.now += 0.2
    bench.relay._tick()
    assert bench.client.only("head").status == 504
    assert leg.words[-1] == "abort"


async def test_a_stalled_upload_is_408_and_says_nothing_against_the_edge(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin()
    bench.client.receiver.on_data(b"part")
    bench.now += 10.1
    bench.relay._tick()
    assert bench.client.only("head").status == 408
    assert leg.words[-1] == "abort"
    assert bench.edge().finished == [None]
    assert bench.records[0].outcome == "client timed out"


async def test_a_client_that_was_told_to_go_on_and_does_not_is_408_too(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin(expect_continue=True)
    leg.receiver.on_interim(ResponseHead(100, []))
    bench.now += 20.2
    bench.relay._tick()
    assert bench.client.only("head").status == 408
    assert bench.edge().finished == [None]


def drip(bench: Bench, size: int, every_s: float, times: int) -> int:
    """Send so many bytes so often; how many pieces came before the request was over."""
    for sent in range(times):
        bench.client.receiver.on_data(b"x" * size)
        bench.now += every_s
        bench.relay._tick()
        if not bench.relay.exchanges:
            return sent
    return times


async def test_a_dripping_upload_is_cut_soon_after_first_byte(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin()
    assert drip(bench, 1, 2.0, 1000) < 8  # 10 s of patience
    assert bench.client.only("head").status == 408
    assert leg.words[-1] == "abort"
    assert bench.edge().finished == [None]


async def test_a_slow_upload_may_take_as_long_as_it_likes(bench: Bench) -> None:
    bench.ready(FakeLeg())
    bench.begin()
    assert drip(bench, 1100, 2.0, 1000) == 1000


async def test_time_in_which_the_edge_held_the_client_back_is_not_the_clients(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin()
    for _ in range(100):
        leg.receiver.on_full()
        bench.client.receiver.on_data(b"x")
        bench.now += 9
        bench.relay._tick()
        leg.receiver.on_drained()
    assert bench.relay.exchanges


async def test_once_the_answer_began_an_upload_may_drip(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin()
    bench.client.receiver.on_data(b"hello")
    leg.receiver.on_head(ResponseHead(200, SSE))
    assert drip(bench, 1, 19.0, 50) == 50


@pytest.mark.parametrize("why", ["edge reads nothing", "edge owes a 100"])
async def test_an_upload_that_the_edge_holds_up_is_the_edges_timeout(bench: Bench, why: str) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin(expect_continue=why == "edge owes a 100")
    if why == "edge reads nothing":
        bench.client.receiver.on_data(b"part")
        leg.receiver.on_full()
    bench.now += 10.1
    bench.relay._tick()
    assert bench.client.only("head").status == 504
    assert [abort.by for abort in bench.edge().finished if abort is not None] == [Party.EDGE]


async def test_a_silent_stream_is_cut_after_idle_and_not_before(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin(length=0)
    bench.client.receiver.on_end()
    leg.receiver.on_head(ResponseHead(200, SSE))
    for _ in range(5):
        bench.now += 19
        bench.relay._tick()
        leg.receiver.on_data(b": still here\n")
    assert "abort" not in bench.client.words
    bench.now += 21
    bench.relay._tick()
    assert bench.client.words[-1] == "abort"
    assert bench.records[0].outcome == "edge timed out"


async def test_an_own_answer_to_head_has_no_body(bench: Bench) -> None:
    bench.ready(UNREACHABLE)
    bench.ready(UNREACHABLE, on="b")
    bench.begin(b"HEAD", length=0)
    assert bench.client.words == ["head", "end"]


async def test_one_100_passes_and_only_to_who_waits(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin(expect_continue=True)
    for _ in range(2):
        leg.receiver.on_interim(ResponseHead(100, []))
    assert bench.client.words == ["interim"]


async def test_no_100_for_a_client_that_did_not_ask(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin()
    leg.receiver.on_interim(ResponseHead(100, []))
    assert bench.client.words == []


# ------------------------------------------------------------------------------------------------ redirects


def redirect(location: bytes) -> ResponseHead:
    return ResponseHead(307, [(b"location", location)])


async def test_a_307_to_an_edge_of_the_pool_is_followed_with_method_and_body(bench: Bench) -> None:
    first, second = FakeLeg(), FakeLeg()
    bench.ready(first)
    bench.ready(second, on="b")
    bench.begin()
    bench.client.receiver.on_data(b"body")
    bench.client.receiver.on_end()
    first.receiver.on_head(redirect(b"http://b.test/elsewhere"))
    assert second.words == ["head", "data", "end"]
    assert (second.only("head").method, second.only("head").target, second.body) == (b"POST", b"/elsewhere", b"body")
    assert first.words[-1] == "abort"
    assert bench.client.words == []


async def test_a_307_out_of_the_pool_passes_unchanged(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin(length=0)
    bench.client.receiver.on_end()
    leg.receiver.on_head(redirect(b"https://elsewhere.test/"))
    assert bench.client.only("head").get(b"location") == b"https://elsewhere.test/"


async def test_a_redirect_loop_ends_and_names_no_edge(bench: Bench) -> None:
    legs = [FakeLeg() for _ in range(8)]
    bench.ready(*legs[::2])
    bench.ready(*legs[1::2], on="b")
    bench.begin(length=0)
    bench.client.receiver.on_end()
    for leg, location in zip(legs, [b"http://b.test/", b"http://a.test/base/"] * 4, strict=True):
        if leg.words:
            leg.receiver.on_head(redirect(location))
    assert bench.client.only("head").status == 508
    assert b"b.test" not in bench.client.body
    assert sum(bool(leg.words) for leg in legs) <= 5


async def test_a_redirect_of_a_body_that_is_gone_is_503_that_may_be_retried(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin()
    bench.client.receiver.on_data(bytes(REPLAY_BYTES + 1))
    bench.client.receiver.on_end()
    leg.receiver.on_head(redirect(b"http://b.test/"))
    head = bench.client.only("head")
    assert (head.status, head.get(b"x-should-retry"), head.get(b"location")) == (503, b"true", None)


# ------------------------------------------------------------------------------------------------ limits


async def test_a_body_over_the_limit_is_413(bench: Bench) -> None:
    bench.relay.max_body_bytes = 10
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin()
    bench.client.receiver.on_data(bytes(11))
    assert bench.client.only("head").status == 413
    assert leg.words == ["head", "abort"]


async def test_the_hard_stop_ends_nothing_cleanly(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin(length=0)
    bench.client.receiver.on_end()
    leg.receiver.on_head(ResponseHead(200, SSE))
    bench.relay.abort_all("stopping")
    assert bench.client.words == ["head", "abort"]
    assert leg.words[-1] == "abort"


# ------------------------------------------------------------------------------------------------ upgrades

UPGRADE = {"method": b"GET", "length": 0, "protocol": b"websocket"}


async def test_an_edge_without_websocket_is_426(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin(**UPGRADE)  # type: ignore[arg-type]
    leg.receiver.on_head(ResponseHead(200, []))
    assert bench.client.only("head").status == 426
    assert bench.edge().connections.asked == [(False, True)]


async def test_a_refused_upgrade_passes(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin(**UPGRADE)  # type: ignore[arg-type]
    leg.receiver.on_head(ResponseHead(404, []))
    leg.receiver.on_end()
    assert bench.client.words == ["head", "end"]
    assert bench.client.only("head").status == 404


async def test_a_standby_is_offered_by_307_before_the_upgrade() -> None:
    standby = Edge(id="b", scheme="https", host="b.test", port=443, standby=True)
    bench = Bench(Pool("p", (A, standby)))
    bench.ready(UNREACHABLE)
    bench.begin(**UPGRADE)  # type: ignore[arg-type]
    head = bench.client.only("head")
    assert (head.status, head.get(b"location")) == (307, b"https://b.test/v1/chat/completions")
    assert bench.relay._ticking is not None
    bench.relay._ticking.cancel()


async def test_an_upgrade_joins_both_legs(bench: Bench) -> None:
    leg = FakeLeg()
    bench.ready(leg)
    bench.begin(b"GET", length=0, protocol=b"other")
    assert leg.words == ["head"]
    leg.receiver.on_head(ResponseHead(101, [(b"upgrade", b"other")]))
    leg.receiver.on_data(b"down")
    bench.client.receiver.on_data(b"up")
    assert (leg.body, bench.client.body) == (b"up", b"down")
    bench.client.receiver.on_end()
    assert leg.words[-1] == "end"
    leg.receiver.on_data(b" more")
    leg.receiver.on_end()
    assert bench.client.words[-1] == "end"
    assert (bench.records[0].bytes_in, bench.records[0].bytes_out) == (2, 9)
