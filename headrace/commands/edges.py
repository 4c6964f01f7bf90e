"""`headrace edges`: each edge with its protocol, times, load, weight, state and why."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from headrace import exits
from headrace.client import Daemon, load_or_fail
from headrace.console import FORMAT, coloured, put, put_json, say, table

HEADS = ["pool", "edge", "proto", "rtt", "tls", "ttfb", "active", "weight", "live", "state", "why"]
NUMBERS = ("rtt", "tls", "ttfb", "active", "weight", "live")
COLOURS = {"healthy": "green", "degraded": "yellow", "ejected": "red", "down": "red", "draining": "yellow"}


def run(args: argparse.Namespace) -> int:
    daemon = Daemon(load_or_fail(args.config))
    if args.watch is not None:
        return _watch(daemon, args.watch, as_json=args.json)
    answer = daemon.get("/edges")
    if args.json:
        put_json({name: value for name, value in answer.items() if name != "version"})
    else:
        _put_table(answer)
    return exits.OK


def _watch(daemon: Daemon, every_s: float, *, as_json: bool) -> int:
    """Until interrupted: a fresh screen on a terminal, else one table (or one line of JSON) after the other."""
    clears = sys.stdout.isatty() and not as_json
    while True:
        answer = daemon.get("/edges")
        if as_json:
            put(json.dumps({**answer, "version": FORMAT}))
        else:
            if clears:
                sys.stdout.write("\033[H\033[2J")
            _put_table(answer)
        sys.stdout.flush()
        time.sleep(every_s)


def _put_table(answer: dict[str, Any]) -> None:
    if not answer["edges"]:
        say("no edges: the configuration has no pool")
        return
    for line, edge in zip(lines(answer["edges"]), [None, *answer["edges"]], strict=True):
        put(coloured(line, COLOURS.get(edge["state"], "") if edge else "dim"))


def lines(edges: list[dict[str, Any]]) -> list[str]:
    return table(HEADS, [_row(edge) for edge in edges], right=NUMBERS)


def _row(edge: dict[str, Any]) -> list[str]:
    return [
        edge["pool"],
        edge["id"] + (" (standby)" if edge["standby"] else ""),
        edge["version"] or edge["protocol"],
        _ms(edge["rtt_ms"]),
        _ms(edge["tls_ms"]),
        _ms(edge["ttfb_ms"]),
        str(edge["active"]),
        f"{edge['weight']:g}",
        f"{edge['live_weight']:.2f}",
        edge["state"],
        edge["reason"],
    ]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
