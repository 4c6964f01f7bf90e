"""`headrace requests`: the last requests, and where the time of each went."""

from __future__ import annotations

import argparse
from datetime import datetime
from typing import Any

from headrace import exits
from headrace.admin import MAX_REQUESTS
from headrace.client import Daemon, load_or_fail
from headrace.console import Failure, coloured, put, put_json, say, table
from headrace.wording import counted, size, span

HEADS = ["time", "id", "request", "pool/edge", "via", "status", "total", "in", "out", "where the time went"]


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.last <= MAX_REQUESTS:
        raise Failure(f"-n must be from 1 to {MAX_REQUESTS}", exits.USAGE)
    answer = Daemon(load_or_fail(args.config)).get(f"/requests?last={args.last}")
    if args.json:
        put_json({name: value for name, value in answer.items() if name != "version"})
        return exits.OK
    if not answer["requests"]:
        say("no requests yet")
        return exits.OK
    for line, request in zip(lines(answer["requests"]), [None, *answer["requests"]], strict=True):
        failed = request is not None and request["outcome"] not in ("ok", "client cancelled")
        put(coloured(line, "red" if failed else "dim" if request is None else ""))
    return exits.OK


def lines(requests: list[dict[str, Any]]) -> list[str]:
    return table(HEADS, [_row(request) for request in requests], right=("total", "in", "out"))


def _row(request: dict[str, Any]) -> list[str]:
    parts = ", ".join(f"{name} {span(seconds)}" for name, seconds in request["parts"].items() if seconds >= 0.00005)
    flags = "".join(f", {flag}" for flag in ("reused", "resumed") if request[flag])
    retries = f", {counted(request['retries'], 'retry', 'retries')}" if request["retries"] else ""
    detail = f"; {request['detail']}" if request["detail"] else ""
    outcome = "" if request["outcome"] == "ok" else f" {request['outcome']}"
    return [
        _clock(request["time"]),
        request["id"],
        f"{request['method']} {request['path']}"[:60],
        f"{request['pool'] or '-'}/{request['edge'] or '-'}",
        f"{request['client_version']}>{request['edge_version'] or '-'}",
        f"{request['status'] or '-'}{outcome}",
        span(request["wall_s"]),
        size(request["bytes_in"]),
        size(request["bytes_out"]),
        parts + flags + retries + detail,
    ]


def _clock(moment: str) -> str:
    """The time of day here: the record has UTC."""
    return datetime.fromisoformat(moment).astimezone().strftime("%H:%M:%S.%f")[:12]
