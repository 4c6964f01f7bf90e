"""The lab is the origin of every end-to-end test, so it is judged first, by the clients that people use."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import openai
import pytest
import websockets

from config.load import load
from headrace.lab import Lab
from headrace.lab.clients import VERSIONS, Recorder, Request, Target, ask, connect_h3, handshake, pseudo_fields
from headrace.lab.dialects import CHAT
from tests.patience import no_hang, soon
from tests.peers.realtime import one_turn

ASKED = [{"role": "user", "content": "why does water fall?"}]
curl_needed = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
kdig_needed = pytest.mark.skipif(shutil.which("kdig") is None, reason="kdig (knot-dnsutils) is not installed")


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    async with Lab() as started:
        yield started


async def run(*command: str, code: int | tuple[int, ...] = 0) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await soon(process.communicate())
    assert process.returncode in ((code,) if isinstance(code, int) else code), (process.returncode, err.decode())
    return out.decode()


async def curl(lab: Lab, edge_id: str, path: str, *options: str, code: int | tuple[int, ...] = 0) -> str:
    edge = lab.edges[edge_id]
    resolve = f"{edge.host}:{edge.port}:127.0.0.1"
    return await run(
        "curl", "-sS", "-N", "--cacert", str(lab.ca_file), "--resolve", resolve, *options, edge.url + path, code=code
    )


def local_base(lab: Lab, edge_id: str = "edge-a") -> str:
    return f"https://localhost:{lab.edges[edge_id].port}"


def target(lab: Lab, edge_id: str = "edge-a") -> Target:
    return Target(lab.edges[edge_id].port, lab.ca_file)


@pytest.fixture
async def gpt(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[openai.AsyncOpenAI]:
    monkeypatch.setenv("SSL_CERT_FILE", str(lab.ca_file))
    async with openai.AsyncOpenAI(base_url=local_base(lab) + "/v1", api_key="sk-lab", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[anthropic.AsyncAnthropic]:
    monkeypatch.setenv("SSL_CERT_FILE", str(lab.ca_file))
    async with anthropic.AsyncAnthropic(base_url=local_base(lab), api_key="sk-lab", max_retries=0) as client:
        yield client


async def test_chat_streams_what_it_answers_whole(lab: Lab, gpt: openai.AsyncOpenAI) -> None:
    whole = await gpt.chat.completions.create(model="lab-small", messages=ASKED)
    stream = await gpt.chat.completions.create(
        model="lab-small", messages=ASKED, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage == whole.usage
    assert len(chunks) == 24 + 3


async def test_a_token_limit_ends_the_answer_with_length(lab: Lab, gpt: openai.AsyncOpenAI) -> None:
    whole = await gpt.chat.completions.create(model="lab-small", messages=ASKED, max_tokens=5)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 5


async def test_responses_stream_what_they_answer_whole(lab: Lab, gpt: openai.AsyncOpenAI) -> None:
    whole = await gpt.responses.create(model="lab-small", input="why does water fall?")
    events = [
        event
        async for event in await gpt.responses.create(model="lab-small", input="why does water fall?", stream=True)
    ]
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


async def test_messages_stream_what_they_answer_whole(lab: Lab, claude: anthropic.AsyncAnthropic) -> None:
    whole = await claude.messages.create(model="lab-small", max_tokens=100, messages=ASKED)
    async with claude.messages.stream(model="lab-small", max_tokens=100, messages=ASKED) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason == "end_turn"
    assert final.usage.output_tokens == 24


async def test_models_and_embeddings_are_parsed_by_the_packages(
    lab: Lab, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    assert (await gpt.models.list()).data[0].id == "lab-small"
    assert (await claude.models.list()).data[0].id == "lab-small"
    made = await gpt.embeddings.create(model="text-embedding-lab", input=["one", "two"])
    assert len(made.data) == 2 and len(made.data[0].embedding) == 8


async def test_errors_are_raised_as_the_packages_own(
    lab: Lab, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    controls = lab.edges["edge-a"].controls
    controls.change({"fail_status": 429, "retry_after_s": 2.5})
    with pytest.raises(openai.RateLimitError) as limited:
        await gpt.chat.completions.create(model="lab-small", messages=ASKED)
    assert limited.value.response.headers["retry-after-ms"] == "2500"
    with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
        await claude.messages.create(model="lab-small", max_tokens=9, messages=ASKED)
    controls.change({"fail_status": 0, "require_key": "sk-other"})
    with pytest.raises(openai.AuthenticationError):
        await gpt.models.list()
    controls.reset()
    with pytest.raises(openai.BadRequestError, match="messages"):
        await gpt.chat.completions.create(model="lab-small", messages=[])


async def test_realtime_session_is_driven_by_the_openai_package(lab: Lab, gpt: openai.AsyncOpenAI) -> None:
    context = ssl.create_default_context(cafile=lab.ca_file)
    async with gpt.realtime.connect(model="lab-small", websocket_connection_options={"ssl": context}) as session:
        kinds = await one_turn(session)
    assert kinds.count("response.output_text.delta") == 24


async def test_responses_over_a_socket_send_the_same_events(lab: Lab) -> None:
    context = ssl.create_default_context(cafile=lab.ca_file)
    url = local_base(lab).replace("https", "wss") + "/v1/responses"
    async with websockets.connect(url, ssl=context) as socket:
        await socket.send(json.dumps({"type": "response.create", "model": "lab-small", "input": "hello"}))
        kinds = [json.loads(await socket.recv())["type"]]
        while kinds[-1] != "response.completed":
            kinds.append(json.loads(await socket.recv())["type"])
    assert kinds[0] == "response.created" and kinds.count("response.output_text.delta") == 24


@curl_needed
@pytest.mark.parametrize(("option", "version"), [("--http1.1", "1.1"), ("--http2", "2")])
async def test_curl_streams_over_both_tcp_versions(lab: Lab, option: str, version: str) -> None:
    body = json.dumps({"model": "lab-small", "messages": ASKED, "stream": True})
    out = await curl(lab, "edge-a", "/v1/chat/completions", option, "-D", "-", "-d", body)
    assert f"x-lab-version: {version}" in out
    assert out.endswith("data: [DONE]\n\n")
    assert lab.edges["edge-a"].tally.versions[version] == 1


@curl_needed
async def test_head_leaves_before_the_first_token_and_a_client_that_leaves_stops_the_model(lab: Lab) -> None:
    edge = lab.edges["edge-a"]
    edge.controls.first_token_s = 600.0
    body = json.dumps({"model": "lab-small", "messages": ASKED, "stream": True})
    how = ("-D", "-", "-d", body, "--max-time", "3")
    asked = [curl(lab, "edge-a", "/v1/chat/completions", option, *how, code=28) for option in ("--http1.1", "--http2")]
    assert ["text/event-stream" in out for out in await asyncio.gather(*asked)] == [True, True]
    await edge.tally.until("cancelled", 2)
    await edge.tally.until("running", 0)
    assert edge.tally.numbers["tokens"] == 0


@curl_needed
async def test_a_cut_stream_is_an_error_for_the_client(lab: Lab) -> None:
    lab.edges["edge-a"].controls.cut_after = 3
    body = json.dumps({"model": "lab-small", "messages": ASKED, "stream": True})
    reset_while_reading_or_sending = (56, 55)  # over h2 curl may have a SETTINGS or WINDOW_UPDATE of its own to send
    for option in ("--http1.1", "--http2"):
        await curl(lab, "edge-a", "/v1/chat/completions", option, "-d", body, code=reset_while_reading_or_sending)
    await lab.edges["edge-a"].tally.until("cut", 2)


@curl_needed
async def test_a_draining_edge_sends_the_same_request_to_its_neighbour(lab: Lab) -> None:
    lab.edges["edge-a"].controls.drain_to = "edge-b"
    body = json.dumps({"model": "lab-small", "messages": ASKED})
    other = lab.edges["edge-b"]
    resolve = f"{other.host}:{other.port}:127.0.0.1"
    await curl(
        lab, "edge-a", "/v1/chat/completions?x=%2F", "-L", "--resolve", resolve, "-H", "x-lab-request: r1", "-d", body
    )
    assert lab.edges["edge-a"].tally.arrivals["r1"] == other.tally.arrivals["r1"] == 1
    assert lab.edges["edge-a"].tally.numbers["redirected"] == other.tally.numbers["answered"] == 1


@curl_needed
async def test_a_killed_edge_refuses_and_a_restarted_one_answers_on_the_same_port(lab: Lab) -> None:
    edge = lab.edges["edge-a"]
    port = edge.port
    await edge.kill()
    await curl(lab, "edge-a", "/health", code=7)
    await edge.start()
    assert edge.port == port
    await curl(lab, "edge-a", "/health", "-f")


async def test_an_edge_dies_at_once_with_answers_under_way_over_each_version(lab: Lab) -> None:
    edge = lab.edges["edge-a"]
    edge.controls.first_byte_s = 600.0
    body = json.dumps({"model": "lab-small", "messages": ASKED, "stream": True}).encode()
    request = Request("POST", "/v1/chat/completions", body)
    asking = [asyncio.ensure_future(ask(version, target(lab), request)) for version in ("h1", "h2")]
    await edge.tally.until("running", 2)
    async with no_hang():  # before the answers begin that are under way
        await edge.kill()
    assert [answer.clean for answer in await asyncio.gather(*asking)] == [False, False]
    assert edge.connections == 0


@curl_needed
async def test_metrics_have_the_names_of_vllm(lab: Lab) -> None:
    lab.edges["edge-a"].controls.change({"kv_cache_usage": 0.5, "waiting": 3})
    text = await curl(lab, "edge-a", "/metrics")
    assert 'vllm:num_requests_waiting{engine="0",model_name="lab-small"} 3.0' in text
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="lab-small"} 0.5' in text


async def test_an_idle_socket_is_dropped_unless_pings_come(lab: Lab) -> None:
    lab.edges["edge-a"].controls.websocket_idle_s = 0.3
    context = ssl.create_default_context(cafile=lab.ca_file)
    url = local_base(lab).replace("https", "wss") + "/v1/realtime"
    async with websockets.connect(url, ssl=context, ping_interval=0.05) as alive:
        await alive.recv()
        async with websockets.connect(url, ssl=context, ping_interval=None) as idle:
            await idle.recv()
            with pytest.raises(websockets.ConnectionClosedError):
                await idle.recv()
        await alive.send("{}")
        assert json.loads(await alive.recv())["type"] == "error"


@kdig_needed
@pytest.mark.parametrize(
    ("transport", "options"),
    [
        ("udp", []),
        ("tcp", ["+tcp"]),
        ("tls", ["+tls", "+tls-hostname=dns.lab.example"]),
        ("https", ["+https=/dns-query", "+tls-hostname=dns.lab.example"]),
    ],
)
async def test_kdig_gets_an_answer_over_each_transport(lab: Lab, transport: str, options: list[str]) -> None:
    server = lab.nameserver
    port = {"udp": server.port, "tcp": server.port, "tls": server.tls_port, "https": server.https_port}[transport]
    ca = [f"+tls-ca={lab.ca_file}"] if transport in {"tls", "https"} else []
    out = await run("kdig", "@127.0.0.1", "-p", str(port), *options, *ca, "+noall", "+answer", "www.lab.example", "A")
    assert "CNAME\thop.lab.example." in out and "A\t192.0.2.10" in out
    assert server.queries[transport, "www.lab.example", "A"] == 1


@kdig_needed
async def test_negative_answers_carry_the_soa_and_large_ones_are_truncated(lab: Lab) -> None:
    at = ["kdig", "@127.0.0.1", "-p", str(lab.nameserver.port)]
    missing = await run(*at, "nobody.lab.example", "A")
    assert "NXDOMAIN" in missing and "SOA" in missing
    empty = await run(*at, "ent.lab.example", "A")
    assert "NOERROR" in empty and "SOA" in empty
    large = await run(*at, "+ignore", "big.lab.example", "TXT")
    assert "Flags: qr tc" in large
    whole = await run(*at, "big.lab.example", "TXT")
    assert whole.count("xxxxx") >= 20


@kdig_needed
async def test_edges_are_found_by_https_records(lab: Lab) -> None:
    edge = lab.edges["edge-b"]
    name = f"_{edge.port}._https.{edge.host}"
    out = await run("kdig", "@127.0.0.1", "-p", str(lab.nameserver.port), "+short", name, "HTTPS")
    assert 'alpn="h3,h2"' in out or "alpn=h3,h2" in out
    assert f"port={edge.port}" in out


@curl_needed
async def test_the_control_listener_tells_and_changes_and_refuses_pages(lab: Lab) -> None:
    url = lab.control.url
    await run("curl", "-sSf", "-d", '{"tokens": 3, "token_s": 0.001}', f"{url}/edges/edge-c")
    assert lab.edges["edge-c"].controls.tokens == 3
    refused = json.loads(await run("curl", "-sS", "-d", '{"speed": 3}', f"{url}/edges/edge-c"))
    assert "no control named 'speed'" in refused["error"]
    await run("curl", "-sSf", "-X", "POST", f"{url}/edges/edge-c/kill")
    view = json.loads(await run("curl", "-sSf", f"{url}/"))
    assert [view["edges"][edge]["alive"] for edge in view["edges"]] == [True, True, False]
    await run("curl", "-sSf", "-H", "Host: evil.example", f"{url}/", code=22)


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_answer_is_the_same_over_each_version(lab: Lab, version: str) -> None:
    edge = lab.edges["edge-a"]
    body = json.dumps({"model": "lab-small", "messages": ASKED, "stream": True}).encode()
    answer = await ask(version, target(lab), Request("POST", "/v1/chat/completions", body))
    assert (answer.status, answer.clean) == (200, True), answer
    assert answer.fields["x-lab-body-sha256"] == hashlib.sha256(body).hexdigest()
    expected = b"".join(event for _, event in CHAT.stream(CHAT.read(body, edge.controls.tokens)))
    assert answer.body == expected
    assert edge.tally.versions == {{"h1": "1.1", "h2": "2", "h3": "3"}[version]: 1}


@pytest.mark.parametrize("version", VERSIONS)
async def test_tokens_leave_one_by_one_over_each_version(lab: Lab, version: str) -> None:
    lab.edges["edge-a"].controls.change({"token_s": 0.01, "tokens": 10})
    body = json.dumps({"model": "lab-small", "messages": ASKED, "stream": True}).encode()
    pieces: list[bytes] = []
    answer = await ask(version, target(lab), Request("POST", "/v1/chat/completions", body), on_body=pieces.append)
    assert answer.clean and len(pieces) >= 10
    assert answer.total_s - answer.first_byte_s > 9 * 0.01 * 0.9


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_cut_never_ends_cleanly_over_each_version(lab: Lab, version: str) -> None:
    # asyncio's reader forgets what it holds when a reset comes, so the pieces must come apart.
    lab.edges["edge-a"].controls.change({"cut_after": 3, "token_s": 0.02})
    body = json.dumps({"model": "lab-small", "messages": ASKED, "stream": True}).encode()
    answer = await ask(version, target(lab), Request("POST", "/v1/chat/completions", body))
    assert (answer.status, answer.clean) == (200, False)
    assert answer.ending


async def test_leaving_over_h3_stops_the_model_while_the_connection_lives(lab: Lab) -> None:
    edge = lab.edges["edge-a"]
    edge.controls.first_token_s = 30.0
    body = json.dumps({"model": "lab-small", "messages": ASKED, "stream": True}).encode()
    async with connect_h3(target(lab), Recorder("h3")) as client:
        client.send(pseudo_fields(target(lab), Request("POST", "/v1/chat/completions")), body)
        await edge.tally.until("running", 1)
        client.leave()
        await edge.tally.until("cancelled", 1)
        await edge.tally.until("running", 0)
        assert edge.connections == 1


@pytest.mark.parametrize("version", ["h1", "h2"])
async def test_a_closed_connection_is_forgotten_at_once(lab: Lab, version: str) -> None:
    edge = lab.edges["edge-a"]
    assert (await ask(version, target(lab), Request("GET", "/health"))).status == 200
    async with no_hang():
        while edge.connections:
            await asyncio.sleep(0.01)
    assert edge.accepted == 1


async def test_the_second_handshake_is_resumed(lab: Lab) -> None:
    first = await handshake(target(lab))
    second = await handshake(target(lab), first.session)
    assert (first.resumed, second.resumed) == (False, True)


async def test_the_file_that_points_at_the_lab_is_a_valid_configuration(lab: Lab) -> None:
    loaded = load(lab.write_settings(lab.settings(websocket={"ping_interval": "300ms"})), {})
    (pool,) = loaded.config.pools
    assert [edge.port for edge in pool.edges] == [edge.port for edge in lab.edges.values()]
    assert [upstream.scheme for upstream in loaded.config.resolver.upstreams] == ["https", "tls"]
    assert pool.websocket.ping_interval_s == 0.3


async def test_nothing_is_left_when_the_lab_ends() -> None:
    async with Lab() as lab:
        folder: Path = lab.folder
        port = lab.edges["edge-a"].port
        assert (folder / "lab-key.pem").stat().st_mode & 0o077 == 0
    assert not folder.exists()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
