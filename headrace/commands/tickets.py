"""`headrace tickets`: the TLS ticket keys' ids and ages, how often they were of use, and their rotation."""

from __future__ import annotations

import argparse
from typing import Any

from headrace import exits
from headrace.client import Daemon, load_or_fail
from headrace.console import put, put_json, say, table
from headrace.wording import ago


def run(args: argparse.Namespace) -> int:
    daemon = Daemon(load_or_fail(args.config))
    answer = daemon.post("/tickets/rotate") if args.action == "rotate" else daemon.get("/tickets")
    if args.json:
        put_json({name: value for name, value in answer.items() if name != "version"})
        return exits.OK
    if args.action == "rotate":
        say(f"rotated: {answer['current']} seals new tickets, older ones still open")
        return exits.OK
    for line in lines(answer):
        put(line)
    return exits.OK


def lines(answer: dict[str, Any]) -> list[str]:
    counts = f"handshakes: {answer['full']} full, {answer['resumed']} resumed"
    for way in ("h3", "doq"):
        counts += f"; over {way} {answer[way]['full']} full, {answer[way]['resumed']} resumed"
    if not answer["supported"]:
        return [f"tickets are OpenSSL's own: {answer['why_not']}", counts]
    rows = [
        [key["id"], ago(key["age_s"]), "seals and opens" if key["seals"] else "opens", ago(key["opens_for_s"])]
        for key in answer["keys"]
    ]
    return [*table(["key", "age", "role", "opens for"], rows), counts]
