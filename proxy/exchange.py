"""Decide what each end of an exchange means for the other one: the relay's table.

Theory: an exchange has one phase and hears a few events; each pair has one step. Body bytes are no events: they flow while
the phase allows and change nothing. The commit point is the step ANSWER: before it a failure may become a retry, after it
nothing may be retried, rewritten or ended cleanly by us.

Rules for editing: 1. no clock, no leg here; 2. every transition is in TRANSITIONS, any other is a KeyError; 3. a new row
needs a word in the table of docs/relay.md, which tests/proxy/test_exchange.py holds against this one.
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    __hash__ = object.__hash__  # Enum's own is a Python call, paid twice for each step of each request

    DIALING = "dialing"  # no leg to an edge; request bytes are held, bounded
    ASKED = "asked"  # the request is on its way or sent; no final head yet
    ANSWERING = "answering"  # past the commit point
    TUNNEL = "tunnel"  # 101, or 2xx to CONNECT: bytes both ways
    OVER = "over"


class Event(Enum):
    __hash__ = object.__hash__

    OPENED = "an edge's leg is open"
    RETRY = "the attempt failed and another may be made"
    GAVE_UP = "the attempt failed and none may be made"
    ANSWERED = "final head from the edge"
    SWITCHED = "101 from the edge"
    EDGE_ENDED = "clean end from the edge"
    EDGE_LOST = "the edge's leg is dead"
    CLIENT_LOST = "the client's leg is dead"
    REFUSED = "we refuse to go on: a limit or a policy"
    TIMED_OUT = "a deadline passed"
    BOTH_ENDED = "both directions of the tunnel ended"


class Step(Enum):
    __hash__ = object.__hash__

    DIAL = "ask for a leg to the next edge"
    SEND = "send the head and what is held of the body"
    ANSWER = "pass the head on: the commit point"
    JOIN = "pass the 101 on and join the two directions"
    FINISH = "end the client's leg cleanly"
    CUT = "abort the client's leg: never a clean end"
    FAIL = "answer with an error of our own"
    CANCEL = "abort what there is towards the edge"
    CANCEL_AND_FAIL = "abort the edge, answer with an error of our own"
    CANCEL_AND_CUT = "abort both"
    NOTHING = "nothing is left to do"


TRANSITIONS: dict[tuple[Phase, Event], tuple[Phase, Step]] = {
    (Phase.DIALING, Event.OPENED): (Phase.ASKED, Step.SEND),
    (Phase.DIALING, Event.RETRY): (Phase.DIALING, Step.DIAL),
    (Phase.DIALING, Event.GAVE_UP): (Phase.OVER, Step.FAIL),
    (Phase.DIALING, Event.CLIENT_LOST): (Phase.OVER, Step.CANCEL),
    (Phase.DIALING, Event.REFUSED): (Phase.OVER, Step.CANCEL_AND_FAIL),
    (Phase.DIALING, Event.TIMED_OUT): (Phase.OVER, Step.CANCEL_AND_FAIL),
    (Phase.ASKED, Event.RETRY): (Phase.DIALING, Step.DIAL),
    (Phase.ASKED, Event.GAVE_UP): (Phase.OVER, Step.FAIL),
    (Phase.ASKED, Event.ANSWERED): (Phase.ANSWERING, Step.ANSWER),
    (Phase.ASKED, Event.SWITCHED): (Phase.TUNNEL, Step.JOIN),
    (Phase.ASKED, Event.CLIENT_LOST): (Phase.OVER, Step.CANCEL),
    (Phase.ASKED, Event.REFUSED): (Phase.OVER, Step.CANCEL_AND_FAIL),
    (Phase.ASKED, Event.TIMED_OUT): (Phase.OVER, Step.CANCEL_AND_FAIL),
    (Phase.ANSWERING, Event.EDGE_ENDED): (Phase.OVER, Step.FINISH),
    (Phase.ANSWERING, Event.EDGE_LOST): (Phase.OVER, Step.CUT),
    (Phase.ANSWERING, Event.CLIENT_LOST): (Phase.OVER, Step.CANCEL),
    (Phase.ANSWERING, Event.REFUSED): (Phase.OVER, Step.CANCEL_AND_CUT),
    (Phase.ANSWERING, Event.TIMED_OUT): (Phase.OVER, Step.CANCEL_AND_CUT),
    (Phase.TUNNEL, Event.EDGE_LOST): (Phase.OVER, Step.CUT),
    (Phase.TUNNEL, Event.CLIENT_LOST): (Phase.OVER, Step.CANCEL),
    (Phase.TUNNEL, Event.BOTH_ENDED): (Phase.OVER, Step.NOTHING),
    (Phase.TUNNEL, Event.REFUSED): (Phase.OVER, Step.CANCEL_AND_CUT),
    (Phase.TUNNEL, Event.TIMED_OUT): (Phase.OVER, Step.CANCEL_AND_CUT),
}


TABLE = TRANSITIONS | {(Phase.OVER, event): (Phase.OVER, Step.NOTHING) for event in Event}
"""The whole: after OVER everything is late and means nothing. A pair that is not in it is a rim's broken promise."""
