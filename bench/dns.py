"""DNS queries for a CPU-second of the resolver, cached and through one upstream, beside unbound (dnsdist, dnsmasq).

dnsperf (DoH: h2load) asks on loopback; one origin answers everybody's misses. Each contestant has one thread that
answers. Cached: 200 names, all warm. Missed: every name is new, so that each query is one upstream exchange, with 0x20
on both sides.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.measure import RESULTS, Figures, Server, free_port, record, take_turns

NAMES = 200
LOAD = ["-c", "4", "-q", "50"]
ROOT = Path(__file__).parent.parent
PEER = "unbound"


@dataclass(frozen=True)
class Ports:
    """Where a contestant answers; 0: it does not offer that transport."""

    dns: int
    dot: int = 0
    doh: int = 0

    def of(self, mode: str) -> int:
        return {"udp": self.dns, "tcp": self.dns, "dot": self.dot, "doh": self.doh}[mode]


@dataclass(frozen=True)
class Contestant:
    server: Server
    ports: Ports


def origin(stack: ExitStack) -> int:
    server, port = stack.enter_context(Server("origin")), free_port()
    os.environ["PYTHONPATH"] = str(ROOT)
    server.start([sys.executable, "-m", "bench.dns_origin", str(port)], port)
    return port


def certificate(server: Server) -> tuple[str, str]:
    cert, key = str(server.folder / "cert.pem"), str(server.folder / "key.pem")
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*made, "-keyout", key, "-out", cert, *names], check=True, capture_output=True)
    return cert, key


def headrace(stack: ExitStack, upstream: int) -> Contestant:
    server = stack.enter_context(Server("headrace"))
    ports = Ports(free_port(), free_port(), free_port())
    cert, key = certificate(server)
    config = server.write(
        "headrace.toml",
        f"""
state_dir = "{server.folder}/state"
log = {{ level = "warning" }}
[resolver]
listen = ["udp://127.0.0.1:{ports.dns}", "tcp://127.0.0.1:{ports.dns}", "tls://127.0.0.1:{ports.dot}"]
bootstrap = []
hosts_files = []
[resolver.cache]
entries = 2_000_000
prefetch = false
persist = false
[[resolver.upstream]]
url = "udp://127.0.0.1:{upstream}"
[proxy]
listen = ["https://127.0.0.1:{ports.doh}"]
[tls]
cert_file = "{cert}"
key_file = "{key}"
[admin]
listen = "http://127.0.0.1:{free_port()}"
""",
    )
    server.start([str(Path(sys.executable).parent / "headrace"), "run", "--config", config], ports.dns)
    return Contestant(server, ports)


def unbound(stack: ExitStack, upstream: int) -> Contestant:
    server = stack.enter_context(Server("unbound"))
    ports = Ports(free_port(), free_port(), free_port())
    cert, key = certificate(server)
    config = server.write(
        "unbound.conf",
        f"""
server:
  interface: 127.0.0.1@{ports.dns}
  interface: 127.0.0.1@{ports.dot}
  interface: 127.0.0.1@{ports.doh}
  tls-port: {ports.dot}
  https-port: {ports.doh}
  tls-service-key: "{key}"
  tls-service-pem: "{cert}"
  access-control: 127.0.0.0/8 allow
  do-daemonize: no
  username: ""
  chroot: ""
  directory: "{server.folder}"
  pidfile: ""
  use-syslog: no
  verbosity: 0
  num-threads: 1
  module-config: "iterator"
  do-not-query-localhost: no
  qname-minimisation: no
  use-caps-for-id: yes
  msg-cache-size: 256m
  rrset-cache-size: 512m
  outgoing-range: 4096
  num-queries-per-thread: 2048
  incoming-num-tcp: 100
remote-control:
  control-enable: no
forward-zone:
  name: "."
  forward-addr: 127.0.0.1@{upstream}
""",
    )
    server.start(["unbound", "-d", "-c", config], ports.dns)
    return Contestant(server, ports)


def dnsdist(stack: ExitStack, upstream: int) -> Contestant:
    server, ports = stack.enter_context(Server("dnsdist")), Ports(free_port())
    config = server.write(
        "dnsdist.conf",
        f"""
