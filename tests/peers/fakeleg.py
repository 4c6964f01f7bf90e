"""A leg and a receiver that write down what they are told: enough to test everything that is not a protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from proxy.messages import NOBODY, Abort, Fields, Head, Receiver, ResponseHead
from proxy.priority import Priority


@dataclass
class FakeLeg:
    """Notes each word said to it; a test speaks for its peer through `receiver`."""

    said: list[tuple[str, Any]] = field(default_factory=list)
    receiver: Receiver = NOBODY
    reused: bool = False
    version: str = "fake"
    paused: bool = False

    def head(self, head: Head) -> None:
        self.said.append(("head", head))

    def interim(self, head: ResponseHead) -> None:
        self.said.append(("interim", head))

    def data(self, chunk: bytes) -> None:
        self.said.append(("data", chunk))

    def trailers(self, fields: Fields) -> None:
        self.said.append(("trailers", fields))

    def end(self) -> None:
        self.said.append(("end", None))

    def finish(self) -> None:
        self.said.append(("finish", None))

    def abort(self, abort: Abort) -> None:
        self.said.append(("abort", abort))

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def prioritize(self, priority: Priority) -> None:
        self.said.append(("prioritize", priority))

    @property
    def words(self) -> list[str]:
        return [word for word, _ in self.said]

    @property
    def body(self) -> bytes:
        return b"".join(value for word, value in self.said if word == "data")

    def only(self, word: str) -> Any:
        values = [value for said, value in self.said if said == word]
        assert len(values) == 1, f"{word}: said {len(values)} times in {self.words}"
        return values[0]


@dataclass
class Recorder:
    """A receiver that writes down what it hears."""

    heard: list[tuple[str, Any]] = field(default_factory=list)

    def on_head(self, head: ResponseHead) -> None:
        self.heard.append(("head", head))

    def on_interim(self, head: ResponseHead) -> None:
        self.heard.append(("interim", head))

    def on_data(self, chunk: bytes) -> None:
        self.heard.append(("data", chunk))

    def on_trailers(self, fields: Fields) -> None:
        self.heard.append(("trailers", fields))

    def on_end(self) -> None:
        self.heard.append(("end", None))

    def on_abort(self, abort: Abort) -> None:
        self.heard.append(("abort", abort))

    def on_full(self) -> None:
        self.heard.append(("full", None))

    def on_drained(self) -> None:
        self.heard.append(("drained", None))

    def on_priority(self, priority: Priority) -> None:
        self.heard.append(("priority", priority))

    @property
    def words(self) -> list[str]:
        return [word for word, _ in self.heard]

    @property
    def body(self) -> bytes:
        return b"".join(value for word, value in self.heard if word == "data")
