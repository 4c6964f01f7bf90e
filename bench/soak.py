"""A thousand streams at once over all nine version pairs, while clients leave and edges die; nothing may stay behind.

Every stream knows how it ended for its client; every record says how the gateway saw it. The two must agree for each one,
and once all is quiet the descriptors, tasks, exchanges and objects must be those of the start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from bench.census import Census, rss_bytes, take_census
from bench.measure import RESULTS
from bench.soak_stage import PAIRS, Stage, piece, staged
from proxy.messages import Abort, Cause, Leg, NullReceiver, Party, RequestHead, ResponseHead
from proxy.messages import Stage as At
from proxy.waterfall import RequestRecord

LEAVING = 0.15  # the share of streams whose client leaves at a moment of its own
KILL_EVERY_S = 5.0
DEAD_FOR_S = 0.5
PORT = re.compile(r":\d+(?=:)|, last stream \d+")  # told apart, refusals would not add up
LEAVE = Abort(Party.US, At.BODY, Cause.CANCELLED, "soak")


@dataclass(slots=True)
class Plan:
    """What one stream asks for; `leaves_after_s` None: it stays to the end."""

    number: int
    down: str
    up: str
    chunks: int
    size: int
    gap_ms: int
    upload: int
    leaves_after_s: float | None

    @property
    def target(self) -> bytes:
        return f"/s/{self.number}/{self.chunks}/{self.size}/{self.gap_ms}".encode()

    @property
    def answer(self) -> bytes:
        return b"".join(piece(self.number, index, self.size) for index in range(self.chunks))


class Hearing(NullReceiver):
    """The client's end of a stream: what came, and how it ended."""

    def __init__(self, plan: Plan) -> None:
        self.status, self.ending = 0, ""
        self.got, self.true_so_far, self.is_exact = 0, True, False
        self.over = asyncio.Event()
        self._due = plan.answer

    def on_head(self, head: ResponseHead) -> None:
        self.status = head.status

    def on_data(self, chunk: bytes) -> None:
        self.true_so_far &= self.status != 200 or self._due.startswith(chunk, self.got)
        self.got += len(chunk)

    def on_end(self) -> None:
        self._end("whole" if self.status == 200 else "refused")

    def on_abort(self, abort: Abort) -> None:
        self._end("unprocessed" if abort.unprocessed else "cut")

    def _end(self, how: str) -> None:
        self.ending = self.ending or how
        self.is_exact = self.true_so_far and self.got == len(self._due)
        self._due = b""  # thousands of these wait for the judgement
        self.over.set()


@dataclass(slots=True)
class Report:
    streams: int
    seconds: float
    kills: int = 0
    most_at_once: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    before: Census | None = None
    after: Census | None = None
    rss_mib: list[int] = field(default_factory=list)

    @property
    def left_behind(self) -> dict[str, int]:
        assert self.before is not None and self.after is not None
        return self.after.more_than(self.before)

    def told(self) -> dict[str, object]:
        """For bench/results; at most fifty of the wrong ones."""
        assert self.before is not None and self.after is not None
        return {
            "streams": self.streams,
            "seconds": self.seconds,
            "most_at_once": self.most_at_once,
            "edge_kills": self.kills,
            "endings": dict(self.endings),
            "refusals": dict(self.refusals.most_common(20)),
            "wrong": self.wrong[:50],
            "left_behind": self.left_behind,
            "rss_mib": {
                "before": self.before.rss_bytes >> 20,
                "at_each_kill": self.rss_mib,
                "after": self.after.rss_bytes >> 20,
            },
        }


