"""The command lines that the README shows: curl, kdig, websockets and a headless browser."""

from __future__ import annotations

import json
import shutil
import ssl
from pathlib import Path

import pytest
import websockets

from headrace.lab.story import Stage
from tests.e2e.stage import TURNS, Ran, needs, run

pytestmark = pytest.mark.asyncio(loop_scope="session")
BODY = json.dumps({"model": "lab-small", "messages": TURNS, "stream": True})


async def curl(stage: Stage, *options: str) -> Ran:
    return await run("curl", "-sS", "-N", "--cacert", str(stage.daemon.ca_file), *options)


@needs("curl")
@pytest.mark.parametrize("option", ["--http1.1", "--http2"])
async def test_curl_streams_over_tls(stage: Stage, option: str) -> None:
    url = stage.daemon.ports.https_url + "/lab/v1/chat/completions"
    ran = await curl(stage, option, "-D", "-", "-d", BODY, url)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("HTTP/1.1 200" if option == "--http1.1" else "HTTP/2 200")
    assert ran.out.endswith("data: [DONE]\n\n")
    assert "server-timing: headrace" in ran.out.lower()


@needs("curl")
async def test_curl_streams_over_plain_loopback(stage: Stage) -> None:
    ran = await curl(stage, "-d", BODY, stage.daemon.ports.http_url + "/lab/v1/chat/completions")
    assert ran.out.endswith("data: [DONE]\n\n")


@needs("curl")
async def test_raw_targets_and_bodies_arrive_unchanged(stage: Stage) -> None:
    url = stage.daemon.ports.https_url + "/lab/echo/a%2Fb//c?q=%20&q=2"
    ran = await curl(stage, "--path-as-is", "-H", "authorization: Bearer sk-lab", "-d", "x=1", url)
    seen = json.loads(ran.out)
    assert (seen["target"], seen["body_bytes"]) == ("/echo/a%2Fb//c?q=%20&q=2", 3)
    assert seen["headers"]["authorization"] == "Bearer sk-lab"


@needs("curl")
async def test_curl_resolves_through_our_doh(stage: Stage) -> None:
    edge = stage.lab.edges["edge-a"]
    doh = stage.daemon.ports.https_url.replace("127.0.0.1", "localhost") + "/dns-query"
    ran = await run(
        "curl",
        "-sS",
        "-f",
        "--cacert",
        str(stage.lab.ca_file),
        "--doh-insecure",
        "--doh-url",
        doh,
        edge.url + "/health",
    )
    assert ran.code == 0, ran.err


@needs("curl")
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example"])
async def test_a_rebound_name_is_not_served(stage: Stage, host: str) -> None:
    ran = await curl(
        stage,
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}",
        "-H",
        f"Host: {host}",
        stage.daemon.ports.http_url + "/lab/health",
    )
    assert ran.out in {"403", "421"}


@needs("kdig")
@pytest.mark.parametrize(
    ("port", "options"),
    [
        ("dns", []),
        ("dns", ["+tcp"]),
        ("dot", ["+tls"]),
        ("https", ["+https=/dns-query"]),
        ("https", ["+https-get=/dns-query"]),
    ],
    ids=["udp", "tcp", "tls", "https-post", "https-get"],
)
async def test_kdig_asks_over_each_transport(stage: Stage, port: str, options: list[str]) -> None:
    number = getattr(stage.daemon.ports, port)
    trust = [] if port == "dns" else [f"+tls-ca={stage.daemon.ca_file}", "+tls-hostname=localhost"]
    ran = await run("kdig", "@127.0.0.1", "-p", str(number), *options, *trust, "www.lab.example", "A")
    assert ran.code == 0, ran.err
    assert "status: NOERROR" in ran.out and "192.0.2.10" in ran.out


@needs("kdig")
async def test_kdig_gets_negative_answers_with_their_soa(stage: Stage) -> None:
    ran = await run("kdig", "@127.0.0.1", "-p", str(stage.daemon.ports.dns), "nobody.lab.example", "A")
    assert "status: NXDOMAIN" in ran.out and "SOA" in ran.out


@pytest.mark.parametrize("scheme", ["ws", "wss"])
async def test_the_websockets_package_talks_through_us(stage: Stage, scheme: str) -> None:
    ports = stage.daemon.ports
    port, host = (ports.http, "127.0.0.1") if scheme == "ws" else (ports.https, "localhost")
    context = ssl.create_default_context(cafile=stage.daemon.ca_file) if scheme == "wss" else None
    url = f"{scheme}://{host}:{port}/lab/v1/realtime?model=lab-small"
    async with websockets.connect(url, ssl=context, subprotocols=["realtime"]) as socket:
        assert socket.subprotocol == "realtime"
        assert json.loads(await socket.recv())["type"] == "session.created"
        await socket.send(json.dumps({"type": "response.create"}))
        kinds = [json.loads(await socket.recv())["type"]]
        while kinds[-1] != "response.done":
            kinds.append(json.loads(await socket.recv())["type"])
    assert kinds.count("response.output_text.delta") == 24


@needs("curl")
async def test_connect_leads_to_allowed_names_alone(stage: Stage) -> None:
    edge = stage.lab.edges["edge-a"]
    through = ["--proxy", stage.daemon.ports.http_url, "--cacert", str(stage.lab.ca_file)]
    allowed = await run("curl", "-sS", *through, edge.url + "/")
    assert allowed.out == "headrace lab edge-a\n", allowed.err
    refused = await run("curl", "-sS", "-o", "/dev/null", "-w", "%{http_connect}", *through, "https://other.example/")
    assert refused.out == "403"


def browser() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(browser() is None, reason="chromium is not installed")
async def test_a_browser_reaches_an_allowed_name_through_the_pac_file(stage: Stage, tmp_path: Path) -> None:
    edge = stage.lab.edges["edge-b"]
    before = edge.accepted
    ran = await run(
        browser() or "",
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--proxy-pac-url={stage.daemon.ports.http_url}/proxy.pac",
        f"--ignore-certificate-errors-spki-list={stage.lab.ca.key_hash()}",
        "--dump-dom",
        edge.url + "/",
        within_s=150,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert "headrace lab edge-b" in ran.out, ran.err
    assert edge.accepted > before
