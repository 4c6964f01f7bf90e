"""The vendors' own Python packages through the daemon, with only the base URL changed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import anthropic
import openai
import pytest
import pytest_asyncio

from headrace.lab.clients import Request, ask
from headrace.lab.dialects import CHAT
from headrace.lab.prompt import Refused
from headrace.lab.story import Stage
from tests.e2e.stage import QUESTION, TURNS
from tests.peers.realtime import one_turn

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def gpt(stage: Stage) -> AsyncIterator[openai.AsyncOpenAI]:
    base = stage.daemon.ports.http_url + "/lab/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="sk-lab", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def claude(stage: Stage) -> AsyncIterator[anthropic.AsyncAnthropic]:
    base = stage.daemon.ports.http_url + "/lab"
    async with anthropic.AsyncAnthropic(base_url=base, api_key="sk-lab", max_retries=0) as client:
        yield client


def set_all(stage: Stage, **controls: object) -> None:
    for edge in stage.lab.edges.values():
        edge.controls.change(controls)


async def test_chat_streams_what_it_answers_whole(gpt: openai.AsyncOpenAI) -> None:
    whole = await gpt.chat.completions.create(model="lab-small", messages=TURNS)
    stream = await gpt.chat.completions.create(model="lab-small", messages=TURNS, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content and len(text) > 50


async def test_responses_stream_what_they_answer_whole(gpt: openai.AsyncOpenAI) -> None:
    whole = await gpt.responses.create(model="lab-small", input=QUESTION)
    stream = await gpt.responses.create(model="lab-small", input=QUESTION, stream=True)
    events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.completed"


async def test_messages_stream_what_they_answer_whole(claude: anthropic.AsyncAnthropic) -> None:
    whole = await claude.messages.create(model="lab-small", max_tokens=100, messages=TURNS)
    async with claude.messages.stream(model="lab-small", max_tokens=100, messages=TURNS) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        assert (await stream.get_final_message()).stop_reason == "end_turn"
    assert text == whole.content[0].text


async def test_models_and_embeddings_pass(gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic) -> None:
    assert (await gpt.models.list()).data[0].id == (await claude.models.list()).data[0].id == "lab-small"
    made = await gpt.embeddings.create(model="text-embedding-lab", input=["one", "two"])
    assert len(made.data) == 2


async def test_packages_stream_over_tls_with_our_bundle(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(stage.daemon.ca_file))
    base = stage.daemon.ports.https_url.replace("127.0.0.1", "localhost") + "/lab/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="sk-lab", max_retries=0) as client:
        stream = await client.chat.completions.create(model="lab-small", messages=TURNS, stream=True)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "stop"


async def test_a_limit_reaches_both_packages_with_its_retry_fields(
    stage: Stage, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    set_all(stage, fail_status=429, retry_after_s=2.5)
    with pytest.raises(openai.RateLimitError) as limited:
        await gpt.embeddings.create(model="text-embedding-lab", input="one")
    fields = limited.value.response.headers
    assert (fields["retry-after"], fields["retry-after-ms"], fields["x-should-retry"]) == ("2.5", "2500", "true")
    with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
        await claude.messages.create(model="lab-small", max_tokens=9, messages=TURNS)


async def test_an_error_body_passes_byte_for_byte_over_each_version(stage: Stage) -> None:
    body = json.dumps({"model": "lab-small", "messages": []}).encode()
    with pytest.raises(Refused) as refused:
        CHAT.read(body, 24)
    for version in ("h1", "h2", "h3"):
        answer = await ask(version, stage.daemon.target(), Request("POST", "/lab/v1/chat/completions", body))
        assert (answer.status, answer.ending, answer.body) == (400, "", CHAT.error(refused.value)), version


async def test_a_missing_key_is_the_service_s_own_401(stage: Stage, gpt: openai.AsyncOpenAI) -> None:
    set_all(stage, require_key="sk-other")
    with pytest.raises(openai.AuthenticationError, match="incorrect API key"):
        await gpt.models.list()


async def test_a_realtime_session_runs_through_us(gpt: openai.AsyncOpenAI) -> None:
    async with gpt.realtime.connect(model="lab-small") as session:
        kinds = await one_turn(session)
    assert kinds.count("response.output_text.delta") == 24


async def test_leaving_a_stream_stops_the_model(stage: Stage, gpt: openai.AsyncOpenAI) -> None:
    set_all(stage, first_token_s=30.0)
    before = sum(edge.tally.numbers["cancelled"] for edge in stage.lab.edges.values())
    stream = await gpt.chat.completions.create(model="lab-small", messages=TURNS, stream=True)
    holder = next(edge for edge in stage.lab.edges.values() if edge.tally.running)
    await stream.close()
    await holder.tally.until("running", 0)
    assert sum(edge.tally.numbers["cancelled"] for edge in stage.lab.edges.values()) == before + 1
