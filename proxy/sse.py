"""Watch a copy of an event stream: how many events, the first with content, usage, errors in band, and whether it was whole.

Theory: the bytes go to the client whatever happens here; this reads beside them. Most chunks of a token stream are exactly
one event, and nothing in them matters once the first content came. One that has the shape of an earlier one is known at one
look (`proxy.known_events`). Anything else goes through the line rules of the WHATWG EventSource section: CR, LF or CRLF, any
split, one optional space after the colon, comments and unknown fields passed over.

A coded stream is undone first, where `proxy.codings` can and within its bounds.

Both dialects: OpenAI chat and completions (`[DONE]`), OpenAI Responses (`response.completed`), Anthropic (`message_stop`).

Rules for editing: 1. nothing here may raise: a stream that cannot be understood stops being watched (`blind`); 2. at most
MAX_EVENT bytes are kept; 3. no text of the stream is kept beyond the event that is being read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from proxy.codings import NotUndoneError, Undo, undoing
from proxy.known_events import NOTHING, learned, like_recent

MAX_EVENT = 256 * 1024
LESSONS, LESSON_EVERY = 8, 64
"""Plain events of a new shape that are learned from in a stream, and how often one is after that: where each has a shape of
its own there is nothing to learn."""

_FINAL_TYPES = frozenset({
    "message_stop", "response.completed", "response.incomplete", "response.failed", "response.cancelled",
})  # fmt: skip
_FAILED = frozenset({"error", "response.failed"})
_NULLS = (b'"usage":null', b'"usage": null')
"""What OpenAI says in every event but the last when usage was asked for."""


def _says_usage(event: bytes) -> bool:
    at = event.find(b'"usage"')
    return at >= 0 and not event.startswith(_NULLS, at)


def _matters(chunk: bytes) -> bool:
    """Whether the chunk may say usage, an error or an end. Spelt out: a loop over the words would cost more than they do."""
    return (
        _says_usage(chunk)
        or b'"error"' in chunk
        or b"[DONE]" in chunk
        or b"_stop" in chunk
        or b".completed" in chunk
        or b".failed" in chunk
        or b".incomplete" in chunk
        or b".cancelled" in chunk
    )


_DELTAS = frozenset({
    b"content_block_delta", b"response.output_text.delta", b"response.reasoning_text.delta", b"response.refusal.delta",
    b"response.reasoning_summary_text.delta", b"response.function_call_arguments.delta", b"response.audio.delta",
})  # fmt: skip


class Observer:
    """One stream's watcher. Feed it every body chunk in order, then ask. `clock` gives seconds; `undo` the plain bytes of a
    coded stream, raising ValueError when it cannot."""

    __slots__ = (
        "_at", "_clock", "_data", "_event", "_is_plain", "_rest", "_shape", "_size", "_strange", "_undo", "blind", "done",
        "error", "events", "expects", "first_token", "has_content", "last_token", "usage",
    )  # fmt: skip

    def __init__(self, clock: Callable[[], float], undo: Undo | None = None) -> None:
        self._clock = clock
        self._at = 0.0  # when what is being looked at came
        self._undo = undo
        self.first_token = self.last_token = -1.0
        """When the first event with content came, and the last that was one of its kind; -1 for none."""
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
        self._size = 0  # of the lines of `_data`, names included: empty ones must meet the cap as well
        self._event = b""
        self._is_plain = False  # the last event brought content and nothing else that matters
        self._shape = NOTHING  # of the last plain event that had a known one
        self._strange = 0  # plain events whose shape was not known
        self.expects = NOTHING
        """Tells a chunk that is one more plain event, for which `events` and `last_token` are all there is to note."""

    @property
    def incomplete(self) -> bool:
        """The stream said none of the ends it may say, or stopped inside an event. Only for streams that have ended."""
        return not self.blind and (not self.done or bool(self._rest.strip()) or bool(self._data))

    def feed(self, chunk: bytes) -> None:
        """Watch the next bytes. Never raises."""
        expects, clock = self.expects, self._clock
        self._at = clock()
        if expects(chunk, 0, len(chunk)) is not None:
            self._one_more()
        elif self._undo is not None:
            self._feed_coded(chunk)
        else:
            self._feed_plain(chunk)
            self.expects = self._shape if self._is_between and not self.blind else NOTHING

    def _one_more(self) -> None:
        self.events += 1
        self.last_token = self._at

    @property
    def _is_between(self) -> bool:
        """Nothing of an event is waiting for the rest of it."""
        return not (self._rest or self._data or self._event)

    def _feed_coded(self, chunk: bytes) -> None:
        assert self._undo is not None
        if self.blind:
            return
        try:
            plain = self._undo(chunk)
        except ValueError:
            self.blind = True
            return
        if plain:
            self._feed_plain(plain)

    def _feed_plain(self, chunk: bytes) -> None:
        if self.blind:
            return
        is_whole, events = self._is_between, self.events
        if is_whole and self.has_content:
            # Before a plain event was learned: there is one wherever content is.
            shape = self._shape if self._shape(chunk, 0, len(chunk)) is not None else like_recent(chunk)
            if shape is not NOTHING:
                self._shape = shape
                self._one_more()
                return
        try:
            self._feed_lines(chunk)
        except (ValueError, RecursionError, AttributeError, TypeError):
            self.blind = True
            return
        if is_whole and self._is_plain and self.events == events + 1 and self._is_between:
            self._learn(chunk)

    def _learn(self, event: bytes) -> None:
        self._strange += 1
        if self._strange <= LESSONS or self._strange % LESSON_EVERY == 0:
            self._shape = learned(event)

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
            self._size += len(line)
            if self._size > MAX_EVENT:
                raise ValueError("event over the cap")
        elif line[:6] == b"event:":
            self._event = line[6:].strip()

    def _dispatch(self) -> None:
        data, self._data, self._size = b"\n".join(self._data), [], 0
        event, self._event = self._event, b""
        if not data:
            return
        self.events += 1
        self._is_plain = False
        if data == b"[DONE]":
            self.done = True
            return
        if event == b"error":
            self.error = True
        if self.has_content and not _matters(data) and (not event or event in _DELTAS):
            self.last_token = self._at
            self._is_plain = True
            return
        try:
            said = json.loads(data)
        except ValueError:
            return  # an event that is not JSON is somebody else's dialect
        if isinstance(said, dict):
            self._on_json(said)

    def _on_json(self, said: dict[str, Any]) -> None:
        kind = said.get("type")
        if said.get("error") or kind in _FAILED:
            self.error = True
        if kind in _FINAL_TYPES:
            self.done = True
        if _is_delta(kind) or any(_has_content(choice) for choice in said.get("choices") or ()):
            self.last_token = self._at
            if not self.has_content:
                self.has_content, self.first_token = True, self.last_token
        for place in (said, said.get("message"), said.get("response")):
            if isinstance(place, dict) and isinstance(place.get("usage"), dict):
                self.usage.update({k: v for k, v in place["usage"].items() if isinstance(v, int) and len(k) < 64})


def observer_for(kind: bytes | None, coding: bytes | None, clock: Callable[[], float]) -> Observer | None:
    """A watcher for an answer by its Content-Type and Content-Encoding; None for what is no event stream, or coded in a way
    that is not undone here."""
    if kind is None or kind[:17].lower() != b"text/event-stream":
        return None
    try:
        return Observer(clock, undoing(coding))
    except NotUndoneError:
        return None


def _is_delta(kind: Any) -> bool:
    """Whether an event of this type brings a piece of the answer: Anthropic's, or any of the Responses API's."""
    return isinstance(kind, str) and (
        kind == "content_block_delta" or (kind.startswith("response.") and kind.endswith(".delta"))
    )


def _has_content(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("tool_calls") or delta.get("reasoning_content"))
