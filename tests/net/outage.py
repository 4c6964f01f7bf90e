"""Take the way out for a few seconds under load and count what clients get. Runs as root in a network namespace of its own.

Ours is deleted (sends fail, the kernel tells), or the far side's: every answer is lost and nobody here is told.

    this namespace: daemon, clients -- near 10.9.0.1 --veth-- far 10.9.0.2 -- its namespace: upstream

Prints one line of JSON: counts before, during and after, and how soon a new name was answered once the way was back.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dns.message
import dns.rcode

from headrace.lab.daemon import Daemon
from headrace.lab.settings import DaemonPorts

NEAR, FAR = "10.9.0.1", "10.9.0.2"
RATE, NAMES = 200, 50
WARM_S, OUT_S, AFTER_S = 2.0, 5.0, 2.0
NEW_EVERY_S = 0.1
WAYS = {
    "route": (("ip", "route", "del", "default"), ("ip", "route", "add", "default", "dev", "near")),
    "silent": (("FAR", "ip", "route", "del", "default"), ("FAR", "ip", "route", "add", "default", "dev", "far")),
}
"""What is run to leave and to come back; FAR stands for the other namespace, whose answers are then lost."""


@dataclass
class Counts:
    asked: int = 0
    answered: int = 0
    failed: int = 0
    slowest_s: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)

    def fail(self, reason: str) -> bool:
        self.failed += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        return False


@dataclass
class Found:
    before: Counts = field(default_factory=Counts)
    during: Counts = field(default_factory=Counts)
    after: Counts = field(default_factory=Counts)
    new_during: Counts = field(default_factory=Counts)
    new_name_after_s: float = -1.0
    log: str = ""


class Client(asyncio.DatagramProtocol):
    """One socket, many questions in flight, told apart by id."""

    def __init__(self) -> None:
        self.waiting: dict[int, asyncio.Future[bytes]] = {}
        self.transport: Any = None
        self._id = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: object) -> None:
        future = self.waiting.pop(int.from_bytes(data[:2]), None)
        if future is not None and not future.done():
            future.set_result(data)

    async def ask(self, name: str, counts: Counts, within_s: float = 4.0) -> bool:
        self._id = (self._id + 1) % 65536
        query = dns.message.make_query(name, "A", use_edns=0, id=self._id)
        future = self.waiting[self._id] = asyncio.get_running_loop().create_future()
        begin = time.monotonic()
        self.transport.sendto(query.to_wire())
        counts.asked += 1
        try:
            async with asyncio.timeout(within_s):
                reply = dns.message.from_wire(await future)
        except TimeoutError:
            return counts.fail(f"no answer in {within_s:g} s")
        good = bool(reply.answer)
        counts.answered += good
        if not good:
            counts.fail("; ".join(option.to_text() for option in reply.options) or dns.rcode.to_text(reply.rcode()))
        counts.slowest_s = max(counts.slowest_s, time.monotonic() - begin)
        return good


def run(*words: str) -> None:
    subprocess.run(words, check=True)


async def main(kind: str, way: str, folder: Path) -> None:
    holder = subprocess.Popen(["unshare", "-n", "sleep", "60"])
    try:
        await _wire(holder.pid)
        far = await asyncio.create_subprocess_exec(
            *(
                "nsenter",
                "-t",
                str(holder.pid),
                "-n",
                sys.executable,
                "-m",
                "tests.net.far_side",
                kind,
                FAR,
                str(folder),
            ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert far.stdout is not None and far.stdin is not None
        place = json.loads(await far.stdout.readline())
        try:
            found = await _measure(kind, _commands(way, holder.pid), folder, place["port"], place["ca_file"])
        finally:
            far.stdin.close()
            await far.wait()
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
    finally:
        holder.kill()
        holder.wait()


def _commands(way: str, pid: int) -> list[list[str]]:
    there = ["nsenter", "-t", str(pid), "-n"]
    return [[*there, *words[1:]] if words[0] == "FAR" else list(words) for words in WAYS[way]]


async def _wire(pid: int) -> None:
    run("ip", "link", "set", "lo", "up")
    own = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{pid}/ns/net").readlink() == own:
        await asyncio.sleep(0.01)
    run("ip", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(pid))
    run("ip", "address", "add", f"{NEAR}/32", "dev", "near")
    run("ip", "link", "set", "near", "up")
    far = ("nsenter", "-t", str(pid), "-n", "ip")
    for words in (
        ("link", "set", "lo", "up"),
        ("address", "add", f"{FAR}/32", "dev", "far"),
        ("link", "set", "far", "up"),
        ("route", "add", "default", "dev", "far"),
    ):
        subprocess.run([*far, *words], check=True)
    run("ip", "route", "add", "default", "dev", "near")


async def _measure(kind: str, way: list[list[str]], folder: Path, port: int, ca_file: str) -> Found:
    ports = DaemonPorts.choose()
    file = folder / "headrace.toml"
    path = "/dns-query" if kind in ("https", "h3") else ""
    trust = f'ca_file = "{ca_file}"' if kind != "udp" else ""
    file.write_text(
        f'state_dir = "{folder}/state"\n[resolver]\nlisten = ["udp://127.0.0.1:{ports.dns}"]\nhosts_files = []\n'
        f'[[resolver.upstream]]\nurl = "{kind}://localhost:{port}{path}"\naddresses = ["{FAR}"]\n{trust}\n'
        f'[proxy]\nlisten = ["http://127.0.0.1:{ports.http}"]\n[admin]\nlisten = "http://127.0.0.1:{ports.admin}"\n'
        '[[pool]]\nname = "none"\npath = "/none"\n[[pool.edge]]\nid = "none"\nurl = "http://127.0.0.1:9"\n'
    )
    async with Daemon(file, folder / "state", ports) as daemon:
        found = Found()
        _, client = await asyncio.get_running_loop().create_datagram_endpoint(
            Client, remote_addr=("127.0.0.1", ports.dns)
        )
        await _load(client, found, *way)
        client.transport.close()
        found.log = daemon.log
        return found


async def _load(client: Client, found: Found, leave: list[str], come_back: list[str]) -> None:
    begin = time.monotonic()
    away_at, back_at = begin + WARM_S, begin + WARM_S + OUT_S
    end_at = back_at + AFTER_S
    tasks: set[asyncio.Task[bool]] = set()
    is_away, is_back, number, new_at = False, False, 0, 0.0
    while (now := time.monotonic()) < end_at:
        if not is_away and now >= away_at:
            is_away = True
            run(*leave)
        if not is_back and now >= back_at:
            is_back = True
            run(*come_back)
        counts = found.after if is_back else found.during if is_away else found.before
        _spawn(tasks, client.ask(f"known{number % NAMES}.test", counts))
        if is_away and not is_back and now >= new_at:
            new_at = now + 1.0
            _spawn(tasks, client.ask(f"new{number}.test", found.new_during))
        if is_back and now >= new_at and found.new_name_after_s < 0:
            new_at = now + NEW_EVERY_S
            _spawn(tasks, _first_new(client, f"after{number}.test", back_at, found))
        number += 1
        await asyncio.sleep(max(0.0, begin + number / RATE - time.monotonic()))
    await asyncio.gather(*tasks)


async def _first_new(client: Client, name: str, back_at: float, found: Found) -> bool:
    good = await client.ask(name, Counts())
    if good and found.new_name_after_s < 0:
        found.new_name_after_s = time.monotonic() - back_at
    return good


def _spawn(tasks: set[asyncio.Task[bool]], work: Any) -> None:
    task = asyncio.ensure_future(work)
    tasks.add(task)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
