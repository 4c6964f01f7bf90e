"""The rules of headrace.toml that one type cannot say: what a text must look like, and which values refuse each other.

Theory: functions of one text return its usual form or raise `Wrong`. Functions of a table get its instance, its spot and
what is read around it, and note problems. What is unsafe is refused here rather than left to the reader of a warning.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from config import model, values
from config.kinds import Around
from config.reading import Spot
from config.values import Wrong

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PATH = re.compile(r"/[!$&-;=@-Z_a-z~%]*")  # RFC 3986 pchar and "/", "%"
_PRIORITY = re.compile(r"(u=[0-7])?(,\s*)?(i(=\?[01])?)?")  # RFC 9218 4
_NOT_FOR_HEADERS = {"host", "content-length", "transfer-encoding", "connection", "te", "trailer", "upgrade"}
_SECRET_HEADERS = {"authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key", "api-key"}
_SECRET_HEADERS |= {"sec-websocket-protocol", "x-goog-api-key"}
TOKEN_LENGTH = 16


def label(text: str) -> str:
    """A name that becomes a metric label and a word on a command line."""
    if not _LABEL.fullmatch(text):
        raise Wrong("is not a name", 'use at most 63 letters, digits, "-", "_" and "."')
    return text


def request_path(text: str) -> str:
    target, _, query = text.partition("?")
    if not _PATH.fullmatch(target) or not re.fullmatch(r"[!-~]*", query) or "#" in query:
        raise Wrong("is not a request path", 'begin it with "/" and write special characters as %XX')
    return text


def prefix(text: str) -> str:
    """A pool's path, without a final slash."""
    trimmed = text.rstrip("/")
    if not trimmed:
        raise Wrong("is every path", 'for a pool that takes every path use hosts = ["localhost"]')
    if not _PATH.fullmatch(trimmed) or any(part in ("", ".", "..") for part in trimmed[1:].split("/")):
        raise Wrong("is not a path prefix", 'write it as in "/openai", without ".", ".." and "//"')
    return trimmed


def doh_path(text: str) -> str:
    return prefix(text.removesuffix("{?dns}"))


def field_name(text: str) -> str:
    name = values.read_token(text).lower()
    if name in _NOT_FOR_HEADERS:
        raise Wrong("belongs to the connection", "remove it; headrace sets it for each edge")
    return name


def field_value(text: str) -> str:
    if re.search(r"[\x00-\x08\x0a-\x1f\x7f]", text) or text != text.strip() or not text.isascii():
        raise Wrong("is not a field value", "remove line breaks, control characters, outer spaces and non-ASCII text")
    return text


def label_header(text: str) -> str:
    name = values.read_token(text).lower()
    if name in _SECRET_HEADERS:
        raise Wrong("carries secrets", "a label is written into traces; name another header")
    return name


def priority_value(text: str) -> str:
    if not _PRIORITY.fullmatch(text):
        raise Wrong("is not a priority", 'write it as RFC 9218 does: "u=3" or "u=1, i"')
    return text


def token(text: str) -> None:
    if len(text) < TOKEN_LENGTH:
        raise Wrong("is too short to be safe", f"use at least {TOKEN_LENGTH} characters, or leave it empty")


def http_url(text: str) -> str:
    values.read_url(text, ("http", "https"))
    return text


def otlp_url(text: str) -> str:
    values.read_url(text, ("http", "https", "grpc"))
    return text


def _secret_url(text: str, schemes: tuple[str, ...]) -> None:
    """A URL that may carry credentials, so only its frame is judged and nothing of it is repeated."""
    try:
        parts = urlsplit(text)
        whole = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole:
        raise Wrong("is not a URL that is possible here", f"write it as in {schemes[0]}://host:port/")


def redis_url(text: str) -> None:
    _secret_url(text, ("redis", "rediss"))


def webhook_url(text: str) -> None:
    _secret_url(text, ("https", "http"))


