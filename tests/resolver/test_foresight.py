"""What is expected of a question, told as transcripts, and held to its bounds by random ones."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from resolver.answer import Answer
from resolver.blocklist import Blocklist
from resolver.cache import Cache, Entry, key_of
from resolver.chain import Chain
from resolver.companions import FOLLOWERS, LEADERS, MOST_OPEN, NEW_LEADERS, PAIRS, Companions
from resolver.foresight import BURST, MOST_HEARD, ONCE, RECURRING, SHARE, Foresight
from resolver.hosts import LocalNames
from resolver.recurrence import KEPT, Recurrence
from tests.resolver.test_cache import asking, said

PAGE = [b"www", b"cdn", b"img", b"fonts"]


def load(companions: Companions, names: list[bytes], at: float) -> list[bytes]:
    """One page, a tenth of a second between its names; what its first one named."""
    named = companions.asked(names[0], at)
    for number, name in enumerate(names[1:], 1):
        companions.asked(name, at + number / 10)
    return named


# --- companions -------------------------------------------------------------------------------------------------------


def test_the_first_of_a_group_names_those_that_followed_it() -> None:
    companions = Companions()
    assert load(companions, PAGE, 0) == []
    assert sorted(load(companions, PAGE, 100)) == sorted(PAGE[1:])


def test_the_likeliest_is_named_first_and_the_unlikely_one_not_at_all() -> None:
    companions = Companions()
    for visit in range(10):
        load(
            companions, [b"www", b"cdn", *([b"img"] if visit % 2 else []), *([b"ad"] if visit == 3 else [])], visit * 60
        )
    assert companions.asked(b"www", 1000) == [b"cdn", b"img"]


def test_what_comes_later_than_two_seconds_is_no_companion() -> None:
    companions = Companions()
    companions.asked(b"www", 0)
    companions.asked(b"late", 2.1)
    assert companions.asked(b"www", 100) == []


def test_a_name_that_comes_twice_in_a_group_counts_once() -> None:
    companions = Companions()
    for visit in range(9):
        load(companions, [b"www", b"cdn", *([b"twice"] * 5 if visit == 0 else [])], visit * 60)
    assert companions.asked(b"www", 1000) == [b"cdn"]


def test_a_site_that_changed_is_learned_anew() -> None:
    companions = Companions()
    for visit in range(40):
        load(companions, [b"www", b"old"], visit * 60)
    for visit in range(40, 90):
        load(companions, [b"www", b"new"], visit * 60)
    assert companions.asked(b"www", 10_000) == [b"new"]


def test_on_a_new_page_not_everybody_becomes_a_leader() -> None:
    companions = Companions()
    load(companions, [b"%d" % n for n in range(20)], 0)
    assert len(companions) == MOST_OPEN


def test_a_flood_of_new_names_leaves_those_who_lead_alone() -> None:
    companions = Companions()
    for visit in range(3):
        load(companions, PAGE, visit * 60)
    for n in range(2 * NEW_LEADERS):
        companions.asked(b"flood %d" % n, 1000 + n * 3)
    assert len(companions) <= NEW_LEADERS + LEADERS
    assert set(companions.asked(b"www", 1e6)) == set(PAGE[1:])


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3000), st.floats(0, 3)), max_size=400))
def test_groups_stay_within_their_bounds_whatever_is_asked(questions: list[tuple[int, float]]) -> None:
    companions, now, asked = Companions(), 0.0, set()
    for number, pause_s in questions:
        now += pause_s
        key = b"%d" % number
        named = companions.asked(key, now)
        assert set(named) <= asked and key not in named and len(named) <= FOLLOWERS
        asked.add(key)
        assert len(companions) <= LEADERS + NEW_LEADERS and 0 <= companions.pairs <= PAIRS


def test_the_table_of_pairs_is_held_when_every_group_is_large() -> None:
    companions = Companions()
    now = 0.0
    for _ in range(2):
        for leader in range(LEADERS + 50):
            companions.asked(b"leader %d" % leader, now)
            for follower in range(FOLLOWERS + 10):
                companions.asked(b"%d of %d" % (follower, leader), now + 1)
            now += 10
        assert companions.pairs <= PAIRS
    assert companions.pairs > PAIRS - FOLLOWERS


# --- recurrence -------------------------------------------------------------------------------------------------------


def test_only_the_last_eight_intervals_count() -> None:
    polled = Recurrence(0.0)
    for number in range(1, 31):
        polled.asked(number * 600.0)  # for hours every ten minutes
    for number in range(1, KEPT + 1):
        polled.asked(18_000.0 + number * 60.0)  # now every minute
    asked_at = 18_000.0 + KEPT * 60.0
    assert polled.refresh_at(asked_at + 100.0, 30.0) is None, "nothing that is still remembered lasted so long"


def test_a_poll_is_met_by_a_refresh_shortly_before_it() -> None:
    poll = Recurrence(0)
    for n in range(1, 6):
        poll.asked(n * 100)
    at = poll.refresh_at(520, ttl_s=20)
    assert at is not None and 590 < at < 600


def test_what_was_seen_once_before_is_no_habit() -> None:
    seen = Recurrence(0)
    assert seen.refresh_at(10, ttl_s=60) is None


def test_a_reader_who_left_is_not_waited_for() -> None:
    name = Recurrence(0)
    for at in (10, 40, 55, 100, 120, 125, 180, 200):
        name.asked(at)
    assert name.refresh_at(229, ttl_s=20) == 229, "another page may come any moment"
    assert name.refresh_at(260, ttl_s=20) is None, "no pause was as long as this one"


def test_intervals_that_differ_are_not_worth_short_answers_and_are_worth_long_ones() -> None:
    name, at = Recurrence(0), 0.0
    for interval_s in (100, 400, 800, 1300, 1900, 2500, 3000, 3500):
        at += interval_s
        name.asked(at)
    assert name.refresh_at(at + 20, ttl_s=20) is None
    assert name.refresh_at(at + 20, ttl_s=2000) is not None


def test_questions_of_one_moment_are_one_occasion() -> None:
    name = Recurrence(0)
    for n in range(1, 6):
        for retry in range(5):
            name.asked(n * 100 + retry / 4)
    at = name.refresh_at(520, ttl_s=20)
    assert at is not None and 590 < at < 600


@given(st.lists(st.floats(0, 20_000), max_size=40), st.floats(0, 10_000), st.floats(1, 86_400))
def test_a_refresh_is_never_planned_for_the_past_nor_beyond_what_was_seen(
    pauses: list[float], quiet_s: float, ttl_s: float
) -> None:
    now = 0.0
    name = Recurrence(now)
    for pause_s in pauses:
        now += pause_s
        name.asked(now)
    now += quiet_s
    at = name.refresh_at(now, ttl_s)
    assert at is None or now - 1e-6 <= at <= name.last_at + sum(pauses) * (1 + 1e-6)
    assert len(name._intervals) <= KEPT


# --- both, beside a cache ---------------------------------------------------------------------------------------------


class Story:
    """A cache and what is foreseen for it. What is named is refreshed at once, as by an upstream at no distance."""

    def __init__(self, ttl_s: int = 60) -> None:
        self.cache = Cache(entries=100_000, size=1 << 26)
        self.foresight = Foresight(self.cache)
        self._answer = said(asking("a.example"), f"{ttl_s} A 192.0.2.1")
        self.refreshed: list[tuple[str, float]] = []

    def ask(self, name: str, now: float) -> bool:
        """Whether it was answered from memory."""
        self.pass_time(now)
        key = key_of(asking(name))
        entry = self.cache.known(key)
        fresh = entry is not None and now < entry.expires_at
        if not fresh:
            self.store(key, now)
        self._refresh(self.foresight.asked(key, now), now)
        return fresh

    def store(self, key: bytes, now: float, answer: Answer | None = None) -> Entry | None:
        kept = answer or self._answer
        return self.cache.store(key, kept, now, now + kept.ttl_s, "peer")

    def pass_time(self, now: float) -> None:
        while self.foresight.next_at <= now:
            at = self.foresight.next_at
            self._refresh(self.foresight.due(at), at)

    def _refresh(self, keys: list[bytes], now: float) -> None:
        for key in keys:
            self.refreshed.append((key[3:].decode("ascii", "replace"), now))
            self.store(key, now)


def test_companions_are_fresh_when_they_are_asked_and_cost_nothing_while_they_live() -> None:
    story = Story()
    for at in (0, 1000, 1010):
        fresh = [story.ask(name, at + n / 10) for n, name in enumerate(("www.example", "cdn.example", "img.example"))]
    assert fresh == [True, True, True]
    assert [at for _, at in story.refreshed] == [1000, 1000]
    assert (story.foresight.refreshed, story.foresight.used) == (2, 2)


def test_a_poll_of_a_short_lived_name_is_answered_without_waiting_once_it_is_known() -> None:
    story = Story(ttl_s=20)
    fresh = [story.ask("poll.example", n * 100.0) for n in range(10)]
    assert not any(fresh[:2]) and all(fresh[3:])
    assert len(story.refreshed) <= 8, "one for each poll"


def test_nothing_is_refreshed_for_a_machine_that_nobody_uses() -> None:
    story = Story(ttl_s=20)
    for n in range(10):
        story.ask("a.example", n * 30.0)
    count = len(story.refreshed)
    story.pass_time(1e6)
    assert len(story.refreshed) <= count + 3
    assert story.foresight.next_at == float("inf")


def test_what_the_cache_has_dropped_is_not_asked_for() -> None:
    story = Story(ttl_s=20)
    for n in range(5):
        story.ask("a.example", n * 100.0)
    story.cache.flush()
    story.refreshed.clear()
    story.pass_time(600)
    assert not story.refreshed


def test_refreshes_never_outnumber_their_share_of_the_questions() -> None:
    story = Story(ttl_s=1)
    asked = 0
    for visit in range(60):
        for n in range(80):
            story.ask(f"n{n}.example", visit * 30 + n / 50)
            asked += 1
        assert story.foresight.refreshed <= BURST / 2 + asked * SHARE
    assert story.foresight.refreshed > asked * SHARE / 2
    assert story.foresight.starved > 0


def test_a_busy_second_is_heard_in_part_and_the_next_one_again() -> None:
    story = Story()
    for n in range(2 * MOST_HEARD):
        story.ask(f"n{n}.example", n / (2 * MOST_HEARD))
    assert story.foresight.deaf_until > 0.9
    heard = len(story.foresight)
    assert heard <= MOST_HEARD + NEW_LEADERS
    story.ask("later.example", story.foresight.deaf_until + 0.5)
    assert len(story.foresight) > heard


def test_a_flood_of_names_asked_once_leaves_what_recurs_alone() -> None:
    story = Story(ttl_s=20)
    for n in range(5):
        story.ask("poll.example", n * 100.0)
    for n in range(2 * ONCE):
        story.ask(f"flood{n}.example", 410 + n / 50)
    assert len(story.foresight) <= RECURRING + ONCE + LEADERS + NEW_LEADERS
    assert story.ask("poll.example", 500.0)


def test_a_name_that_does_not_exist_is_foreseen_as_well() -> None:
    story = Story()
    question = asking("gone.example")
    denial = said(question, rcode="NXDOMAIN", soa="example. 60 60")
    for visit in range(2):
        now = visit * 1000.0
        story.ask("www.example", now)
        story.cache.put(question, denial, now)
        story.foresight.asked(key_of(question), now + 0.1)
    assert key_of(question) in story.foresight.asked(key_of(asking("www.example")), 5000)


def test_forgetting_a_name_forgets_those_below_it_and_no_others() -> None:
    story = Story(ttl_s=20)
    for n in range(5):
        story.ask("a.gone.example", n * 100.0)
        story.ask("kept.example", n * 100.0 + 50)
    story.foresight.forget(b"\x04gone\x07example\0")
    story.refreshed.clear()
    story.pass_time(700)
    assert {name for name, _ in story.refreshed} == {"\x04kept\x07example\0"}


def test_who_is_told_not_to_listen_knows_nothing() -> None:
    story = Story()
    for at in (0, 100, 200):
        story.ask("a.example", at)
    story.foresight.listen(False)
    assert len(story.foresight) == 0 and story.foresight.next_at == float("inf")
    story.ask("a.example", 300)
    assert len(story.foresight) == 0
    story.foresight.listen(True)
    story.ask("a.example", 400)
    assert len(story.foresight) > 0


def test_a_key_becomes_the_question_it_stands_for() -> None:
    chain = Chain(Cache(entries=10, size=1 << 20))
    for question in (asking("a.example"), asking("a.example", "HTTPS", use_edns=0, want_dnssec=True)):
        again = chain.again(key_of(question))
        assert again is not None
        assert (again.name, again.type, again.do, key_of(again)) == (
            question.name,
            question.type,
            question.do,
            key_of(question),
        )


def test_what_stands_before_the_cache_today_is_not_asked_of_anybody() -> None:
    chain = Chain(Cache(entries=10, size=1 << 20))
    key = key_of(asking("ads.example"))
    assert chain.again(key) is not None
    chain.blocklist = Blocklist()
    chain.blocklist.add_lines(["ads.example"])
    assert chain.again(key) is None
    chain.blocklist, chain.local = Blocklist(), LocalNames(["192.0.2.1 ads.example"])
    assert chain.again(key) is None
    assert chain.again(key_of(asking("x.onion"))) is None
    subnet = asking("a.example")
    subnet.ecs = bytes.fromhex("00011800c63364")
    assert chain.again(key_of(subnet)) is None, "an answer for one subnet"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 200)), max_size=150), st.sampled_from([1, 20, 300]))
def test_whatever_is_asked_only_what_was_asked_is_refreshed_and_within_the_budget(
    questions: list[tuple[int, float]], ttl_s: int
) -> None:
    story, now, asked = Story(ttl_s), 0.0, set()
    for count, (number, pause_s) in enumerate(questions, 1):
        now += pause_s
        name = f"n{number}.example"
        asked.add(key_of(asking(name))[3:].decode())
        story.ask(name, now)
        assert story.foresight.refreshed <= BURST / 2 + count * SHARE
        assert {refreshed for refreshed, _ in story.refreshed} <= asked
    for at in (now + 1e4, now + 1e6):
        story.pass_time(at)
    assert story.foresight.next_at == float("inf"), "somebody who is gone is not waited for"
