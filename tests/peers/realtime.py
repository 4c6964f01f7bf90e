"""One turn of a Realtime session, spoken by the openai package."""

from __future__ import annotations

from openai.resources.realtime.realtime import AsyncRealtimeConnection


async def one_turn(session: AsyncRealtimeConnection) -> list[str]:
    """Say "hello" and ask for an answer; the types of all events until it is done."""
    assert (await session.recv()).type == "session.created"
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    await session.conversation.item.create(item=item)  # type: ignore[arg-type]
    await session.response.create()
    kinds = []
    async for event in session:
        kinds.append(event.type)
        if event.type == "response.done":
            break
    return kinds
