"""The daemon as a process: start, reload, drain, and what happens when something is in its way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import dns.asyncquery
import dns.message
import dns.rcode
import dns.rrset
import pytest

from headrace.daemon import LINGER_S
from headrace.lab.daemon import Daemon, DaemonFailed
from headrace.lab.settings import DaemonPorts
from resolver import outgoing, shared_cache
from tests.patience import no_hang, soon
from tests.peers.h3peers import Client
from tests.peers.redis import RedisServer, needs_redis

ROOT = Path(__file__).parent.parent.parent
POOL = """
[[pool]]
name = "here"
path = "/here"
probe = {{ interval = "1h" }}
[[pool.edge]]
id = "one"
url = "http://127.0.0.1:{edge}"
"""


class SilentEdge:
    """Takes requests and answers none, until told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []
        self.asking: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        # Probes and warm connections come too; the one that asks is the one to answer.
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):
                self.asking = writer
                self.asked.set()

    async def say(self, data: bytes) -> None:
        assert self.asking is not None
        self.asking.write(data)
        await self.asking.drain()

    async def close(self) -> None:
        self.server.close()
        for writer in self.writers:
            writer.close()


@pytest.fixture
async def edge() -> AsyncIterator[SilentEdge]:
    silent = SilentEdge()
    await silent.start()
    yield silent
    await silent.close()


