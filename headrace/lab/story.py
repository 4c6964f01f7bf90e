"""The nine steps of the demo: each does one thing to a running daemon, measures it, and asserts what it says.

Theory: a step returns `Fact`s, which are numbers and the line that shows them; a claim that does not hold raises
`StepFailed` with what was seen instead. A later step may build on an earlier one's warm connections, so order matters.
Rules for editing: 1. no line without a measured number; 2. no claim without `expect`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import dns.message
import dns.rcode

from headrace.lab.clients import VERSIONS, Answer, Request, ask, handshake
from headrace.lab.daemon import Daemon
from headrace.lab.edge import LabEdge
from headrace.lab.lab import Lab
from headrace.lab.websocket_client import WebSocketClient

NAME = "answer.lab.example"
CHAT = "/lab/v1/chat/completions"
REALTIME = "/lab/v1/realtime?model=lab-small"
STARTS = 100
POSTS_TO_DRAIN = 12
SLOW_S = 0.4
BAR_WIDTH = 40
SUM_TOLERANCE_S = 0.005
HANDSHAKES = 5
CACHED = 20


class StepFailed(Exception):
    """A claim that did not hold; lower case, with the numbers seen."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What a step found out: the line for people, and the numbers in it."""

    line: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the story plays."""

    lab: Lab
    daemon: Daemon


Step = Callable[[Stage], Awaitable[list[Fact]]]


async def resolve_twice(stage: Stage) -> list[Fact]:
    """A name over encrypted DNS, then from the cache."""
    before = stage.lab.nameserver.queries["https", NAME, "A"]
    fresh_s, cached_s = await _query(stage), min([await _query(stage) for _ in range(CACHED)])
    asked = stage.lab.nameserver.queries["https", NAME, "A"] - before
    expect(asked == 1, f"the upstream was asked {asked} times over DoH, not once")
    expect(cached_s < fresh_s, f"the cache took {ms(cached_s)}, the upstream {ms(fresh_s)}")
    line = f"{NAME} over DoH in {ms(fresh_s)}, from the cache in {ms(cached_s)}; upstream asked once"
    return [Fact(line, {"name": NAME, "upstream_s": fresh_s, "cache_s": cached_s, "upstream_questions": asked})]


async def stream_over_three_versions(stage: Stage) -> list[Fact]:
    """The same chat completion, streamed over h1, h2 and h3: equal bytes."""
    answers: dict[str, Answer] = {}
    for version in VERSIONS:
        answers[version] = await ask(version, stage.daemon.target(), chat(f"versions-{version}"))
        expect_whole(answers[version])
    bodies = {answer.body for answer in answers.values()}
    expect(len(bodies) == 1, f"{len(bodies)} different bodies over three versions")
    size = len(bodies.pop())
    firsts = {version: answer.first_byte_s for version, answer in answers.items()}
    shown = ", ".join(f"{version} {ms(first_s)}" for version, first_s in firsts.items())
    line = f"one chat completion of {size} bytes, byte for byte equal; first byte over {shown}"
    return [Fact(line, {"bytes": size, "first_byte_s": firsts})]


async def draw_a_waterfall(stage: Stage) -> list[Fact]:
    """Where the time of a request went that had to dial its edge."""
    listed = (await stage.daemon.admin("GET", "/requests?last=20"))["requests"]
    record = max((each for each in listed if each["outcome"] == "ok"), key=lambda each: len(each["parts"]))
    parts: dict[str, float] = record["parts"]
    gap_s = abs(sum(parts.values()) - record["wall_s"])
    expect(gap_s <= SUM_TOLERANCE_S, f"the parts miss the wall time by {ms(gap_s)}")
    title = f"{record['client_version']} in, {record['edge_version']} out to {record['edge']}: {ms(record['wall_s'])}"
    numbers = {"parts_s": parts, "wall_s": record["wall_s"], "gap_s": gap_s}
    return [Fact(title, numbers), *[Fact(line) for line in bars(parts, record["wall_s"])]]


async def rotate_tickets(stage: Stage) -> list[Fact]:
    """Full handshakes, resumed ones, a rotation, and still resumed ones; of each kind the quickest of a few."""
    target = stage.daemon.target()
    full = [await handshake(target) for _ in range(HANDSHAKES)]
    resumed = [await handshake(target, full[-1].session)]
    resumed += [await handshake(target, resumed[-1].session) for _ in range(HANDSHAKES)]
    before = _current_key(await stage.daemon.admin("GET", "/tickets"))
    await stage.daemon.admin("POST", "/tickets/rotate")
    after = _current_key(await stage.daemon.admin("GET", "/tickets"))
    rotated = [await handshake(target, resumed[-1].session)]
    rotated += [await handshake(target, rotated[-1].session) for _ in range(HANDSHAKES)]
    expect(not any(each.resumed for each in full), "a first handshake was resumed")
    expect(all(each.resumed for each in resumed), "a ticket of the current key was not resumed")
    expect(all(each.resumed for each in rotated), "a ticket from before the rotation was not resumed")
    expect(before != after, f"the key {before} was not replaced")
    full_s, resumed_s, rotated_s = (min(each.took_s for each in kind) for kind in (full, resumed, rotated))
    line = (
        f"full handshake {ms(full_s)}, resumed {ms(resumed_s)}; key {before} -> {after}: "
        f"the old key's ticket still resumed, {ms(rotated_s)}"
    )
    numbers = {"full_s": full_s, "resumed_s": resumed_s, "after_rotation_s": rotated_s, "keys": [before, after]}
    return [Fact(line, numbers)]


async def slow_one_edge(stage: Stage) -> list[Fact]:
    """An edge that answers late loses weight, beside what it had when all three were equal."""
    edge = stage.lab.edges["edge-b"]
    usual_s = await _ask_many(stage, "equal", 30)
    before = await _live_weight(stage, edge.id)
    served_before = edge.tally.numbers["answered"]
    # Late beside the others, also on a machine that is so busy that all of them take their time.
    late_s = max(SLOW_S, 4 * usual_s)
    edge.controls.first_byte_s = late_s
    for batch in range(3):
        await _ask_many(stage, f"slow-{batch}", 10)
    served = edge.tally.numbers["answered"] - served_before
    after = await _live_weight(stage, edge.id)
    edge.controls.reset()
    expect(after < before * 0.7, f"live weight {before:.1f} -> {after:.1f} after {served} slow answers")
    line = (
        f"edge-b answers {ms(late_s)} late: live weight {before:.1f} -> {after:.1f}, {served} of 30 requests went there"
    )
    return [Fact(line, {"before": before, "after": after, "late_s": late_s, "served": served})]


async def kill_one_edge(stage: Stage) -> list[Fact]:
    """An edge dies while a hundred streams start."""
    edge = await _best(stage, among=("h2", "h3"))
    # Only a request on a reused connection, of whose answer no byte came, may be sent again: the connection must be warm.
    expect_whole(*await _until_served_by(stage, edge))
    edge.controls.first_byte_s = 5.0
    started = time.perf_counter()
    asking = [asyncio.ensure_future(_later(index * 0.005, stage, f"start-{index}")) for index in range(STARTS)]
    await edge.tally.until("running", 1)
    await asyncio.sleep(0.15)
    held = edge.tally.running
    await edge.kill()
    answers = await asyncio.gather(*asking)
    took_s = time.perf_counter() - started
    expect_whole(*answers)
    first_s = sorted(answer.first_byte_s for answer in answers)
    await edge.start()
    for each in stage.lab.edges.values():
        each.controls.reset()
    line = f"{edge.id} killed holding {held} of {STARTS} starting streams: {STARTS} whole answers in {took_s:.2f} s"
    return [Fact(line, {"streams": STARTS, "answers": len(answers), "held": held, "slowest_first_byte_s": first_s[-1]})]


async def drain_one_edge(stage: Stage) -> list[Fact]:
    """A draining edge sends a POST on to its neighbour, where it arrives once."""
    edge = await _best(stage)
    other = next(each for each in stage.lab.edges.values() if each is not edge)
    edge.controls.drain_to = other.id
    ids: list[str] = []
    while edge.tally.numbers["redirected"] == 0 and len(ids) < 8 * POSTS_TO_DRAIN:
        batch = [f"drain-{len(ids) + index}" for index in range(POSTS_TO_DRAIN)]
        ids += batch
        expect_whole(*await asyncio.gather(*[ask("h1", stage.daemon.plain_target(), chat(each)) for each in batch]))
    moved = [each for each in ids if edge.tally.arrivals[each]]
    edge.controls.reset()
    expect(bool(moved), f"none of {len(ids)} requests came to the draining edge")
    arrivals = {each: other.tally.arrivals[each] for each in moved}
    expect(set(arrivals.values()) == {1}, f"arrivals at {other.id}: {arrivals}")
    line = f"draining {edge.id} answered 307 to {len(moved)} POST: each arrived at {other.id} exactly once"
    return [Fact(line, {"drained": edge.id, "redirected": len(moved), "arrivals": arrivals})]


async def keep_a_websocket(stage: Stage) -> list[Fact]:
    """A socket that idles past the edge's limit, and loses its edge before the first message."""
    idle_s, limit_s = 2.8, 1.6
    for edge in stage.lab.edges.values():
        edge.controls.change({"greet": False, "websocket_idle_s": limit_s})
    async with WebSocketClient(stage.daemon.target(), REALTIME) as client:
        await asyncio.sleep(idle_s)
        expect(not client.closed, f"closed within {idle_s:g} s although the limit is {limit_s:g} s")
        holder = next(edge for edge in stage.lab.edges.values() if edge.tally.running)
        pings = client.pings
        await holder.kill()
        client.say({"type": "session.update", "session": {}})
        heard = [(await client.hear())["type"] for _ in range(2)]
        expect(heard == ["session.created", "session.updated"], f"heard {heard} after the loss of {holder.id}")
        heir = next(edge for edge in stage.lab.edges.values() if edge.tally.running)
    await holder.start()
    for edge in stage.lab.edges.values():
        edge.controls.reset()
    expect(pings > 0, "no ping reached the client")
    line = (
        f"WebSocket idle {idle_s:g} s past a limit of {limit_s:g} s: {pings} pings, open; "
        f"{holder.id} killed: same socket goes on at {heir.id}"
    )
    return [Fact(line, {"idle_s": idle_s, "limit_s": limit_s, "pings": pings, "lost": holder.id, "heir": heir.id})]


