"""TLS and HTTP/2 through headrace beside nginx: small requests, event streams, downloads, handshakes, idle connections.

All figures are for the proxy's own CPU-seconds or memory; clients are h2load and Python's ssl. P-256 certificate, X25519,
TLS 1.3, tickets. nginx is as it is shipped; for handshakes it stands there once more with the choices that headrace has made:
one ticket each, AES-128 first.
"""

from __future__ import annotations

import argparse
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import uvloop

from bench.h2_events import events
from bench.http_peers import NGINX, start_headrace
from bench.measure import Figures, Server, free_port, record, take_turns
from headrace.lab.ca import ThrowAwayCa, issue
from proxy.io.tls import SUITES_1_3, TICKETS_A_HANDSHAKE

HANDSHAKES, IDLE = 400, 1000
EVENTS_S = 4.0
DOWN = 256 << 20
SMALL = "/bench/big?bytes=240"
ALIKE = "nginx, one ticket, AES-128"


LIKE_OURS = f"""
      ssl_conf_command NumTickets {TICKETS_A_HANDSHAKE}; ssl_conf_command Ciphersuites {SUITES_1_3};
      ssl_prefer_server_ciphers on;"""


def nginx(stack: ExitStack, upstream: int, ca: ThrowAwayCa, more: str = "") -> tuple[Server, int, int]:
    server, tls, plain = stack.enter_context(Server("nginx")), free_port(), free_port()
    rest = f"""
      ssl_certificate {ca.cert_file}; ssl_certificate_key {ca.key_file}; ssl_protocols TLSv1.3;{more}
      upstream o {{ server 127.0.0.1:{upstream}; keepalive 128; keepalive_requests 10000000; }}
      server {{ listen 127.0.0.1:{tls} ssl http2; listen 127.0.0.1:{plain}; location /bench/ {{
        proxy_pass http://o/; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}"""
    file = server.write("nginx.conf", NGINX.format(folder=server.folder, rest=rest))
    server.start(["nginx", "-c", file, "-e", str(server.folder / "error.log")], tls)
    return server, tls, plain


def headrace(stack: ExitStack, upstream: int, ca: ThrowAwayCa) -> tuple[Server, int, int]:
    tls, plain = free_port(), free_port()
    listen = [f"https://127.0.0.1:{tls}", f"http://127.0.0.1:{plain}"]
    pem = (ca.cert_file, ca.key_file)
    return start_headrace(stack, upstream, listen, tls, serves='path = "/bench"', pem=pem), tls, plain


def h2load(port: int, requests: int, connections: int, streams: int, path: str) -> int:
    """Requests that succeeded."""
    argv = ["h2load", "-n", str(requests), "-c", str(connections), "-m", str(streams), "-w", "24", "-W", "24"]
    said = subprocess.run(
        [*argv, f"https://127.0.0.1:{port}{path}"], capture_output=True, text=True, timeout=120
    ).stdout
    done = re.search(r"(\d+) succeeded", said)
    if done is None or int(done[1]) < requests:
        raise RuntimeError(said)
    return int(done[1])


