"""Files, pictures, sounds and errors through the vendors' Python packages: the same through us as from the edge itself."""

from __future__ import annotations

import hashlib
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from headrace.lab.story import Stage
from tests.e2e.stage import QUESTION, TURNS

pytestmark = pytest.mark.asyncio(loop_scope="session")

UPLOAD_BYTES = 50 * 1024 * 1024
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 400
Clients = dict[str, openai.AsyncOpenAI]


@pytest_asyncio.fixture(loop_scope="session")
async def both(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Clients]:
    """A client of an edge itself, and one of the daemon in front of it."""
    monkeypatch.setenv("SSL_CERT_FILE", str(stage.lab.ca_file))
    edge = next(iter(stage.lab.edges.values()))
    bases = {"direct": f"https://127.0.0.1:{edge.port}/v1", "through us": stage.daemon.ports.http_url + "/lab/v1"}
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(openai.AsyncOpenAI(base_url=base, api_key="sk-lab", max_retries=0))
            for name, base in bases.items()
        }


async def same(clients: Clients, call: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    """What both clients get, which is the same."""
    direct, ours = await call(clients["direct"]), await call(clients["through us"])
    assert ours == direct
    return ours


async def test_a_large_file_goes_up_whole_and_comes_down_whole(both: Clients) -> None:
    sent = hashlib.sha256(b"seed").digest() * (UPLOAD_BYTES // 32)

    async def upload(client: openai.AsyncOpenAI) -> dict[str, Any]:
        made = await client.files.create(file=("notes.jsonl", io.BytesIO(sent)), purpose="batch")
        return made.model_dump()

    made = await same(both, upload)
    assert (made["bytes"], made["filename"], made["purpose"]) == (UPLOAD_BYTES, "notes.jsonl", "batch")
    assert made["id"] == f"file-{hashlib.sha256(sent).hexdigest()[:16]}-{UPLOAD_BYTES}"

    async def download(client: openai.AsyncOpenAI) -> str:
        content = await client.files.content(made["id"])
        assert len(content.content) == UPLOAD_BYTES
        return hashlib.sha256(content.content).hexdigest()

    await same(both, download)

    async def facts(client: openai.AsyncOpenAI) -> list[Any]:
        found, gone = await client.files.retrieve(made["id"]), await client.files.delete(made["id"])
        return [found.model_dump(), gone.model_dump()]

    await same(both, facts)


async def test_pictures_are_drawn_and_edited(both: Clients) -> None:
    async def draw(client: openai.AsyncOpenAI) -> Any:
        return (await client.images.generate(model="lab-draws", prompt="a mill")).model_dump()

    async def edit(client: openai.AsyncOpenAI) -> Any:
        picture = ("mill.png", io.BytesIO(PICTURE), "image/png")
        return (await client.images.edit(model="lab-draws", image=picture, prompt="more water")).model_dump()

    drawn, edited = await same(both, draw), await same(both, edit)
    assert len(drawn["data"][0]["b64_json"]) > 300_000
    assert drawn != edited


async def test_speech_comes_in_pieces_and_sound_goes_up(both: Clients) -> None:
    async def speak(client: openai.AsyncOpenAI) -> tuple[int, str]:
        call = client.audio.speech.with_streaming_response.create(model="lab-speaks", voice="alloy", input=QUESTION)
        async with call as spoken:
            pieces = [piece async for piece in spoken.iter_bytes(16_384)]
        return len(pieces), hashlib.sha256(b"".join(pieces)).hexdigest()

    async def hear(client: openai.AsyncOpenAI) -> Any:
        sound = ("river.mp3", io.BytesIO(PICTURE * 8), "audio/mpeg")
        return (await client.audio.transcriptions.create(model="lab-hears", file=sound)).model_dump()

    assert (await same(both, speak))[0] == 16
    assert "river.mp3" in (await same(both, hear))["text"]


async def test_streams_have_the_same_events(both: Clients) -> None:
    async def chat(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.chat.completions.create(
            model="lab-small", messages=TURNS, stream=True, stream_options={"include_usage": True}
        )
        return [_without_ids(chunk.model_dump()) async for chunk in stream]

    async def respond(client: openai.AsyncOpenAI) -> list[str]:
        stream = await client.responses.create(model="lab-small", input=QUESTION, stream=True)
        return [event.type async for event in stream]

    assert len(await same(both, chat)) > 20
    assert (await same(both, respond))[-1] == "response.completed"


def _without_ids(chunk: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in chunk.items() if name not in ("id", "created")}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 429, 500, 503])
async def test_errors_are_raised_as_the_same_kind(stage: Stage, both: Clients, status: int) -> None:
    for edge in stage.lab.edges.values():
        edge.controls.change({"fail_status": status})

    async def fail(client: openai.AsyncOpenAI) -> tuple[str, int, Any]:
        with pytest.raises(openai.APIStatusError) as raised:
            await client.embeddings.create(model="text-embedding-lab", input="one")
        error = raised.value
        return type(error).__name__, error.status_code, error.body

    await same(both, fail)


async def test_a_stream_that_is_cut_is_an_error_to_both_packages(stage: Stage, both: Clients) -> None:
    for edge in stage.lab.edges.values():
        edge.controls.change({"cut_after": 5})
    for client in both.values():
        stream = await client.chat.completions.create(model="lab-small", messages=TURNS, stream=True)
        with pytest.raises(Exception, match=r"(?i)peer closed|incomplete|protocol|connection"):
            async for _ in stream:
                pass
    base = stage.daemon.ports.http_url + "/lab"
    async with anthropic.AsyncAnthropic(base_url=base, api_key="sk-lab", max_retries=0) as claude:
        with pytest.raises(Exception, match=r"(?i)peer closed|incomplete|protocol|connection"):
            async with claude.messages.stream(model="lab-small", max_tokens=100, messages=TURNS) as messages:
                await messages.get_final_message()