async def lose_an_edge_mid_stream(stage: Stage) -> list[Fact]:
    """After the first byte there is no other edge: the client must see an error."""
    for edge in stage.lab.edges.values():
        edge.controls.change({"cut_after": 4, "token_s": 0.01})
    endings: dict[str, str] = {}
    for version in VERSIONS:
        answer = await ask(version, stage.daemon.target(), chat(f"cut-{version}"))
        expect(answer.status == 200, f"{version}: status {answer.status} {answer.ending}")
        expect(not answer.clean, f"{version}: a cut answer ended cleanly")
        expect(b"[DONE]" not in answer.body, f"{version}: [DONE] was invented")
        endings[version] = answer.ending
    for edge in stage.lab.edges.values():
        edge.controls.reset()
    shown = "; ".join(f"{version} {ending}" for version, ending in endings.items())
    return [Fact(f"edge lost after 4 tokens, no clean end: {shown}", {"endings": endings})]


STEPS: tuple[tuple[str, Step], ...] = (
    ("resolve", resolve_twice),
    ("versions", stream_over_three_versions),
    ("waterfall", draw_a_waterfall),
    ("tickets", rotate_tickets),
    ("weights", slow_one_edge),
    ("failover", kill_one_edge),
    ("drain", drain_one_edge),
    ("websocket", keep_a_websocket),
    ("honesty", lose_an_edge_mid_stream),
)


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StepFailed(otherwise)


