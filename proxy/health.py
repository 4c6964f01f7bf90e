"""Decide whether an edge may take traffic, and say why not.

Theory: an edge has independent *facts* (probes say down, requests say outlier, it asked to be left alone, it is loaded,
it is leaving). Its state is read off the facts by `_verdict`, worst first, so that no order of events can lose one:

      DRAINING   leaving the configuration, or weight 0: finishes what it has, takes nothing new
      DOWN       `fall` probes in a row failed; `rise` good ones bring it back
      EJECTED    cooling (429 or 503 said when to come back), or an outlier among its peers for a growing time
      DEGRADED   usable, but loaded or slow; its cost already steers traffic away
      HEALTHY

What counts against an edge: transport failures (3 in a row) and 5xx (5 in a row). A 4xx never does: it is about the
request, and proves that the edge lives. A loss on a reused connection before any answer does not either: idle
connections are closed by anybody. Losses in the same instant are one: a connection with forty streams dies once.
At most half of a pool is ejected as outliers (the caller says so by `may_eject`): when everybody fails, the cause is
elsewhere, and ejecting the last ones helps nobody.

Rules for editing: 1. no clock here; 2. a state changes in `_settle` alone, which makes the Transition; 3. bounds are
constants with their reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC
from enum import Enum

from proxy.messages import Abort, Cause, Fields, Party, Stage, get_field

LOST_IN_A_ROW = 3
FAILED_IN_A_ROW = 5
SAME_INSTANT_S = 0.1
EJECTION_BASE_S = 10.0  # doubles with each ejection
EJECTION_CAP_S = 300.0
FORGET_EJECTIONS_S = 300.0  # this long without one, and the next is a first one again
COOL_DEFAULT_S = 2.0  # a 429 that names no time: providers' token buckets refill by the second
COOL_CAP_S = 60.0  # a quota that is gone for an hour belongs to one key; the edge is asked again after a minute
SLOW_START_S = 15.0
SLOW_START_FLOOR = 0.25
OWN_FAULT_STATUS = frozenset({500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
"""5xx that speak of the server. 501, 505 and 511 are about the request or the path to it."""


class State(Enum):
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    EJECTED = "ejected"
    DOWN = "down"
    DRAINING = "draining"


USABLE = frozenset({State.HEALTHY, State.DEGRADED})


@dataclass(frozen=True, slots=True)
class Transition:
    """An edge changed its state. `at` is in seconds of the caller's clock."""

    edge_id: str
    old: State
    new: State
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an exchange with an edge ended: with a final status, or with an abort, or (abort in BODY) with both.

    `retry_after_s`: what a 429 or 503 asked for, see `retry_after_s()`. `reused`: the connection had carried an
    earlier request.
    """

    status: int = 0
    abort: Abort | None = None
    retry_after_s: float | None = None
    reused: bool = False


class _Mark(Enum):
    """What an outcome says about the edge."""

    GOOD = "good"
    SILENT = "says nothing"
    FAILED = "failed"
    LOST = "lost"


def mark_of(outcome: Outcome) -> _Mark:
    """Read an outcome as evidence about the edge, not about the request."""
    abort = outcome.abort
    if abort is None:
        return _Mark.FAILED if outcome.status in OWN_FAULT_STATUS else _Mark.GOOD
    ours = abort.by is Party.US and abort.cause is not Cause.TIMED_OUT
    if abort.by is Party.CLIENT or ours:
        return _Mark.SILENT
    if abort.stage is Stage.HEAD and (abort.unprocessed or (outcome.reused and abort.cause is Cause.LOST)):
        return _Mark.SILENT
    return _Mark.LOST


def retry_after_s(fields: Fields, wall_now: float) -> float | None:
    """Seconds that an answer asks to wait, or None: `retry-after-ms`, else `Retry-After` in seconds or as a date.

    A date is compared with the answer's own Date field when there is one, so that our clock may be wrong
    (RFC 9110 10.2.3); else with `wall_now`, seconds of the Unix epoch. Never negative; nonsense is None.
    """
    exact = _number(get_field(fields, b"retry-after-ms"))
    if exact is not None:
        return exact / 1000
    value = get_field(fields, b"retry-after")
    seconds = _number(value)
    if seconds is not None or value is None:
        return seconds
    until = _date(value)
    if until is None:
        return None
    base = _date(get_field(fields, b"date") or b"")
    return max(until - (wall_now if base is None else base), 0.0)


def _number(value: bytes | None) -> float | None:
    try:
        number = float(value) if value is not None else None
    except ValueError:
        return None
    # float() takes "nan" and "inf"; neither is a time to wait.
    return number if number is not None and 0 <= number < 1e9 else None


def _date(value: bytes) -> float | None:
    from email.utils import parsedate_to_datetime  # 2 ms of a start, for a form that few servers use

    try:
        moment = parsedate_to_datetime(value.decode("ascii"))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, IndexError):  # the last two for years and zones of many digits, or of none
        return None


class EdgeHealth:
    """The facts about one edge. Each `on_*` returns the Transition it caused, or None."""

    def __init__(self, edge_id: str, *, fall: int = 3, rise: int = 2, now: float = 0.0) -> None:
        self.edge_id = edge_id
        self.fall = fall
        self.rise = rise
        self.state = State.HEALTHY
        self.reason = ""
        self.since = now
        self.failures = 0
        """Outcomes that counted against it, ever."""
        self._down = ""  # why probes say down; "" for up
        self._probe_streak = 0  # good ones while down, failed ones while up
        self._probe_note = ""
        self._lost = self._failed = 0  # in a row
        self._lost_at = -SAME_INSTANT_S
        self._on_trial = False  # back from an ejection, no good answer yet: one failure is enough
        self._ejected_until = 0.0
        self._ejected_for = ""
        self._ejections = 0
        self._cooling_until = 0.0
        self._cooling_for = ""
        self._load = ""
        self._draining = ""
        self._recovered_at = -SLOW_START_S

    @property
    def usable(self) -> bool:
        return self.state in USABLE

    @property
    def is_outlier(self) -> bool:
        """Ejected by its own failures: the kind of which at most half of a pool may be."""
        return bool(self._ejected_for)

    @property
    def is_cooling(self) -> bool:
        return bool(self._cooling_for)

    @property
    def is_spotless(self) -> bool:
        """Nothing counts against it now: one more good answer would change nothing."""
        return not (self._failed or self._on_trial)

    @property
    def is_undecided(self) -> bool:
        """A streak of probes has begun and not ended: the next one may come sooner."""
        return self._probe_streak > 0

    def back_in_s(self, now: float) -> float | None:
        """Seconds until an ejection ends; 0.0 when usable; None when only probes or people can bring it back."""
        if self.state is State.EJECTED:
            return max(self._ejected_until, self._cooling_until) - now
        return 0.0 if self.usable else None

    def slow_start(self, now: float) -> float:
        """Share of its weight that an edge gets after a recovery: from 0.25 to 1.0 in 15 s. Its caches are cold."""
        share = (now - self._recovered_at) / SLOW_START_S
        return min(SLOW_START_FLOOR + (1 - SLOW_START_FLOOR) * max(share, 0.0), 1.0)

    def on_probe(self, ok: bool, reason: str, now: float) -> Transition | None:
        """An active probe ended. One failure ejects nobody; `fall` in a row do, `rise` good ones bring it back."""
        if ok is not bool(self._down):
            self._probe_streak, self._probe_note = 0, ""
            return self._settle(now)
        self._probe_streak += 1
        if self._probe_streak >= (self.rise if ok else self.fall):
            self._down = "" if ok else f"{self._probe_streak} probes failed: {reason}"
            self._probe_streak, self._probe_note = 0, ""
        elif not ok:
            self._probe_note = f"probe failed, {self._probe_streak} of {self.fall}: {reason}"
        return self._settle(now)

    def on_outcome(self, outcome: Outcome, now: float, *, may_eject: bool = True) -> Transition | None:
        """An exchange ended. `may_eject`: fewer than half of the pool's edges are ejected as outliers."""
        if outcome.status == 429 or (outcome.status == 503 and outcome.retry_after_s is not None):
            return self._cool(outcome, now)
        mark = mark_of(outcome)
        if mark is _Mark.GOOD:
            self._lost = self._failed = 0
            self._on_trial = False
        elif mark is not _Mark.SILENT:
            self._count(mark, outcome, now, may_eject)
        return self._settle(now)

    def on_load(self, reason: str, now: float) -> Transition | None:
        """The edge is loaded or slow ("" when it is not)."""
        self._load = reason
        return self._settle(now)

    def drain(self, reason: str, now: float) -> Transition | None:
        """It takes nothing new from now on ("" undoes it)."""
        self._draining = reason
        return self._settle(now)

    def advance(self, now: float) -> Transition | None:
        """Let time pass: ejections end."""
        return self._settle(now)

    def _cool(self, outcome: Outcome, now: float) -> Transition | None:
        wait = COOL_DEFAULT_S if outcome.retry_after_s is None else min(outcome.retry_after_s, COOL_CAP_S)
        if now + wait > self._cooling_until:
            self._cooling_until = now + wait
            self._cooling_for = f"cooling for {wait:.1f} s after {outcome.status}"
        self._lost = self._failed = 0  # it answered
        return self._settle(now)

    def _count(self, mark: _Mark, outcome: Outcome, now: float, may_eject: bool) -> None:
        if mark is _Mark.LOST:
            if now - self._lost_at < SAME_INSTANT_S and not self._is_dial(outcome):
                return
            self._lost_at = now
            self._lost += 1
        self.failures += 1
        self._failed += 1
        enough = self._on_trial or self._lost >= LOST_IN_A_ROW or self._failed >= FAILED_IN_A_ROW
        if enough and may_eject and not self._ejected_for:
            self._eject(_told(outcome), now)

    @staticmethod
    def _is_dial(outcome: Outcome) -> bool:
        return outcome.abort is not None and outcome.abort.stage is Stage.CONNECT

    def _eject(self, last: str, now: float) -> None:
        if now - self._ejected_until > FORGET_EJECTIONS_S:
            self._ejections = 0
        self._ejections += 1
        wait = min(EJECTION_BASE_S * 2 ** (self._ejections - 1), EJECTION_CAP_S)
        self._ejected_until = now + wait
        self._ejected_for = f"out for {wait:.0f} s after {self._failed} failures in a row, last: {last}"
        self._lost = self._failed = 0

    def _lapse(self, now: float) -> None:
        if self._ejected_for and now >= self._ejected_until:
            self._ejected_for = ""
            self._on_trial = True
        if self._cooling_for and now >= self._cooling_until:
            self._cooling_for = ""

    def _verdict(self) -> tuple[State, str]:
        if self._draining:
            return State.DRAINING, self._draining
        if self._down:
            return State.DOWN, self._down
        if self._ejected_for or self._cooling_for:
            return State.EJECTED, self._ejected_for or self._cooling_for
        if self._load:
            return State.DEGRADED, self._load
        return State.HEALTHY, self._probe_note

    def _settle(self, now: float) -> Transition | None:
        was_out = bool(self._down or self._ejected_for)
        self._lapse(now)
        old = self.state
        self.state, self.reason = self._verdict()
        # Cooling empties no cache and is often a second long: coming back from it needs no slow start.
        if self._came_back(old, was_out):
            self._recovered_at = now
        if self.state is old:
            return None
        self.since = now
        return Transition(self.edge_id, old, self.state, self.reason or "recovered", now)

    def _came_back(self, old: State, was_out: bool) -> bool:
        return self.usable and (old is State.DOWN or (old is State.EJECTED and was_out))


def _told(outcome: Outcome) -> str:
    if outcome.abort is None:
        return f"status {outcome.status}"
    return outcome.abort.detail or outcome.abort.cause.value
