"""The wire forms of three APIs: OpenAI chat completions, OpenAI responses, Anthropic messages.

Pure: a `Prompt` in, bytes out. `stream` yields (is_token, event) in order; the edge puts its delays before tokens.
The names and shapes are those that the services' own Python packages parse; tests run those packages against them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Iterator
from typing import Any, Protocol

from headrace.lab.asgi import compact
from headrace.lab.prompt import CREATED, Prompt, Refused, read_prompt

Events = Iterator[tuple[bool, bytes]]


class Dialect(Protocol):
    """One API's forms."""

    name: str

    def read(self, body: bytes, tokens: int) -> Prompt:
        """Parse a request or raise `Refused`."""

    def whole(self, prompt: Prompt) -> bytes:
        """The answer when no stream was asked for."""

    def stream(self, prompt: Prompt) -> Events:
        """The answer as wire events; True marks those that a model must think for."""

    def error(self, refused: Refused) -> bytes:
        """An error's body."""


class OpenAiErrors:
    """What both OpenAI dialects say when they refuse."""

    def error(self, refused: Refused) -> bytes:
        fault = {"message": refused.message, "type": refused.kind, "param": refused.parameter or None, "code": None}
        # Indented as the service does it: a proxy that parses and writes anew is seen.
        return json.dumps({"error": fault}, indent=2).encode() + b"\n"


