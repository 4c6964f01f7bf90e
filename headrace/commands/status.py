"""`headrace status`: one screen of what runs, where it listens, who can be reached, and what goes through it."""

from __future__ import annotations

import argparse
from typing import Any

from headrace import exits
from headrace.client import Daemon, load_or_fail
from headrace.console import coloured, put, put_json
from headrace.wording import ago, counted, span

USABLE = ("healthy", "degraded")
PAGES = {"status": "/status", "edges": "/edges", "resolver": "/resolver", "tickets": "/tickets"}


def run(args: argparse.Namespace) -> int:
    daemon = Daemon(load_or_fail(args.config))
    answers = {name: _plain(daemon.get(path)) for name, path in PAGES.items()}
    if args.json:
        put_json(
            {**answers["status"], **answers["edges"], "resolver": answers["resolver"], "tickets": answers["tickets"]}
        )
        return exits.OK
    for line in lines(**answers):
        put(coloured(line, "yellow" if line.startswith("notes") else ""))
    return exits.OK


def _plain(answer: dict[str, Any]) -> dict[str, Any]:
    """The page without the number of its own form: what `status` shows has one for all of it."""
    return {name: value for name, value in answer.items() if name != "version"}


def lines(
    status: dict[str, Any], edges: dict[str, Any], resolver: dict[str, Any], tickets: dict[str, Any]
) -> list[str]:
    """A word and what it stands for on each line; the word stands only on the first of its lines."""
    told = [
        ("headrace", [f"{status['headrace']}, pid {status['pid']}, up {ago(status['uptime_s'])}"]),
        ("config", [status["config_file"] or "the defaults: no file was found"]),
        ("state", [status["state_dir"]]),
        ("listens", status["listeners"]),
        ("pools", [_pool(name, edges["edges"]) for name in status["pools"]] or ["none"]),
        ("upstreams", [_upstream(view) for view in resolver["upstreams"]]),
        ("network", [_network(status)]),
        ("traffic", [_traffic(status, resolver)]),
        ("tickets", [_tickets(tickets)]),
        ("notes", status["notes"]),
    ]
    return [f"{word if number == 0 else '':10}{text}" for word, texts in told for number, text in enumerate(texts)]


def _pool(name: str, edges: list[dict[str, Any]]) -> str:
    own = [edge for edge in edges if edge["pool"] == name]
    others = [edge for edge in own if edge["state"] not in USABLE]
    why = "; ".join(f"{edge['id']} {edge['state']}{_reason(edge)}" for edge in others)
    return f"{name}: {len(own) - len(others)} of {counted(len(own), 'edge')} usable" + (f"; {why}" if why else "")


def _upstream(view: dict[str, Any]) -> str:
    took = "" if view["rtt_s"] is None else f", {span(view['rtt_s'])}"
    return f"{view['url']}: {view['state']}{took}{_reason(view)}"


def _reason(view: dict[str, Any]) -> str:
    return f" ({view['reason']})" if view["reason"] else ""


def _network(status: dict[str, Any]) -> str:
    portal = "a portal may stand in the way" if status["portal_suspected"] else "no portal suspected"
    return f"{portal}; zones of the links: {', '.join(status['link_zones']) or 'none'}"


def _traffic(status: dict[str, Any], resolver: dict[str, Any]) -> str:
    active = counted(status["active_requests"], "request")
    connections = counted(status["connections"], "connection")
    return f"{active} under way, {connections} open, {resolver['counts']['queries']} DNS queries so far"


def _tickets(tickets: dict[str, Any]) -> str:
    full, resumed = (
        sum(each[kind] for each in (tickets, tickets["h3"], tickets["doq"])) for kind in ("full", "resumed")
    )
    counts = f"{full} full and {resumed} resumed handshakes"
    newest = next((key for key in tickets["keys"] if key["seals"]), None)
    if newest is None:
        return f"{counts}; " + ("no key yet" if tickets["supported"] else "the keys are OpenSSL's own")
    return f"{counts}; {counted(len(tickets['keys']), 'key')}, the one in use {ago(newest['age_s'])} old"
