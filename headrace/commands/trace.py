"""`headrace trace`: the way from the root servers to an answer, hop by hop, and what each upstream says beside it.

The walk speaks to the name servers themselves, from this process: a daemon's cache could only hide what is to be seen.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from config.load import Loaded
from config.values import read_address
from headrace import exits
from headrace.client import load_or_fail
from headrace.console import Failure, put, put_json, say, table
from headrace.wording import counted, span

if TYPE_CHECKING:
    from resolver.trace import Hop, Sample, Trace

# Where nothing could be judged, what the reply itself shows.
SIGNED = {None: "", True: "signed", False: "not signed"}
FOUND = ("answer", "nxdomain", "nodata")


def run(args: argparse.Namespace) -> int:
    loaded = load_or_fail(args.config)
    try:
        walked = asyncio.run(_walk(loaded, args))
    except ValueError as exc:
        raise Failure(str(exc), exits.USAGE) from exc
    if args.json:
        put_json(asdict(walked))
    else:
        _show(walked)
    return exits.OK if walked.outcome.partition(":")[0] in FOUND else exits.PROBLEM


async def _walk(loaded: Loaded, args: argparse.Namespace) -> Trace:
    from resolver.io.trace import trace
    from resolver.io.upstream_set import UpstreamSet
    from resolver.io.validation import trust_of
    from resolver.trace import ROOT_HINTS, Server

    roots = (Server(args.root, (read_address(args.root),)),) if args.root else ROOT_HINTS
    resolver = loaded.config.resolver
    upstreams = UpstreamSet(resolver)
    try:
        return await trace(
            args.name,
            args.type,
            roots=roots,
            port=args.port,
            timeout_s=resolver.timeout_s,
            upstreams=upstreams,
            trust=trust_of(replace(resolver, zones=())),
        )
    finally:
        await upstreams.close()


def _show(walked: Trace) -> None:
    for line in table(["zone", "server", "address", "rtt", "says", "dnssec"], [_hop(hop) for hop in walked.hops]):
        put(line)
    for record in walked.answer:
        put(record)
    if walked.upstreams:
        put("")
        for line in table(["upstream", "time", "says"], [_sample(sample) for sample in walked.upstreams]):
            put(line)
    say(f"{walked.outcome} in {span(walked.took_s)}, {counted(len(walked.hops), 'server')} asked")


def _hop(hop: Hop) -> list[str]:
    says = f"{hop.kind} {hop.rcode}" if hop.rcode not in ("", "NOERROR") else hop.kind
    says += f": {hop.detail}" if hop.detail else ""
    dnssec = hop.security or SIGNED[hop.signed]
    dnssec += f": {hop.why}" if hop.why else ""
    return [hop.zone, hop.server, hop.address, span(hop.rtt_s), says, dnssec]


def _sample(sample: Sample) -> list[str]:
    said = sample.failure or "; ".join((sample.rcode, *sample.records))
    return [sample.upstream, span(sample.took_s), said]
