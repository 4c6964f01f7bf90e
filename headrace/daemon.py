"""The life of the program: start the parts in order, reload them, stop them.

Start: everything that can fail for a reason outside (certificate, ports) comes before anything is served for long; a port
that is taken ends the start with exit code 1, and nothing stays open. Reload: the file is read whole, new listeners are
opened, and only then is anything changed; a bad file changes nothing. Stop: take nothing new, let streams end for
`drain_timeout`, then abort what is left; a second signal aborts at once.

Owner: `serve` owns the loop and this object; this object owns every part. `run` is the one task that ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import ssl
import time
from collections.abc import Coroutine, Sequence

from config.load import ConfigError, Loaded, find_file, load
from config.model import Config
from headrace import exits, logs, process, state
from headrace.admin import AdminApp, AdminServer
from headrace.allocator import keep_blocks
from headrace.imports import SOON, load_beside
from headrace.links import LOOK_S
from headrace.listeners import ListenFailed
from headrace.network import NetworkWatch
from headrace.operations import DaemonOperations
from headrace.parts import Parts, close_one
from headrace.reload import Reloaded, needs_restart
from headrace.service import Notifier
from headrace.telemetry import Telemetry
from proxy.io.inbound_tcp import bind
from proxy.io.tls import IdentityProblem
from resolver.io.clock import now

FLUSH_S = 0.05
"""Log lines of requests wait so long for company: one write for many."""
DRAIN_LOOK_S = 0.02
LINGER_S = 0.5
"""After the last exchange: time for idle connections to say goodbye."""
RENEW_S = 3600.0
"""How often certificate files are looked at: ours are issued anew in time, others may be replaced at any time."""

logger = logging.getLogger("headrace.daemon")


def serve(loaded: Loaded, *, named: str | None) -> int:
    """Run until a signal; the exit code. `named`: the file of the command line, read again on reload."""
    import uvloop

    output = logs.set_up_logging(loaded.config.log)
    process.take_descriptors()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop().set_exception_handler(_log_unexpected)
        return runner.run(Daemon(loaded, named=named, output=output).run())


class Daemon:
    """The running program: its parts, its admin interface, and the tasks and signals that move them."""

    def __init__(self, loaded: Loaded, *, named: str | None, output: logs.LogOutput) -> None:
        config = loaded.config
        self.loaded = loaded
        self.started_at = time.time()
        self.telemetry = Telemetry()
        self._named = named
        self._output = output
        self._log_json = logs.wants_json(config.log, 2)
        self._signals = 0
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._reloading = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self.admin: AdminServer | None = None
        self.notifier = Notifier()
        self._network: NetworkWatch | None = None
        try:
            state.ensure_folder(config.state_dir)
        except OSError as exc:
            logger.warning("%s cannot be used (%s): nothing outlives this process", config.state_dir, exc.strerror)
        self.parts = Parts(config, record=self.telemetry.record)
        self.telemetry.on_pending = self._flush_soon

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def log_lines_dropped(self) -> int:
        return self._output.dropped

    # ---------------------------------------------------------------- life

    async def run(self) -> int:
        """Serve until told to stop. Every part is closed when this returns, however it does."""
        self._hear_signals()
        try:
            # Held meanwhile: a SIGHUP that comes early waits for the start to be over.
            async with self._reloading:
                await self._start()
        except ListenFailed as exc:
            for reason in exc.reasons:
                logger.error("cannot start: %s", reason)  # noqa: TRY400 - the reason is all there is to say
            return await self._give_up(exits.NEEDS_PRIVILEGE if exc.privilege else exits.PROBLEM)
        except (IdentityProblem, OSError) as exc:
            logger.error("cannot start: %s", exc)  # noqa: TRY400
            return await self._give_up(exits.PROBLEM)
        except Exception:
            logger.exception("cannot start")
            return await self._give_up(exits.PROBLEM)
        try:
            await self._stop.wait()
        finally:
            await self._drain()
            await self._close()
        return exits.OK

    async def _give_up(self, code: int) -> int:
        await self._close()
        return code

    async def _start(self) -> None:
        config, parts = self.config, self.parts
        parts.identity.make(config)
        self._apply(config)
        await parts.listeners.open(config.proxy.listen, parts.identity.tls, config.tls.tickets)
        await parts.resolver.start()
        await parts.listeners.open(config.resolver.listen, parts.identity.tls, config.tls.tickets)
        parts.designate(config.resolver.doh_path)
        self._start_admin(config)
        parts.edges.start()
        await parts.ring.start()
        await parts.listeners.load_quic()
        await load_beside(*SOON)
        self._spawn(self._keep_certificate(), "certificate")
        self._spawn(self._keep_links(), "links")
        self._network = NetworkWatch(self._on_network_changed)
        self._say_ready()

    def _start_admin(self, config: Config) -> None:
        operations = DaemonOperations(self)
        token = config.admin.token.reveal() or state.admin_token(config.state_dir)
        running = state.Running(os.getpid())
        if config.admin.listen is not None:
            try:
                bound = bind(config.admin.listen)
            except OSError as exc:
                raise ListenFailed.of([(config.admin.listen, exc)]) from exc
            self.admin = AdminServer(AdminApp(operations, token=token, metrics=config.admin.metrics), bound)
            self.admin.start()
            running = state.Running(os.getpid(), *self.admin.address)
        state.write_running(config.state_dir, running)

    def _say_ready(self) -> None:
        listens, pools = self.parts.listeners.addresses, len(self.config.pools)
        for listen in listens:
            logger.info("listening on %s", listen)
        took_ms = (time.time() - self.started_at) * 1000
        logger.info("ready after %.0f ms, %d pools", took_ms, pools)
        for note in self.loaded.notes:
            logger.warning("%s", note)
        process.keep_what_exists()
        keep_blocks()
        self.notifier.ready(f"{len(listens)} listeners, {pools} pools")

    async def _drain(self) -> None:
        """Take nothing new and let what runs end, for `drain_timeout` at most."""
        gateway = self.parts.gateway
        self.notifier.stopping()
        self.parts.listeners.drain()
        gateway.drain()
        give_up_at = now() + self.config.proxy.drain_timeout_s
        active = gateway.active
        self.notifier.extend_timeout(self.config.proxy.drain_timeout_s + 2 * LINGER_S + 5.0)
        if active:
            logger.info("stopping: %d requests have %g s to end", active, self.config.proxy.drain_timeout_s)
        while gateway.active and now() < give_up_at and not self._stop_now.is_set():
            await self._look_again()
        linger_until = now() + LINGER_S
        while gateway.connections and now() < linger_until and not self._stop_now.is_set():
            await self._look_again()
        if gateway.active:
            logger.warning("stopping: %d requests are cut off", gateway.active)
        gateway.abort_all()

    async def _look_again(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop_now.wait(), DRAIN_LOOK_S)

    async def _close(self) -> None:
        """Close everything, who asks before whom it asks."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._network is not None:
            self._network.close()
        if self.admin is not None:
            await close_one(self.admin.close())
        await self.parts.close()
        self._flush()
        state.forget_running(self.config.state_dir)
        self.notifier.close()

    # ---------------------------------------------------------------- signals

    def _hear_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_stop_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            self._stop_now.set()

    def _on_hangup(self) -> None:
        if not self._stop.is_set():
            self._spawn(self.reload(), "reload")

    def _spawn(self, work: Coroutine[object, object, object], name: str) -> None:
        """A task that `_close` cancels if it is still there."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---------------------------------------------------------------- the machine's network

    def _on_network_changed(self, reason: str) -> None:
        self.parts.network_changed()

    async def _keep_links(self) -> None:
        """Look at the links every two seconds, for as long as the daemon lives."""
        parts = self.parts
        while True:
            if parts.links.look(self.config.resolver, parts.upstreams.snapshot()):
                parts.resolve_by(self.config.resolver)
            await asyncio.sleep(LOOK_S)

    # ---------------------------------------------------------------- reload

    async def reload(self) -> Reloaded:
        """Load the file again. What it says applies whole, or not at all; no open stream is broken either way."""
        async with self._reloading:
            self.notifier.reloading()
            try:
                reloaded = await self._reload()
            except Exception:
                logger.exception("reload failed; the configuration is unchanged")
                reloaded = Reloaded(False, problems=("internal error; the log has the reason",))
            self.notifier.ready("reloaded" if reloaded.applied else "reload refused: see the log")
            return reloaded

    async def _reload(self) -> Reloaded:
        try:
            loaded = await asyncio.to_thread(self._load_again)
            waiting = await self._take(loaded)
        except ConfigError as exc:
            return self._refused([str(problem) for problem in exc.problems])
        except ListenFailed as exc:
            return self._refused(exc.reasons)
        except (IdentityProblem, OSError, ValueError) as exc:
            return self._refused([str(exc)])
        logger.info("reloaded %s", loaded.file or "the defaults")
        return Reloaded(True, notes=(*map(str, loaded.notes), *waiting))

    def _load_again(self) -> Loaded:
        return load(find_file(self._named, os.environ), os.environ)

    @staticmethod
    def _refused(problems: Sequence[str]) -> Reloaded:
        for problem in problems:
            logger.error("reload refused: %s", problem)
        return Reloaded(False, problems=tuple(problems))

    async def _take(self, loaded: Loaded) -> list[str]:
        """Change over to another configuration. Raises before anything is changed. Returns what waits for a restart."""
        old, new, parts = self.config, loaded.config, self.parts
        certificate = await parts.identity.prove(new)
        wanted = (*new.proxy.listen, *new.resolver.listen)
        await parts.listeners.open(wanted, parts.identity.tls, new.tls.tickets)
        # From here on nothing may fail for a reason that the file could have: it applies whole.
        self.loaded = loaded
        parts.use_certificate(certificate, new.resolver.doh_path)
        parts.take_tickets_by(new.tls.tickets)
        parts.resolve_by(new.resolver)
        self._apply(new)
        parts.listeners.remove(parts.listeners.kept() - set(wanted), new.proxy.drain_timeout_s)
        await parts.listeners.load_quic()
        parts.designate(new.resolver.doh_path)
        waiting = needs_restart(old, new)
        for line in (*map(str, loaded.notes), *waiting):
            logger.warning("%s", line)
        return waiting

    def _apply(self, config: Config) -> None:
        self.parts.apply(config)
        self.telemetry.log_requests = config.log.level in ("debug", "info")
        self._output = logs.set_up_logging(config.log)
        self._log_json = logs.wants_json(config.log, 2)
        if self.admin is not None:
            self.admin.app.with_metrics = config.admin.metrics

    # ---------------------------------------------------------------- certificate

    async def _keep_certificate(self) -> None:
        """Look at the files every hour, for as long as the daemon lives."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                certificate = await self.parts.identity.prove(self.config)
                self.parts.use_certificate(certificate, self.config.resolver.doh_path)
            except (IdentityProblem, OSError, ValueError) as exc:
                logger.error("the certificate cannot be renewed, the old one stays in use: %s", exc)  # noqa: TRY400

    # ---------------------------------------------------------------- log of requests

    def _flush_soon(self) -> None:
        asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self.telemetry.flush_log(self._output, as_json=self._log_json)


def _log_unexpected(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """What a callback raised. The context's own repr is left out: it may show buffers."""
    exc = context.get("exception")
    error = exc if isinstance(exc, BaseException) else None
    level = logging.DEBUG if isinstance(error, ssl.SSLError | ConnectionError) else logging.ERROR
    logger.log(level, "in the event loop: %s", context.get("message", "unknown"), exc_info=error)
