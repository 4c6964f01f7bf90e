"""The TLS identity of the listeners: one certificate, one ring of ticket keys, many contexts.

Theory: each listener holds one `SSLContext` for its life. What changes behind it:

      ring         a callback asks the ring at every handshake, so a rotation is a swapped tuple
      certificate  a context made anew from the changed files; the old one hands each new handshake over to it

The second is not done by loading the new files into the old context: OpenSSL keeps one certificate for each kind of
key, and after a change from EC to RSA it would go on serving the old one (measured with OpenSSL 3.0).

Ring and workers: all workers of a machine share `state_dir/ticket-keys`. Any of them may rotate, under a lock; the
others see the new file when a client shows a ticket that they cannot open, or when their own turn comes.

Tasks: `TicketRing.start()` makes one task, which waits for the next rotation or drop; `close()` and a change of the
rules cancel it. It never writes: a *turn* of the ring runs in a thread, because of its fsync, and is applied by its own
callback on the loop, whatever became of who asked for it. `close()` waits for turns under way.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from config.model import Tickets
from proxy.io.openssl_tickets import LoadedKey, OpenSsl, TicketCallback, Unreachable, reach
from proxy.io.ticket_file import TicketFile
from proxy.ticketkeys import KEY_BYTES, BrokenRing, KeyView, TicketKey, TicketKeys

log = logging.getLogger("headrace.tls")

LOOK_AGAIN_S = 600.0
"""The longest sleep of the rotation task: the loop's clock stops in suspend, wall time does not."""
MISS_LOOK_S = 1.0
"""How often a ticket that nobody can open may make us look at the file: a bound on what garbage tickets cost."""
CIPHERS_1_2 = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Forward secret and authenticated only; the suites of TLS 1.3 need no choice."""


SUITES_1_3 = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"
"""OpenSSL's three, but with the cheap one first, as Go and BoringSSL have them: a handshake hashes some thirty times, and
SHA-256 is done by the processor. A handshake costs 20 us less of 280."""
TICKETS_A_HANDSHAKE = 1
"""OpenSSL mints two, 40 us each, for browsers of HTTP/1.1 that open connections side by side. Each handshake brings another."""


class IdentityProblem(ValueError):
    """A certificate or key that cannot be used; names the files and what is wrong, never their content."""


@dataclass(frozen=True, slots=True)
class TicketView:
    """What `headrace tickets` shows."""

    supported: bool
    why_not: str
    keys: list[KeyView]
    lifetime_s: float
    rotate_every_s: float
    full: int
    resumed: int
    issued: int
    missed: int


class TicketRing:
    """The keys of this process: loaded, rotated, stored, and given to every context that is installed.

    `clock` is wall time. Without `state_dir` the keys live in memory only. `supported` is False where this
    interpreter's OpenSSL cannot be reached: OpenSSL's own tickets serve then, and one log line says so.
    """

    def __init__(
        self,
        rules: Tickets,
        *,
        state_dir: Path | None,
        clock: Callable[[], float] = time.time,
        reach: Callable[[], OpenSsl] = reach,
    ) -> None:
        self.full = self.resumed = 0
        self.why_not = ""
        self._clock = clock
        self._file = TicketFile(state_dir / "ticket-keys") if state_dir else None
        self._looked_at = float("-inf")
        self._contexts: list[ssl.SSLContext] = []
        self._task: asyncio.Task[None] | None = None
        self._turns: set[asyncio.Future[TicketKeys]] = set()
        self._dropped: list[TicketKey] = []
        self._callback: TicketCallback | None = None
        try:
            self._openssl: OpenSsl | None = reach()
            self._callback = TicketCallback(self._openssl, self._on_missing)
        except Unreachable as exc:
            self._give_up(exc)
        self.keys = TicketKeys(lifetime_s=rules.lifetime_s, rotate_every_s=rules.rotate_every_s, keep=rules.keep)
        self._use(self._stored())
        self._use(self._turned(self.keys, force=False))

    @property
    def supported(self) -> bool:
        return self._callback is not None

    def install(self, context: ssl.SSLContext) -> None:
        """Give this ring to a server context, for the context's life."""
        if self._openssl is None or self._callback is None:
            return
        try:
            self._openssl.install(context, self._callback, self.keys.lifetime_s)
            self._contexts.append(context)
            self._openssl.prefer(context, SUITES_1_3)
        except Unreachable as exc:
            self._give_up(exc)

    def observe(self, handshaken: ssl.SSLObject) -> bool:
        """Count a finished server handshake; True when it resumed a session."""
        if handshaken.session_reused:
            self.resumed += 1
            return True
        self.full += 1
        return False

    def configure(self, rules: Tickets) -> None:
        """A reload's rules, for the keys that there are and the tickets to come."""
        changed = self.keys.configured(
            self._clock(), lifetime_s=rules.lifetime_s, rotate_every_s=rules.rotate_every_s, keep=rules.keep
        )
        if self._openssl is not None and changed.lifetime_s != self.keys.lifetime_s:
            for context in self._contexts:
                self._openssl.set_lifetime(context, changed.lifetime_s)
        self._use(changed)
        if self._task is not None:
            self._restart()

    async def start(self) -> None:
        """Rotate when it is time, until close()."""
        self._task = asyncio.create_task(self._keep_turning(), name="ticket rotation")

    async def close(self) -> None:
        """Rotate no more. The keys stay in use: handshakes may still be under way."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._turns:
            await asyncio.wait(self._turns)

    async def rotate(self) -> str:
        """Put a fresh key in front now and return its id; tickets under the old ones still open."""
        await self._turn(force=True)
        if self._task is not None:
            self._restart()
        current = self.keys.current
        assert current is not None, "a rotation leaves a key"
        return current.id

    def snapshot(self) -> TicketView:
        """For people; no key bytes."""
        counts = self._callback.counts if self._callback else None
        return TicketView(
            supported=self.supported,
            why_not=self.why_not,
            keys=self.keys.views(self._clock()) if self.supported else [],
            lifetime_s=self.keys.lifetime_s,
            rotate_every_s=self.keys.rotate_every_s,
            full=self.full,
            resumed=self.resumed,
            issued=counts.issued if counts else 0,
            missed=counts.missed if counts else 0,
        )

    async def _keep_turning(self) -> None:
        while True:
            now = self._clock()
            await asyncio.sleep(min(max(self.keys.next_at(now) - now, 0.1), LOOK_AGAIN_S))
            now = self._clock()
            if self.keys.due(now):
                await self._turn(force=False)
            else:
                self._use(self.keys.pruned(now))

    def _restart(self) -> None:
        """The task sleeps until a time that has changed."""
        assert self._task is not None
        self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._keep_turning(), name="ticket rotation")

    async def _turn(self, *, force: bool) -> None:
        """Let a thread turn the ring. Cancelled here, the turn goes on and is applied all the same."""
        turn = asyncio.get_running_loop().run_in_executor(None, partial(self._turned, self.keys, force=force))
        self._turns.add(turn)
        turn.add_done_callback(self._on_turned)
        await asyncio.shield(turn)

    def _on_turned(self, turn: asyncio.Future[TicketKeys]) -> None:
        self._turns.discard(turn)
        rules = self.keys  # a reload may have changed them meanwhile
        self._use(
            turn.result().configured(
                self._clock(), lifetime_s=rules.lifetime_s, rotate_every_s=rules.rotate_every_s, keep=rules.keep
            )
        )

    def _turned(self, ring: TicketKeys, *, force: bool) -> TicketKeys:
        """`ring` after what is stored was taken in and, if it is due or forced, a fresh key put in front.

        Another worker may have rotated a moment ago: then its key is adopted, for two fresh keys would halve the time
        that `keep` keys reach back.
        """

        def change(stored: tuple[TicketKey, ...]) -> TicketKeys:
            now = self._clock()
            merged = ring.merge(now, stored)
            return merged.advance(now, os.urandom(KEY_BYTES)) if force or merged.due(now) else merged

        if self._file is None:
            return change(())
        try:
            return self._file.update(change)
        except OSError as exc:
            log.warning("ticket keys cannot be stored in %s (%s): they live in memory only", self._file.path, exc)
            return change(())

    def _stored(self) -> TicketKeys:
        try:
            stored = self._file.read() if self._file else ()
        except BrokenRing as exc:
            log.warning("stored ticket keys are not used, clients make full handshakes once: %s", exc)
            stored = ()
        except OSError as exc:
            log.warning("stored ticket keys cannot be read: %s", exc)
            stored = ()
        return self.keys.merge(self._clock(), stored)

    def _on_missing(self) -> bool:
        """A ticket that no key of ours opens: True when another worker's file brought new keys.

        Called inside a handshake, so it is one stat a second at most and, rarely, one small read.
        """
        now = time.monotonic()
        if self._file is None or now - self._looked_at < MISS_LOOK_S:
            return False
        self._looked_at = now
        if not self._file.changed():
            return False
        self._use(self._stored())
        return True

    def _use(self, keys: TicketKeys) -> None:
        """Swap the ring, on the loop's thread; what fell out of it is overwritten."""
        self._dropped += self.keys.keys
        self.keys = keys
        if self._callback is not None:
            held = {key.name: key for key in self._callback.keys}
            self._callback.keys = tuple(held.pop(key.name) if key.name in held else LoadedKey(key) for key in keys.keys)
            for loaded in held.values():
                loaded.wipe()
        # A thread that turns the ring may be reading a key: wiped under its hands, zeros would be stored as a key.
        if not self._turns:
            in_use = {id(key.secret) for key in keys.keys}
            for key in self._dropped:
                if id(key.secret) not in in_use:
                    key.wipe()
            self._dropped.clear()

    def _give_up(self, why: Unreachable) -> None:
        self._openssl = self._callback = None
        self.why_not = str(why)
        log.warning("TLS tickets are OpenSSL's own, not rotated and not shared by workers: %s", why)


