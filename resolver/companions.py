"""Learn which questions come together, and name those that will follow the one that was just asked.

Theory: names come in groups. A page asks for its site, and within two seconds for the 15 to 40 names around it. The first of
a group leads: a question that no leader of the last seconds made us expect, or one that led before. What follows is counted.
When the leader comes again, its likely followers are named, which leaves the 50 ms and more that a browser takes to read the
page until it asks for them itself. Chrome kept such a table by referring host, inside the browser; here it serves whoever
asks. There is no rule for A, AAAA and HTTPS of one name: clients ask for them in the same instant, which leaves no time to
be early, and between names they follow each other as any others do.

        www ------+------- cdn 7 of 8 ---- img 6 of 8 ---- fonts 8 of 8 ---- ad17 1 of 8: not likely
         | leads  | names  fonts, cdn, img

Counts are halved when the leader has led sixteen times, so that a site that changed is learned anew within days.
Bounds: LEADERS with FOLLOWERS each, PAIRS over all; those that led once are kept apart (NEW_LEADERS), so that a flood of new
names passes the others by.
Rules for editing: 1. `now` is an argument; 2. nothing is named that was not asked before.
"""

from __future__ import annotations

from collections import OrderedDict

TOGETHER_S = 2.0
"""How long after its leader a question belongs to the group."""
LEADERS, NEW_LEADERS, FOLLOWERS, PAIRS = 512, 512, 96, 32_768
MOST_OPEN = 2
"""While so many groups are open no question becomes a leader that was none before: on a new page everybody could, and two are
enough to know it again. Those that led before lead in any case."""
HALVED_AT = 16
LIKELY = 0.15
"""Who followed as often is named. A refresh too many costs a question, and one too few makes somebody wait."""


class _Leader:
    """`led` groups began with it; each follower has how many of them it came in, and the last of these."""

    __slots__ = ("followers", "group", "led")

    def __init__(self) -> None:
        self.led = self.group = 0
        self.followers: dict[bytes, tuple[int, int]] = {}

    def lead(self) -> None:
        self.group += 1
        if self.led >= HALVED_AT:
            self.led //= 2
            self.followers = {key: (count // 2, group) for key, (count, group) in self.followers.items() if count > 1}
        self.led += 1

    def follow(self, key: bytes) -> int:
        """By how many followers it has grown: 0, or 1."""
        count, group = self.followers.get(key, (0, 0))
        if group == self.group:
            return 0
        grown = not group
        if grown and len(self.followers) >= FOLLOWERS:
            del self.followers[min(self.followers, key=self.followers.__getitem__)]
            grown = False
        self.followers[key] = (count + 1, self.group)
        return int(grown)

    def expects(self, key: bytes) -> bool:
        """One group more is counted than there were: what happened once may have been chance."""
        return self.followers.get(key, (0, 0))[0] >= LIKELY * (self.led + 1)

    def likely(self) -> list[bytes]:
        least = LIKELY * (self.led + 1)
        found = [(count, key) for key, (count, _) in self.followers.items() if count >= least]
        return [key for _, key in sorted(found, reverse=True)]


class Companions:
    """The table. Keys are whatever tells one question from another."""

    def __init__(self) -> None:
        self._leaders: OrderedDict[bytes, _Leader] = OrderedDict()
        self._new: OrderedDict[bytes, _Leader] = OrderedDict()
        self._open: list[tuple[float, bytes, _Leader]] = []
        self.pairs = 0

    def __len__(self) -> int:
        return len(self._leaders) + len(self._new)

    def asked(self, key: bytes, now: float) -> list[bytes]:
        """Who will follow, the most likely first; nobody unless this question leads."""
        self._open = [one for one in self._open if now - one[0] < TOGETHER_S]
        expected = False
        for _, leading, leader in self._open:
            if leading == key:
                return []
            expected = expected or leader.expects(key)
            self.pairs += leader.follow(key)
        self._hold()
        if key in self._leaders or key in self._new:
            return self._lead(key, now)
        if not expected and len(self._open) < MOST_OPEN:
            self._begin(key, now)
        return []

    def _begin(self, key: bytes, now: float) -> None:
        leader = self._new[key] = _Leader()
        leader.lead()
        self._open.append((now, key, leader))
        self._hold()

    def _lead(self, key: bytes, now: float) -> list[bytes]:
        leader = self._new.pop(key, None) or self._leaders.pop(key)
        likely = leader.likely()
        self.pairs -= len(leader.followers)
        leader.lead()
        self.pairs += len(leader.followers)
        self._leaders[key] = leader
        self._open.append((now, key, leader))
        self._hold()
        return likely

    def _hold(self) -> None:
        """To the bounds. Who still collects may be dropped too: what he collects then goes with him."""
        while len(self._new) > NEW_LEADERS:
            self._drop(self._new.popitem(last=False)[1])
        while len(self._leaders) > LEADERS or self.pairs > PAIRS:
            self._drop((self._leaders or self._new).popitem(last=False)[1])

    def _drop(self, leader: _Leader) -> None:
        self.pairs -= len(leader.followers)
        self._open = [one for one in self._open if one[2] is not leader]

    def forget(self) -> None:
        for table in (self._leaders, self._new, self._open):
            table.clear()
        self.pairs = 0
