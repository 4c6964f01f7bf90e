"""Read where a redirect of an edge leads, and whether that is an edge of the same pool.

Theory: a 307 or 308 between edges of one pool is an arrangement inside the fleet (drain, rebalance) and is followed with
method and body (RFC 9110 15.4.8, 15.4.9). Everything else is the client's business and passes unchanged: following it would
carry the client's credentials to an origin that it never named. But a Location that names an edge (a 302, a 201) would hand
out its address, which the client may not reach and must not know: it is told the path to ask us for.

Rules for editing: no downgrade: an https edge's redirect never leads to plain http, not even inside the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from config.model import Edge, Pool
from proxy.messages import Fields, ResponseHead


@dataclass(frozen=True, slots=True)
class Redirection:
    """An edge of the pool and the target to ask it for, without that edge's base path."""

    edge_id: str
    target: bytes


def follow(head: ResponseHead, pool: Pool, edge: Edge) -> Redirection | None:
    """Where the Location of `head`, sent by `edge`, leads inside `pool`; None when it leads out of it."""
    location = head.get(b"location")
    found = _destination(location, pool, edge) if location else None
    if found is None or (edge.is_tls and not found[0].is_tls):
        return None
    target, path = found
    return Redirection(target.id, path)


def for_client(fields: Fields, pool: Pool, edge: Edge, prefix: bytes) -> Fields:
    """The fields of an answer that is passed on, with a Location inside the pool said as the client may ask for it: without
    the edge's address and base path, below the `prefix` that was taken off (RFC 9110 10.2.2 allows a path alone)."""
    return [(name, _as_asked(value, pool, edge, prefix) if name == b"location" else value) for name, value in fields]


def _as_asked(location: bytes, pool: Pool, edge: Edge, prefix: bytes) -> bytes:
    found = _destination(location, pool, edge)
    if found is None:
        return location
    _, mark, fragment = location.partition(b"#")
    path = prefix + found[1]
    # Two slashes at its start would make the path's first part a host (RFC 3986 4.2).
    return (b"/." if path[:2] == b"//" else b"") + path + mark + fragment


def _destination(location: bytes, pool: Pool, edge: Edge) -> tuple[Edge, bytes] | None:
    """The edge of the pool that a Location names, and the target below its base path."""
    location = location.split(b"#", 1)[0]
    if location[:2] == b"//":
        location = (b"https:" if edge.is_tls else b"http:") + location  # RFC 3986 4.2: the scheme stays
    if location[:1] == b"/":
        return edge, _under(location, edge)
    scheme, separator, rest = location.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return None
    cut = min((i for i in (rest.find(b"/"), rest.find(b"?")) if i >= 0), default=len(rest))
    secure = scheme.lower() == b"https"
    target = _named(pool, secure, *_host_and_port(rest[:cut], secure))
    if target is None:
        return None
    path = rest[cut:]
    return target, _under(path if path[:1] == b"/" else b"/" + path, target)


def _host_and_port(authority: bytes, secure: bool) -> tuple[str, int]:
    text = authority.rpartition(b"@")[2].decode("latin-1").lower()
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
    default = 443 if secure else 80
    return host.strip("[]").removesuffix("."), int(port) if port.isdecimal() and len(port) < 6 else default


def _named(pool: Pool, secure: bool, host: str, port: int) -> Edge | None:
    """The edge that a URL names: by its host, its TLS name or one of its addresses, and by its port.

    A server behind somebody's TLS says http where https was asked for: that is the same edge, over TLS as ever.
    """
    for edge in pool.edges:
        names = {edge.host.lower(), edge.tls_name.lower(), *edge.addresses}
        ports = {edge.port} if edge.is_tls == secure else {edge.port, 80 if edge.port == 443 else edge.port}
        if host in names and port in ports and (edge.is_tls or not secure):
            return edge
    return None


def _under(path: bytes, edge: Edge) -> bytes:
    base = edge.base_path.encode().rstrip(b"/")
    if base and path.startswith(base) and path[len(base) : len(base) + 1] in (b"", b"/", b"?"):
        path = path[len(base) :]
    return path if path[:1] == b"/" else b"/" + path
