"""Print the variables that point SDKs and tools at this daemon, and take them back.

Theory: what should be set follows from the configuration alone (`wanted`). What a shell is told also depends on what is
set there: a value that the user had is put aside as HEADRACE_OLD_<NAME>, HEADRACE_SET lists what we set, and `--undo`
goes by these two. Undone after being done, however often, the environment is what it was.

      eval "$(headrace env)"           headrace env fish | source           headrace env dotenv >> .env

Rules for editing: 1. proxies are in the way of loopback, so NO_PROXY is always merged, in both cases; 2. a variable that
*replaces* a trust store gets the bundle with the system's roots or nothing; 3. a trust file of the user's own stays;
4. no secret is ever printed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config.model import Config, Listen, Pool
from headrace import trust

Shell = Literal["bash", "fish", "dotenv"]

OLD = "HEADRACE_OLD_"
SET = "HEADRACE_SET"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PROXY_EXCEPTIONS = ("NO_PROXY", "no_proxy")
REPLACE_TRUST = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CODEX_CA_CERTIFICATE")
"""httpx, Go, Rust and OpenSSL; requests; curl; Codex. Each takes its file in place of the system's roots."""
ADD_TRUST = ("NODE_EXTRA_CA_CERTS",)
OURS = ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", *PROXY_EXCEPTIONS, *REPLACE_TRUST, *ADD_TRUST)

_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Variables to set, lists to add to, and what a reader should know."""

    values: Mapping[str, str]
    notes: tuple[str, ...] = ()


def render(config: Config, shell: Shell, environ: Mapping[str, str], undo: bool) -> str:
    """Lines for `shell`; nothing is executed or written. `environ` is the caller's, as it is now."""
    return _undone(shell, environ) if undo else _done(config, shell, environ)


def wanted(config: Config) -> Wanted:
    """What should be set, proxy exceptions apart."""
    listen = _entry(config)
    if listen is None:
        return Wanted({}, ("[proxy] listens neither on http nor on https: there is nothing to point an SDK at",))
    values, notes = _base_urls(config, listen)
    trusted, more = _trust(config)
    return Wanted(values | trusted, (*notes, *more))


# -------------------------------------------------------------------------------------------------- what is wanted


def _entry(config: Config) -> Listen | None:
    """The listener for SDKs: http first, for no client has to be told to trust it."""
    for scheme in ("http", "https"):
        for listen in config.proxy.listen:
            if listen.scheme == scheme:
                return listen
    return None


def _base_urls(config: Config, listen: Listen) -> tuple[dict[str, str], tuple[str, ...]]:
    openai = _pool_for(config, "openai", "api.openai.com")
    anthropic = _pool_for(config, "anthropic", "api.anthropic.com")
    if openai is None and len(config.pools) == 1 and config.pools[0] is not anthropic:
        openai = config.pools[0]  # vLLM, SGLang, llama.cpp: all speak the OpenAI API
    values = {}
    if openai is not None:
        # The OpenAI SDKs join paths to ".../v1", unless the edge's URL has it already; Anthropic's add /v1 themselves.
        has_version = openai.edges and all(edge.base_path.rstrip("/").endswith("/v1") for edge in openai.edges)
        values["OPENAI_BASE_URL"] = _base(openai, listen) + ("" if has_version else "/v1")
    if anthropic is not None:
        values["ANTHROPIC_BASE_URL"] = _base(anthropic, listen)
    notes = () if values else ("no pool is named openai or anthropic, or has an edge there: set base URLs by hand",)
    return values, notes


def _pool_for(config: Config, name: str, host: str) -> Pool | None:
    named = [pool for pool in config.pools if pool.name == name]
    served = [pool for pool in config.pools if any(edge.host == host for edge in pool.edges)]
    reachable = [pool for pool in (*named, *served) if pool.path or pool.hosts]
    return reachable[0] if reachable else None


def _base(pool: Pool, listen: Listen) -> str:
    """By path under the loopback address, which needs no name to be resolved; else by the pool's first host."""
    host = _loopback(listen.host) if pool.path else pool.hosts[0]
    return f"{listen.scheme}://{host}:{listen.port}{pool.path.rstrip('/')}"