class Soak:
    """Keeps `streams` streams going for `seconds`, then compares."""

    def __init__(self, stage: Stage, *, streams: int, seconds: float, seed: int) -> None:
        self.report = Report(streams, seconds)
        self._stage = stage
        self._rng = random.Random(seed)
        self._number = self._now = 0
        self._fates: dict[int, tuple[Plan, Hearing]] = {}

    async def run(self) -> Report:
        report = self.report
        await self._warm()
        await self._rest()
        self._stage.records.clear()
        self._fates.clear()
        report.before = take_census(self._stage)
        self._stage.resume()
        ends_at = time.monotonic() + report.seconds
        killer = asyncio.create_task(self._kill(ends_at))
        slots = [asyncio.create_task(self._slot(PAIRS[i % len(PAIRS)], ends_at)) for i in range(report.streams)]
        await asyncio.gather(killer, *slots)
        await self._rest()
        self._judge(last=True)
        self._stage.records.clear()
        report.after = await self._count()
        return report

    async def _warm(self) -> None:
        """One stream of each pair: what is imported, compiled and remembered at first use is no leak."""
        for down, up in PAIRS * 2:
            await self._stream(self._plan(down, up, leaves=False, gap_ms=1))

    def _plan(self, down: str, up: str, *, leaves: bool, gap_ms: int = 0) -> Plan:
        rng = self._rng
        self._number += 1
        chunks, gap_ms = rng.randint(5, 15), gap_ms or rng.randint(200, 500)
        upload = rng.choice((0, 0, 100, 3000, 100_000))
        leaves_after_s = rng.random() * chunks * gap_ms / 1000 if leaves else None
        return Plan(self._number, down, up, chunks, rng.choice((60, 300, 2000)), gap_ms, upload, leaves_after_s)

    async def _slot(self, pair: tuple[str, str], ends_at: float) -> None:
        await asyncio.sleep(self._rng.random() * min(2.0, self.report.seconds / 4))
        while time.monotonic() < ends_at:
            await self._stream(self._plan(*pair, leaves=self._rng.random() < LEAVING))

    async def _stream(self, plan: Plan) -> None:
        hearing = Hearing(plan)
        self._fates[plan.number] = plan, hearing
        connection = await self._stage.clients[plan.down].connection()
        leg = connection.open()
        leg.receiver = hearing
        self._now += 1
        self.report.most_at_once = max(self.report.most_at_once, self._now)
        try:
            send(plan, leg)
            await asyncio.wait_for(hearing.over.wait(), plan.leaves_after_s or 60)
        except TimeoutError:
            hearing.ending = "left" if plan.leaves_after_s is not None else "hangs"
            leg.abort(LEAVE)
        finally:
            self._now -= 1

    async def _kill(self, ends_at: float) -> None:
        """One edge after the other, each with a pool-mate that lives."""
        while time.monotonic() + KILL_EVERY_S / 2 < ends_at:
            await asyncio.sleep(min(KILL_EVERY_S, self.report.seconds / 4) * self._rng.uniform(0.5, 1.0))
            edge = self._rng.choice(self._stage.edges)
            edge.kill()
            self.report.kills += 1
            self._judge()
            self.report.rss_mib.append(rss_bytes() >> 20)
            await asyncio.sleep(DEAD_FOR_S)
            await edge.start()

    async def _rest(self) -> None:
        """Until every connection is gone, at most ten seconds."""
        self._stage.rest()
        await until(lambda: self._stage.is_quiet, 10)

    async def _count(self) -> Census:
        """A QUIC connection that was closed answers for three more round trips, a TCP transport lingers up to 2 s."""
        assert self.report.before is not None
        census, deadline = take_census(self._stage), time.monotonic() + 20
        while census.more_than(self.report.before) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            census = take_census(self._stage)
        return census

    def _judge(self, *, last: bool = False) -> None:
        """Hold the ends of streams against their records, and forget both: a soak must not grow by itself."""
        records: dict[int, list[RequestRecord]] = {}
        for record in self._stage.records:
            records.setdefault(int(record.path.split("/")[2]), []).append(record)
        for number, (plan, hearing) in list(self._fates.items()):
            if hearing.ending and (number in records or last):
                del self._fates[number]
                self._judge_one(plan, hearing, records.pop(number, []))
        self._stage.records[:] = [record for each in records.values() for record in each]
        if last:
            self.report.wrong += [
                f"record without a stream, or a second one: {record}" for record in self._stage.records
            ]

    def _judge_one(self, plan: Plan, hearing: Hearing, records: list[RequestRecord]) -> None:
        self.report.endings[hearing.ending] += 1
        if hearing.ending == "refused" and records:
            self.report.refusals[f"{hearing.status} {PORT.sub('', records[0].detail)}"] += 1
        said = wrong(plan, hearing, records)
        if said:
            self.report.wrong.append(f"stream {plan.number} {plan.down}-{plan.up}: {said}")


def send(plan: Plan, leg: Leg) -> None:
    scheme = b"http" if plan.down == "h1" else b"https"
    method = b"POST" if plan.upload else b"GET"
    length = plan.upload if plan.number % 2 or not plan.upload else None
    fields = [(b"content-length", b"%d" % length)] if length else []
    leg.head(RequestHead(method, plan.target, scheme, f"{plan.up}.localhost".encode(), fields, length))
    if plan.upload:
        leg.data(bytes(plan.upload))
    leg.end()


def wrong(plan: Plan, hearing: Hearing, records: list[RequestRecord]) -> str:
    """What does not fit together, or ""."""
    if not records and hearing.ending in ("left", "unprocessed", "cut"):
        return ""  # it left, or its connection did, before the gateway had its head
    if len(records) != 1:
        return f"{hearing.ending} for its client, and {len(records)} records"
    (record,) = records
    seen = f"{hearing.ending} ({hearing.status}) for its client, recorded as {record.outcome!r} ({record.status})"
    fits: dict[str, Callable[[], bool]] = {
        "whole": lambda: record.outcome == "ok" and hearing.is_exact,
        "refused": lambda: record.outcome != "ok" and hearing.status == record.status,
        "cut": lambda: record.outcome.startswith("edge ") and hearing.true_so_far,
        # An end may cross with the client's leaving; then the record may tell of either.
        "left": lambda: record.outcome in ("client cancelled", "ok") or record.outcome.startswith("edge "),
    }
    return "" if fits.get(hearing.ending, lambda: False)() else f"{seen}: {record.detail}"


async def until(holds: Callable[[], bool], within_s: float) -> None:
    """Wait for what has no event, and go on when it never comes: the census will tell."""
    deadline = time.monotonic() + within_s
    while not holds() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


async def soak(folder: Path, *, streams: int, seconds: float, seed: int = 1) -> Report:
    async with staged(folder, seed) as stage:
        return await Soak(stage, streams=streams, seconds=seconds, seed=seed).run()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench soak", description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write bench/results/soak.json")
    options = parser.parse_args(argv)
    with (
        tempfile.TemporaryDirectory(prefix="bench-soak-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        report = runner.run(soak(Path(folder), streams=options.streams, seconds=options.seconds, seed=options.seed))
    machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "system": platform.system()}
    told = {"date": time.strftime("%Y-%m-%d"), "machine": machine} | report.told()
    if options.record:
        (RESULTS / "soak.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))
    return 1 if report.wrong or report.left_behind else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
