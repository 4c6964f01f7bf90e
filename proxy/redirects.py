"""Read where a redirect of an edge leads, and whether that is an edge of the same pool.

Theory: a 307 or 308 between edges of one pool is an arrangement inside the fleet (drain, rebalance) and is followed with
method and body (RFC 9110 15.4.8, 15.4.9). Everything else is the client's business and passes unchanged: following it would
carry the client's credentials to an origin that it never named.

Rules for editing: no downgrade: an https edge's redirect never leads to plain http, not even inside the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from config.model import Edge, Pool
from proxy.messages import ResponseHead


@dataclass(frozen=True, slots=True)
class Redirection:
    """An edge of the pool and the target to ask it for, without that edge's base path."""

    edge_id: str
    target: bytes


def follow(head: ResponseHead, pool: Pool, edge: Edge) -> Redirection | None:
    """Where the Location of `head`, sent by `edge`, leads inside `pool`; None when it leads out of it."""
    location = head.get(b"location")
    if not location:
        return None
    location = location.split(b"#", 1)[0]
    if location[:1] == b"/" and location[:2] != b"//":
        return Redirection(edge.id, _under(location, edge))
    scheme, separator, rest = location.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return None
    cut = min((i for i in (rest.find(b"/"), rest.find(b"?")) if i >= 0), default=len(rest))
    secure = scheme.lower() == b"https"
    if edge.is_tls and not secure:
        return None
    target = _named(pool, secure, *_host_and_port(rest[:cut], secure))
    if target is None:
        return None
    path = rest[cut:]
    return Redirection(target.id, _under(path if path[:1] == b"/" else b"/" + path, target))


def _host_and_port(authority: bytes, secure: bool) -> tuple[str, int]:
    text = authority.rpartition(b"@")[2].decode("latin-1").lower()
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
    default = 443 if secure else 80
    return host.strip("[]").removesuffix("."), int(port) if port.isdecimal() and len(port) < 6 else default


def _named(pool: Pool, secure: bool, host: str, port: int) -> Edge | None:
    """The edge that a URL names: by its host, its TLS name or one of its addresses, and by its port."""
    for edge in pool.edges:
        names = {edge.host.lower(), edge.tls_name.lower(), *edge.addresses}
        if edge.is_tls == secure and edge.port == port and host in names:
            return edge
    return None


def _under(path: bytes, edge: Edge) -> bytes:
    base = edge.base_path.encode().rstrip(b"/")
    if base and path.startswith(base) and path[len(base) : len(base) + 1] in (b"", b"/", b"?"):
        path = path[len(base) :]
    return path if path[:1] == b"/" else b"/" + path
