"""Ask the running daemon, over its admin interface."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from config.load import ConfigError, Loaded, find_file, load
from headrace import exits
from headrace.console import Failure, say
from headrace.state import RUNNING, TOKEN, Running, read_running
from headrace.wording import counted

TIMEOUT_S = 30.0
REFUSALS = {400: exits.USAGE, 401: exits.NEEDS_PRIVILEGE}


def load_or_fail(named: str | None) -> Loaded:
    """The configuration that `run` would load. Every problem is said; Failure with code 2."""
    try:
        return load(find_file(named, os.environ), os.environ)
    except ConfigError as exc:
        for problem in exc.problems:
            say(str(problem))
        raise Failure(f"{counted(len(exc.problems), 'problem')} in the configuration", exits.USAGE) from exc


class Daemon:
    """The daemon of one configuration. Raises Failure: code 3 when it does not run, 4 when the token cannot be read."""

    def __init__(self, loaded: Loaded) -> None:
        self.state_dir: Path = loaded.config.state_dir
        self._admin = loaded.config.admin
        self._running = read_running(self.state_dir / RUNNING)

    @property
    def address(self) -> tuple[str, int]:
        """Where the admin interface listens: what the daemon wrote down, else what the configuration says."""
        if self._running is not None and self._running.admin_port:
            return self._running.admin_host, self._running.admin_port
        if self._admin.listen is None:
            raise Failure("the admin interface is off (admin.listen is empty), so the daemon cannot be asked")
        return self._admin.listen.host, self._admin.listen.port

    @property
    def running(self) -> Running | None:
        return self._running

    def get(self, path: str) -> dict[str, Any]:
        return self._ask("GET", path, {})

    def post(self, path: str) -> dict[str, Any]:
        """A change. The answer of a refused one is Failure."""
        return self._ask("POST", path, {"Authorization": f"Bearer {self._token()}"})

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
        import http.client  # its imports cost `headrace run` 30 ms, which asks nobody

        host, port = self.address
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        except ConnectionRefusedError as exc:
            raise Failure(
                f"not running: nothing listens on {host} port {port} (start it: headrace run)", exits.NOT_RUNNING
            ) from exc
        except (OSError, http.client.HTTPException, ValueError) as exc:
            reason = f"{type(exc).__name__}: {exc}"
            raise Failure(f"{host} port {port} does not answer like headrace ({reason})", exits.NOT_RUNNING) from exc
        finally:
            connection.close()
        if response.status != 200:
            code = REFUSALS.get(response.status, exits.PROBLEM)
            raise Failure(f"{method} {path.partition('?')[0]}: {answer.get('error', response.reason)}", code)
        return answer

    def _token(self) -> str:
        if self._admin.token:
            return self._admin.token.reveal()
        file = self.state_dir / TOKEN
        try:
            return file.read_text("ascii").strip()
        except FileNotFoundError as exc:
            raise Failure(f"not running with this state_dir: no {file}", exits.NOT_RUNNING) from exc
        except OSError as exc:
            text = f"{file} cannot be read ({exc.strerror}); run this as the user of the service"
            raise Failure(text, exits.NEEDS_PRIVILEGE) from exc
