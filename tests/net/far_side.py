"""The other end of the wire: an upstream in a network namespace of its own. Says on stdout where it is, ends with stdin."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tests.peers.authority import Authority
from tests.peers.dns import Ask, Peer

TTL_S = 2
"""Of every answer: names that are known before the outage expire in it."""


async def answer(ask: Ask) -> None:
    ask.answer(ask.reply(f"{TTL_S} A 198.51.100.7"))


async def main(kind: str, host: str, folder: str) -> None:
    authority = Authority(Path(folder))
    async with Peer(answer, kind, authority, host=host) as peer:
        sys.stdout.write(json.dumps({"port": peer.port, "ca_file": authority.ca_file}) + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
