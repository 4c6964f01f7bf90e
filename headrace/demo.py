"""`headrace demo`: run the daemon against the lab and tell what it does in nine measured steps.

    lab (this process)                    daemon (its own process)         clients (this process)
    DoH/DoT upstream, 3 edges  <-- TLS -- headrace run --config FILE <---- h1, h2, h3, WebSocket, DNS

Each line is a fact that was asserted. Exit code 1 names the step that failed. Everything made is gone at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from headrace import exits
from headrace.lab.daemon import Daemon, DaemonFailed
from headrace.lab.lab import Lab
from headrace.lab.settings import EdgeEntry, Settings
from headrace.lab.story import STEPS, Fact, Stage, Step, StepFailed
from headrace.lab.tries import invitation

FORMAT = 1
STEP_WITHIN_S = 60.0


@dataclass(slots=True)
class Telling:
    """What was told so far: lines for people as they come, or one JSON document at the end."""

    out: TextIO
    as_json: bool
    steps: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def say(self, line: str = "") -> None:
        if not self.as_json:
            print(line, file=self.out, flush=True)

    def told(self, number: int, name: str, facts: list[Fact], took_s: float) -> None:
        first, *rest = facts
        self.say(f"{number} {name:<10} {first.line}")
        for fact in rest:
            self.say(f"  {'':<10} {fact.line}")
        step = {"step": number, "name": name, "ok": True, "took_s": round(took_s, 3), "line": first.line}
        self.steps.append(step | {"facts": dict(first.numbers)})

    def failed(self, number: int, name: str, why: str) -> None:
        self.say(f"{number} {name:<10} FAILED: {why}")
        self.steps.append({"step": number, "name": name, "ok": False, "error": why})

    def end(self, *, ok: bool) -> None:
        took_s = time.perf_counter() - self.started
        if self.as_json:
            document = {"version": FORMAT, "ok": ok, "took_s": round(took_s, 3), "steps": self.steps}
            print(json.dumps(document, indent=2), file=self.out, flush=True)
        elif ok:
            self.say(f"all {len(self.steps)} steps hold, {took_s:.1f} s")


def run(*, as_json: bool = False, keep: bool = False) -> int:
    """Tell the story on stdout; 0 when every step held, 1 when one did not, 130 when it was told to stop."""
    # The lab dies, is cut and falls silent on purpose, in this process: what its libraries say of that is no news.
    for name in ("asyncio", "quic", "headrace.lab"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        return asyncio.run(_run(Telling(sys.stdout, as_json), keep=keep))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return exits.INTERRUPTED


async def _run(telling: Telling, *, keep: bool) -> int:
    _end_on_sigterm()
    try:
        async with _stage() as stage:
            telling.say(f"headrace demo: daemon {stage.daemon.pid}, three edges and a DNS upstream on loopback")
            ok = await tell(telling, stage)
            telling.end(ok=ok)
            if ok and keep:
                await _keep(stage)
    except (DaemonFailed, OSError) as failed:
        telling.failed(0, "daemon", str(failed))
        telling.end(ok=False)
        return exits.PROBLEM
    return exits.OK if ok else exits.PROBLEM


@contextlib.asynccontextmanager
async def _stage() -> AsyncIterator[Stage]:
    async with Lab() as lab:
        settings = demo_settings(lab)
        async with Daemon(lab.write_settings(settings), settings.state_dir, settings.ports) as daemon:
            yield Stage(lab, daemon)


def demo_settings(lab: Lab) -> Settings:
    """Three edges, each reached over another version; pings short enough to be seen within a demo, and no connection
    held before it is asked for, so that the waterfall has a dial to show."""
    versions = dict(zip(lab.edges, ("h2", "h3", "h1"), strict=True))
    edges = [EdgeEntry(edge.id, edge.url, {"protocol": versions[edge.id]}) for edge in lab.edges.values()]
    websocket = {"ping_interval": "250ms", "on_edge_failure": "reconnect"}
    return lab.settings(edges=edges, websocket=websocket, pool={"keep_warm": 0})


async def tell(telling: Telling, stage: Stage, steps: Sequence[tuple[str, Step]] = STEPS) -> bool:
    """Take the steps in order; False as soon as one does not hold."""
    for number, (name, step) in enumerate(steps, 1):
        started = time.perf_counter()
        try:
            facts = await _within(step, stage)
        except (StepFailed, DaemonFailed, TimeoutError, OSError) as failed:
            telling.failed(number, name, str(failed) or type(failed).__name__)
            return False
        telling.told(number, name, facts, time.perf_counter() - started)
    return True


async def _within(step: Step, stage: Stage) -> list[Fact]:
    try:
        async with asyncio.timeout(STEP_WITHIN_S):
            return await step(stage)
    except TimeoutError as late:
        raise StepFailed(str(late) or f"no end within {STEP_WITHIN_S:g} s") from late


async def _keep(stage: Stage) -> None:
    """Print what to try and wait for Ctrl-C."""
    print("\n".join(invitation(stage)), file=sys.stderr, flush=True)  # noqa: T201
    await asyncio.Event().wait()


def _end_on_sigterm() -> None:
    """SIGTERM ends the demo as Ctrl-C does: with everything cleaned up."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
