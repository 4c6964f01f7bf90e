"""`headrace query`: resolve a name as headrace does, and say where the answer came from.

Asked of the daemon when it runs: its cache is the point. Else a resolver of the same configuration lives for one question.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from config.load import Loaded
from headrace import exits
from headrace.client import Daemon, load_or_fail
from headrace.console import Failure, put, put_json, say
from headrace.wording import span

if TYPE_CHECKING:
    from resolver.io.service import ResolverService


def run(args: argparse.Namespace) -> int:
    loaded = load_or_fail(args.config)
    answer = ask(loaded, args.name, args.type, explained=args.explain)
    if args.json:
        put_json({name: value for name, value in answer.items() if name != "version"})
    else:
        _show(answer)
    return exits.OK if answer["rcode"] in ("NOERROR", "NXDOMAIN") else exits.PROBLEM


def ask(loaded: Loaded, name: str, rdtype: str, *, explained: bool = False) -> dict[str, Any]:
    """The daemon's answer, or that of a resolver in this process when no daemon runs."""
    try:
        query = urlencode({"name": name, "type": rdtype, "explain": int(explained)})
        return Daemon(loaded).get(f"/resolver/query?{query}")
    except Failure as exc:
        if exc.code != exits.NOT_RUNNING and loaded.config.admin.listen is not None:
            raise
        say(f"headrace: {exc}; resolving in this process")
    try:
        return asyncio.run(_ask_alone(loaded, name, rdtype, explained=explained))
    except ValueError as exc:
        raise Failure(str(exc), exits.USAGE) from exc


async def _ask_alone(loaded: Loaded, name: str, rdtype: str, *, explained: bool) -> dict[str, Any]:
    from headrace.operations import explained_fields, resolved_fields
    from resolver.io.inspection import explain_answer

    async with lone_resolver(loaded) as resolver:
        if explained:
            return explained_fields(name, rdtype, await explain_answer(resolver, name, rdtype))
        return resolved_fields(name, rdtype, await resolver.resolve(name, rdtype))


@asynccontextmanager
async def lone_resolver(loaded: Loaded) -> AsyncIterator[ResolverService]:
    """A resolver without listeners that reads and writes nothing in state_dir."""
    from dataclasses import replace

    from resolver.io.service import ResolverService
    from resolver.io.upstream_set import UpstreamSet

    cache = replace(loaded.config.resolver.cache, persist=False)
    config = replace(loaded.config.resolver, listen=(), cache=cache)
    upstreams = UpstreamSet(config)
    resolver = ResolverService(config, state_dir=loaded.config.state_dir, upstreams=upstreams)
    try:
        await resolver.start()
        yield resolver
    finally:
        await resolver.close()
        await upstreams.close()


def _show(answer: dict[str, Any]) -> None:
    for record in answer["records"]:
        put(record)
    for step in answer.get("steps", ()):
        say(f"{'=>' if step['decides'] else '  '} {step['name']}: {step['said']}")
    for attempt in answer.get("attempts", ()):
        took = f" in {span(attempt['took_s'])}" if attempt["took_s"] is not None else ""
        say(f"   {span(attempt['after_s'])} {attempt['upstream']}: {attempt['said']}{took}")
    reasons = "".join(f"; {reason}" for reason in answer["reasons"])
    ttl = f", TTL {answer['ttl_s']} s" if answer["records"] else ""
    say(f"{answer['rcode']} from {answer['source']} in {span(answer['took_s'])}{ttl}{reasons}")