class Chat(OpenAiErrors):
    """POST /v1/chat/completions."""

    name = "openai-chat"

    def read(self, body: bytes, tokens: int) -> Prompt:
        limits = ("max_completion_tokens", "max_tokens")
        return read_prompt(body, turns_key="messages", limit_keys=limits, tokens=tokens)

    def whole(self, prompt: Prompt) -> bytes:
        message = {"role": "assistant", "content": prompt.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": prompt.stopped_by}
        return compact(self._envelope(prompt, "chat.completion") | {"choices": [choice], "usage": _chat_usage(prompt)})

    def stream(self, prompt: Prompt) -> Events:
        yield False, self._chunk(prompt, {"role": "assistant", "content": "", "refusal": None})
        for token in prompt.tokens:
            yield True, self._chunk(prompt, {"content": token})
        yield False, self._chunk(prompt, {}, finish=prompt.stopped_by)
        if prompt.include_usage:
            last = self._envelope(prompt, "chat.completion.chunk") | {"choices": [], "usage": _chat_usage(prompt)}
            yield False, b"data: " + compact(last) + b"\n\n"
        yield False, b"data: [DONE]\n\n"

    def _chunk(self, prompt: Prompt, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk = self._envelope(prompt, "chat.completion.chunk") | {"choices": [choice]}
        if prompt.include_usage:
            chunk["usage"] = None
        return b"data: " + compact(chunk) + b"\n\n"

    def _envelope(self, prompt: Prompt, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{prompt.digest}",
            "object": kind,
            "created": CREATED,
            "model": prompt.model,
            "service_tier": "default",
            "system_fingerprint": "fp_headrace_lab",
        }


class Responses(OpenAiErrors):
    """POST /v1/responses, and its WebSocket form, which sends the same events as messages."""

    name = "openai-responses"

    def read(self, body: bytes, tokens: int) -> Prompt:
        return read_prompt(body, turns_key="input", limit_keys=("max_output_tokens",), tokens=tokens)

    def whole(self, prompt: Prompt) -> bytes:
        return compact(self._response(prompt, "completed"))

    def stream(self, prompt: Prompt) -> Events:
        for is_token, event in self.events(prompt):
            yield is_token, sse(event["type"], event)

    def events(self, prompt: Prompt) -> Iterator[tuple[bool, dict[str, Any]]]:
        """The events as objects, numbered from 0."""
        for number, (is_token, kind, rest) in enumerate(self._sequence(prompt)):
            yield is_token, {"type": kind, "sequence_number": number, **rest}

    def _sequence(self, prompt: Prompt) -> Iterator[tuple[bool, str, dict[str, Any]]]:
        item_id = f"msg_{prompt.digest}"
        place = {"item_id": item_id, "output_index": 0, "content_index": 0}
        yield False, "response.created", {"response": self._response(prompt, "in_progress")}
        yield False, "response.in_progress", {"response": self._response(prompt, "in_progress")}
        opened = {"id": item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        yield False, "response.output_item.added", {"output_index": 0, "item": opened}
        yield False, "response.content_part.added", {**place, "part": _output_text("")}
        for token in prompt.tokens:
            yield True, "response.output_text.delta", {**place, "delta": token, "logprobs": []}
        yield False, "response.output_text.done", {**place, "text": prompt.text, "logprobs": []}
        yield False, "response.content_part.done", {**place, "part": _output_text(prompt.text)}
        yield False, "response.output_item.done", {"output_index": 0, "item": self._item(prompt)}
        yield False, "response.completed", {"response": self._response(prompt, "completed")}

    def _item(self, prompt: Prompt) -> dict[str, Any]:
        content = [_output_text(prompt.text)]
        item_id = f"msg_{prompt.digest}"
        return {"id": item_id, "type": "message", "status": "completed", "role": "assistant", "content": content}

    def _response(self, prompt: Prompt, status: str) -> dict[str, Any]:
        done = status == "completed"
        return {
            "id": f"resp_{prompt.digest}",
            "object": "response",
            "created_at": CREATED,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": prompt.model,
            "output": [self._item(prompt)] if done else [],
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "usage": _responses_usage(prompt) if done else None,
        }


class Messages:
    """POST /v1/messages."""

    name = "anthropic"

    def read(self, body: bytes, tokens: int) -> Prompt:
        return read_prompt(body, turns_key="messages", limit_keys=("max_tokens",), tokens=tokens)

    def whole(self, prompt: Prompt) -> bytes:
        usage = {"input_tokens": prompt.input_tokens, "output_tokens": len(prompt.tokens)}
        content = [{"type": "text", "text": prompt.text}]
        return compact(self._message(prompt) | {"content": content, "usage": usage, "stop_reason": _reason(prompt)})

    def stream(self, prompt: Prompt) -> Events:
        yield False, _named("message_start", message=self._message(prompt))
        yield False, _named("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield False, _named("ping")
        for token in prompt.tokens:
            yield True, _named("content_block_delta", index=0, delta={"type": "text_delta", "text": token})
        yield False, _named("content_block_stop", index=0)
        delta = {"stop_reason": _reason(prompt), "stop_sequence": None}
        yield False, _named("message_delta", delta=delta, usage={"output_tokens": len(prompt.tokens)})
        yield False, _named("message_stop")

    def error(self, refused: Refused) -> bytes:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "api_error", 529: "overloaded_error"}
        kind = kinds.get(refused.status, refused.kind)
        fault = {"type": "error", "error": {"type": kind, "message": refused.message}, "request_id": "req_headrace_lab"}
        return compact(fault)

    def _message(self, prompt: Prompt) -> dict[str, Any]:
        return {
            "id": f"msg_{prompt.digest}",
            "type": "message",
            "role": "assistant",
            "model": prompt.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt.input_tokens, "output_tokens": 1},
        }


CHAT, RESPONSES, MESSAGES = Chat(), Responses(), Messages()


def models(names: tuple[str, ...]) -> bytes:
    """GET /v1/models, in the form that both vendors' packages read."""
    listed = [
        {"id": name, "object": "model", "created": CREATED, "owned_by": "headrace-lab", "type": "model"}
        | {"display_name": name, "created_at": "2023-11-14T22:13:20Z"}
        for name in names
    ]
    first, last = names[0], names[-1]
    return compact({"object": "list", "data": listed, "has_more": False, "first_id": first, "last_id": last})


def embeddings(body: bytes) -> bytes:
    """POST /v1/embeddings: eight floats from a digest of each input, as numbers or as base64 (RFC 4648)."""
    prompt = read_prompt(body, turns_key="input", limit_keys=(), tokens=0)
    asked = json.loads(body)
    inputs = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
    in_base64 = asked.get("encoding_format") == "base64"
    rows = [
        {"object": "embedding", "index": index, "embedding": _vector(str(text), in_base64=in_base64)}
        for index, text in enumerate(inputs)
    ]
    usage = {"prompt_tokens": prompt.input_tokens, "total_tokens": prompt.input_tokens}
    return compact({"object": "list", "data": rows, "model": prompt.model, "usage": usage})


def sse(name: str, event: dict[str, Any]) -> bytes:
    """A named server-sent event with its object as data."""
    return b"event: " + name.encode() + b"\ndata: " + compact(event) + b"\n\n"


def _named(kind: str, **rest: Any) -> bytes:
    return sse(kind, {"type": kind, **rest})


def _reason(prompt: Prompt) -> str:
    return "end_turn" if prompt.stopped_by == "stop" else "max_tokens"


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _chat_usage(prompt: Prompt) -> dict[str, Any]:
    made = len(prompt.tokens)
    return {
        "prompt_tokens": prompt.input_tokens,
        "completion_tokens": made,
        "total_tokens": prompt.input_tokens + made,
    }


def _responses_usage(prompt: Prompt) -> dict[str, Any]:
    made = len(prompt.tokens)
    return {
        "input_tokens": prompt.input_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt.input_tokens + made,
    }


def _vector(text: str, *, in_base64: bool) -> list[float] | str:
    digest = hashlib.sha256(text.encode()).digest()
    floats = [(byte - 128) / 128 for byte in digest[:8]]
    return base64.b64encode(struct.pack("<8f", *floats)).decode() if in_base64 else floats
