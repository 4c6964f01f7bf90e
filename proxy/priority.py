"""Say how urgent an answer is: read RFC 9218 priorities, and give one by path to requests that carry none.

Theory: who said it decides. A client's own `priority` field stands whole, what it leaves out has RFC 9218's default (section 4:
an omission in a request is a statement). Where the client said nothing, the pool's longest path rule speaks, then its
`default_priority`. A later PRIORITY_UPDATE of the client replaces all of it; an edge's response field changes only the
parameters that it names (section 8).

A pool whose default is RFC 9218's own says nothing: no field is sent upstream, and streams that nobody spoke for share the
connection (see `UNSAID`).

Rules for editing: 1. a value that does not parse is ignored whole (RFC 8941 4.2), a parameter out of range by itself
(RFC 9218 4); 2. no regular expression here may match the same bytes in two ways: values come from strangers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from config.model import PathPriority
from proxy.messages import Fields, get_field

LONGEST_VALUE = 256
"""Bytes of a value that are looked at: `u=0, i` has six, and extensions are rare."""


@dataclass(frozen=True, slots=True)
class Priority:
    """`urgency` 0 (first) to 7; `incremental`: of use in parts, so it shares with its equals instead of following them."""

    urgency: int = 3
    incremental: bool = False

    def __bytes__(self) -> bytes:
        return b"u=%d, i" % self.urgency if self.incremental else b"u=%d" % self.urgency


DEFAULT = Priority()
"""What RFC 9218 section 4 says of a request whose field leaves everything out."""
UNSAID = Priority(3, incremental=True)
"""How a stream is served that nobody spoke for. RFC 9218's default would serve equals one after the other, which is right
for parts of a page and wrong here: SDKs send no priority, and a token stream must not wait for the end of a download."""

_BARE = (
    rb"(?:-?[0-9]{1,15}(?:\.[0-9]{1,3})?"
    rb'|"(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*"'
    rb"|[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*"
    rb"|:[A-Za-z0-9+/=]*:"
    rb"|\?[01])"
)
_KEY = rb"[a-z*][a-z0-9_\-.*]*"
_PARAMETERS = rb"(?:; *" + _KEY + rb"(?:=" + _BARE + rb")?)*"
_ITEM = _BARE + _PARAMETERS
_INNER_LIST = rb"\( *(?:" + _ITEM + rb"(?: +" + _ITEM + rb")*)? *\)"
_MEMBER = re.compile(rb"(" + _KEY + rb")(?:=(?:(" + _BARE + rb")|" + _INNER_LIST + rb"))?" + _PARAMETERS)
_COMMA = re.compile(rb"[ \t]*,[ \t]*")


def _members(value: bytes) -> dict[bytes, bytes | None] | None:
    """An RFC 8941 dictionary's bare items by key (None: a list; `?1` where only the key stands); None: it is no dictionary."""
    members: dict[bytes, bytes | None] = {}
    at, value = 0, value.strip(b" ")
    while at < len(value):
        member = _MEMBER.match(value, at)
        if member is None:
            return None
        key, bare = member.groups()
        members[key] = b"?1" if value[member.end(1) : member.end(1) + 1] != b"=" else bare
        at = member.end()
        if at == len(value):
            return members
        comma = _COMMA.match(value, at)
        if comma is None or comma.end() == len(value):
            return None
        at = comma.end()
    return members


@lru_cache(256)
def _parameters(value: bytes) -> tuple[int | None, bool | None] | None:
    """(urgency, incremental), None each where it is not said or not valid; None for a value to be ignored."""
    members = _members(value) if len(value) <= LONGEST_VALUE else None
    if members is None:
        return None
    urgency, incremental = members.get(b"u") or b"", members.get(b"i")
    return (
        int(urgency) if urgency in (b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7") else None,
        {b"?1": True, b"?0": False}.get(incremental or b""),
    )


def read(value: bytes) -> Priority | None:
    """A client's statement: the field of its request, or a PRIORITY_UPDATE frame's value. None: it says nothing."""
    said = _parameters(value)
    if said is None:
        return None
    urgency, incremental = said
    return Priority(3 if urgency is None else urgency, bool(incremental))


def of_fields(fields: Fields) -> Priority | None:
    """What a request's fields say; several lines are one value (RFC 8941 4.2). None: nothing, or nothing that parses."""
    lines = [value for name, value in fields if name == b"priority"]
    return read(lines[0] if len(lines) == 1 else b", ".join(lines)) if lines else None


def adjusted(priority: Priority, value: bytes) -> Priority:
    """A stream's priority after its response said `value`: only what is named there changes (RFC 9218 8)."""
    said = _parameters(value)
    if said is None or said == (None, None):
        return priority
    urgency, incremental = said
    return Priority(
        priority.urgency if urgency is None else urgency, priority.incremental if incremental is None else incremental
    )


def renewed(fields: Fields, priority: Priority) -> Fields:
    """A request's fields once a PRIORITY_UPDATE took the place of what they said (RFC 9218 7)."""
    return [field for field in fields if field[0] != b"priority"] + [(b"priority", bytes(priority))]


class PathPriorities:
    """A pool's priorities for requests that carry none; `default` as in `default_priority`."""

    __slots__ = ("_default", "_paths")

    def __init__(self, default: str, paths: Iterable[PathPriority]) -> None:
        said = read(default.encode())
        self._default = said if said != DEFAULT else None
        rules = [(rule.path.encode(), Priority(rule.urgency, rule.incremental)) for rule in paths]
        self._paths = sorted(rules, key=lambda rule: len(rule[0]), reverse=True)

    def __bool__(self) -> bool:
        """Whether there is anything to look up."""
        return self._default is not None or bool(self._paths)

    def of(self, target: bytes) -> Priority | None:
        """The priority of a raw target: its longest rule's, else the default; None when the pool says nothing.

        A rule covers its path and what lies below it: `/v1/chat` is not a rule for `/v1/chatter`.
        """
        for path, priority in self._paths:
            if target.startswith(path) and (
                path[-1:] == b"/" or target[len(path) : len(path) + 1] in (b"", b"/", b"?")
            ):
                return priority
        return self._default

    def add_to(self, fields: Fields, target: bytes) -> None:
        """Say it upstream, in a request that says nothing. RFC 9218's own default needs no bytes."""
        said = self.of(target)
        if said is not None and said != DEFAULT and get_field(fields, b"priority") is None:
            fields.append((b"priority", bytes(said)))