def proxy_listen(listen: model.Listen) -> None:
    """Plain HTTP carries keys in the clear: it stays on this machine or a network of its own."""
    address = ipaddress.ip_address(listen.host)
    if listen.scheme == "http" and (address.is_unspecified or not address.is_private):
        raise Wrong(
            "would take keys in clear text from any network",
            "name a loopback or private address, or use https",
        )


def admin_listen(listen: model.Listen) -> None:
    if not ipaddress.ip_address(listen.host).is_loopback:
        raise Wrong("would open the admin interface to the network", "use a loopback address, as in 127.0.0.1")


def zone_upstream(parts: tuple[str, str, int, str]) -> model.DnsUpstream:
    return model.DnsUpstream(*parts)


def url_of_upstream(upstream: model.DnsUpstream) -> tuple[str, str, int, str]:
    return upstream.scheme, upstream.host, upstream.port, upstream.path


def upstream(found: model.DnsUpstream, spot: Spot, around: Around) -> None:
    spot.at("url").claim("upstream", found.url, remedy="remove one of them")
    if found.scheme in ("udp", "tcp"):
        for name in ("server_name", "ca_file"):
            if getattr(found, name):
                spot.at(name).problem(f"{found.scheme}:// has no TLS to verify; use tls:// or https://, or remove it")
    if not found.addresses:
        _findable(found, spot.at("url"), around)


def _findable(found: model.DnsUpstream, spot: Spot, around: Around) -> None:
    if not values.is_address(found.host) and not around.get("bootstrap"):
        spot.problem(f"nothing can find the address of {found.host}; give its addresses, or name a bootstrap resolver")


def zone(found: model.Zone, spot: Spot, around: Around) -> None:
    spot.at("name").claim("zone", found.name, remedy="list every upstream of a zone in one place")
    if not found.upstreams:
        spot.at("upstream").problem("is empty; name at least one, or remove the zone")
    for index, one in enumerate(found.upstreams):
        _findable(one, spot.at("upstream", index), around)


def record(found: model.Record, spot: Spot, around: Around) -> None:
    import dns.exception  # only local records pay for it
    import dns.rdata
    import dns.rdatatype

    try:
        rdtype = dns.rdatatype.from_text(found.type)
    except (dns.exception.DNSException, ValueError):
        spot.at("type").problem(f'"{found.type}" is not a record type; use A, AAAA, CNAME, TXT, HTTPS, SRV, ...')
        return
    try:
        dns.rdata.from_text("IN", rdtype, found.value, origin=None, relativize=False)
    except (dns.exception.DNSException, ValueError):
        spot.at("value").problem(f"is not the value of a {found.type} record; write it as a zone file would")


def dns_cache(found: model.DnsCache, spot: Spot, around: Around) -> None:
    if found.min_ttl_s > found.max_ttl_s:
        lower, upper = values.show_duration(found.min_ttl_s), values.show_duration(found.max_ttl_s)
        spot.at("min_ttl").problem(f"{lower} is more than max_ttl, {upper}; lower it")


def resolver(found: model.Resolver, spot: Spot, around: Around) -> None:
    for listen in found.listen:
        address = ipaddress.ip_address(listen.host)
        is_open = address.is_unspecified or not address.is_private
        if listen.scheme == "udp" and is_open and not found.rate_limit_per_s:
            spot.at("listen").problem(
                f"{listen} would answer forged queries of any network, an amplifier for attacks; "
                "set rate_limit, or name a loopback or private address"
            )


def proxy(found: model.Proxy, spot: Spot, around: Around) -> None:
    doors = {listen.host for listen in found.listen if listen.scheme == "https"}
    for listen in found.listen:
        if listen.scheme == "h3" and listen.host not in doors:
            spot.at("listen").problem(
                f"{listen} cannot be found by clients, who learn of HTTP/3 over https; "
                f"add https://{str(listen).partition('://')[2]}"
            )


