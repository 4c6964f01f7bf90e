"""Any script of words from both sides, the relay and a small model of it: bytes, order, pauses, ends, retries, the record.

The legs are fake, the clock is set by hand, and the model was written from docs/relay.md and the table of proxy/failover.py,
not from the code. A word that a rim would not say at this moment is passed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from config.model import Edge, Pool, Retry, Timeouts, WebSocket
from proxy.io.relay import Relay
from proxy.io.rims import DialMarks, Origin
from proxy.io.sides import HOLD_BYTES, REPLAY_BYTES
from proxy.messages import Abort, Cause, Head, Party, RequestHead, ResponseHead, Stage
from proxy.waterfall import Finished
from tests.peers.fakeleg import FakeLeg
from tests.proxy.test_relay import FakePool

MAX_BODY = 2 * 1024 * 1024
LARGEST = 900_000
HOPS = 2
EDGES = (Edge(id="a", scheme="http", host="a.test", port=80), Edge(id="b", scheme="http", host="b.test", port=80))
ORIGIN = Origin("127.0.0.1", 5, "http://127.0.0.1:8080", b"http", "h1")
GONE = Abort(Party.CLIENT, Stage.BODY, Cause.CANCELLED, "gone")
UNREACHABLE = Abort(Party.EDGE, Stage.CONNECT, Cause.LOST, "connection refused", unprocessed=True)
SAFE, IDEMPOTENT = {b"GET"}, {b"GET", b"PUT"}


@dataclass
class StrictLeg(FakeLeg):
    """Bears one ending, nothing but a cancel after it, and nothing at all after that."""

    def _must_not_be_over(self, word: str) -> None:
        assert "abort" not in self.words, f"{word} after {self.words}"
        assert "end" not in self.words or word == "abort", f"{word} after {self.words}"

    def head(self, head: Head) -> None:
        self._must_not_be_over("head")
        assert "head" not in self.words
        super().head(head)

    def data(self, chunk: bytes) -> None:
        self._must_not_be_over("data")
        assert "head" in self.words
        super().data(chunk)

    def end(self) -> None:
        self._must_not_be_over("end")
        super().end()

    def abort(self, abort: Abort) -> None:
        self._must_not_be_over("abort")
        super().abort(abort)

    def interim(self, head: ResponseHead) -> None:
        self._must_not_be_over("interim")
        assert "head" not in self.words
        super().interim(head)


@dataclass
class Model:
    """What the relay should have done. `due`: what the client has been told, in words."""

    method: bytes
    expects: bool
    total_s: float
    phase: str = "dialing"
    current: str = "a"
    spent: set[str] = field(default_factory=lambda: {"a"})
    turned_away: set[str] = field(default_factory=set)
    once: set[int] = field(default_factory=set)
    moves: int = 0
    hops: int = 0
    fresh_only: bool = False
    fresh: bool = False
    dials: int = 1
    reused: bool = False
    interims: int = 0  # of the current attempt
    continued: bool = False
    body: bytes = b""
    kept: bool = True
    ended: bool = False
    trailers: bool = False
    client_full: bool = False
    edge_full: bool = False
    held_back: bool = False
    due: list[str] = field(default_factory=list)
    answer: bytes = b""
    outcome: str = ""

    # ---------------------------------------------------------------- ends

    def over(self, outcome: str, *words: str) -> None:
        self.phase, self.outcome = "over", outcome
        self.due += words

    def own_answer(self, outcome: str) -> None:
        self.over(outcome, "head", "own", "end")

    def failed(self, by: str) -> None:
        """Before the commit point an answer of our own, after it a cut."""
        if self.phase == "answering":
            self.over(by, "abort")
        else:
            self.own_answer(by)

    # ---------------------------------------------------------------- retries, by the table of proxy/failover.py

    def next(self) -> str | None:
        return next((each for each in ("a", "b") if each not in self.spent), None)

    def dial(self, edge: str, *, fresh: bool = False) -> None:
        self.phase, self.current, self.fresh = "dialing", edge, fresh or self.fresh_only
        self.spent.add(edge)
        self.interims = 0
        self.dials += 1

    def move(self, edge: str | None) -> bool:
        if edge is None or self.moves >= 2:
            return False
        self.moves += 1
        self.dial(edge)
        return True

    def attempt_failed(self, abort: Abort) -> None:
        outcome = f"{abort.by.value} {abort.cause.value}"
        if abort.stage is Stage.BODY:
            self.own_answer(outcome)
        elif abort.stage is Stage.CONNECT:
            if not self.move(self.next()):
                self.own_answer(outcome)
        elif not self.kept:
            self.own_answer(outcome)
        elif abort.unprocessed:
            if not self.move(self.next() or self.current):
                self.own_answer(outcome)
        elif self.reused and abort.cause is Cause.LOST and not self.fresh_only:
            self.fresh_only = True
            self.dial(self.current)
        elif not (self.method in SAFE and self.move(self.next())):
            self.own_answer(outcome)

    def answered(self, status: int, leads_to: str | None) -> None:
        replayable = self.kept and self.ended
        if leads_to is not None:
            if replayable and self.hops < HOPS and leads_to not in self.turned_away:
                self.hops += 1
                if leads_to != self.current:
                    self.turned_away.add(self.current)
                self.dial(leads_to)
            else:
                self.own_answer("ok")
            return
        if replayable and status in (421, 425) and status not in self.once:
            self.once.add(status)
            self.dial(self.current, fresh=status == 421)
        elif not (replayable and status in (429, 503) and self.method in IDEMPOTENT and self.move(self.next())):
            self.phase, self.kept = "answering", False
            self.due.append("head")


class Play:
    """The relay between its fakes, and the model beside it."""

    def __init__(self, method: bytes, *, expects: bool, total_s: float) -> None:
        self.now = 100.0
        self.records: list[Finished] = []
        self.relay = Relay(clock=lambda: self.now, record=self.records.append)
        self.relay.max_body_bytes = MAX_BODY
        timeouts = Timeouts(first_byte_s=10, idle_s=20, total_s=total_s)
        pool = Pool("p", EDGES, timeouts=timeouts, retry=Retry(attempts=2), websocket=WebSocket(follow_redirects=HOPS))
        self.pool = FakePool(pool)
        self.client = StrictLeg()
        self.legs: list[tuple[str, StrictLeg]] = []
        self.script: list[tuple[str, Any]] = []
        self.went: list[StrictLeg] = []  # legs whose edge left by itself
        self.window = True
        self.model = Model(method, expects, total_s)
        head = RequestHead(method, b"/v1/x", b"http", b"localhost", [], None, expect_continue=expects)
        self.exchange = self.relay.begin(self.client, head, ORIGIN, self.pool, b"/v1/x")  # type: ignore[arg-type]

    @property
    def leg(self) -> StrictLeg:
        return self.legs[-1][1]

    def say(self, word: str, value: Any) -> None:
        """A word of the script, if whoever says it could."""
        self.script.append((word, value))
        getattr(self, "_" + word)(value)
        self.check()

    # ---------------------------------------------------------------- the client

    def _client_data(self, size: int) -> None:
        model = self.model
        if model.ended or model.phase == "over" or (self.client.paused and not self.window):
            return
        self.window = not self.client.paused  # at most one window follows a pause
        chunk = bytes([65 + len(model.body) % 26]) * size
        model.body += chunk
        if len(model.body) > MAX_BODY:
            if model.phase == "answering":
                model.over("us refused", "abort")
            else:
                model.own_answer("us refused")
        elif model.phase == "dialing":
            model.held_back = model.held_back or len(model.body) > HOLD_BYTES
        elif len(model.body) > REPLAY_BYTES:
            model.kept = False
        self.client.receiver.on_data(chunk)

    def _client_end(self, trailers: bool) -> None:
        if self.model.ended or self.model.phase == "over":
            return
        self.model.ended, self.model.trailers = True, trailers
        if trailers:
            self.client.receiver.on_trailers([(b"t", b"1")])
        self.client.receiver.on_end()

    def _client_abort(self, _: object) -> None:
        if self.model.phase != "over":
            self.model.over("client cancelled")
            self.client.receiver.on_abort(GONE)

    def _client_stall(self, full: bool) -> None:
        if self.model.phase != "over" and self.model.client_full != full:
            self.model.client_full = full
            (self.client.receiver.on_full if full else self.client.receiver.on_drained)()

    # ---------------------------------------------------------------- the edge

    def _open(self, reused: bool) -> None:
        connections = self.pool.edges[self.model.current].connections
        if self.model.phase != "dialing":
            return
        asked_fresh, _ = connections.asked[-1]
        assert asked_fresh == self.model.fresh
        leg = StrictLeg(reused=reused and not asked_fresh)
        self.legs.append((self.model.current, leg))
        model = self.model
        model.phase, model.reused = "asked", leg.reused
        model.edge_full = model.held_back = False
        connections.waiting.pop().on_open(leg, DialMarks(version="h1", reused=leg.reused))

    def _open_failed(self, _: object) -> None:
        if self.model.phase == "dialing":
            opening = self.pool.edges[self.model.current].connections.waiting.pop()
            self.model.attempt_failed(UNREACHABLE)
            opening.on_open_failed(UNREACHABLE)

    def _edge_interim(self, status: int) -> None:
        model = self.model
        if model.phase != "asked":
            return
        model.interims += 1
        if status != 100 or (model.expects and not model.continued):
            model.due.append("interim")
            model.continued |= status == 100
        self.leg.receiver.on_interim(ResponseHead(status, []))

    def _edge_head(self, answer: tuple[int, bytes, str | None]) -> None:
        status, location, leads_to = answer
        if self.model.phase != "asked":
            return
        leads_to = self.model.current if leads_to == "here" else leads_to
        self.model.answered(status, leads_to)
        fields = [(b"location", location)] if location else []
        self.leg.receiver.on_head(ResponseHead(status, fields))

    def _edge_data(self, size: int) -> None:
        if self.model.phase == "answering":
            chunk = bytes([97 + len(self.model.answer) % 26]) * size
            self.model.answer += chunk
            self.model.due.append("data")
            self.leg.receiver.on_data(chunk)

    def _edge_end(self, trailers: bool) -> None:
        if self.model.phase == "answering":
            self.model.over("ok", *(["trailers"] if trailers else []), "end")
            if trailers:
                self.leg.receiver.on_trailers([(b"t", b"1")])
            self.leg.receiver.on_end()

    def _edge_abort(self, abort: Abort) -> None:
        model = self.model
        if model.phase not in ("asked", "answering"):
            return
        began = model.phase == "answering" or model.interims > 0
        abort = replace(abort, stage=Stage.BODY if began else Stage.HEAD, unprocessed=abort.unprocessed and not began)
        if model.phase == "asked":
            model.attempt_failed(abort)
        else:
            model.over(f"edge {abort.cause.value}", "abort")
        leg = self.leg
        self.went.append(leg)
        leg.receiver.on_abort(abort)

    def _edge_stall(self, full: bool) -> None:
        if self.model.phase in ("asked", "answering") and self.model.edge_full != full:
            self.model.edge_full = full
            (self.leg.receiver.on_full if full else self.leg.receiver.on_drained)()

    # ---------------------------------------------------------------- time, and the hard stop

    def _wait(self, seconds: float) -> None:
        """A moment, in which nothing is due, or longer than any deadline."""
        model = self.model
        self.now += seconds
        if seconds > 100 and model.phase != "over" and (model.total_s or model.phase != "dialing"):
            waits_for_client = model.phase == "asked" and not (
                model.ended or model.edge_full or (model.expects and not model.body)
            )
            clients = model.client_full or (waits_for_client and not model.total_s)
            model.failed(f"{'client' if clients else 'edge'} timed out")
        self.relay._tick()

    def _stop(self, _: object) -> None:
        if self.model.phase != "over":
            self.model.failed("us refused")
            self.relay.abort_all("stopping")

    # ---------------------------------------------------------------- what must hold after each word

    def check(self) -> None:
        model = self.model
        said = [word for word, _ in self.client.said]
        own = "own" in model.due
        assert said == ["data" if word == "own" else word for word in model.due]
        if not own:
            assert self.client.body == model.answer
        elif "head" in said:
            assert self.client.only("head").status >= 400
        self._check_edges()
        self._check_pauses()
        kept = self.exchange.kept or []
        assert sum(map(len, kept)) <= max(REPLAY_BYTES, HOLD_BYTES + LARGEST) + LARGEST
        assert (len(self.records), len(self.relay.exchanges)) == ((1, 0) if model.phase == "over" else (0, 1))

    def _check_edges(self) -> None:
        model = self.model
        in_flight = {name: edge.begun - len(edge.finished) for name, edge in self.pool.edges.items()}
        assert in_flight == {name: int(model.phase != "over" and name == model.current) for name in self.pool.edges}, (
            "each begin has its finish"
        )
        assert sum(edge.begun for edge in self.pool.edges.values()) == model.dials
        for at, (_, leg) in enumerate(self.legs):
            is_current = at == len(self.legs) - 1 and model.phase in ("asked", "answering")
            assert model.body.startswith(leg.body)
            if not is_current:
                self._check_left(leg, is_last=at == len(self.legs) - 1)
                continue
            assert "abort" not in leg.words
            assert leg.body == model.body
            assert ("end" in leg.words) == model.ended
            assert ("trailers" in leg.words) == (model.ended and model.trailers)

    def _check_left(self, leg: StrictLeg, *, is_last: bool) -> None:
        """An edge is told that it is left, unless it went by itself or said all to a request that was whole."""
        model = self.model
        served = is_last and model.outcome == "ok" and "own" not in model.due and model.ended
        went = any(leg is each for each in self.went)
        assert ("abort" in leg.words) == (not served and not went)

    def _check_pauses(self) -> None:
        model = self.model
        if model.phase in ("asked", "answering"):
            assert self.leg.paused == model.client_full
            if not model.ended:
                assert self.client.paused == model.edge_full
        elif model.phase == "dialing" and model.held_back and not model.ended:
            assert self.client.paused

    def finish(self) -> None:
        """The script is over: the client leaves, and nothing is left of it."""
        self.say("client_abort", None)
        (record,) = self.records
        assert record.outcome == self.model.outcome
        assert record.whole().bytes_out == len(self.model.answer)
        assert record.attempts == self.model.dials
        clean = [word for word in self.client.words if word == "end"]
        assert not clean or self.model.outcome == "ok" or "own" in self.model.due, "a failed stream ended cleanly"
        before = [list(leg.words) for leg in (self.client, *(leg for _, leg in self.legs))]
        self._late_words()
        assert before == [list(leg.words) for leg in (self.client, *(leg for _, leg in self.legs))]
        assert len(self.records) == 1

    def _late_words(self) -> None:
        for leg in (self.client, *(leg for _, leg in self.legs)):
            leg.receiver.on_data(b"late")
            leg.receiver.on_drained()
            leg.receiver.on_end()
            leg.receiver.on_abort(GONE)


ABORTS = st.sampled_from(
    [
        Abort(Party.EDGE, Stage.HEAD, Cause.LOST, "connection reset"),
        Abort(Party.EDGE, Stage.HEAD, Cause.LOST, "connection reset"),
        Abort(Party.EDGE, Stage.HEAD, Cause.BROKEN, "no head"),
        Abort(Party.EDGE, Stage.HEAD, Cause.REFUSED, "refused stream", 7, unprocessed=True),
        Abort(Party.EDGE, Stage.HEAD, Cause.REFUSED, "goaway", 0, unprocessed=True),
    ]
)
ANSWERS = st.sampled_from(
    [
        (200, b"", None),
        (200, b"", None),
        (404, b"", None),
        (421, b"", None),
        (425, b"", None),
        (429, b"", None),
        (503, b"", None),
        (307, b"http://b.test/x", "b"),
        (308, b"http://a.test/x", "a"),
        (307, b"/again", "here"),
        (307, b"http://elsewhere.test/", None),
    ]
)
SIZES = st.sampled_from([1, 1000, 40_000, LARGEST, LARGEST])


STALLS = st.booleans()
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "client_data": SIZES,
    "client_end": st.booleans(),
    "client_stall": STALLS,
    "client_abort": st.none(),
    "open": st.booleans(),
    "open_failed": st.none(),
    "edge_interim": st.sampled_from([100, 103]),
    "edge_head": ANSWERS,
    "edge_data": SIZES,
    "edge_end": st.booleans(),
    "edge_abort": ABORTS,
    "edge_stall": STALLS,
    "wait": st.sampled_from([0.01, 0.01, 1000.0]),
    "stop": st.none(),
}
CLIENT = ("client_data", "client_data", "client_stall", "client_end")
ANY_TIME = (*CLIENT, "wait", "client_abort", "stop")
POSSIBLE = {
    "dialing": ("open",) * 8 + ("open_failed",) * 2 + ANY_TIME,
    "asked": ("edge_stall", "edge_interim") + ("edge_head",) * 5 + ("edge_abort",) * 6 + ANY_TIME,
    "answering": ("edge_data",) * 4 + ("edge_stall",) * 3 + ("edge_end", "edge_abort") + ANY_TIME,
}
"""Words by phase, those that lead on more often than those that end."""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@settings(max_examples=1200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    method=st.sampled_from([b"POST", b"GET", b"PUT"]),
    expects=st.booleans(),
    total_s=st.sampled_from([0.0, 500.0]),
    steps=st.integers(1, 40),
    draws=st.data(),
)
def test_the_relay_does_what_the_model_says(
    loop: asyncio.AbstractEventLoop, method: bytes, expects: bool, total_s: float, steps: int, draws: st.DataObject
) -> None:
    async def play() -> None:
        played = Play(method, expects=expects, total_s=total_s)
        try:
            while steps > len(played.script) and played.model.phase != "over":
                name = draws.draw(st.sampled_from(POSSIBLE[played.model.phase]))
                played.say(name, draws.draw(VALUES[name]))
            event(f"{played.model.phase} after {min(played.model.dials, 4)} dials")
            played.finish()
        finally:
            if played.relay._ticking is not None:
                played.relay._ticking.cancel()

    loop.run_until_complete(play())


LOST = Abort(Party.EDGE, Stage.HEAD, Cause.LOST, "connection reset")


@pytest.mark.parametrize(
    "script",
    [
        [("open", True), ("edge_stall", True), ("edge_abort", LOST), ("open", False), ("client_data", 1)],
        [("client_data", LARGEST), ("open", False), ("edge_stall", True), ("edge_stall", False), ("wait", 1000.0)],
    ],
)
async def test_a_client_that_was_stopped_goes_on_at_the_next_edge_and_is_judged_by_its_own_pace(
    script: list[tuple[str, Any]],
) -> None:
    played = Play(b"POST", expects=False, total_s=0.0)
    for word, value in script:
        played.say(word, value)
    played.finish()


async def test_an_edge_that_comes_after_its_client_stalled_is_stopped_at_once() -> None:
    played = Play(b"POST", expects=False, total_s=0.0)
    for word in ("client_stall", "open"):
        played.say(word, True)
    assert played.leg.paused
    played.finish()
