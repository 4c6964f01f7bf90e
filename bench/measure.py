"""Start contestants, take turns, and keep what the operating system says of them.

The machine is shared: absolute figures drift by tens of percent within a minute. So contestants alternate in every round,
a figure is a ratio within its round, and what is kept is the median over the rounds.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

RESULTS = Path(__file__).parent / "results"
PROCESS_CPU = 2
"""With the complement of a process id above it: that process's clock (CPUCLOCK_SCHED, clock_getcpuclockid(3))."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """So many different ones. Asked for one by one they may be the same: a port that is let go can be given again."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in held:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in held]


def wait_listening(port: int, process: subprocess.Popen[bytes], timeout_s: float = 10.0) -> None:
    """Until somebody accepts on the port; RuntimeError when the process ends before."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        with socket.socket() as sock:
            sock.settimeout(0.2)
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"{process.args!r} does not listen on {port}")


class Server(AbstractContextManager["Server"]):
    """A server process in a folder of its own; `write` makes its files before `start`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-"))
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def start(
        self, argv: Sequence[str], port: int, *, environ: Mapping[str, str] | None = None, within_s: float = 10.0
    ) -> None:
        """Start it, `environ` added to ours, and wait until it listens. Raises RuntimeError with the end of its log."""
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                argv,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **(environ or {})},
            )
        try:
            wait_listening(port, self._process, within_s)
        except RuntimeError as exc:
            raise RuntimeError(f"{exc}\n{self.log()}") from exc

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """The end of what it has said."""
        texts = [
            path.read_text(errors="replace")
            for path in (self.folder / "log", self.folder / "error.log")
            if path.exists()
        ]
        return "\n".join(texts)[-2000:]

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def pids(self) -> list[int]:
        """The process and its descendants."""
        assert self._process is not None
        parents: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                except OSError:
                    continue
                parents.setdefault(parent, []).append(int(entry.name))
        found, todo = [], [self._process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            todo += parents.get(pid, [])
        return found

    def cpu_s(self) -> float:
        """User and system seconds that it has used so far, by the scheduler's count: /proc's is in steps of 10 ms, which
        a large body can be done in a dozen of."""
        total = 0.0
        for pid in self.pids():
            with suppress(OSError):  # it may have ended meanwhile
                total += time.clock_gettime(~pid << 3 | PROCESS_CPU)
        return total

    def rss_bytes(self) -> int:
        pages = 0
        for pid in self.pids():
            try:
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue
        return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Figures:
    """One figure of several contestants over the rounds; ratios are within a round."""

    name: str
    unit: str
    peer: str
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, contestant: str, value: float) -> None:
        self.values.setdefault(contestant, []).append(value)

    def ratio(self, contestant: str, peer: str = "") -> float:
        """Median over the rounds of contestant / peer (this figure's own, when none is named); 0 where the peer has 0."""
        pairs = zip(self.values[contestant], self.values[peer or self.peer], strict=True)
        return statistics.median([ours / theirs for ours, theirs in pairs if theirs] or [0.0])

    def median(self, contestant: str) -> float:
        return statistics.median(self.values[contestant])

    def row(self) -> dict[str, object]:
        return {
            "figure": self.name,
            "unit": self.unit,
            "peer": self.peer,
            "rounds": len(self.values[self.peer]),
            "ratio": {name: round(self.ratio(name), 3) for name in self.values},
            "median": {name: round(statistics.median(values), 3) for name, values in self.values.items()},
        }


def take_turns(rounds: int, turns: dict[str, Callable[[], None]], say: Callable[[str], None] = print) -> None:
    """Each contestant once in each round; the order turns, so that nobody always runs after the same one."""
    names = list(turns)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            turns[name]()
        say(f"  round {i + 1} of {rounds}")


def record(name: str, figures: Iterable[Figures], notes: Sequence[str] = ()) -> Path:
    """Write bench/results/NAME.json and print the rows as a table."""
    rows = [figure.row() for figure in figures]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "system": platform.system()}
    path.write_text(
        json.dumps(
            {"date": time.strftime("%Y-%m-%d"), "machine": machine, "notes": list(notes), "figures": rows}, indent=1
        )
        + "\n"
    )
    for row in rows:
        ratios = "  ".join(f"{contestant} {ratio}" for contestant, ratio in row["ratio"].items())  # type: ignore[attr-defined]
        print(f"{row['figure']:44} x {row['peer']}: {ratios}")
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path