def expect_whole(*answers: Answer) -> None:
    """Each answer is a 200 that ended cleanly with [DONE]."""
    for answer in answers:
        seen = f"{answer.version}: status {answer.status}, {len(answer.body)} bytes, {answer.ending or 'clean end'}"
        expect(answer.status == 200 and answer.clean and answer.body.endswith(b"data: [DONE]\n\n"), seen)


def chat(request_id: str) -> Request:
    """A streamed chat completion; the text depends on the question alone, never on the id."""
    turns = [{"role": "user", "content": "why does water fall?"}]
    body = json.dumps({"model": "lab-small", "messages": turns, "stream": True}).encode()
    return Request("POST", CHAT, body, {"content-type": "application/json", "x-lab-request": request_id})


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds >= 0.001 else f"{seconds * 1000:.2f} ms"


def bars(parts: Mapping[str, float], wall_s: float) -> list[str]:
    """A waterfall as text, one line a part, each bar where its time was."""
    lines: list[str] = []
    start_s = 0.0
    for name, part_s in parts.items():
        left = round(start_s / wall_s * BAR_WIDTH)
        width = max(1, round(part_s / wall_s * BAR_WIDTH))
        lines.append(f"{name:>10} {' ' * left}{'█' * width:<{BAR_WIDTH - left + 1}} {ms(part_s)}")
        start_s += part_s
    return lines


