"""The resolvers that are measured, each with one thread that answers, all with the same upstream."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.measure import Server, free_port

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ports:
    """Where a contestant answers; 0: it does not offer that transport."""

    dns: int = 0
    dot: int = 0
    doh: int = 0
    pipelines: bool = True  # over TCP

    def of(self, mode: str) -> int:
        return {"udp": self.dns, "tcp": self.dns if self.pipelines else 0, "dot": self.dot, "doh": self.doh}[mode]


@dataclass(frozen=True)
class Contestant:
    server: Server
    ports: Ports


@dataclass(frozen=True)
class Upstream:
    """An origin; over TLS when `tls_port`, and then its certificate names `localhost`."""

    server: Server
    port: int
    tls_port: int = 0
    cert: str = ""


def origin(stack: ExitStack, *, delay_ms: float = 0.0, tls: bool = False) -> Upstream:
    server, port = stack.enter_context(Server("origin")), free_port()
    os.environ["PYTHONPATH"] = str(ROOT)
    argv = [sys.executable, "-m", "bench.dns_origin", str(port), "--delay", str(delay_ms)]
    upstream = Upstream(server, port)
    if tls:
        cert, key = certificate(server)
        upstream = Upstream(server, port, free_port(), cert)
        argv += ["--tls", str(upstream.tls_port), cert, key]
    server.start(argv, port)
    return upstream


def certificate(server: Server) -> tuple[str, str]:
    cert, key = str(server.folder / "cert.pem"), str(server.folder / "key.pem")
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*made, "-keyout", key, "-out", cert, *names], check=True, capture_output=True)
    return cert, key


def headrace(stack: ExitStack, upstreams: Sequence[Upstream], *, extra: str = "") -> Contestant:
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
{extra}
[resolver.cache]
entries = 2_000_000
size = "2GiB"
prefetch = false
persist = false
{"".join(_headrace_upstream(upstream) for upstream in upstreams)}
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


def _headrace_upstream(upstream: Upstream) -> str:
    if not upstream.tls_port:
        return f'[[resolver.upstream]]\nurl = "udp://127.0.0.1:{upstream.port}"\n'
    url, trust = f"tls://localhost:{upstream.tls_port}", f'addresses = ["127.0.0.1"]\nca_file = "{upstream.cert}"\n'
    return f'[[resolver.upstream]]\nurl = "{url}"\n{trust}'


def unbound(stack: ExitStack, upstreams: Sequence[Upstream]) -> Contestant:
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
  outgoing-num-tcp: 100
  {f'tls-cert-bundle: "{upstreams[0].cert}"' if upstreams[0].cert else ""}
remote-control:
  control-enable: no
forward-zone:
  name: "."
{"".join(_unbound_upstream(upstream) for upstream in upstreams)}
""",
    )
    server.start(["unbound", "-d", "-c", config], ports.dns)
    return Contestant(server, ports)


def _unbound_upstream(upstream: Upstream) -> str:
    if not upstream.tls_port:
        return f"  forward-addr: 127.0.0.1@{upstream.port}\n"
    return f"  forward-tls-upstream: yes\n  forward-addr: 127.0.0.1@{upstream.tls_port}#localhost\n"


def dnsdist(stack: ExitStack, upstreams: Sequence[Upstream]) -> Contestant:
    server = stack.enter_context(Server("dnsdist"))
    ports = Ports(free_port(), free_port(), free_port())
    cert, key = certificate(server)
    config = server.write(
        "dnsdist.conf",
        f"""
setLocal("127.0.0.1:{ports.dns}", {{maxInFlight=100}})
addTLSLocal("127.0.0.1:{ports.dot}", "{cert}", "{key}", {{maxInFlight=100}})
addDOHLocal("127.0.0.1:{ports.doh}", "{cert}", "{key}")
setSecurityPollSuffix("")
getPool(""):setCache(newPacketCache(2000000, {{maxTTL=86400}}))
{"".join(_dnsdist_upstream(upstream) for upstream in upstreams)}
""",
    )
    server.start(["dnsdist", "--supervised", "--disable-syslog", "-C", config], ports.dns)
    return Contestant(server, ports)


def _dnsdist_upstream(upstream: Upstream) -> str:
    if not upstream.tls_port:
        return f'newServer({{address="127.0.0.1:{upstream.port}", checkInterval=1, maxCheckFailures=1}})\n'
    trust = f'tls="openssl", subjectName="localhost", caStore="{upstream.cert}"'
    return f'newServer({{address="127.0.0.1:{upstream.tls_port}", {trust}, healthCheckMode="up"}})\n'


def dnsmasq(stack: ExitStack, upstreams: Sequence[Upstream]) -> Contestant:
    """UDP alone: it closes a connection after a hundred queries, which dnsperf counts as lost."""
    server, ports = stack.enter_context(Server("dnsmasq")), Ports(free_port(), pipelines=False)
    flags = ["--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--user=", "--no-resolv", "--no-hosts"]
    servers = [f"--server=127.0.0.1#{upstream.port}" for upstream in upstreams]
    place = [f"--port={ports.dns}", "--listen-address=127.0.0.1", "--bind-interfaces"]
    server.start(["dnsmasq", *flags, *place, *servers, "--cache-size=10000", "--dns-forward-max=2000"], ports.dns)
    return Contestant(server, ports)


def hypercorn(stack: ExitStack, upstreams: Sequence[Upstream]) -> Contestant:
    """DoH alone, and without any resolver behind it."""
    server, ports = stack.enter_context(Server("hypercorn")), Ports(doh=free_port())
    cert, key = certificate(server)
    server.start([sys.executable, "-m", "bench.dns_hypercorn", str(ports.doh), cert, key], ports.doh)
    return Contestant(server, ports)


STARTERS: dict[str, Callable[[ExitStack, Sequence[Upstream]], Contestant]] = {
    "headrace": headrace,
    "unbound": unbound,
    "dnsdist": dnsdist,
    "dnsmasq": dnsmasq,
    "hypercorn": hypercorn,
}


def present(*names: str) -> list[str]:
    """Those of `names` that are installed here."""
    return [name for name in names if name in ("headrace", "hypercorn") or shutil.which(name)]
