"""Validate answers: drive the pure judgement, bring it the keys it asks for, and say what is wrong.

Theory: `resolver.dnssec_answer` decides and asks, this file fetches. Records are asked for with DO and CD, so that they
come as they are; identical ones that several answers wait for are asked for once. What chains were found is kept by
`Trust`, so most answers need nothing but one to three signature checks: 0.1 to 0.4 ms each, 2 ms for P-384 (measured).
They run on the loop: a hand-over to a thread costs as much as a check, and the judgement pauses after four of them, so
that no step takes longer than 8 ms. Only answers of many records, which no resolver sees in a day, go to a thread.

Which task owns what: a look-up is a task owned by its `Validator` and cancelled by `close` alone; an answer that gives up
waiting leaves it to the others.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable
from pathlib import Path

import dns.name
import dns.rdata

from config import anchors as trust_anchors
from config.model import Resolver
from resolver import wire as w
from resolver.answer import Answer
from resolver.dnssec_answer import Security, Verdict, judge
from resolver.dnssec_chain import Missing, Need, Trust, Walk
from resolver.dnssec_records import DS_TYPE, rdata_wire, read
from resolver.dnssec_records import name_of as dns_name
from resolver.dnssec_reply import kept
from resolver.dnssec_signatures import EXPIRED, NOT_YET, Flaw
from resolver.errors import Malformed, NotBelieved, UpstreamsFailed
from resolver.io.fetch import Upstreams, query_for, question_for
from resolver.io.steps import drive
from resolver.question import Question
from resolver.zones import Zones

log = logging.getLogger("headrace.resolver")

MOST_LOOKUPS = 1024
"""Keys and DS asked for at once; more than that is a flood, and its answers fail."""
MOST_RECORDS_HERE = 64
"""An answer with more is read and checked in a thread: 2000 addresses are 150 ms of dnspython (measured)."""
SAY_EVERY_S, MOST_ZONES_SAID = 60.0, 256
OTHER = 0


class Validator:
    """The judge of one configuration. `mode` "log" tells what it finds and lets everything pass.

    Raises OSError or ValueError when the file of trust anchors cannot be used.
    """

    def __init__(
        self,
        config: Resolver,
        upstreams: Upstreams,
        zones: Zones,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.mode: str = config.dnssec
        self.counts = {f"dnssec_{security.value}": 0 for security in Security}
        self._upstreams = upstreams
        self._clock, self._wall = clock, wall
        self._config, self._zones, self._trust = config, zones, trust_of(config)
        self._lookups: dict[tuple[Need, str], asyncio.Task[bytes | UpstreamsFailed]] = {}
        self._said: dict[dns.name.Name, float] = {}
        self._clock_is_said = False

    def reconfigure(self, config: Resolver, zones: Zones) -> bool:
        """Takes another configuration; whether chains begin elsewhere now, so that nothing judged before may stay."""
        old, self._config = self._config, config
        self.mode, self._zones = config.dnssec, zones
        if (old.trust_anchors, old.zones) == (config.trust_anchors, config.zones):
            return False
        self._trust = trust_of(config)
        return True

    async def close(self) -> None:
        tasks = list(self._lookups.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def forget(self) -> None:
        """Everything that was found out about zones: another network may tell the truth."""
        self._trust.forget()

    async def validated(
        self, answer: Answer, question: Question, upstream: str, deadline: float, *, avoid: str = ""
    ) -> Answer:
        """The answer as it may be kept. Raises NotBelieved, or UpstreamsFailed when the chain could not be fetched.

        In log mode neither: the answer that came is the answer, with AD only where it is ours to say. `avoid`: an upstream
        that was not believed; what it told of keys is doubted, and others are asked.
        """
        try:
            verdict = await self._judge(answer, question, deadline, avoid)
        except Malformed as exc:
            verdict = Verdict(Security.BOGUS, Flaw(OTHER, f"malformed: {exc}"), dns_name(question.name))
        except UpstreamsFailed as exc:
            if self.mode == "validate":
                raise
            self._say(dns.name.root, f"cannot be validated: {exc}")
            return answer.without_ad()
        self.counts[f"dnssec_{verdict.security.value}"] += 1
        if verdict.security is Security.BOGUS and verdict.why is not None:
            self._tell(verdict.zone, verdict.why)
            if self.mode == "validate":
                raise NotBelieved(((upstream, f"DNSSEC: {verdict.why.text}"),), ede=verdict.why.ede)
            verdict = Verdict(Security.INSECURE)
        elif verdict.security is Security.SECURE:
            self._clock_is_said = False
        return kept(answer, question, verdict)

    # --- driving ----------------------------------------------------------------------------------------------------

    async def _judge(self, answer: Answer, question: Question, deadline: float, avoid: str = "") -> Verdict:
        walk = Walk(self._trust, self._clock(), self._wall(), doubting=bool(avoid))
        heavy = len(answer.ttl_at) > MOST_RECORDS_HERE
        message = await asyncio.to_thread(read, answer.wire) if heavy else read(answer.wire)
        unfinished = bool(answer.unfinished)
        steps = judge(question, dns_name(question.name), message, walk, unfinished=unfinished)
        failed: list[UpstreamsFailed] = []
        try:
            return await drive(steps, lambda needs: self._bring(needs, deadline, failed, avoid), heavy=heavy)
        except Missing as exc:
            causes = failed[-1].causes if failed else ()
            said = tuple((url, f"{exc}: {reason}") for url, reason in causes) or (("upstreams", str(exc)),)
            raise UpstreamsFailed(said, ede=failed[-1].ede if failed else 22) from exc

    async def _bring(
        self, needs: tuple[Need, ...], deadline: float, failed: list[UpstreamsFailed], avoid: str
    ) -> list[bytes | None]:
        tasks = [self._look_up(need, deadline, avoid) for need in needs]
        await asyncio.wait(tasks)
        results = [UpstreamsFailed() if task.cancelled() else task.result() for task in tasks]
        failed += (result for result in results if isinstance(result, UpstreamsFailed))
        return [None if isinstance(result, UpstreamsFailed) else result for result in results]

    def _look_up(self, need: Need, deadline: float, avoid: str) -> asyncio.Task[bytes | UpstreamsFailed]:
        task = self._lookups.get((need, avoid))
        if task is None:
            task = asyncio.get_running_loop().create_task(self._fetch(need, deadline, avoid))
            self._lookups[need, avoid] = task
            task.add_done_callback(lambda _: self._lookups.pop((need, avoid), None))
        return task

    async def _fetch(self, need: Need, deadline: float, avoid: str) -> bytes | UpstreamsFailed:
        if len(self._lookups) > MOST_LOOKUPS:
            return UpstreamsFailed((("upstreams", "too many keys are being fetched"),), ede=OTHER)
        name = rdata_wire(need.name)
        # A DS stands in the parent: the servers of a zone of ours need not know the one at its top.
        place = name if need.type != DS_TYPE or name == w.ROOT else rdata_wire(need.name.parent())
        _, zone = self._zones.zone_of(place)
        query = query_for(question_for(name, need.type, do=True, cd=True))
        try:
            return (await self._upstreams.ask(query, zone=zone, deadline=deadline, avoid=avoid)).wire
        except UpstreamsFailed as exc:
            return exc

    # --- saying -----------------------------------------------------------------------------------------------------

    def _tell(self, zone: dns.name.Name, why: Flaw) -> None:
        if zone == dns.name.root and why.ede in (EXPIRED, NOT_YET):
            # Everything fails at once and every text would name another zone: this one cause is worth its own words.
            if not self._clock_is_said:
                self._clock_is_said = True
                day = datetime.datetime.fromtimestamp(self._wall(), datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
                log.error("dnssec: %s; this machine's clock says %s, is that right?", why.text, day)
            return
        self._say(zone, f"is bogus: {why.text}")

    def _say(self, zone: dns.name.Name, text: str) -> None:
        """One line for each zone in a minute: a broken zone is asked for often, and a flood of names is not a log."""
        now = self._clock()
        if now < self._said.get(zone, float("-inf")):
            return
        self._said = {name: until for name, until in self._said.items() if now < until}
        if len(self._said) < MOST_ZONES_SAID:
            self._said[zone] = now + SAY_EVERY_S
            log.warning("dnssec: %s %s%s", zone, text, "" if self.mode == "validate" else " (only logged)")


def trust_of(config: Resolver) -> Trust:
    """Where chains begin by this configuration: the shipped root anchors, or those of the file, and its islands.

    A split-horizon zone is insecure unless it says `dnssec = "validate"` or the file has an anchor for it: what a private
    name server says cannot follow from the public tree.
    """
    listed = trust_anchors.parse(read_anchors(config.trust_anchors)) if config.trust_anchors else []
    anchors = {
        dns.name.from_text(owner): [dns.rdata.from_text("IN", kind, text) for kind, text in records]
        for owner, records in trust_anchors.by_owner(listed).items()
    }
    private = {dns.name.from_text(zone.name).canonicalize() for zone in config.zones if zone.dnssec == "insecure"}
    return Trust(anchors, frozenset(private))


def read_anchors(path: str) -> str:
    with Path(path).open("rb") as file:
        return file.read(trust_anchors.MOST_BYTES).decode("ascii", "replace")