async def _query(stage: Stage) -> float:
    return await asyncio.to_thread(_query_over_udp, stage.daemon.ports.dns)


def _query_over_udp(port: int) -> float:
    """Seconds for one question, measured at the socket: building and parsing messages is the client's own time."""
    query = dns.message.make_query(NAME, "A")
    wire = query.to_wire()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(10.0)
        asking.connect(("127.0.0.1", port))
        started = time.perf_counter()
        asking.send(wire)
        received = asking.recv(4096)
        took_s = time.perf_counter() - started
    answer = dns.message.from_wire(received)
    good = query.is_response(answer) and answer.rcode() == dns.rcode.NOERROR and len(answer.answer[0]) == 2
    expect(good, f"answered {dns.rcode.to_text(answer.rcode())}, {len(answer.answer)} record sets")
    return took_s


async def _live_weight(stage: Stage, edge_id: str) -> float:
    listed = (await stage.daemon.admin("GET", "/edges"))["edges"]
    return next(float(each["live_weight"]) for each in listed if each["id"] == edge_id)


async def _best(stage: Stage, among: Collection[str] = VERSIONS) -> LabEdge:
    """The edge with the greatest live weight: in every draw of two it wins over its likes."""
    listed = (await stage.daemon.admin("GET", "/edges"))["edges"]
    best = max((each for each in listed if each["protocol"] in among), key=lambda each: float(each["live_weight"]))
    return stage.lab.edges[best["id"]]


async def _until_served_by(stage: Stage, edge: LabEdge) -> list[Answer]:
    """Ask until `edge` has answered once, so that a warm connection leads to it."""
    answers: list[Answer] = []
    before = edge.tally.numbers["answered"]
    while edge.tally.numbers["answered"] == before:
        expect(len(answers) < STARTS, f"{edge.id} was never chosen in {STARTS} requests")
        answers.append(await ask("h1", stage.daemon.plain_target(), chat(f"warm-{len(answers)}")))
    return answers


async def _ask_many(stage: Stage, prefix: str, count: int) -> float:
    """Ask all at once; the median time to the first byte."""
    asked = [ask("h1", stage.daemon.plain_target(), chat(f"{prefix}-{index}")) for index in range(count)]
    answers = await asyncio.gather(*asked)
    expect_whole(*answers)
    return sorted(answer.first_byte_s for answer in answers)[count // 2]


async def _later(delay_s: float, stage: Stage, request_id: str) -> Answer:
    await asyncio.sleep(delay_s)
    return await ask("h1", stage.daemon.plain_target(), chat(request_id))


def _current_key(tickets: Mapping[str, Any]) -> str:
    return str(tickets["keys"][0]["id"])
