"""The short way under fuzz, for `bench.fuzz_rims`: a gateway that knows heads and one that never does hear the same bytes.

The client asks the same thing until it is known and then something like it, mutated; the edge answers plainly and then
mutated. Both gateways must say the same to both peers, and end with nothing in progress. The ordinary way is the oracle.
"""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.rim_mutations import Mutator, reads
from bench.rim_seeds import GET, H1_ANSWERS, H1_REQUESTS, POST
from bench.rim_stage import Transport
from config.model import Config, Edge, Pool, Probe, Proxy
from proxy.io.dial import Dialled
from proxy.io.edges import EdgeSet
from proxy.io.eyeballs import DialError
from proxy.io.gateway import Gateway
from proxy.io.inbound_h1 import H1ServerConnection
from proxy.io.outbound_h1 import H1EdgeConnection
from proxy.io.rims import DialMarks, Origin
from proxy.messages import Abort, Cause, Party, RequestHead, Stage
from proxy.waterfall import Finished

OURS = re.compile(rb'headrace;desc="[0-9a-f]+-([0-9a-f]+)[^"]*"[^\r\n]*')
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
NO_WAY = DialError(Abort(Party.EDGE, Stage.CONNECT, Cause.LOST, "no way", unprocessed=True))
MEMBERS = (Edge(id="e", scheme="http", host="e.test", port=80, protocol="h1", addresses=("192.0.2.9",)),)
POOL = Pool("p", MEMBERS, hosts=("pool.localhost",), keep_warm=0, probe=Probe())
CONFIG = Config(state_dir=Path("/nonexistent"), pools=(POOL,), proxy=Proxy())


class Unknowing(Gateway):
    """The ordinary way only."""

    def known(self, head: RequestHead, origin: object) -> None:
        return None


@dataclass(frozen=True)
class Script:
    """What both gateways hear: reads of the client, then of the edge, in this order, and how both leave."""

    steps: tuple[tuple[str, bytes], ...]
    client_leaves_first: bool


class DiallerToNowhere:
    """Gives connections without sockets, one after the other."""

    strays: tuple[()] = ()
    is_fixed = True
    found = None

    def __init__(self, wires: list[Transport], most: int) -> None:
        self._wires, self._most = wires, most

    async def dial(self, timeout_s: float, *, h1_only: bool = False) -> Dialled:
        if len(self._wires) >= self._most:
            raise NO_WAY
        rim = H1EdgeConnection()
        wire = Transport(rim)
        self._wires.append(wire)
        rim.connection_made(wire)
        return Dialled(rim, None, DialMarks(version="h1"))

    def prepare(self) -> None: ...
    def close(self) -> None: ...


class Played:
    """One gateway's side of a script."""

    def __init__(self, made_by: type[Gateway]) -> None:
        self.now = 100.0
        self.records: list[Finished] = []
        self.wires: list[Transport] = []
        self.edges = EdgeSet(resolver=None, clock=lambda: self.now, rng=random.Random(3))  # type: ignore[arg-type]
        self.gateway = made_by(
            edges=self.edges,
            resolver=None,
            doh=None,
            clock=lambda: self.now,
            record=self.records.append,  # type: ignore[arg-type]
        )
        self.edges.apply(CONFIG.pools)
        self.gateway.apply(CONFIG)
        self.edge = self.edges.pool("p").edges["e"]
        self.edge.connections._dialler = DiallerToNowhere(self.wires, 4)  # type: ignore[assignment]

    async def play(self, script: Script) -> dict[str, Any]:
        client = H1ServerConnection(self.gateway, Origin("192.0.2.1", 5, "http://127.0.0.1:1", b"http", "h1"))
        wire = Transport(client)
        client.connection_made(wire)
        for who, read in script.steps:
            target = wire if who == "client" else self.wires[-1] if self.wires else None
            if target is not None and not target.closing and target.reading:
                target.protocol.data_received(read)
            for _ in range(4):
                await asyncio.sleep(0)
        order = [wire, *self.wires] if script.client_leaves_first else [*self.wires, wire]
        for each in order:
            each.lose(None)
            for _ in range(4):
                await asyncio.sleep(0)
        for each in self.wires:
            each.lose(None)
        await asyncio.sleep(0)
        assert not self.gateway.relay.exchanges, f"left behind: {self.gateway.relay.exchanges}"
        assert self.edge.standing.inflight == 0, f"{self.edge.standing.inflight} in flight"
        assert self.gateway.connections == 0
        return {
            "client": OURS.sub(rb"\1", bytes(wire.sent)),
            "edge": [bytes(each.sent) for each in self.wires],
            "records": [(r.status, r.outcome, r.bytes_in, r.bytes_out, r.attempts) for r in self.records],
        }

    async def close(self) -> None:
        await self.edges.close()
        if self.gateway.relay._ticking is not None:
            self.gateway.relay._ticking.cancel()


class BothWays:
    def __init__(self) -> None:
        self._requests = Mutator([GET, POST, *H1_REQUESTS])
        self._answers = Mutator([(PLAIN,), *H1_ANSWERS])
        self.took_short_way = 0

    def script(self, dice: random.Random) -> Script:
        like = b"".join(dice.choice((GET, POST)))
        steps = [("client", like), ("edge", PLAIN)] * dice.choice((2, 4, 4, 5))
        for _ in range(dice.randrange(1, 4)):
            way = dice.randrange(3)
            asked = [like] if way else reads(dice, self._requests.pieces(dice))
            answered = [PLAIN] if way == 2 else reads(dice, self._answers.pieces(dice))
            more = [*(("client", read) for read in asked), *(("edge", read) for read in answered)]
            if not dice.randrange(4):
                dice.shuffle(more)
            steps += more
        return Script(tuple(steps), bool(dice.randrange(2)))

    async def __call__(self, dice: random.Random) -> None:
        script = self.script(dice)
        seen: list[dict[str, Any]] = []
        for made_by in (Gateway, Unknowing):
            played = Played(made_by)
            try:
                seen.append(await played.play(script))
                if made_by is Gateway:
                    self.took_short_way += played.gateway.lane.taken
                else:
                    assert not played.gateway.lane.taken
            finally:
                await played.close()
        assert seen[0] == seen[1], _difference(*seen)


def _difference(short: dict[str, Any], ordinary: dict[str, Any]) -> str:
    return "; ".join(f"{key}: {short[key]!r} against {ordinary[key]!r}" for key in short if short[key] != ordinary[key])