setLocal("127.0.0.1:{ports.dns}", {{maxInFlight=100}})
setSecurityPollSuffix("")
getPool(""):setCache(newPacketCache(2000000, {{maxTTL=86400}}))
newServer({{address="127.0.0.1:{upstream}", healthCheckMode="up"}})
""",
    )
    server.start(["dnsdist", "--supervised", "--disable-syslog", "-C", config], ports.dns)
    return Contestant(server, ports)


def dnsmasq(stack: ExitStack, upstream: int) -> Contestant:
    server, ports = stack.enter_context(Server("dnsmasq")), Ports(free_port())
    flags = ["--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--user=", "--no-resolv", "--no-hosts"]
    place = [f"--port={ports.dns}", "--listen-address=127.0.0.1", "--bind-interfaces", f"--server=127.0.0.1#{upstream}"]
    server.start(["dnsmasq", *flags, *place, "--cache-size=10000", "--dns-forward-max=2000"], ports.dns)
    return Contestant(server, ports)


STARTERS: dict[str, Callable[[ExitStack, int], Contestant]] = {
    "headrace": headrace,
    "unbound": unbound,
    "dnsdist": dnsdist,
    "dnsmasq": dnsmasq,
}


def perf(port: int, mode: str, names: Path, seconds: float, *extra: str) -> tuple[int, float]:
    """(queries answered, seconds it took). Raises RuntimeError when dnsperf lost one in a hundred or more."""
    if mode == "doh":
        return h2load(port, names, seconds)
    argv = ["dnsperf", "-s", "127.0.0.1", "-p", str(port), "-m", mode, "-d", str(names), "-l", str(seconds)]
    said = subprocess.run([*argv, *LOAD, *extra], capture_output=True, text=True, check=True, timeout=60).stdout
    sent, done = (int(re.search(rf"Queries {word}:\s+(\d+)", said).group(1)) for word in ("sent", "completed"))  # type: ignore[union-attr]
    took = float(re.search(r"Run time \(s\):\s+([\d.]+)", said).group(1))  # type: ignore[union-attr]
    if done < 0.99 * sent or "NOERROR" not in said:
        raise RuntimeError(f"{mode}: {done} of {sent} answered\n{said}")
    return done, took


def h2load(port: int, names: Path, seconds: float) -> tuple[int, float]:
    """As `perf`, over HTTP/2. dnsperf reads one answer from a TLS record and loses the others of the same record."""
    uris = names.with_suffix(f".{port}")
    paths = (f"https://127.0.0.1:{port}/dns-query?dns={encoded(line.split()[0])}" for line in names.open())
    uris.write_text("\n".join(paths))
    argv = ["h2load", "-D", str(int(seconds)), "-c", "4", "-m", "50", "-i", str(uris)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    good, bad = (int(re.search(rf"(\d+) {word}", said).group(1)) for word in ("2xx", "failed"))  # type: ignore[union-attr]
    if bad or not good:
        raise RuntimeError(f"doh: {good} answered, {bad} failed\n{said}")
    return good, float(int(seconds))


def encoded(name: str) -> str:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    query = b"\0\0\1\0\0\1\0\0\0\0\0\0" + labels + b"\0\0\1\0\1"
    return base64.urlsafe_b64encode(query).rstrip(b"=").decode()


def write_names(path: Path, tag: str, count: int) -> Path:
    path.write_text("".join(f"n{i}.{tag}.bench.example A\n" for i in range(count)))
    return path


def measured(contestant: Contestant, mode: str, names: Path, seconds: float, *extra: str) -> tuple[float, float]:
    """(queries for a CPU-second of the server, queries for a second)."""
    before = contestant.server.cpu_s()
    done, took = perf(contestant.ports.of(mode), mode, names, seconds, *extra)
    return done / max(contestant.server.cpu_s() - before, 0.01), done / took


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench dns", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--modes", default="udp,tcp,dot,doh", help="transports of the cached part")
    parser.add_argument("--misses", type=int, default=20_000, help="names in each uncached run, 0: none")
    options = parser.parse_args(argv)
    missing = [tool for tool in ("dnsperf", "h2load", "unbound", "openssl") if not shutil.which(tool)]
    if missing:
        print(f"not measured: {', '.join(missing)} not installed", file=sys.stderr)
        return 0
    with ExitStack() as stack:
        upstream = origin(stack)
        names = [name for name in STARTERS if name == "headrace" or shutil.which(name)]
        contestants = {name: STARTERS[name](stack, upstream) for name in names}
        folder = contestants["headrace"].server.folder
        figures = cached(contestants, options, folder) + missed(contestants, options, folder)
    path = record("dns", figures, [" ".join((__doc__ or "").split())])
    write_table(path.with_suffix(".md"), figures)
    return 0


def cached(contestants: dict[str, Contestant], options: argparse.Namespace, folder: Path) -> list[Figures]:
    names, figures = write_names(folder / "warm", "warm", NAMES), []
    for mode in options.modes.split(","):
        taking = {name: c for name, c in contestants.items() if c.ports.of(mode)}
        per_cpu = Figures(f"cached, {mode}, per CPU-second", "1/s", PEER)
        per_s = Figures(f"cached, {mode}, per second", "1/s", PEER)
        for contestant in taking.values():
            perf(contestant.ports.of(mode), mode, names, 1.0)

        def turn(name: str, mode: str = mode, per_cpu: Figures = per_cpu, per_s: Figures = per_s) -> None:
            cpu, wall = measured(contestants[name], mode, names, options.seconds)
            per_cpu.add(name, cpu)
            per_s.add(name, wall)

        print(f"cached, {mode}")
        take_turns(options.rounds, {name: lambda name=name, turn=turn: turn(name) for name in taking})  # type: ignore[misc]
        figures += [per_cpu, per_s]
    return figures


def missed(contestants: dict[str, Contestant], options: argparse.Namespace, folder: Path) -> list[Figures]:
    if not options.misses:
        return []
    per_cpu = Figures("missed, udp upstream, per CPU-second", "1/s", PEER)
    per_s = Figures("missed, udp upstream, per second", "1/s", PEER)
    fresh = itertools.count()

    def turn(name: str) -> None:
        names = write_names(folder / "cold", f"cold{next(fresh)}", options.misses)
        cpu, wall = measured(contestants[name], "udp", names, 30.0, "-n", "1")
        per_cpu.add(name, cpu)
        per_s.add(name, wall)

    print("missed, udp upstream")
    take_turns(options.rounds, {name: lambda name=name: turn(name) for name in contestants})  # type: ignore[misc]
    return [per_cpu, per_s]


def write_table(path: Path, figures: Sequence[Figures]) -> None:
    """The same ratios as a table for people."""
    contestants = list(dict.fromkeys(name for figure in figures for name in figure.values))
    lines = [f"| ratio to {PEER} | " + " | ".join(contestants) + " |", "|---|" + "---|" * len(contestants)]
    for figure in figures:
        ratios = [f"{figure.ratio(name):.2f}" if name in figure.values else "-" for name in contestants]
        lines.append(f"| {figure.name} | " + " | ".join(ratios) + " |")
    path.write_text("\n".join(lines) + "\n")
    assert path.parent == RESULTS
