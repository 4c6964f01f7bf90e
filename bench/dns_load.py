"""Load on a resolver, and what it saw: dnsperf for DNS, h2load for DNS over HTTPS."""

from __future__ import annotations

import base64
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

LOAD = ["-c", "4", "-q", "50"]


def dnsperf(port: int, mode: str, names: Path, *more: str, timeout_s: float = 90.0) -> str:
    """What dnsperf says; `more` are its options (-l, -n, -Q, -v)."""
    argv = ["dnsperf", "-s", "127.0.0.1", "-p", str(port), "-m", mode, "-d", str(names), *LOAD, *more]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=timeout_s).stdout


def counted(said: str, word: str) -> int:
    found = re.search(rf"Queries {word}:\s+(\d+)", said)
    return int(found.group(1)) if found else 0


def perf(port: int, mode: str, names: Path, seconds: float, *more: str) -> tuple[int, float]:
    """(queries answered, seconds it took). Raises RuntimeError when dnsperf lost one in a hundred or more."""
    if mode == "doh":
        return h2load(port, names, seconds)
    said = dnsperf(port, mode, names, "-l", str(seconds), *more)
    sent, done = counted(said, "sent"), counted(said, "completed")
    took = float(re.search(r"Run time \(s\):\s+([\d.]+)", said).group(1))  # type: ignore[union-attr]
    if done < 0.99 * sent or "NOERROR" not in said:
        raise RuntimeError(f"{mode}: {done} of {sent} answered\n{said[-1000:]}")
    return done, took


def h2load(port: int, names: Path, seconds: float) -> tuple[int, float]:
    """As `perf`, over HTTP/2. dnsperf reads one answer from a TLS record and loses the others of the same record."""
    uris = names.with_suffix(f".{port}")
    if not uris.exists():
        lines = (f"https://127.0.0.1:{port}/dns-query?dns={encoded(line.split()[0])}" for line in names.open())
        uris.write_text("\n".join(lines))
    argv = ["h2load", "-D", str(int(seconds)), "-c", "4", "-m", "50", "-i", str(uris)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    good, bad = (int(re.search(rf"(\d+) {word}", said).group(1)) for word in ("2xx", "failed"))  # type: ignore[union-attr]
    if bad or not good:
        raise RuntimeError(f"doh: {good} answered, {bad} failed\n{said[-1000:]}")
    return good, float(int(seconds))


def encoded(name: str) -> str:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    query = b"\0\0\1\0\0\1\0\0\0\0\0\0" + labels + b"\0\0\1\0\1"
    return base64.urlsafe_b64encode(query).rstrip(b"=").decode()


@dataclass(frozen=True)
class Latencies:
    """Of the queries that were answered, in seconds and in order, and what went wrong."""

    seconds: list[float]
    lost: int
    failed: int  # answered, and not with NOERROR

    def at(self, share: float) -> float:
        return self.seconds[min(len(self.seconds) - 1, int(share * len(self.seconds)))]


def steady(port: int, mode: str, names: Path, per_s: int, seconds: float, *more: str) -> Latencies:
    """Latencies at a steady rate; `-v` of dnsperf prints one line for each query."""
    said = dnsperf(port, mode, names, "-Q", str(per_s), "-l", str(seconds), "-v", *more)
    lines = re.findall(r"^> (\w+) .* ([\d.]+)$", said, re.MULTILINE)
    took = sorted(float(seconds) for code, seconds in lines if code != "T")
    failed = sum(1 for code, _ in lines if code not in ("NOERROR", "T"))
    return Latencies(took, counted(said, "lost"), failed)


def write_names(path: Path, tag: str, count: int) -> Path:
    path.write_text("".join(f"n{i}.{tag}.bench.example A\n" for i in range(count)))
    return path
