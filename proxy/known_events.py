r"""Know an event of a stream by the shape of an earlier one: the same words, but for other strings and numbers.

Theory: the events in the middle of a token stream have the same keys in the same order, and nothing but strings and numbers
in them changes: the token, and with some providers a time, a sequence number or padding as well. So a shape is the event
with a hole for each value, as a regular expression that is tried at one go: 0.7 us for 240 bytes, where a search for each
word that could matter takes 1.2 and json.loads 3.2. Whatever says something else has another key, another literal or
another type, and does not match.

Holes hold no line end, so what matches is one event as the learned one was; every repetition is possessive, so a match takes
one pass, whatever the text.

Rules for editing: what the observer decides on may not be a hole: see KEPT.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Match = Callable[[bytes, int, int], object | None]
"""Whether `text[start:end]` is of the shape; not None when it is."""

NOTHING: Match = re.compile(rb"(?!)").fullmatch
"""Matches no event."""

KEPT = frozenset({b'"type"', b'"error"', b'"event"', b'"object"'})
"""Keys whose strings tell kinds of events apart."""
MAX_EVENT, MAX_HOLES = 1024, 32
"""Bytes and values of an event that is made a shape of: a larger one would take some 10 ms to compile."""
SHAPES, RECENT = 64, 4
"""Shapes remembered for all streams, of which a provider has some ten, and those a new stream is tried with."""

_STRING = re.compile(rb'"[^"\\\n\r]*+(?:\\[^\n\r][^"\\\n\r]*+)*+"(\s*:)?')
_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*")
_ANY_STRING = rb'"[^"\\\n\r]*+(?:\\[^\n\r][^"\\\n\r]*+)*+"'
_ANY_NUMBER = rb"-?[0-9][0-9.eE+-]*+"

_shapes: dict[bytes, Match | None] = {}
_recent: list[Match] = []


def shape_of(event: bytes) -> tuple[bytes, int]:
    """The regular expression for all events like this one, and how many values it leaves open."""
    parts, at, key, holes = [], 0, b"", 0
    for found in _STRING.finditer(event):
        between, numbers = _between(event[at : found.start()])
        parts.append(between)
        at = found.end()
        is_open = found[1] is None and key not in KEPT
        if found[1] is not None:
            key = found[0][: found.start(1) - found.start()]
        holes += numbers + is_open
        parts.append(_ANY_STRING if is_open else re.escape(found[0]))
    between, numbers = _between(event[at:])
    return b"".join([*parts, between]), holes + numbers


def _between(text: bytes) -> tuple[bytes, int]:
    """What stands between strings: punctuation, literals, names of fields, with holes for the numbers, and how many."""
    pieces = _NUMBER.split(text)
    return _ANY_NUMBER.join(map(re.escape, pieces)), len(pieces) - 1


def like_recent(event: bytes) -> Match:
    """The shape of this event among those that streams last learned; NOTHING when it is none of them."""
    end = len(event)
    for match in _recent:
        if match(event, 0, end) is not None:
            return match
    return NOTHING


def learned(event: bytes) -> Match:
    """What matches the events like this one, once a second one of its shape was shown; NOTHING before, and for large ones.

    Compiling takes a millisecond, which an event whose shape does not come again is not worth.
    """
    if len(event) > MAX_EVENT:
        return NOTHING
    shape, holes = shape_of(event)
    if holes > MAX_HOLES:
        return NOTHING
    if shape not in _shapes:
        if len(_shapes) >= SHAPES:
            _shapes.clear()
        _shapes[shape] = None
        return NOTHING
    match = _shapes[shape]
    if match is None:
        match = _shapes[shape] = re.compile(shape).fullmatch
    if match not in _recent:
        _recent.insert(0, match)
        del _recent[RECENT:]
    return match