class Place:
    """A folder with a configuration and what belongs to it."""

    def __init__(self, folder: Path, edge: int = 9) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.file = folder / "headrace.toml"
        self.ports = DaemonPorts.choose()
        self.edge = edge
        self.write()

    def write(self, extra: str = "", *, listen: tuple[str, ...] = (), pools: str = POOL, top: str = "") -> None:
        ports = self.ports
        addresses = listen or (f"https://127.0.0.1:{ports.https}", f"http://127.0.0.1:{ports.http}")
        self.file.write_text(
            f'state_dir = "{self.state}"\n{top}\n'
            f'[resolver]\nlisten = ["udp://127.0.0.1:{ports.dns}"]\nupstream = []\nhosts_files = []\n'
            f'[proxy]\nlisten = {json.dumps(list(addresses))}\ndrain_timeout = "20s"\n'
            f'[admin]\nlisten = "http://127.0.0.1:{ports.admin}"\n' + pools.format(edge=self.edge) + extra
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Daemon]:
        async with Daemon(self.file, self.state, self.ports) as daemon:
            yield daemon

    async def ask_slowly(self, edge: SilentEdge) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request that reached the edge and has no answer yet."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports.http)
        writer.write(b"GET /here/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await soon(edge.asked.wait())
        return reader, writer

    async def told_to_stop(self, daemon: Daemon) -> None:
        """Until it takes no connection any more."""
        daemon.send(signal.SIGTERM)
        async with no_hang():
            while await is_open(self.ports.http):
                await asyncio.sleep(0.01)

    async def command(self, *args: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace", *args, "--config", str(self.file)),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def get(port: int, path: str, *, tls: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    """Status and body of a request on a connection of its own."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, server_hostname="localhost" if tls else None
    )
    writer.write(b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode())
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def is_open(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def test_it_serves_http_https_by_its_own_ca_and_dns(place: Place) -> None:
    async with place.running() as daemon:
        assert (await get(place.ports.http, "/nothing"))[0] == 421
        trusting = ssl.create_default_context(cafile=daemon.ca_file)
        assert (await get(place.ports.https, "/nothing", tls=trusting))[0] == 421
        query = dns.message.make_query("localhost", "A")
        answer = await dns.asyncquery.udp(query, "127.0.0.1", port=place.ports.dns, timeout=20)
        assert answer.rcode() == dns.rcode.NOERROR
        status = await daemon.admin("GET", "/status")
        assert status["pid"] == daemon.pid
        assert status["ca_file"] == str(daemon.ca_file)
    assert await daemon.stop() == 0


async def test_its_status_is_one_screen_and_one_json_value(place: Place) -> None:
    async with place.running() as daemon:
        code, out, err = await place.command("status")
        assert (code, err) == (0, "")
        assert f"pid {daemon.pid}, " in out and "pools     here: 1 of 1 edge usable\n" in out
        assert (
            f"listens   https://127.0.0.1:{place.ports.https}\n          http://127.0.0.1:{place.ports.http}\n" in out
        )
        code, out, err = await place.command("status", "--json")
        told = json.loads(out)
        assert (code, err, told["version"], told["pid"]) == (0, "", 1, daemon.pid)
        assert [edge["id"] for edge in told["edges"]] == ["one"]
        assert told["resolver"]["upstreams"] == [] and told["tickets"]["full"] == 0
    assert await daemon.stop() == 0


async def test_what_it_keeps_is_for_its_owner_alone(place: Place) -> None:
    async with place.running():
        assert stat.S_IMODE(place.state.stat().st_mode) == 0o700
        running = json.loads((place.state / "running.json").read_text())
        assert running["admin_port"] == place.ports.admin
        for file in place.state.rglob("*"):
            assert not stat.S_IMODE(file.stat().st_mode) & 0o077, file
    assert not (place.state / "running.json").exists()


async def test_a_port_that_is_taken_names_its_holder_and_nothing_is_started(place: Place) -> None:
    with socket.create_server(("127.0.0.1", place.ports.http)):
        code, out, err = await place.command("run")
    assert (code, out) == (1, "")
    assert f"http://127.0.0.1:{place.ports.http}: the port is taken by" in err
    assert f"(process {os.getpid()})" in err
    assert "is free" in err
    assert not await is_open(place.ports.https)


async def test_every_port_that_is_taken_is_named_at_once(place: Place) -> None:
    with socket.create_server(("127.0.0.1", place.ports.http)), socket.create_server(("127.0.0.1", place.ports.https)):
        code, _, err = await place.command("run")
    assert code == 1
    assert err.count("the port is taken") == 2


async def test_sigterm_lets_a_request_end_and_a_second_one_does_not(tmp_path: Path, edge: SilentEdge) -> None:
    place = Place(tmp_path, edge.port)
    async with place.running() as daemon:
        # given a request that the edge is slow to answer
        reader, writer = await place.ask_slowly(edge)
        # when the daemon is told to stop, it takes no connection and waits for the answer
        await place.told_to_stop(daemon)
        await asyncio.sleep(2 * LINGER_S)  # longer than a daemon would stay that has nothing to wait for
        await edge.say(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole")
        answer = await reader.read()
        assert answer.endswith(b"\r\n\r\nwhole")
        writer.close()
        assert await daemon.wait() == 0


async def test_a_second_signal_stops_at_once(tmp_path: Path, edge: SilentEdge) -> None:
    place = Place(tmp_path, edge.port)
    async with place.running() as daemon:
        reader, writer = await place.ask_slowly(edge)
        await place.told_to_stop(daemon)
        daemon.send(signal.SIGTERM)
        assert await daemon.wait() == 0
        with contextlib.suppress(ConnectionResetError):
            assert b" 200 " not in await reader.read()
        writer.close()


async def test_a_bad_file_on_reload_changes_nothing_and_every_problem_is_said(place: Place) -> None:
    async with place.running() as daemon:
        place.file.write_text(place.file.read_text() + "\n[nothing]\n[log]\nlevel = 'loud'\n")
        await daemon.reload()
        assert (await get(place.ports.http, "/nothing"))[0] == 421
        assert "nothing: unknown key" in daemon.log
        assert "log.level" in daemon.log
        # when the same is asked of it by API, the caller hears it too
        token = (place.state / "admin-token").read_text().strip()
        answer = await post(place.ports.admin, "/reload", token)
        assert answer["applied"] is False
        assert len(answer["problems"]) == 2


async def post(port: int, path: str, token: str) -> dict[str, object]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Authorization: Bearer {token}\r\nContent-Length: 0\r\n\r\n".encode()
    )
    answer = await reader.read()
    writer.close()
    body: dict[str, object] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return body


async def test_reload_opens_new_doors_closes_old_ones_and_breaks_no_stream(tmp_path: Path, edge: SilentEdge) -> None:
    place = Place(tmp_path, edge.port)
    other = DaemonPorts.choose()
    async with place.running() as daemon:
        # given a stream through the plain listener
        reader, writer = await place.ask_slowly(edge)
        await edge.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await reader.readuntil(b"one")
        # when that listener moves to another port, and a pool comes
        more = POOL.replace("here", "there")
        place.write(listen=(f"http://127.0.0.1:{other.http}",), pools=POOL + more)
        await daemon.reload()
        # then the new door is open, the old ones are closed, and the stream ends as it would have
        assert (await get(other.http, "/nothing"))[0] == 421
        assert not await is_open(place.ports.http)
        assert not await is_open(place.ports.https)
        await edge.say(b"3\r\ntwo\r\n0\r\n\r\n")
        assert (await reader.read()).endswith(b"3\r\ntwo\r\n0\r\n\r\n")
        writer.close()
        assert [view["pool"] for view in (await daemon.admin("GET", "/edges"))["edges"]] == ["here", "there"]


async def test_a_reload_whose_new_port_is_taken_changes_nothing(place: Place) -> None:
    async with place.running() as daemon:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            place.write(listen=(f"http://127.0.0.1:{port}",), pools=POOL + POOL.replace("here", "there"))
            code, _, err = await place.command("reload")
        assert code == 2
        assert "the port is taken" in err
        assert "nothing was changed" in err
        assert (await get(place.ports.http, "/nothing"))[0] == 421
        assert (await daemon.admin("GET", "/status"))["listeners"][0].startswith("https://")
        assert [view["pool"] for view in (await daemon.admin("GET", "/edges"))["edges"]] == ["here"]


async def test_a_reload_says_what_waits_for_a_restart(place: Place) -> None:
    async with place.running():
        place.write(top="workers = 2")
        code, _, err = await place.command("reload")
    assert code == 0
    assert "workers: takes effect at the next start" in err


async def test_commands_ask_the_running_daemon(place: Place) -> None:
    async with place.running():
        token = (place.state / "admin-token").read_text()
        code, out, _ = await place.command("edges")
        assert (code, out.splitlines()[1].split()[:2]) == (0, ["here", "one"])
        code, out, _ = await place.command("query", "localhost", "--json")
        assert (code, json.loads(out)["source"]) == (0, "local")
        code, out, err = await place.command("query", "localhost", "BOGUS")
        assert (code, out) == (2, "")
        (place.state / "admin-token").write_text("another\n")
        assert (await place.command("tickets", "rotate"))[0] == 4
        (place.state / "admin-token").write_text(token)
        code, out, err = await place.command("tickets", "rotate")
        assert (code, out) == (0, "")
        assert "rotated" in err
        code, out, _ = await place.command("tickets")
        assert len([line for line in out.splitlines() if "opens" in line]) == 3
        await get(place.ports.http, "/here/path?key=sk-canary-0123456789")
        code, out, _ = await place.command("requests")
        assert "GET /path" in out or "GET /here/path" in out
        assert "canary" not in out


async def test_no_secret_of_a_request_reaches_the_log(place: Place) -> None:
    place.write(top='log = { level = "debug", format = "json" }')
    canary = "sk-canary-0123456789"
    async with place.running() as daemon:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.ports.http)
        writer.write(
            f"POST /here/v1?key={canary} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {canary}\r\n"
            f"x-api-key: {canary}\r\nConnection: close\r\nContent-Length: 20\r\n\r\n{canary}".encode()
        )
        assert b" 502 " in await reader.read()
        writer.close()
        requests = json.dumps(await daemon.admin("GET", "/requests"))
    assert '"path": "/' in daemon.log
    assert "canary" not in daemon.log + requests


async def test_the_configuration_without_a_listener_runs_too(place: Place) -> None:
    place.file.write_text(
        f'state_dir = "{place.state}"\n[resolver]\nlisten = []\n[proxy]\nlisten = []\n[admin]\nlisten = ""\n'
    )
    async with place.running() as daemon:
        assert daemon.running
    assert await daemon.stop() == 0


async def test_a_state_dir_that_cannot_be_made_is_one_warning(place: Place) -> None:
    place.state = Path("/proc/headrace")
    place.write()
    async with place.running() as daemon:
        assert (await get(place.ports.http, "/nothing"))[0] == 421
        assert "nothing outlives this process" in daemon.log
        assert "local CA" in daemon.log
        context = ssl.create_default_context()
        with pytest.raises(ssl.SSLError):
            await get(place.ports.https, "/nothing", tls=context)


async def test_a_certificate_that_does_not_fit_its_key_stops_the_start(place: Place, tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("no pem\n")
    place.write(f'[tls]\ncert_file = "{tmp_path}/cert.pem"\nkey_file = "{tmp_path}/key.pem"\n')
    with pytest.raises(DaemonFailed, match="cannot start: certificate"):
        async with place.running():
            pass


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x00\x00", b"\x00" * 200, b"GET / HTTP/1.1\nHost:\n\n", bytes(range(255, -1, -1))]
)
async def test_garbage_on_every_listener_leaves_it_serving(place: Place, garbage: bytes) -> None:
    async with place.running() as daemon:
        for port in (place.ports.http, place.ports.https, place.ports.admin):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(garbage)
            writer.write_eof()
            await soon(_read_out(reader))
            writer.close()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
            sending.sendto(garbage, ("127.0.0.1", place.ports.dns))
        assert (await get(place.ports.http, "/nothing"))[0] == 421
        assert (await daemon.admin("GET", "/healthz"))["ok"]
    assert "Traceback" not in daemon.log


async def _read_out(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(4096):
            pass
    except OSError:
        return


async def test_dns_over_quic_is_served_and_designated(place: Place) -> None:
    ports = place.ports
    listens = [f"udp://127.0.0.1:{ports.dns}", "tls://127.0.0.1:0", "quic://127.0.0.1:0"]
    place.write(top="", listen=(f"https://127.0.0.1:{ports.https}", f"h3://127.0.0.1:{ports.https}"))
    text = place.file.read_text().replace(
        f'listen = ["udp://127.0.0.1:{ports.dns}"]', f"listen = {json.dumps(listens)}"
    )
    place.file.write_text(text)
    async with place.running():
        asked = dns.message.make_query("_dns.resolver.arpa", "SVCB")
        said = await dns.asyncquery.udp(asked, "127.0.0.1", port=ports.dns, timeout=20)
        found = {record.params[1].ids: record for record in said.answer[0]}
        assert set(found) == {(b"dot",), (b"doq",), (b"h3", b"h2")}
        assert found[(b"h3", b"h2")].params[3].port == ports.https
        doq_port = found[(b"doq",)].params[3].port
        ca = str(place.state / "ca" / "ca.pem")
        reply = await dns.asyncquery.quic(
            dns.message.make_query("localhost", "A"), "127.0.0.1", port=doq_port, verify=ca, server_hostname="localhost"
        )
        assert reply.answer[0][0].to_text() == "127.0.0.1"
        code, out, _ = await place.command("tickets", "--json")
        assert code == 0 and json.loads(out)["doq"] == {"full": 1, "resumed": 0}


async def test_a_reload_turns_early_data_off_on_listeners_that_stay(place: Place) -> None:
    port = place.ports.https
    doors = (f"https://127.0.0.1:{port}", f"h3://127.0.0.1:{port}")
    ca = str(place.state / "ca" / "ca.pem")
    place.write(listen=doors)
    async with place.running() as daemon:
        for offered in (True, False):
            async with Client(port, ca) as client:
                await client.until(lambda c: c.tickets)
                assert [bool(ticket.max_early_data_size) for ticket in client.tickets] == [offered]
            place.write('[tls.tickets]\nearly_data = "off"\n', listen=doors)
            await daemon.reload()


async def test_the_daemon_takes_all_descriptors_that_it_may_have(place: Place) -> None:
    """A soft limit of 1024 is two dozen browsers; it stands there for programs that use select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))  # the daemon inherits it
    try:
        await _expect_all_descriptors(place)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _expect_all_descriptors(place: Place) -> None:
    async with place.running() as daemon:
        limits = Path(f"/proc/{daemon.pid}/limits").read_text()
        soft, hard = next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files"))
        assert soft == hard or int(soft) == 1 << 20


@needs_redis
async def test_the_shared_cache_answers_for_upstreams_that_are_not_there(place: Place, tmp_path: Path) -> None:
    async with RedisServer(tmp_path) as redis:
        query = dns.message.make_query("fleet.test", "A", use_edns=0)
        said = dns.message.make_response(query)
        said.answer.append(dns.rrset.from_text("fleet.test.", 60, "IN", "A", "192.0.2.9"))
        out = outgoing.read(query.to_wire())
        key = shared_cache.key_for(out, "").decode()
        value = shared_cache.pack(said.to_wire(), 60, time.time())
        reader, writer = await asyncio.open_connection("127.0.0.1", redis.port)
        writer.write(b"SELECT 1\r\n" + b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n" % (len(key), key.encode()))
        writer.write(b"$%d\r\n%b\r\n" % (len(value), value))
        assert await reader.readexactly(10) == b"+OK\r\n+OK\r\n"
        writer.close()
        place.write(f'\n[resolver.cache]\nredis = "{redis.url}"\n')
        async with place.running():
            first = await dns.asyncquery.udp(query, "127.0.0.1", port=place.ports.dns, timeout=20)
            assert first.rcode() == dns.rcode.SERVFAIL  # nothing waits for the first dial
            async with no_hang():
                while not (await dns.asyncquery.udp(query, "127.0.0.1", port=place.ports.dns, timeout=20)).answer:
                    await asyncio.sleep(0.1)
            _, body = await get(place.ports.admin, "/resolver")
            assert json.loads(body)["shared_cache"]["hits"] == 1


async def test_the_cache_can_be_looked_into_and_made_to_forget(place: Place) -> None:
    record = '\n[[resolver.record]]\nname = "edge.test"\ntype = "A"\nvalue = "192.0.2.4"\n'
    place.write(record)
    async with place.running():
        code, out, err = await place.command("query", "edge.test", "--explain")
        assert code == 0 and "192.0.2.4" in out and "=> local: " in err
        code, out, _ = await place.command("query", "other.test", "--explain", "--json")
        assert [s["name"] for s in json.loads(out)["steps"]][-1] == "upstream" and code == 1
        code, out, _ = await place.command("cache")
        assert code == 0 and "0 of 100000" in out
        code, out, _ = await place.command("cache", "dump", "--json")
        assert code == 0 and json.loads(out) == {"version": 1, "entries": [], "more": False}
        assert (await place.command("cache", "flush"))[0] == 2
        code, _, err = await place.command("cache", "flush", "edge.test")
        assert code == 0 and "forgot 0 answers" in err
        await dns.asyncquery.udp(
            dns.message.make_query("edge.test", "A"), "127.0.0.1", port=place.ports.dns, timeout=20
        )
        _, body = await get(place.ports.admin, "/metrics")
        assert b'headrace_dns_replies_total{transport="udp",rcode="NOERROR"} 1' in body
        assert b'headrace_dns_answers_total{source="local"} 2' in body
