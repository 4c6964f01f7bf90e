"""DNS queries for a CPU-second of the resolver, and what they wait, beside unbound, dnsdist, dnsmasq and hypercorn.

dnsperf (DoH: h2load) asks on loopback; one origin answers everybody's misses. Each contestant has one thread that
answers. Cached: 10 000 names, all warm. Missed: every name is new, so that each query is one upstream exchange, with 0x20
on both sides. Over TLS with 20 ms: what a new name waits beyond its round trip. Outage: one of two upstreams falls silent
while new names are asked at a steady rate.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Timer

from bench.dns_load import Latencies, dnsperf, perf, steady, write_names
from bench.dns_peers import STARTERS, Contestant, Upstream, origin, present
from bench.measure import RESULTS, Figures, Server, record, take_turns

NAMES = 10_000
STEADY_PER_S, OVER_TLS_PER_S, OUTAGE_PER_S = 10_000, 200, 1_000
DELAY_MS = 20.0
PEER = "unbound"
PARTS = ("cached", "steady", "missed", "over_tls", "outage", "memory")

Measure = Callable[[argparse.Namespace], list[Figures]]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench dns", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each run")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--modes", default="udp,tcp,dot,doh", help="transports of the cached part")
    parser.add_argument("--misses", type=int, default=8_000, help="names in each uncached run")
    parser.add_argument("--memory", type=int, default=100_000, help="names that are cached for the memory part")
    parser.add_argument(
        "--realtime", action="store_true", help="the steady part before everybody else on the machine (root)"
    )
    options = parser.parse_args(argv)
    missing = [tool for tool in ("dnsperf", "h2load", "unbound", "openssl") if not shutil.which(tool)]
    if missing:
        print(f"not measured: {', '.join(missing)} not installed", file=sys.stderr)
        return 0
    begin = time.monotonic()
    figures = [figure for part in options.parts.split(",") for figure in _PARTS[part](options)]
    notes = [" ".join((__doc__ or "").split())]
    if options.realtime:
        notes.append("steady: contestants and load with real-time priority, since others were at work on the machine")
    path = record("dns", figures, notes)
    write_table(path.with_suffix(".md"), figures)
    print(f"took {time.monotonic() - begin:.0f} s")
    return 0


class Stage(ExitStack):
    """Contestants beside each other, and an endless supply of names that nobody asked before."""

    _fresh = itertools.count()

    def contestants(self, *names: str, delay_ms: float = 0.0, tls: bool = False) -> dict[str, Contestant]:
        upstreams = [origin(self, delay_ms=delay_ms, tls=tls)]
        return {name: STARTERS[name](self, upstreams) for name in present(*names)}

    @classmethod
    def new_names(cls, folder: Path, count: int) -> Path:
        return write_names(folder / "cold", f"cold{next(cls._fresh)}", count)


def turns(options: argparse.Namespace, what: str, names: Sequence[str], turn: Callable[[str], None]) -> None:
    print(what)
    take_turns(options.rounds, {name: lambda name=name: turn(name) for name in names})  # type: ignore[misc]


def measured(contestant: Contestant, mode: str, names: Path, seconds: float, *more: str) -> tuple[float, float]:
    """(queries for a CPU-second of the server, queries for a second)."""
    before = contestant.server.cpu_s()
    done, took = perf(contestant.ports.of(mode), mode, names, seconds, *more)
    return done / max(contestant.server.cpu_s() - before, 0.01), done / took


def cached(options: argparse.Namespace) -> list[Figures]:
    figures: list[Figures] = []
    with Stage() as stage:
        all_of_them = stage.contestants("headrace", "unbound", "dnsdist", "dnsmasq", "hypercorn")
        names = write_names(all_of_them["headrace"].server.folder / "warm", "warm", NAMES)
        for contestant in all_of_them.values():
            if contestant.ports.dns:
                perf(contestant.ports.dns, "udp", names, 30.0, "-n", "1")
        for mode in options.modes.split(","):
            figures += _cached_over(mode, options, {n: c for n, c in all_of_them.items() if c.ports.of(mode)}, names)
    return figures


def _cached_over(mode: str, options: argparse.Namespace, taking: dict[str, Contestant], names: Path) -> list[Figures]:
    per_cpu = Figures(f"cached, {mode}, per CPU-second", "1/s", PEER)
    per_s = Figures(f"cached, {mode}, per second", "1/s", PEER)
    for contestant in taking.values():
        perf(contestant.ports.of(mode), mode, names, 1.0)

    def turn(name: str) -> None:
        cpu, wall = measured(taking[name], mode, names, options.seconds)
        per_cpu.add(name, cpu)
        per_s.add(name, wall)

    turns(options, f"cached, {mode}", list(taking), turn)
    return [per_cpu, per_s]


class Waits:
    """p50 and p99 of what was waited beyond `rtt_s`, in us."""

    def __init__(self, what: str, rtt_s: float = 0.0) -> None:
        self._rtt_s = rtt_s
        self.figures = [Figures(f"{what}, p50", "us", PEER), Figures(f"{what}, p99", "us", PEER)]

    def add(self, name: str, seen: Latencies) -> None:
        if seen.failed or seen.lost > 2:
            raise RuntimeError(f"{name}: {seen.failed} failed, {seen.lost} lost of {len(seen.seconds)}")
        for figure, share in zip(self.figures, (0.5, 0.99), strict=True):
            figure.add(name, (seen.at(share) - self._rtt_s) * 1e6)


@contextmanager
def _before_others(wanted: bool) -> Iterator[None]:
    """Whatever is started meanwhile runs before all others: on a loaded machine half a millisecond of waiting is theirs. Only
    where the load leaves the machine idle for most of the time."""
    if wanted:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        if wanted:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def steadily(options: argparse.Namespace) -> list[Figures]:
    waits = Waits(f"cached, udp, {STEADY_PER_S} queries/s")
    with _before_others(options.realtime), Stage() as stage:
        taking = stage.contestants("headrace", "unbound", "dnsdist")
        names = write_names(taking["headrace"].server.folder / "warm", "warm", NAMES)
        for contestant in taking.values():
            perf(contestant.ports.dns, "udp", names, 30.0, "-n", "1")
        turns(
            options,
            f"steady, {STEADY_PER_S} queries/s",
            list(taking),
            lambda name: waits.add(name, steady(taking[name].ports.dns, "udp", names, STEADY_PER_S, options.seconds)),
        )
    return waits.figures


def missed(options: argparse.Namespace) -> list[Figures]:
    per_cpu = Figures("missed, udp upstream, per CPU-second", "1/s", PEER)
    per_s = Figures("missed, udp upstream, per second", "1/s", PEER)
    with Stage() as stage:
        taking = stage.contestants("headrace", "unbound", "dnsdist", "dnsmasq")
        folder = taking["headrace"].server.folder

        def turn(name: str) -> None:
            names = stage.new_names(folder, options.misses)
            cpu, wall = measured(taking[name], "udp", names, 30.0, "-n", "1")
            per_cpu.add(name, cpu)
            per_s.add(name, wall)

        turns(options, "missed, udp upstream", list(taking), turn)
    return [per_cpu, per_s]


def over_tls(options: argparse.Namespace) -> list[Figures]:
    waits = Waits(f"missed, tls upstream {DELAY_MS:.0f} ms away, added", DELAY_MS / 1000)
    per_cpu = Figures("missed, tls upstream, per CPU-second", "1/s", PEER)
    with Stage() as stage:
        taking = stage.contestants("headrace", "unbound", "dnsdist", delay_ms=DELAY_MS, tls=True)
        folder = taking["headrace"].server.folder

        def turn(name: str) -> None:
            port = taking[name].ports.dns
            dnsperf(port, "udp", stage.new_names(folder, 20), "-n", "1", "-Q", "50")  # the connection is there
            names = stage.new_names(folder, OVER_TLS_PER_S * 2)
            waits.add(name, steady(port, "udp", names, OVER_TLS_PER_S, 30.0, "-n", "1"))
            cpu, _ = measured(taking[name], "udp", stage.new_names(folder, options.misses // 2), 30.0, "-n", "1")
            per_cpu.add(name, cpu)

        turns(options, "missed, tls upstream", list(taking), turn)
    return [*waits.figures, per_cpu]


def outage(options: argparse.Namespace) -> list[Figures]:
    """One of two upstreams stops (SIGSTOP: it neither answers nor refuses) a third into the run; its standing of the
    round before is forgotten by a new start. The peer is dnsdist: unbound alone has no second server to judge by."""
    failed = Figures("an upstream dies at 1000 new names/s: failed", "queries", "dnsdist")
    p99 = Figures("an upstream dies at 1000 new names/s: p99", "ms", "dnsdist")

    def turn(name: str) -> None:
        with Stage() as stage:
            upstreams = [origin(stage, delay_ms=DELAY_MS) for _ in range(2)]
            contestant = STARTERS[name](stage, upstreams)
            perf(contestant.ports.dns, "udp", stage.new_names(contestant.server.folder, 200), 30.0, "-n", "1")
            names = stage.new_names(contestant.server.folder, OUTAGE_PER_S * 4)
            timer = Timer(1.5, lambda: busiest(upstreams).signal(signal.SIGSTOP))
            timer.start()
            seen = steady(contestant.ports.dns, "udp", names, OUTAGE_PER_S, 30.0, "-n", "1")
            timer.join()
        failed.add(name, seen.failed + seen.lost)
        p99.add(name, seen.at(0.99) * 1000)

    turns(options, "an upstream dies", present("headrace", "dnsdist"), turn)
    return [failed, p99] if "dnsdist" in p99.values else []


def busiest(upstreams: Sequence[Upstream]) -> Server:
    return max((upstream.server for upstream in upstreams), key=lambda server: server.cpu_s())


def memory(options: argparse.Namespace) -> list[Figures]:
    """One round: the figure does not move."""
    whole, grown = Figures("memory with 100k names", "MiB", PEER), Figures("memory of 100k names", "MiB", PEER)
    print("memory")
    with Stage() as stage:
        taking = stage.contestants("headrace", "unbound")
        for name, contestant in taking.items():
            before = contestant.server.rss_bytes()
            names = stage.new_names(contestant.server.folder, options.memory)
            perf(contestant.ports.dns, "udp", names, 90.0, "-n", "1")
            after = contestant.server.rss_bytes()
            whole.add(name, after / 2**20)
            grown.add(name, (after - before) / 2**20)
    return [whole, grown]


_PARTS: dict[str, Measure] = dict(zip(PARTS, (cached, steadily, missed, over_tls, outage, memory), strict=True))


def write_table(path: Path, figures: Sequence[Figures]) -> None:
    """The same ratios as a table for people, with headrace's own figure."""
    contestants = list(dict.fromkeys(name for figure in figures for name in figure.values))
    lines = ["| figure | headrace | " + " | ".join(f"/ {name}" for name in contestants if name != "headrace") + " |"]
    lines.append("|---|" + "---|" * len(contestants))
    for figure in figures:
        cells = [f"{figure.ratio('headrace', name):.2f}" if name in figure.values else "-" for name in contestants[1:]]
        lines.append(f"| {figure.name} | {figure.median('headrace'):,.0f} {figure.unit} | " + " | ".join(cells) + " |")
    path.write_text("\n".join(lines) + "\n")
    assert path.parent == RESULTS