def tls(found: model.Tls, spot: Spot, around: Around) -> None:
    if bool(found.cert_file) != bool(found.key_file):
        given, missing = ("cert_file", "key_file") if found.cert_file else ("key_file", "cert_file")
        spot.at(given).problem(f"stands without {missing}; give both, or neither to have a local CA issue one")


def edge(found: model.Edge, spot: Spot, around: Around) -> None:
    pool = spot.path[:-2]
    spot.at("id").claim(f"edge of {pool}", found.id, remedy="give each edge of a pool its own id")
    if found.scheme == "http":
        for name in ("ca_file", "client_cert", "server_name"):
            if getattr(found, name):
                spot.at(name).problem("http:// has no TLS; use https://, or remove it")
    if (found.scheme, found.protocol) in (("http", "h3"), ("h3", "h1"), ("h3", "h2")):
        spot.at("protocol").problem(f'"{found.protocol}" cannot be spoken to {found.scheme}://; use "auto"')
    if found.scheme == "http" and found.headers and not _is_near(found.host):
        spot.at("headers").note(f"these headers travel to {found.host} in clear text; use https:// if it can")


def _is_near(host: str) -> bool:
    if values.is_address(host):
        return ipaddress.ip_address(host).is_private
    return host == "localhost" or host.endswith(".localhost")


def websocket(found: model.WebSocket, spot: Spot, around: Around) -> None:
    if found.pong_timeout_s <= found.ping_interval_s:
        spot.at("pong_timeout").problem("is not longer than ping_interval; a pong would always be late")
    if found.on_edge_failure == "replay" and not found.replay_messages:
        spot.at("on_edge_failure").problem('"replay" has nothing to replay; set replay_messages, or use "reconnect"')


def priority(found: model.PathPriority, spot: Spot, around: Around) -> None:
    spot.at("path").claim(f"priority of {spot.path[:-2]}", found.path, remedy="one path has one urgency")


def pool(found: model.Pool, spot: Spot, around: Around) -> None:
    spot.at("name").claim("pool", found.name, remedy="give each pool its own name")
    if not spot.at("edge", 0).is_written:
        spot.problem("has no edge; add [[pool.edge]] with id and url", on_key=True)
    if not found.hosts and not found.path:
        spot.problem("no request can reach this pool; give it hosts, or a path", on_key=True)
    for index, host in enumerate(found.hosts):
        spot.at("hosts", index).claim("host", host, remedy="a host leads to one pool")
    _no_loop(found.edges, spot, around["proxy"])
    if found.path:
        _path_is_free(found.path, spot.at("path"), around)
    if found.edges and all(edge.standby for edge in found.edges):
        spot.problem("every edge is standby; make at least one active", on_key=True)


def _no_loop(edges: tuple[model.Edge, ...], spot: Spot, own: model.Proxy) -> None:
    """An edge that is one of our own listeners would make one request into endless ones."""
    doors = {(listen.host, listen.port) for listen in own.listen}
    for edge in edges:
        hosts = edge.addresses or (("127.0.0.1", "::1") if edge.host == "localhost" else (edge.host,))
        for host in hosts:
            if (host, edge.port) in doors:
                place = spot.reading.claims[f"edge of {spot.path}", edge.id]
                at_url = Spot(spot.reading, (*place[:-1], "url"))
                at_url.problem(f"{host} port {edge.port} is headrace itself; name the server behind it")


def _path_is_free(path: str, spot: Spot, around: Around) -> None:
    spot.claim("path", path, remedy="a path leads to one pool")
    taken = {"/proxy.pac": "the PAC file", around["resolver"].doh_path: "DNS over HTTPS"}
    if path in taken:
        spot.problem(f'"{path}" is where {taken[path]} is served; choose another path')


def admin(found: model.Admin, spot: Spot, around: Around) -> None:
    if found.listen is None and found.token:
        spot.at("token").note("no effect without admin.listen")


def whole(found: model.Config, spot: Spot, around: Around) -> None:
    if not spot.at("pool", 0).is_written and found.proxy.listen:
        spot.note("no [[pool]]: only DNS and the forward proxy are served, any other request gets 421")
