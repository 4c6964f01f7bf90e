"""Small requests through headrace beside nginx and HAProxy: requests for a CPU-second of the proxy, and added latency.

One origin (nginx, one worker) answers 240 bytes; wrk asks, by HTTP/1.1 on loopback. Each proxy has one process or thread.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack

from bench.measure import Figures, Server, free_port, record, take_turns

BODY = "x" * 240
POST = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer sk-bench"
wrk.headers["User-Agent"] = "OpenAI/Python 3.0.0"
wrk.headers["Accept"] = "application/json"
wrk.headers["X-Stainless-Lang"] = "python"
wrk.headers["Host"] = "bench.localhost"
wrk.body = string.rep("y", 400)
"""

NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/error.log error; worker_processes 1;
events {{ worker_connections 2048; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 10000000;
  {rest}
}}
"""


def origin(stack: ExitStack) -> int:
    server, port = stack.enter_context(Server("origin")), free_port()
    rest = f'server {{ listen 127.0.0.1:{port}; location / {{ return 200 "{BODY}"; }} }}'
    file = server.write("nginx.conf", NGINX.format(folder=server.folder, rest=rest))
    server.start(["nginx", "-c", file, "-e", str(server.folder / "error.log")], port)
    return port


def nginx(stack: ExitStack, upstream: int) -> tuple[Server, int]:
    server, port = stack.enter_context(Server("nginx")), free_port()
    rest = f"""
      upstream o {{ server 127.0.0.1:{upstream}; keepalive 128; keepalive_requests 10000000; }}
      server {{ listen 127.0.0.1:{port}; location / {{
        proxy_pass http://o; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
        proxy_request_buffering off; }} }}"""
    file = server.write("nginx.conf", NGINX.format(folder=server.folder, rest=rest))
    server.start(["nginx", "-c", file, "-e", str(server.folder / "error.log")], port)
    return server, port


def haproxy(stack: ExitStack, upstream: int) -> tuple[Server, int]:
    server, port = stack.enter_context(Server("haproxy")), free_port()
    file = server.write(
        "haproxy.cfg",
        f"""
global
  nbthread 1
defaults
  mode http
  timeout client 60s
  timeout server 60s
  timeout connect 5s
  option http-no-delay
frontend f
  bind 127.0.0.1:{port}
  default_backend b
backend b
  http-reuse always
  server s 127.0.0.1:{upstream}
""",
    )
    server.start(["haproxy", "-f", file], port)
    return server, port


def headrace(stack: ExitStack, upstream: int) -> tuple[Server, int]:
    server, port = stack.enter_context(Server("headrace")), free_port()
    file = server.write(
        "headrace.toml",
        f"""
state_dir = "{server.folder}/state"
log = {{ level = "warning" }}
[resolver]
listen = []
[proxy]
listen = ["http://127.0.0.1:{port}"]
[admin]
listen = "http://127.0.0.1:{free_port()}"
[[pool]]
name = "bench"
hosts = ["bench.localhost"]
[[pool.edge]]
id = "origin"
url = "http://127.0.0.1:{upstream}"
max_active = 10000
""",
    )
    server.start([sys.executable, "-m", "headrace", "run", "--config", file], port)
    return server, port


PROXIES: dict[str, Callable[[ExitStack, int], tuple[Server, int]]] = {
    "nginx": nginx,
    "haproxy": haproxy,
    "headrace": headrace,
}


def wrk(port: int, script: str, connections: int, seconds: int) -> tuple[float, float]:
    """(requests done, p50 in microseconds)."""
    argv = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds}s",
        "--latency",
        "-s",
        script,
        f"http://127.0.0.1:{port}/v1/chat/completions",
    ]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=seconds + 30).stdout
    done = re.search(r"(\d+) requests in", said)
    p50 = re.search(r"50%\s+([\d.]+)(us|ms|s)", said)
    if done is None or p50 is None or "Non-2xx" in said:
        raise RuntimeError(said)
    return float(done[1]), float(p50[1]) * {"us": 1, "ms": 1e3, "s": 1e6}[p50[2]]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench http", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    options = parser.parse_args(argv)
    missing = [tool for tool in ("wrk", "nginx") if shutil.which(tool) is None]
    if missing:
        print(f"bench http needs {', '.join(missing)}", file=sys.stderr)
        return 1
    many = {n: Figures(f"h1 small POST, {n} connections", "requests per CPU-second", "nginx") for n in (16, 64)}
    latency = Figures("h1 small POST, 1 connection, added p50", "us", "nginx")
    with ExitStack() as stack:
        upstream = origin(stack)
        script = Server("script")
        stack.enter_context(script)
        file = script.write("post.lua", POST)
        proxies = {
            name: make(stack, upstream) for name, make in PROXIES.items() if name == "headrace" or shutil.which(name)
        }
        direct: list[float] = []

        def turn(name: str) -> None:
            server, port = proxies[name]
            for connections, figures in many.items():
                before = server.cpu_s()
                done, _ = wrk(port, file, connections, options.seconds)
                figures.add(name, done / max(server.cpu_s() - before, 0.01))
            direct.append(wrk(upstream, file, 1, 1)[1])
            latency.add(name, max(wrk(port, file, 1, options.seconds)[1] - direct[-1], 1.0))

        for server, port in proxies.values():
            wrk(port, file, 4, 1)  # warm
            assert server.pids()
        take_turns(options.rounds, {name: (lambda name=name: turn(name)) for name in proxies})  # type: ignore[misc]
    record("http", [*many.values(), latency], ["nginx and HAProxy: one worker, kept-alive upstream, no buffering"])
    return 0
