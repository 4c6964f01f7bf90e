"""Small requests through headrace beside other proxies: requests for a CPU-second of the proxy, and added latency.

One origin (nginx, one worker) answers a chat completion of 240 bytes to one of 400; wrk asks, by HTTP/1.1 on loopback. Each
proxy has one process or thread.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack

from bench.http_peers import APPLICATIONS, PROXIES, installed, origin
from bench.measure import Figures, Server, record, take_turns

PROMPT = '{"model":"bench","messages":[{"role":"user","content":"' + 325 * "y" + '"}],"max_tokens":16}'
POST = f"""
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer sk-bench"
wrk.headers["User-Agent"] = "OpenAI/Python 3.0.0"
wrk.headers["Accept"] = "application/json"
wrk.headers["X-Stainless-Lang"] = "python"
wrk.headers["Host"] = "bench.localhost"
wrk.body = [[{PROMPT}]]
"""


class Refused(RuntimeError):
    """wrk heard an answer that was none of 2xx, or counted nothing."""


def status_of(port: int) -> str:
    """What a request like those of the bench is answered with now; wrk counts refusals and does not say which."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", PROMPT.encode(), {"Host": "bench.localhost"}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as exc:
        return f"{exc.code} {exc.read(200)!r}"
    except OSError as exc:
        return f"none: {exc}"


def wrk_of(server: Server, port: int, script: str, connections: int, seconds: int) -> tuple[float, float]:
    """As `wrk`; RuntimeError names the contestant, what it answers and the end of its log."""
    try:
        return wrk(port, script, connections, seconds)
    except Refused as exc:
        raise RuntimeError(
            f"{server.name}, {connections} connections: {exc}\nnow: {status_of(port)}\n{server.log()}"
        ) from exc


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
        raise Refused(said)
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
        makes, left_out = installed(PROXIES | APPLICATIONS)
        proxies = {name: make(stack, upstream) for name, make in makes.items()}
        direct: list[float] = []

        def turn(name: str) -> None:
            server, port = proxies[name]
            for connections, figures in many.items():
                before = server.cpu_s()
                done, _ = wrk_of(server, port, file, connections, options.seconds)
                figures.add(name, done / max(server.cpu_s() - before, 0.01))
            direct.append(wrk(upstream, file, 1, 1)[1])
            latency.add(name, max(wrk_of(server, port, file, 1, options.seconds)[1] - direct[-1], 1.0))

        for server, port in proxies.values():
            wrk_of(server, port, file, 4, 1)  # warm
            assert server.pids()
        take_turns(options.rounds, {name: (lambda name=name: turn(name)) for name in proxies})  # type: ignore[misc]
    notes = ["one worker or thread each (Caddy: GOMAXPROCS=1), kept-alive upstream, no buffering", *left_out]
    notes += [
        f"headrace x {peer}, {connections} connections: {figures.ratio('headrace', peer):.2f}"
        for peer in proxies
        for connections, figures in many.items()
        if peer != "headrace"
    ]
    record("http", [*many.values(), latency], notes)
    return 0
