"""From exec to the first answer: every listener, the local CA kept from an earlier start, bytecode compiled as an install does.

The edge refuses, so the answer is our own 502 after a real dial. The peer is the interpreter with asyncio, ssl and argparse
loaded and nothing done: what no program of this language can go below.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from bench.measure import Figures, free_ports, record, take_turns

POLL_S = 0.001
WITHIN_S = 20.0
BARE = [sys.executable, "-c", "import asyncio, ssl, argparse"]
ASK = b"GET /bench/x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def config(folder: Path) -> tuple[Path, int]:
    """A file with fresh ports over a `state_dir` that stays; and the port of the plain listener."""
    plain, tls, dns, dot, admin, nobody = free_ports(6)
    file = folder / "headrace.toml"
    file.write_text(
        f'state_dir = "{folder}/state"\nlog = {{ level = "error" }}\n[admin]\nlisten = "http://127.0.0.1:{admin}"\n'
        f'[resolver]\nlisten = ["udp://127.0.0.1:{dns}", "tcp://127.0.0.1:{dns}", "tls://127.0.0.1:{dot}"]\n'
        f'[proxy]\nlisten = ["http://127.0.0.1:{plain}", "https://127.0.0.1:{tls}", "h3://127.0.0.1:{tls}"]\n'
        f'[[pool]]\nname = "bench"\npath = "/bench"\n[[pool.edge]]\nid = "e"\nurl = "http://127.0.0.1:{nobody}"\n'
    )
    return file, plain


def first_answer_s(folder: Path) -> tuple[float, float]:
    """One start: (seconds, CPU-seconds) to the first answer. RuntimeError when none comes, or no 502 as expected."""
    file, port = config(folder)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "run", "--config", str(file)],
        env={**environ, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")},
    )
    try:
        with closing(_connected(port, began + WITHIN_S)) as raw:
            raw.sendall(ASK)
            status = raw.recv(64).split()[1]
            took_s, used_s = time.perf_counter() - began, _cpu_s(process.pid)
    finally:
        process.terminate()
        process.wait()
    if status != b"502":
        raise RuntimeError(f"the first answer was {status!r}, not 502")
    return took_s, used_s


def _cpu_s(pid: int) -> float:
    """Of all threads so far, to the nanosecond that the scheduler counts in."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def _connected(port: int, deadline: float) -> socket.socket:
    while time.perf_counter() < deadline:
        try:
            return socket.create_connection(("127.0.0.1", port), WITHIN_S)
        except ConnectionRefusedError:
            time.sleep(POLL_S)
    raise RuntimeError(f"nothing listens on {port} after {WITHIN_S:g} s")


def bare_s() -> tuple[float, float]:
    began = time.perf_counter()
    process = subprocess.Popen(BARE)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return time.perf_counter() - began, used.ru_utime + used.ru_stime


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(argv)
    starts = Figures("exec to first answer", "ms", "bare interpreter")
    work = Figures("processor time to the first answer", "ms", "bare interpreter")

    def add(name: str, took_s: float, used_s: float) -> None:
        starts.add(name, took_s * 1000)
        work.add(name, used_s * 1000)

    with tempfile.TemporaryDirectory(prefix="bench-startup-") as folder:
        first_answer_s(Path(folder))  # makes the CA and the bytecode
        take_turns(
            options.rounds,
            {
                "headrace": lambda: add("headrace", *first_answer_s(Path(folder))),
                "bare": lambda: add("bare interpreter", *bare_s()),
            },
        )
    fastest = {name: round(min(values)) for name, values in starts.values.items()}
    record("startup", [starts, work], [f"fastest: {name} {ms} ms" for name, ms in fastest.items()])
    return 0
