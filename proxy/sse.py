"""Watch a copy of an event stream: how many events, the first with content, usage, errors in band, and whether it was whole.

Theory: the bytes go to the client whatever happens here; this reads beside them. Most chunks of a token stream are exactly
one event in `data: ...` form, and nothing in them matters once the first content came, so those cost a few substring
searches. Anything else goes through the line rules of the WHATWG EventSource section: CR, LF or CRLF, any split, one
optional space after the colon, comments and unknown fields passed over.

Both dialects: OpenAI chat and completions (`[DONE]`), OpenAI Responses (`response.completed`), Anthropic (`message_stop`).

Rules for editing: 1. nothing here may raise: a stream that cannot be understood stops being watched (`blind`); 2. at most
MAX_EVENT bytes are kept; 3. no text of the stream is kept beyond the event that is being read.
"""

from __future__ import annotations

import json
from typing import Any

MAX_EVENT = 256 * 1024

_CONTENT = ("delta", "content_block_delta", "response.output_text.delta")
_FINAL_TYPES = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})


def _matters(chunk: bytes) -> bool:
    """Whether the chunk may say usage, an error or an end. Spelt out: a loop over the words would cost more than they do."""
    return (
        b'"usage"' in chunk
        or b'"error"' in chunk
        or b"[DONE]" in chunk
        or b"_stop" in chunk
        or b".completed" in chunk
        or b".failed" in chunk
        or b".incomplete" in chunk
    )


_DELTAS = frozenset({b"content_block_delta", b"response.output_text.delta", b"response.reasoning_text.delta"})


def _is_plain_token(event: bytes) -> bool:
    """Whether one whole event is one of the many in the middle of a stream, by as few looks as will do."""
    if event[:6] == b"data: ":
        return not (b'"usage"' in event or b'"error"' in event or b"[DONE]" in event)
    return event[:7] == b"event: " and event[7 : event.find(b"\n")] in _DELTAS


class Observer:
    """One stream's watcher. Feed it every body chunk in order, then ask."""

    __slots__ = ("_data", "_event", "_rest", "blind", "done", "error", "events", "has_content", "usage")

    def __init__(self) -> None:
        self.events = 0
        """Events with data."""
        self.has_content = False
        """A delta with content was seen."""
        self.done = False
        """The dialect's own end was seen: `[DONE]`, `message_stop`, `response.completed`."""
        self.error = False
        """An error came in band."""
        self.usage: dict[str, int] = {}
        self.blind = False
        self._rest = b""
        self._data: list[bytes] = []
        self._event = b""

    @property
    def incomplete(self) -> bool:
        """The stream said none of the ends it may say, or stopped inside an event. Only for streams that have ended."""
        return not self.blind and (not self.done or bool(self._rest.strip()) or bool(self._data))

    def feed(self, chunk: bytes) -> None:
        """Watch the next bytes. Never raises."""
        if self.blind:
            return
        between = not (self._rest or self._data or self._event)
        if self.has_content and between and chunk.find(b"\n\n") == len(chunk) - 2 and _is_plain_token(chunk):
            self.events += 1
            return
        try:
            self._feed_lines(chunk)
        except (ValueError, RecursionError, AttributeError, TypeError):
            self.blind = True

    def _feed_lines(self, chunk: bytes) -> None:
        text = self._rest + chunk if self._rest else chunk
        lines = text.splitlines(keepends=True)
        # A last line without its end waits; so does a CR that may be the first half of a CRLF.
        self._rest = lines.pop() if lines and lines[-1][-1:] != b"\n" else b""
        if len(self._rest) > MAX_EVENT:
            raise ValueError("line over the cap")
        for line in lines:
            self._on_line(line.rstrip(b"\r\n"))

    def _on_line(self, line: bytes) -> None:
        if not line:
            self._dispatch()
        elif line[:5] == b"data:":
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            if sum(map(len, self._data)) > MAX_EVENT:
                raise ValueError("event over the cap")
        elif line[:6] == b"event:":
            self._event = line[6:].strip()

    def _dispatch(self) -> None:
        data, self._data = b"\n".join(self._data), []
        event, self._event = self._event, b""
        if not data:
            return
        self.events += 1
        if data == b"[DONE]":
            self.done = True
            return
        if event == b"error":
            self.error = True
        if self.has_content and not _matters(data):
            return
        try:
            said = json.loads(data)
        except ValueError:
            return  # an event that is not JSON is somebody else's dialect
        if isinstance(said, dict):
            self._on_json(said)

    def _on_json(self, said: dict[str, Any]) -> None:
        kind = said.get("type")
        if said.get("error") or kind in ("error", "response.failed"):
            self.error = True
        if kind in _FINAL_TYPES:
            self.done = True
        if kind in _CONTENT or any(_has_content(choice) for choice in said.get("choices") or ()):
            self.has_content = True
        for place in (said, said.get("message"), said.get("response")):
            if isinstance(place, dict) and isinstance(place.get("usage"), dict):
                self.usage.update({k: v for k, v in place["usage"].items() if isinstance(v, int) and len(k) < 64})


def _has_content(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("tool_calls") or delta.get("reasoning_content"))