def _loopback(host: str) -> str:
    """An address rather than `localhost`, which may lead to ::1 where nobody listens."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - read, not bound
    return f"[{reachable}]" if ":" in reachable else reachable


def _trust(config: Config) -> tuple[dict[str, str], tuple[str, ...]]:
    serves_tls = any(listen.scheme == "https" for listen in config.proxy.listen)
    if config.tls.cert_file or not serves_tls:
        return {}, ()
    ca, bundle = trust.ca_path(config.state_dir), trust.bundle_path(config.state_dir)
    if not ca.exists():
        return {}, ("the local CA is made at the first start; ask again then to have it trusted",)
    values = dict.fromkeys(ADD_TRUST, str(ca))
    if bundle is None:
        return values, ("the system's roots were not found: SSL_CERT_FILE and its kin are left alone",)
    return values | dict.fromkeys(REPLACE_TRUST, str(bundle)), ()


# -------------------------------------------------------------------------------------------------- set and unset


def _done(config: Config, shell: Shell, environ: Mapping[str, str]) -> str:
    asked = wanted(config)
    lines = [f"# {note}" for note in asked.notes]
    values = dict(asked.values)
    for name in [name for name in values if name in (*REPLACE_TRUST, *ADD_TRUST)]:
        theirs = _own_trust(name, values[name], config, environ)
        if _is_system_roots(theirs) and (bundle := trust.bundle_path(config.state_dir)) is not None:
            values[name] = str(bundle)
        elif theirs:
            del values[name]  # it may hold a company's roots, without which nothing else works
            lines.append(f"# {name} is yours already and is left alone; add {trust.ca_path(config.state_dir)} to it")
    values |= dict.fromkeys(PROXY_EXCEPTIONS, _merged_exceptions(environ))
    if shell == "dotenv":
        lines += [_assign(shell, name, value) for name, value in values.items()]
    else:
        lines += _set(shell, values, environ)
        undo = "headrace env fish --undo | source" if shell == "fish" else 'eval "$(headrace env bash --undo)"'
        lines.append(f"# undo: {undo}")
    lines.append("# desktop programs read ~/.config/environment.d/*.conf: put the dotenv form there, log out and in")
    return "\n".join(lines) + "\n"


def _own_trust(name: str, value: str, config: Config, environ: Mapping[str, str]) -> str:
    """The trust file that the user had in the variable before us; "" for none, or one of ours."""
    theirs = environ.get(OLD + name if name in _names_set(environ) else name, "")
    return "" if theirs == value or theirs.startswith(str(config.state_dir / "ca")) else theirs


def _is_system_roots(path: str) -> bool:
    """Does it name the file that our bundle begins with? Images and package managers often set it to no effect."""
    roots = trust.system_roots()
    return bool(path) and roots is not None and Path(path).resolve() == roots.resolve()


def _merged_exceptions(environ: Mapping[str, str]) -> str:
    """The user's own, in their order, and the loopback names. `*` already means everything."""
    theirs = [part.strip() for name in PROXY_EXCEPTIONS for part in environ.get(name, "").split(",")]
    merged = dict.fromkeys(part for part in theirs if part)
    return "*" if "*" in merged else ",".join(dict.fromkeys((*merged, *LOOPBACK)))


def _set(shell: Shell, values: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Assignments, each behind one that puts the user's own value aside, and the list of what is ours now."""
    lines, ours = [], _names_set(environ)
    for name, value in values.items():
        before = environ.get(name)
        if before != value and name not in ours:
            ours.append(name)
            if before is not None:
                lines.append(_assign(shell, OLD + name, before))
        lines.append(_assign(shell, name, value))
    return [*lines, _assign(shell, SET, " ".join(ours))] if ours else lines


def _names_set(environ: Mapping[str, str]) -> list[str]:
    return [name for name in environ.get(SET, "").split() if name in OURS]


def _undone(shell: Shell, environ: Mapping[str, str]) -> str:
    """What was put aside comes back; what was not there before is unset."""
    if shell == "dotenv":
        return f"# remove the lines that begin with: {' '.join(f'{name}=' for name in OURS)}\n"
    lines = []
    for name in _names_set(environ):
        if OLD + name in environ:
            lines += [_assign(shell, name, environ[OLD + name]), _unset(shell, OLD + name)]
        else:
            lines.append(_unset(shell, name))
    if SET in environ:
        lines.append(_unset(shell, SET))
    return "".join(line + "\n" for line in lines) or "# nothing here was set by headrace env\n"


def _assign(shell: Shell, name: str, value: str) -> str:
    if shell == "fish":
        return f"set -gx {name} {_fish_quoted(value)}"
    if shell == "bash":
        return f"export {name}={_bash_quoted(value)}"
    return f"{name}={_dotenv_quoted(value)}"


def _unset(shell: Shell, name: str) -> str:
    return f"set -e {name}" if shell == "fish" else f"unset {name}"


def _bash_quoted(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else "'" + value.replace("'", "'\"'\"'") + "'"


def _fish_quoted(value: str) -> str:
    # Inside single quotes fish knows two escapes: \\ and \'.
    return value if _PLAIN.fullmatch(value) else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _dotenv_quoted(value: str) -> str:
    """Double quotes, for docker, python-dotenv and environment.d read them alike; a dollar sign would be expanded."""
    if _PLAIN.fullmatch(value):
        return value
    return '"' + re.sub(r'(["\\$`])', r"\\\1", value) + '"'
