"""The two WebSocket dialects: OpenAI Realtime and OpenAI Responses over a socket.

Pure: a client event in, server events out, each marked whether a model must think for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from headrace.lab.dialects import RESPONSES
from headrace.lab.prompt import CREATED, Prompt, Refused, read_prompt

Events = Iterator[tuple[bool, dict[str, Any]]]


class Session(Protocol):
    """One socket's conversation."""

    def greeting(self) -> list[dict[str, Any]]:
        """What the service says first, unasked."""

    def on_event(self, text: str, tokens: int) -> Events:
        """The answer to one client event; an `error` event when it makes no sense."""


class RealtimeSession:
    """/v1/realtime with text output."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._turns: list[Any] = []
        self._number = 0

    def greeting(self) -> list[dict[str, Any]]:
        return [self._event("session.created", session=self._session())]

    def on_event(self, text: str, tokens: int) -> Events:
        try:
            event = json.loads(text)
            kind = event["type"]
        except (ValueError, KeyError, TypeError):
            yield False, self._error("invalid_event", "an event is a JSON object with a type")
            return
        if kind == "session.update":
            yield False, self._event("session.updated", session=self._session())
        elif kind == "conversation.item.create":
            yield from self._take_item(event.get("item") or {})
        elif kind == "response.create":
            yield from self._respond(tokens)
        else:
            yield False, self._error("unknown_event", f"unknown event type: {str(kind)[:64]}")

    def _take_item(self, item: dict[str, Any]) -> Events:
        self._turns.append(item)
        kept = {"id": f"item_{len(self._turns)}", "object": "realtime.item", "status": "completed", **item}
        yield False, self._event("conversation.item.added", previous_item_id=None, item=kept)
        yield False, self._event("conversation.item.done", previous_item_id=None, item=kept)

    def _respond(self, tokens: int) -> Events:
        asked = json.dumps({"model": self._model, "messages": self._turns or ["nothing yet"]}).encode()
        prompt = read_prompt(asked, turns_key="messages", limit_keys=(), tokens=tokens)
        item_id = f"item_{prompt.digest}"
        place = {"response_id": f"resp_{prompt.digest}", "item_id": item_id, "output_index": 0, "content_index": 0}
        yield False, self._event("response.created", response=self._response(prompt, "in_progress"))
        for token in prompt.tokens:
            yield True, self._event("response.output_text.delta", **place, delta=token)
        yield False, self._event("response.output_text.done", **place, text=prompt.text)
        yield False, self._event("response.done", response=self._response(prompt, "completed"))

    def _session(self) -> dict[str, Any]:
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": "sess_headrace_lab",
            "model": self._model,
            "output_modalities": ["text"],
            "expires_at": CREATED,
        }

    def _response(self, prompt: Prompt, status: str) -> dict[str, Any]:
        content = [{"type": "output_text", "text": prompt.text}]
        item = {"id": f"item_{prompt.digest}", "type": "message", "role": "assistant", "content": content}
        output = [item] if status == "completed" else []
        made = len(prompt.tokens)
        usage = {"total_tokens": prompt.input_tokens + made, "input_tokens": prompt.input_tokens, "output_tokens": made}
        about = {"id": f"resp_{prompt.digest}", "object": "realtime.response", "status": status}
        return about | {"output": output, "usage": usage if output else None}

    def _event(self, kind: str, **rest: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "event_id": f"event_{self._number}", **rest}

    def _error(self, code: str, message: str) -> dict[str, Any]:
        fault = {"type": "invalid_request_error", "code": code, "message": message, "param": None, "event_id": None}
        return self._event("error", error=fault)


class ResponsesSession:
    """/v1/responses over a socket: each `response.create` is answered by the events of one response."""

    def greeting(self) -> list[dict[str, Any]]:
        return []

    def on_event(self, text: str, tokens: int) -> Events:
        try:
            prompt = RESPONSES.read(text.encode(), tokens)
        except Refused as refused:
            fault = {"type": refused.kind, "code": None, "message": refused.message, "param": refused.parameter}
            yield False, {"type": "error", "status": refused.status, "error": fault}
            return
        yield from RESPONSES.events(prompt)
