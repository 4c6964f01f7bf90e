"""Decide which pool a request belongs to, and refuse what must not be answered at all.

Theory: loopback is hostile. Any page in the user's browser can send requests here; only names that are ours are served,
and only callers that are not another site. The order matters: the Host is judged before the path, so that a rebound name
learns nothing.

      Host is ours? --no--> 421        (DNS rebinding: localhost.attacker.test, 127.0.0.1.evil.test)
      TRACE? --yes--> 405        (its answer repeats the request, and with it the keys that an edge's configuration adds)
      passed us too often? --yes--> 508        (Via, RFC 9110 7.6.3)
      Origin is ours or listed? --no--> 403        (cross-site POST, preflight; CORS is closed by default)
      virtual host of a pool --> that pool, path unchanged
      longest path prefix under our own names --> that pool, prefix stripped once
      anything else --> 421

Rules for editing: no clock, no socket; names are compared in lower case without port and trailing dot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

from config.model import Pool
from proxy import headers
from proxy.messages import NAME, RequestHead

JUDGED_FIELDS = frozenset({b"origin", b"sec-fetch-site", b"via"})
SAFE = frozenset({b"GET", b"HEAD", b"OPTIONS"})


@dataclass(frozen=True, slots=True)
class Route:
    """A request's pool, and the target as the edge shall see it (before the edge's own base path)."""

    pool: str
    target: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    code: str
    message: str


NO_HOST = Refusal(400, "host_missing", "the request has no Host")
TRACE = Refusal(405, "trace_refused", "TRACE is not served here: its answer would repeat credentials (RFC 9110 9.3.8)")
LOOP = Refusal(508, "loop", "the request came through this proxy too often")
FOREIGN_ORIGIN = Refusal(
    403, "origin_refused", "requests from other sites are refused; list the origin in proxy.allowed_origins"
)


@lru_cache(1024)
def host_of(authority: bytes) -> str:
    """The host of `host[:port]` in lower case, without brackets and trailing dot; "" when there is none."""
    text = authority.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    """`localhost`, a name below it, or an address of the loopback networks."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class RouteTable:
    """The routes of one configuration. `own_names`: the hosts under which path prefixes are served, besides loopback."""

    def __init__(
        self, pools: Iterable[Pool], *, own_names: Iterable[str] = (), allowed_origins: Iterable[str] = ()
    ) -> None:
        self._hosts: dict[str, str] = {}
        self._prefixes: list[tuple[bytes, str]] = []
        self._own = {name.lower().removesuffix(".") for name in own_names} | {"localhost"}
        self._allowed_origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)
        for pool in pools:
            self._hosts.update((host.lower(), pool.name) for host in pool.hosts)
            if pool.path:
                self._prefixes.append((pool.path.encode().rstrip(b"/"), pool.name))
        self._prefixes.sort(key=lambda entry: len(entry[0]), reverse=True)

    def is_own(self, host: str) -> bool:
        """Whether path prefixes and our own pages are served under this host."""
        if host in self._own:
            return True
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return False

    def route(self, head: RequestHead) -> Route | Refusal:
        """Where the request goes; see the module's picture."""
        if (refusal := self.judge(head)) is not None:
            return refusal
        pool = self._hosts.get(host_of(head.authority))
        return Route(pool, head.target) if pool is not None else self._under_own_name(head)

    def _under_own_name(self, head: RequestHead) -> Route | Refusal:
        path = head.target.split(b"?", 1)[0]
        for prefix, name in self._prefixes:
            if path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in (b"", b"/"):
                return Route(name, self._strip(head.target, prefix))
        host = host_of(head.authority)[:100]
        return Refusal(421, "no_such_route", f"no pool serves this path under {host}; see [[pool]] path and hosts")

    @staticmethod
    def _strip(target: bytes, prefix: bytes) -> bytes:
        """The target without its prefix, once, byte for byte: `//` after it stays (clients join URLs that way)."""
        rest = target[len(prefix) :]
        return rest if rest[:1] == b"/" else b"/" + rest

    def judge(self, head: RequestHead) -> Refusal | None:
        """The guard alone: Host and Origin (DNS rebinding, cross-site requests)."""
        if not head.authority:
            return NO_HOST
        host = host_of(head.authority)
        if host not in self._hosts and not self.is_own(host):
            return Refusal(421, "host_refused", "this Host is not served here; add it to a pool's hosts")
        if head.method == b"TRACE":
            return TRACE
        # Few requests carry any of them, so they are looked for in one pass.
        if JUDGED_FIELDS.isdisjoint(map(NAME, head.fields)):
            return None
        said = [field for field in head.fields if field[0] in JUDGED_FIELDS]
        return LOOP if headers.is_loop(said) else self._judge_origin(head, dict(said))

    def _judge_origin(self, head: RequestHead, said: dict[bytes, bytes]) -> Refusal | None:
        origin = said.get(b"origin")
        if origin is not None:
            text = origin.decode("latin-1").lower().rstrip("/")
            own = text == f"{head.scheme.decode()}://{head.authority.decode('latin-1').lower()}"
            return None if own or text in self._allowed_origins else FOREIGN_ORIGIN
        # A browser leaves Origin out of some requests but not Sec-Fetch-Site; nobody else sends it.
        site = said.get(b"sec-fetch-site")
        if site in (b"cross-site", b"same-site") and head.method not in SAFE:
            return FOREIGN_ORIGIN
        return None