class TlsIdentity:
    """A certificate and its key, as server contexts that all share one ring. IdentityProblem when they do not fit."""

    def __init__(
        self, cert_file: str, key_file: str, *, ring: TicketRing, min_version: Literal["1.2", "1.3"] = "1.3"
    ) -> None:
        self.cert_file, self.key_file, self.ring = cert_file, key_file, ring
        self._min_version = ssl.TLSVersion.TLSv1_2 if min_version == "1.2" else ssl.TLSVersion.TLSv1_3
        self._loaded = _fingerprint(cert_file, key_file)
        self._fronts: list[tuple[ssl.SSLContext, list[str]]] = []
        self._fresh([])  # says at start, not at the first listener, that the files do not fit

    def context(self, alpn: list[str]) -> ssl.SSLContext:
        """A server context for one listener, offering `alpn` in this order; it outlives changes of the certificate."""
        front = self._fresh(alpn)
        self.ring.install(front)
        self._fronts.append((front, alpn))
        return front

    def reload(self, cert_file: str = "", key_file: str = "") -> bool:
        """Serve what the files (or other files) hold now, from the next handshake on. False when nothing changed.

        IdentityProblem leaves everything as it was. Connections and their sessions live on: tickets resume.
        """
        cert_file, key_file = cert_file or self.cert_file, key_file or self.key_file
        loaded = _fingerprint(cert_file, key_file)
        if loaded == self._loaded:
            return False
        before, self.cert_file, self.key_file = (self.cert_file, self.key_file), cert_file, key_file
        try:
            self._fresh([])  # the files are proved even if no listener is up yet
            renewed = [(front, self._fresh(alpn)) for front, alpn in self._fronts]
        except IdentityProblem:
            self.cert_file, self.key_file = before
            raise
        for front, fresh in renewed:
            front.sni_callback = _handing_over_to(fresh)
        self._loaded = loaded
        return True

    def _fresh(self, alpn: list[str]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = self._min_version
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
        context.set_ciphers(CIPHERS_1_2)
        context.num_tickets = TICKETS_A_HANDSHAKE
        if alpn:
            context.set_alpn_protocols(alpn)
        try:
            context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as exc:
            why = getattr(exc, "reason", None) or getattr(exc, "strerror", None) or exc
            raise IdentityProblem(f"certificate {self.cert_file} with key {self.key_file}: {why}") from exc
        return context


def _handing_over_to(fresh: ssl.SSLContext) -> Callable[[ssl.SSLObject, str | None, ssl.SSLContext], None]:
    """OpenSSL asks it in every handshake, whether the client named a server or not."""

    def hand_over(handshake: ssl.SSLObject, _name: str | None, _front: ssl.SSLContext) -> None:
        handshake.context = fresh

    return hand_over


def _no_password() -> str:
    # Without this OpenSSL asks the terminal, and a daemon hangs at start.
    raise ValueError("the key is encrypted; headrace reads keys without a password")


def _fingerprint(*files: str) -> bytes:
    """Of the content: times and inodes lie when a file is mounted or rewritten in place."""
    digest = hashlib.sha256()
    for name in files:
        try:
            digest.update(Path(name).read_bytes() + b"\0")
        except OSError as exc:
            raise IdentityProblem(f"{name} cannot be read: {exc.strerror}") from exc
    return digest.digest()
