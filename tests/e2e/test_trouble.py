"""What goes wrong on real machines: each gives a clear message, and the daemon goes on serving."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.lab import EdgeEntry, Lab
from headrace.lab.ca import issue
from headrace.lab.clients import Request, ask
from headrace.lab.daemon import Daemon, DaemonFailed
from headrace.lab.settings import render
from headrace.lab.story import Stage, chat
from headrace.lab.websocket_client import SocketClosed, WebSocketClient
from tests.e2e.stage import answers, run, started, still_serves

pytestmark = pytest.mark.asyncio(loop_scope="session")
GARBAGE = bytes(range(256)) * 8


async def test_a_killed_edge_is_not_noticed_by_later_requests(own: Stage) -> None:
    assert {answer.status for answer in await answers(own, 6, "before")} == {200}
    await own.lab.edges["edge-a"].kill()
    after = await answers(own, 20, "after")
    assert {(answer.status, answer.clean) for answer in after} == {(200, True)}


async def test_all_edges_dead_is_a_502_in_the_dialect_and_they_are_found_again(own: Stage) -> None:
    for edge in own.lab.edges.values():
        await edge.kill()
    seen = await answers(own, 3)
    assert all(answer.status in {502, 503, 504} and answer.clean and b'"error"' in answer.body for answer in seen)
    # The first may have gone out on a warm connection that was just dying; what was never sent may be tried again.
    assert seen[-1].fields["x-should-retry"] == "true"
    for edge in own.lab.edges.values():
        await edge.start()
    assert (await answers(own))[0].status == 200


@pytest.mark.parametrize("version", ["h1", "h2", "h3"])
async def test_a_reload_does_not_touch_a_running_stream(own: Stage, version: str) -> None:
    for edge in own.lab.edges.values():
        edge.controls.change({"token_s": 0.04, "tokens": 30})
    first = asyncio.Event()
    target = own.daemon.target()
    asking = asyncio.ensure_future(ask(version, target, chat("reload"), on_body=lambda _: first.set()))
    await first.wait()
    await own.daemon.reload()
    assert not asking.done()
    answer = await asking
    assert answer.clean and answer.body.endswith(b"data: [DONE]\n\n")


async def test_a_reload_applies_what_changed(own: Stage) -> None:
    settings = own.lab.settings(ports=own.daemon.ports, edges=[EdgeEntry("edge-c", own.lab.edges["edge-c"].url)])
    own.daemon.config_file.write_text(render(settings))
    await own.daemon.reload()
    listed = (await own.daemon.admin("GET", "/edges"))["edges"]
    assert [edge["id"] for edge in listed] == ["edge-c"]
    assert {answer.fields["x-lab-edge"] for answer in await answers(own, 5)} == {"edge-c"}


async def test_a_bad_file_on_reload_changes_nothing_and_says_why(own: Stage) -> None:
    text = own.daemon.config_file.read_text()
    own.daemon.config_file.write_text(text.replace("drain_timeout", "drian_timeout"))
    await own.daemon.reload()
    assert "drian_timeout" in own.daemon.log and "drain_timeout" in own.daemon.log
    assert await still_serves(own)


async def test_sigterm_lets_a_running_stream_end_and_takes_no_new_one(own: Stage) -> None:
    for edge in own.lab.edges.values():
        edge.controls.change({"token_s": 0.03, "tokens": 30})
    first = asyncio.Event()
    asking = asyncio.ensure_future(ask("h2", own.daemon.target(), chat("drain"), on_body=lambda _: first.set()))
    await first.wait()
    own.daemon.send(signal.SIGTERM)
    answer = await asking
    assert answer.clean and answer.body.endswith(b"data: [DONE]\n\n"), answer.ending
    assert await own.daemon.wait() == 0


async def test_sigterm_closes_websockets_with_a_code_that_says_come_back(own: Stage) -> None:
    async with WebSocketClient(own.daemon.target(), "/lab/v1/realtime?model=lab-small") as client:
        await client.hear()
        own.daemon.send(signal.SIGTERM)
        with pytest.raises(SocketClosed) as closed:
            await client.hear()
    assert closed.value.code in {1001, 1012}


@pytest.mark.parametrize(
    "scheme", ["dns-udp", "dns-tcp", "dot", "dot-tls", "https", "https-tls", "h3", "http", "admin"]
)
async def test_garbage_on_a_listener_harms_nobody(stage: Stage, scheme: str) -> None:
    name, _, inside = scheme.partition("-")
    port = getattr(stage.daemon.ports, {"h3": "https"}.get(name, name))
    if scheme in {"h3", "dns-udp"}:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
            for size in (0, 1, 11, 12, 64, 1200, 2000):
                opened.sendto(GARBAGE[:size], ("127.0.0.1", port))
    else:
        await throw_at(port, tls=inside == "tls")
    assert await still_serves(stage)


async def throw_at(port: int, *, tls: bool) -> None:
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for _ in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
            writer.write(GARBAGE)
            writer.write_eof() if writer.can_write_eof() else None
            await asyncio.wait_for(reader.read(), 0.3)
        writer.transport.abort()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


async def test_a_taken_port_names_the_address_and_who_has_it(own: Stage) -> None:
    second = own.daemon.config_file.with_name("second.toml")
    second.write_text(own.daemon.config_file.read_text())
    daemon = Daemon(second, own.daemon.state_dir, own.daemon.ports)
    with pytest.raises(DaemonFailed) as failed:
        await daemon.start()
    assert "ended with code 1" in str(failed.value)
    assert any(str(port) in str(failed.value) for port in (own.daemon.ports.https, own.daemon.ports.dns))
    assert str(own.daemon.pid) in str(failed.value)
    assert await still_serves(own)


async def test_an_edge_that_another_ca_vouches_for_is_never_spoken_to(tmp_path: Path) -> None:
    stranger = issue(tmp_path, ["edge-a.lab.example"])
    async with Lab() as lab:
        edges = [EdgeEntry("edge-a", lab.edges["edge-a"].url, {"ca_file": str(stranger.ca_file)})]
        settings = lab.settings(edges=edges)
        async with Daemon(lab.write_settings(settings), settings.state_dir, settings.ports) as daemon:
            stage = Stage(lab, daemon)
            (answer,) = await answers(stage)
            assert answer.status == 502 and b"certificate" in answer.body.lower()
            assert lab.edges["edge-a"].tally.numbers["requests"] == 0
            assert daemon.running


async def test_an_upstream_that_another_ca_vouches_for_is_never_believed(tmp_path: Path) -> None:
    stranger = issue(tmp_path, ["dns.lab.example"])
    async with Lab() as lab:
        text = render(lab.settings())
        head, tail = text.split("[[pool]]", 1)
        settings = lab.settings()
        path = lab.write_settings(settings)
        text = render(settings)
        head, tail = text.split("[[pool]]", 1)
        path.write_text(head.replace(str(lab.ca_file), str(stranger.ca_file)) + "[[pool]]" + tail)
        async with Daemon(path, settings.state_dir, settings.ports) as daemon:
            ran = await run("kdig", "@127.0.0.1", "-p", str(daemon.ports.dns), "+timeout=20", "answer.lab.example")
            assert "SERVFAIL" in ran.out, ran.out + ran.err
            assert lab.nameserver.asked == 0


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(place)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


async def test_a_full_disk_under_state_dir_stops_no_service(tiny_disk: Path) -> None:
    async with started(state_dir=tiny_disk) as stage:
        with contextlib.suppress(OSError):
            (tiny_disk / "filler").write_bytes(b"x" * 2 * 1024 * 1024)
        assert await still_serves(stage)
        with contextlib.suppress(DaemonFailed):
            await stage.daemon.admin("POST", "/tickets/rotate")
        assert await still_serves(stage)
        assert await stage.daemon.stop() == 0
        assert "no space left" in stage.daemon.log.lower()


async def test_secrets_stay_out_of_the_log(own: Stage) -> None:
    canary = "sk-CANARY-7f3a"
    fields = {"authorization": f"Bearer {canary}", "x-api-key": canary, "cookie": canary}
    for edge in own.lab.edges.values():
        edge.controls.fail_status = 500
    for version in ("h1", "h2", "h3"):
        body = f'{{"model": "{canary}", "messages": ["{canary}"]}}'.encode()
        await ask(version, own.daemon.target(), Request("POST", f"/lab/v1/chat/completions?key={canary}", body, fields))
    listed = await own.daemon.admin("GET", "/requests?last=20")
    await own.daemon.stop()
    assert canary not in own.daemon.log and canary not in str(listed)
    held = [path for path in own.daemon.state_dir.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]
    assert held == []
