"""What is asked and what is answered, whatever the dialect: the same request gives the same text on every edge.

Text is drawn from a digest of the request's meaning (model, messages, limit), so that answers over h1, h2 and h3, or
from two edges, can be compared byte for byte. Some words are not ASCII: a relay that splits or decodes shows it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WORDS = (
    *("water", "falls", "through", "the", "headrace", "and", "turns", "a", "wheel", "while", "steady", "light"),
    *("früh", "fällt", "kühles", "Wasser", "señal", "río", "水", "流", "速い", "поток", "🌊", "émeraude", "naïve"),
    *("quiet", "channel", "sluice", "gate", "river", "stone"),
)
CREATED = 1_700_000_000  # a clock here would make equal requests differ


class Refused(Exception):
    """A request that the service would answer with an error of its own dialect."""

    def __init__(self, status: int, kind: str, message: str, parameter: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class Prompt:
    """A parsed request. `digest` names it: ids in the answer come from it."""

    model: str
    digest: str
    input_tokens: int
    tokens: tuple[str, ...]
    stopped_by: str  # "stop" | "length"
    stream: bool = False
    include_usage: bool = False

    @property
    def text(self) -> str:
        return "".join(self.tokens)


def read_prompt(body: bytes, *, turns_key: str, limit_keys: Sequence[str], tokens: int) -> Prompt:
    """Parse a request body whose turns stand under `turns_key`; raise `Refused` with what the services say.

    `tokens` is how long the whole answer would be; the first of `limit_keys` that is set cuts it.
    """
    asked = _object(body)
    model, turns = asked.get("model"), asked.get(turns_key)
    if not isinstance(model, str) or not model:
        raise Refused(400, "invalid_request_error", "you must provide a model parameter", "model")
    if not isinstance(turns, list | str) or not turns:
        raise Refused(400, "invalid_request_error", f"missing required parameter: '{turns_key}'", turns_key)
    limit = next((asked[key] for key in limit_keys if isinstance(asked.get(key), int)), tokens)
    options = asked.get("stream_options")
    meaning = json.dumps([model, asked.get("system"), asked.get("instructions"), turns], sort_keys=True)
    digest = hashlib.sha256(meaning.encode()).hexdigest()
    return Prompt(
        model=model,
        digest=digest[:24],
        input_tokens=max(1, len(meaning.split())),
        tokens=draw(digest, min(limit, tokens)),
        stopped_by="length" if limit < tokens else "stop",
        stream=asked.get("stream") is True,
        include_usage=isinstance(options, Mapping) and options.get("include_usage") is True,
    )


def draw(seed: str, count: int) -> tuple[str, ...]:
    """`count` tokens that depend on `seed` alone; all but the first open with a space."""
    picks = (hashlib.sha256(f"{seed}:{index}".encode()).digest()[0] for index in range(count))
    words = [WORDS[pick % len(WORDS)] for pick in picks]
    return tuple(word if index == 0 else " " + word for index, word in enumerate(words))


def _object(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)
    except ValueError as exc:
        raise Refused(400, "invalid_request_error", "we could not parse the JSON body of your request") from exc
    if not isinstance(asked, dict):
        raise Refused(400, "invalid_request_error", f"expected a JSON object, got {type(asked).__name__}")
    return asked
