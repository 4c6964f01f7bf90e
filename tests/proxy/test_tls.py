"""Sessions resume over contexts, workers, rotations, restarts and new certificates; a lost key costs a handshake only."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shutil
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from config.model import Tickets
from proxy.io import openssl_tickets
from proxy.io.openssl_tickets import OpenSsl, Unreachable
from proxy.io.ticket_file import TicketFile
from proxy.io.tls import IdentityProblem, TicketRing, TlsIdentity
from proxy.ticketkeys import TicketKeys
from resolver.io.tls_client import client_context, remember
from tests.peers import selfsigned
from tests.peers.handshake import shake

RULES = Tickets(keep=3)
STORY = Path(__file__).parents[1] / "peers" / "rotation_story.py"


class Clock:
    """Wall time that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def cert(tmp_path: Path) -> str:
    return selfsigned.write(tmp_path / "one.pem", "one")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir()
    return path


@pytest.fixture
def client(cert: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=cert)


def server(cert: str, ring: TicketRing, alpn: list[str] | None = None) -> ssl.SSLContext:
    return TlsIdentity(cert, cert, ring=ring).context(alpn or [])


INTERPRETERS = [sys.executable] + [
    str(path)
    for minor in (12, 13, 14)
    for path in sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))[:1]
]


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_ring_lives_through_rotation_restart_and_drop_on_every_interpreter(
    interpreter: str, cert: str, state: Path
) -> None:
    run = subprocess.run([interpreter, str(STORY), cert, str(state)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {
        "supported": True,
        "why_not": "",
        "first": False,
        "hint_s": 3600,
        "other context": True,
        "old key, after a rotation": True,
        "renewed under the new key, which is now old": True,
        "another process": True,
        "key dropped": False,
        "missed": 1,
    }


class Echo(asyncio.Protocol):
    def __init__(self, identity: TlsIdentity) -> None:
        self.identity = identity

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.identity.ring.observe(transport.get_extra_info("ssl_object"))

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Ask(asyncio.Protocol):
    def __init__(self) -> None:
        self.answered = asyncio.get_running_loop().create_future()
        self.gone = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(b"hello")

    def data_received(self, data: bytes) -> None:
        self.answered.set_result(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set_result(None)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_twenty_reconnects_over_two_workers_and_a_reload_resume(
    new_loop: Callable[[], asyncio.AbstractEventLoop], cert: str, state: Path, tmp_path: Path
) -> None:
    async def talk() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        workers = [TlsIdentity(cert, cert, ring=TicketRing(RULES, state_dir=state)) for _ in range(2)]
        servers = [
            await loop.create_server(lambda one=one: Echo(one), "127.0.0.1", 0, ssl=one.context(["h2"]))
            for one in workers
        ]
        trusting = client_context(cert, ["h2"])
        other = selfsigned.write(tmp_path / "two.pem", "two")
        trusting.load_verify_locations(other)
        for turn in range(20):
            if turn == 10:
                await workers[0].ring.rotate()
                assert workers[0].reload(other, other)
            port = servers[turn % 2].sockets[0].getsockname()[1]
            transport, ask = await loop.create_connection(
                Ask, "127.0.0.1", port, ssl=trusting, server_hostname="localhost"
            )
            assert await ask.answered == b"hello"
            remember(transport)
            transport.close()
            await ask.gone
        for listening in servers:
            listening.close()
            await listening.wait_closed()
        return sum(one.ring.full for one in workers), sum(one.ring.resumed for one in workers)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(talk()) == (1, 19)


def test_worker_takes_a_key_that_another_one_made_when_a_client_shows_it(
    cert: str, state: Path, client: ssl.SSLContext
) -> None:
    async def later_rotation() -> None:
        await one.rotate()

    one, two = TicketRing(RULES, state_dir=state), TicketRing(RULES, state_dir=state)
    asyncio.run(later_rotation())
    session = shake(server(cert, one), client).session
    assert shake(server(cert, two), client, session).resumed
    assert [key.id for key in two.keys.keys] == [key.id for key in one.keys.keys]


def test_garbage_tickets_make_us_look_at_the_file_once_a_second_at_most(
    cert: str, state: Path, client: ssl.SSLContext
) -> None:
    stranger = shake(server(cert, TicketRing(RULES, state_dir=None)), client).session
    ring = TicketRing(RULES, state_dir=state)
    context = server(cert, ring)
    assert not shake(context, client, stranger).resumed
    TicketRing(RULES, state_dir=state).snapshot()
    (state / "ticket-keys").unlink()
    assert not shake(context, client, stranger).resumed
    assert ring.snapshot().missed == 2 and ring.keys.current is not None


def test_key_of_a_full_lifetime_ago_is_dropped_and_wiped(state: Path) -> None:
    clock = Clock()
    ring = TicketRing(RULES, state_dir=state, clock=clock)
    first = ring.keys.keys[0]
    asyncio.run(ring.rotate())
    clock.now += RULES.lifetime_s + 1
    asyncio.run(ring.rotate())
    assert first not in ring.keys.keys and len(ring.keys.keys) == 2
    assert first.secret == bytearray(64)
    assert all(any(key.secret) for key in ring.keys.keys)


async def test_due_ring_rotates_by_itself_and_close_ends_that(state: Path) -> None:
    ring = TicketRing(Tickets(rotate_every_s=0.05, lifetime_s=60.0), state_dir=state)
    await ring.start()
    before = ring.keys.current
    while ring.keys.current == before:
        await asyncio.sleep(0.01)
    await ring.close()
    assert [task.get_name() for task in asyncio.all_tasks()].count("ticket rotation") == 0


async def test_cancelled_rotation_is_still_whole(state: Path) -> None:
    ring = TicketRing(RULES, state_dir=state)
    asking = asyncio.ensure_future(ring.rotate())
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await ring.close()
    assert len(ring.keys.keys) == 2
    assert TicketFile(state / "ticket-keys").read() == ring.keys.keys


async def test_key_that_is_dropped_while_the_ring_turns_is_not_stored_as_zeros(state: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def clock() -> float:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            release.wait(5)
        return 1_000_000.0

    ring = TicketRing(RULES, state_dir=state, clock=clock)
    release.set()
    await ring.rotate()
    release.clear()
    entered.clear()
    turning = asyncio.ensure_future(ring.rotate())
    await asyncio.to_thread(entered.wait)
    old = ring.keys.keys[1]
    ring.configure(Tickets(keep=0))
    release.set()
    await turning
    assert len(TicketFile(state / "ticket-keys").read()) == 3, "a wiped key would make the file unbelievable"
    assert len(ring.keys.keys) == 1 and ring.keys.keep == 0, "the new rules outlive the turn"
    assert old.secret == bytearray(64)


def test_restart_after_a_long_stop_begins_with_a_fresh_key_and_no_stale_one(state: Path) -> None:
    clock = Clock()
    old = TicketRing(RULES, state_dir=state, clock=clock).keys
    clock.now += 14 * 3600
    ring = TicketRing(RULES, state_dir=state, clock=clock)
    assert len(ring.keys.keys) == 2, "the key that sealed until the rotation opens for its lifetime"
    assert ring.keys.keys[1] == old.keys[0]


def test_new_lifetime_shows_in_the_next_ticket(cert: str, client: ssl.SSLContext) -> None:
    ring = TicketRing(RULES, state_dir=None)
    context = server(cert, ring)
    ring.configure(Tickets(lifetime_s=120.0))
    assert shake(context, client).session.ticket_lifetime_hint == 120


def test_file_is_for_its_owner_only_and_replaced_whole(state: Path) -> None:
    ring = TicketRing(RULES, state_dir=state)
    path = state / "ticket-keys"
    before = path.stat()
    asyncio.run(ring.rotate())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_ino != before.st_ino
    assert [entry.name for entry in state.iterdir()] == ["ticket-keys"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.chmod(0o640), "mode 0640"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "checksum"),
        (lambda path: path.write_bytes(b""), "begin otherwise"),
    ],
    ids=["readable by others", "cut short", "empty"],
)
def test_file_that_must_not_be_believed_is_named_and_replaced(
    state: Path, spoil: Callable[[Path], None], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = TicketRing(RULES, state_dir=state).keys.current
    spoil(state / "ticket-keys")
    ring = TicketRing(RULES, state_dir=state)
    assert says in caplog.text
    assert ring.keys.current != before and len(ring.keys.keys) == 1
    assert TicketFile(state / "ticket-keys").read() == ring.keys.keys


def test_link_in_place_of_the_file_is_not_followed(state: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (state / "ticket-keys").symlink_to(target)
    TicketRing(RULES, state_dir=state)
    assert not target.exists() and not (state / "ticket-keys").is_symlink()


def test_unwritable_state_dir_costs_a_warning_not_the_service(
    tmp_path: Path, cert: str, client: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    ring = TicketRing(RULES, state_dir=tmp_path / "missing")
    context = server(cert, ring)
    assert "live in memory only" in caplog.text
    assert shake(context, client, shake(context, client).session).resumed


def test_no_space_leaves_the_old_file_and_no_rubbish(state: Path) -> None:
    file = TicketFile(state / "ticket-keys")
    ring = TicketKeys().advance(1.0, os.urandom(80))
    file.update(lambda _: ring)

    def full(stored: object) -> TicketKeys:
        os.close(os.open(state / f".ticket-keys.{os.getpid()}", os.O_CREAT | os.O_WRONLY, 0o600))
        (state / f".ticket-keys.{os.getpid()}").unlink()
        (state / f".ticket-keys.{os.getpid()}").mkdir()  # what stands in the way here stands for ENOSPC
        return ring.advance(2.0, os.urandom(80))

    with pytest.raises(OSError, match="ticket-keys"):
        file.update(full)
    assert file.read() == ring.keys


def test_held_lock_gives_up_in_time(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.io.ticket_file.LOCK_WAIT_S", 0.05)
    one, two = TicketFile(state / "ticket-keys"), TicketFile(state / "ticket-keys")
    ring = TicketKeys().advance(1.0, os.urandom(80))

    def while_held(_: object) -> TicketKeys:
        with pytest.raises(TimeoutError, match="lock"):
            two.update(lambda _: ring)
        return ring

    assert one.update(while_held) == ring


def unreachable() -> OpenSsl:
    raise Unreachable("this build hides its symbols")


def test_interpreter_that_cannot_be_reached_says_so_once_and_still_resumes(
    cert: str, client: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    ring = TicketRing(RULES, state_dir=None, reach=unreachable)
    context = server(cert, ring)
    assert not ring.supported and "hides its symbols" in ring.snapshot().why_not
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert shake(context, client, shake(context, client).session).resumed
    asyncio.run(ring.rotate())
    assert ring.snapshot().keys == []


def test_missing_symbol_is_named() -> None:
    with pytest.raises(Unreachable, match="does not show SSL_CTX_of_dreams"):
        openssl_tickets._bound(openssl_tickets._library(), "SSL_CTX_of_dreams", None)


def test_context_laid_out_otherwise_is_refused_not_crashed_into(monkeypatch: pytest.MonkeyPatch) -> None:
    for behind in (lambda _: None, lambda _: 12345, lambda context: id(context)):
        monkeypatch.setattr(openssl_tickets, "_behind_head", behind)
        with pytest.raises(Unreachable):
            OpenSsl()


def test_callback_outlives_the_ring_and_the_context(cert: str, client: ssl.SSLContext) -> None:
    context = server(cert, TicketRing(RULES, state_dir=None))
    session = shake(context, client).session
    gc.collect()
    assert shake(context, client, session).resumed


def test_exception_in_the_callback_is_a_full_handshake(cert: str, client: ssl.SSLContext) -> None:
    ring = TicketRing(RULES, state_dir=None)
    context = server(cert, ring)
    session = shake(context, client).session
    callback = ring._callback
    assert callback is not None
    callback._on_missing = lambda: 1 // 0 > 0
    stranger = shake(server(cert, TicketRing(RULES, state_dir=None)), client).session
    assert not shake(context, client, stranger).resumed
    assert callback.counts.failed == 1
    assert shake(context, client, session).resumed


def test_resumed_client_gets_another_ticket_under_the_same_key(cert: str, client: ssl.SSLContext) -> None:
    ring = TicketRing(RULES, state_dir=None)
    context = server(cert, ring)
    shown = set()
    shaken = shake(context, client)
    for _ in range(4):
        shown.add(shaken.session.id)
        shaken = shake(context, client, shaken.session)
        assert shaken.resumed
    assert len(shown) == 4, "RFC 8446 C.4: a ticket is shown once, so each handshake must bring a new one"
    assert ring.snapshot().issued == 5
    assert ring.snapshot().missed == 0


def test_older_tls_keeps_its_ticket_until_the_key_turns(cert: str, client: ssl.SSLContext) -> None:
    ring = TicketRing(RULES, state_dir=None)
    context = TlsIdentity(cert, cert, ring=ring, min_version="1.2").context([])
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    session = shake(context, client).session
    assert shake(context, client, session).resumed
    assert ring.snapshot().issued == 1


def test_suite_that_costs_least_is_chosen_first(cert: str, client: ssl.SSLContext) -> None:
    suite = shake(server(cert, TicketRing(RULES, state_dir=None)), client).client.cipher()
    assert suite is not None
    assert suite[0] == "TLS_AES_128_GCM_SHA256"


# ---------------------------------------------------------------------------------------------- certificates


def test_new_certificate_is_served_from_the_next_handshake_on_and_sessions_live(cert: str, tmp_path: Path) -> None:
    identity = TlsIdentity(cert, cert, ring=TicketRing(RULES, state_dir=None))
    context = identity.context(["h2"])
    client = ssl.create_default_context(cafile=cert)
    other = selfsigned.write(tmp_path / "two.pem", "two")
    client.load_verify_locations(other)
    client.set_alpn_protocols(["h2"])
    before = shake(context, client)
    assert before.common_name == "one"
    shutil.copy(other, cert)
    assert identity.reload() and not identity.reload()
    after = shake(context, client)
    assert (after.common_name, after.server.selected_alpn_protocol()) == ("two", "h2")
    assert shake(context, client, before.session).resumed and shake(context, client, after.session).resumed
    before.server.write(b"still here")
    assert before.client.read() == b"still here"


def test_other_kind_of_key_is_served_too(tmp_path: Path) -> None:
    """Loaded into the same context, an RSA certificate after an EC one is never shown (OpenSSL 3.0)."""
    path = selfsigned.write(tmp_path / "ec.pem", "ec", ec.generate_private_key(ec.SECP256R1()))
    new = selfsigned.write(tmp_path / "rsa.pem", "rsa", rsa.generate_private_key(65537, 2048))
    identity = TlsIdentity(path, path, ring=TicketRing(RULES, state_dir=None))
    context = identity.context([])
    client = ssl.create_default_context(cafile=new)
    identity.reload(new, new)
    assert shake(context, client).common_name == "rsa"


def test_bad_new_certificate_leaves_the_old_one_serving(cert: str, tmp_path: Path, client: ssl.SSLContext) -> None:
    identity = TlsIdentity(cert, cert, ring=TicketRing(RULES, state_dir=None))
    context = identity.context([])
    other = selfsigned.write(tmp_path / "two.pem", "two")
    with pytest.raises(IdentityProblem, match=r"two\.pem with key .*one\.pem: KEY_VALUES_MISMATCH"):
        identity.reload(other, cert)
    assert shake(context, client).common_name == "one"
    assert not identity.reload()


@pytest.mark.parametrize(
    ("content", "says"), [("", "NO_START_LINE|PEM"), (None, "cannot be read: No such file")], ids=["empty", "missing"]
)
def test_unusable_certificate_names_the_file(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "bad.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(IdentityProblem, match=rf"bad\.pem.*({says})"):
        TlsIdentity(str(path), str(path), ring=TicketRing(RULES, state_dir=None))


def test_encrypted_key_is_refused_rather_than_asked_for_on_the_terminal(tmp_path: Path) -> None:
    path = selfsigned.write(tmp_path / "locked.pem", "locked", password=b"secret")
    with pytest.raises(IdentityProblem, match="without a password"):
        TlsIdentity(path, path, ring=TicketRing(RULES, state_dir=None))


def test_old_version_is_refused_by_default_and_allowed_by_configuration(cert: str, client: ssl.SSLContext) -> None:
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    ring = TicketRing(RULES, state_dir=None)
    with pytest.raises(ssl.SSLError):
        shake(TlsIdentity(cert, cert, ring=ring).context([]), client)
    context = TlsIdentity(cert, cert, ring=ring, min_version="1.2").context([])
    shaken = shake(context, client)
    assert shaken.server.version() == "TLSv1.2" and shake(context, client, shaken.session).resumed