def download_tls(port: int, context: ssl.SSLContext) -> None:
    with (
        closing(socket.create_connection(("127.0.0.1", port))) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as tls,
    ):
        tls.sendall(f"GET /bench/big?bytes={DOWN} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        got, block = 0, bytearray(1 << 18)
        while size := tls.recv_into(block):
            got += size
        if got < DOWN:
            raise RuntimeError(f"{got} of {DOWN} bytes")


def handshakes(port: int, context: ssl.SSLContext, *, resumed: bool) -> None:
    session: ssl.SSLSession | None = None
    for _ in range(HANDSHAKES):
        with closing(socket.create_connection(("127.0.0.1", port))) as raw:
            tls = context.wrap_socket(raw, server_hostname="localhost", session=session if resumed else None)
            tls.sendall(f"GET {SMALL} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            tls.recv(4096)
            session = tls.session  # a TLS 1.3 ticket comes with the first bytes after the handshake
            tls.close()


def idle(server: Server, port: int, context: ssl.SSLContext | None) -> float:
    """Bytes that the proxy grew by for each of IDLE connections that have had one answer."""
    before, held = server.rss_bytes(), []
    for _ in range(IDLE):
        raw: socket.socket = socket.create_connection(("127.0.0.1", port))
        raw = context.wrap_socket(raw, server_hostname="localhost") if context is not None else raw
        raw.sendall(f"GET {SMALL} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        raw.recv(4096)
        held.append(raw)
    grown = server.rss_bytes() - before
    for raw in held:
        raw.close()
    return max(grown, 1) / IDLE


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench tls", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    if missing := [tool for tool in ("h2load", "nginx") if shutil.which(tool) is None]:
        print(f"bench tls needs {', '.join(missing)}", file=sys.stderr)
        return 1
    rows = {
        "small": Figures("h2+TLS small requests, 4 x 32", "requests per CPU-second", "nginx"),
        "one": Figures("h2+TLS small requests, 1 x 1", "requests per CPU-second", "nginx"),
        "events": Figures("SSE 100 x 100/s on one h2+TLS connection, events", "events per CPU-second", "nginx"),
        "late": Figures("SSE 100 x 100/s on one h2+TLS connection, delay p50", "us", "nginx"),
        "share": Figures("SSE 100 x 100/s on one h2+TLS connection, delivered", "share", "nginx"),
        "h1": Figures("download 256 MiB, h1+TLS", "bytes per CPU-second", "nginx"),
        "h2": Figures("download 256 MiB, h2+TLS", "bytes per CPU-second", "nginx"),
        "full": Figures("TLS 1.3 handshake + request, full", "per CPU-second", "nginx"),
        "resumed": Figures("TLS 1.3 handshake + request, resumed", "per CPU-second", "nginx"),
        "idle": Figures("idle connection, plain", "bytes of memory", "nginx"),
        "idle_tls": Figures("idle connection, TLS", "bytes of memory", "nginx"),
    }
    with ExitStack() as stack:
        ca = issue(Path(stack.enter_context(tempfile.TemporaryDirectory())), ["localhost", "127.0.0.1"])
        context, h2 = ca.client_context(["http/1.1"]), ca.client_context(["h2"])
        origin, upstream = stack.enter_context(Server("origin")), free_port()
        origin.start([sys.executable, "-m", "bench.origin", str(upstream)], upstream)
        proxies = {
            "nginx": nginx(stack, upstream, ca),
            "headrace": headrace(stack, upstream, ca),
            ALIKE: nginx(stack, upstream, ca, LIKE_OURS),
        }

        def per_cpu(name: str, row: str, amount: float, work: Callable[[], object]) -> None:
            server = proxies[name][0]
            before = server.cpu_s()
            work()
            rows[row].add(name, amount / max(server.cpu_s() - before, 0.01))

        def shake(name: str) -> None:
            tls = proxies[name][1]
            per_cpu(name, "full", HANDSHAKES, lambda: handshakes(tls, context, resumed=False))
            per_cpu(name, "resumed", HANDSHAKES, lambda: handshakes(tls, context, resumed=True))

        def turn(name: str) -> None:
            if name == ALIKE:
                shake(name)
                return
            server, tls, plain = proxies[name]
            per_cpu(name, "small", 10_000, lambda: h2load(tls, 10_000, 4, 32, SMALL))
            per_cpu(name, "one", 2_000, lambda: h2load(tls, 2_000, 1, 1, SMALL))
            for row, value in zip(
                ("events", "late", "share"), uvloop.run(events(tls, server, h2, EVENTS_S)), strict=True
            ):
                rows[row].add(name, value)
            per_cpu(name, "h1", DOWN, lambda: download_tls(tls, context))
            per_cpu(name, "h2", DOWN, lambda: h2load(tls, 1, 1, 1, f"/bench/big?bytes={DOWN}"))
            shake(name)
            if len(rows["idle"].values.get(name, [])) == 0:  # memory grows once: the first round is the figure
                rows["idle"].add(name, idle(server, plain, None))
                rows["idle_tls"].add(name, idle(server, tls, context))

        take_turns(options.rounds, {name: (lambda name=name: turn(name)) for name in proxies})  # type: ignore[misc]
    record("tls", rows.values(), ["one process each; requests reach the same HTTP/1.1 origin"])
    return 0
