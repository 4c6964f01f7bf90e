"""`headrace cache`: how full the DNS cache is and what it was good for, what it holds, and how to make it forget."""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import urlencode

from headrace import exits
from headrace.client import Daemon, load_or_fail
from headrace.console import Failure, put, put_json, say, table

HEADS = ["name", "type", "rcode", "state", "age", "left", "hits", "bytes", "source"]
NUMBERS = ("age", "left", "hits", "bytes")


def run(args: argparse.Namespace) -> int:
    daemon = Daemon(load_or_fail(args.config))
    answer = {"stats": _stats, "dump": _dump, "flush": _flush}[args.action](daemon, args)
    if args.json:
        put_json({name: value for name, value in answer.items() if name != "version"})
    return exits.OK


def _stats(daemon: Daemon, args: argparse.Namespace) -> dict[str, Any]:
    answer = daemon.get("/resolver/cache")
    if not args.json:
        for line in stats_lines(answer):
            put(line)
    return answer


def stats_lines(answer: dict[str, Any]) -> list[str]:
    counts, bounds = answer["counts"], answer["bounds"]
    without_waiting = sum(counts[name] for name in ("memo", "cache", "stale", "local", "policy"))
    share = without_waiting / counts["queries"] if counts["queries"] else 0.0
    lines = [
        f"entries: {counts['entries']} of {bounds['entries']}, {counts['bytes'] / 2**20:.1f} MiB of"
        f" {bounds['bytes'] / 2**20:.0f} MiB, {counts['evicted']} evicted",
        f"queries: {counts['queries']}, {share:.1%} answered without waiting",
        f"  from memory {counts['memo'] + counts['cache']}, stale {counts['stale']}, local {counts['local']},"
        f" policy {counts['policy']}, upstream {counts['upstream']}, failed {counts['failed']}",
        f"  asked for before anybody did {counts['foreseen']}, of these used {counts['foreseen_used']}",
    ]
    if answer["shared_cache"]:
        shared = answer["shared_cache"]
        why = f" ({shared['reason']})" if shared["reason"] else ""
        counted = ", ".join(f"{shared[name]} {name}" for name in ("hits", "misses", "late", "refused"))
        lines.append(f"shared cache {shared['state']}{why}: {counted}")
    return lines


def _dump(daemon: Daemon, args: argparse.Namespace) -> dict[str, Any]:
    query = urlencode({"below": args.name or "", "limit": args.limit})
    answer = daemon.get(f"/resolver/cache/entries?{query}")
    if not args.json:
        for line in table(HEADS, [_row(entry) for entry in answer["entries"]], right=NUMBERS):
            put(line)
        if answer["more"]:
            say(f"there is more: name a domain, or --limit above {args.limit}")
    return answer


def _row(entry: dict[str, Any]) -> list[str]:
    times = [f"{entry['age_s']:.0f} s", f"{entry['left_s']:.0f} s"]
    numbers = [str(entry["hits"]), str(entry["bytes"])]
    return [entry["name"], entry["type"], entry["rcode"], entry["state"], *times, *numbers, entry["source"]]


def _flush(daemon: Daemon, args: argparse.Namespace) -> dict[str, Any]:
    if not args.name and not args.all:
        raise Failure("say which name to forget (with all below it), or --all", exits.USAGE)
    query = f"?{urlencode({'name': args.name})}" if args.name else ""
    answer = daemon.post(f"/resolver/flush{query}")
    if not args.json:
        say(f"forgot {answer['flushed']} answers")
    return answer
