"""Read and write the small languages inside the configuration's strings: durations, sizes, addresses, URLs, names.

Theory: each reader takes the text of one value and returns it with its unit, or raises `Wrong`: a predicate that the
value is the subject of, and a remedy. The subject is added where the value's place is known, because a value that came
from the environment or a file must not be repeated in a message.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from config.model import Listen

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SIZES = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|kB|MB|GB|KiB|MiB|GiB)")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 5.6.2
DEFAULT_PORTS = {"http": 80, "https": 443, "h3": 443, "tls": 853, "quic": 853, "udp": 53, "tcp": 53, "grpc": 4317}


class Wrong(ValueError):
    """A value that cannot be used: "`what`; `remedy`", with the value as the unspoken subject."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what
        self.remedy = remedy


def read_duration(text: str) -> float:
    """Seconds of "250ms", "30s", "5m", "1h30m", "1d"."""
    if text in ("0", "0.0"):
        return 0.0
    if not _DURATION.fullmatch(text):
        raise Wrong("is not a duration", 'write a number with its unit, as in "250ms", "30s", "5m", "12h" or "1d"')
    # Milliseconds as division: 0.001 * 300 would be 0.3 only by luck.
    parts = ((float(number), unit) for number, unit in _DURATION_PART.findall(text))
    return sum(number / 1000 if unit == "ms" else number * _UNITS_S[unit] for number, unit in parts)


def show_duration(seconds: float) -> str:
    """The shortest exact text: 43200.0 is "12h", 0.5 is "500ms"."""
    for unit in ("d", "h", "m", "s"):
        count = seconds / _UNITS_S[unit]
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return "0s" if seconds == 0 else f"{seconds * 1000:.10g}ms"


def read_size(text: str) -> int:
    """Bytes of "64KiB", "2MiB", "1.5GiB", "500B", "10MB"."""
    match = _SIZE.fullmatch(text)
    if not match:
        raise Wrong("is not a size", 'write a number with its unit, as in "64KiB" or "2MiB"')
    return round(float(match[1]) * _SIZES[match[2].replace("kB", "KB")])


def show_size(size: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if size and size % _SIZES[unit] == 0:
            return f"{size // _SIZES[unit]}{unit}"
    return f"{size}B"


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def read_address(text: str) -> str:
    """An IP address in its usual spelling."""
    if not is_address(text):
        raise Wrong("is not an IP address", 'write it as in "127.0.0.1" or "::1"')
    return str(ipaddress.ip_address(text))


def read_network(text: str) -> str:
    """An address or a network in CIDR form. Host bits are an error: they hide a mistyped prefix."""
    try:
        network = ipaddress.ip_network(text)
    except ValueError as exc:
        raise Wrong("is not an address or a network", 'write it as in "10.0.0.0/8", without host bits') from exc
    return text if "/" in text else str(network.network_address)


def read_host(text: str) -> str:
    """A host name or address, lower case, without brackets, port and final dot."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if is_address(bare):
        return str(ipaddress.ip_address(bare))
    name = text.lower().removesuffix(".")
    if not name.isascii():
        raise Wrong("is not an ASCII host name", "write its xn-- form")
    if re.search(r":\d+$", name):
        raise Wrong("has a port", "a name here stands for every port; leave the port out")
    if not name or len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise Wrong("is not a host name", 'write it as in "api.example.com"')
    return name


def read_host_pattern(text: str) -> str:
    """`example.org` for itself, `*.example.org` for all names below it; a port other than 443 is written after it."""
    name, colon, port = text.rpartition(":")
    if not colon:
        name, port = text, ""
    elif not port.isdigit() or not 0 < int(port) < 65536:
        raise Wrong("has a port that is no port", "write a number from 1 to 65535 after the colon")
    star = "*." if name.startswith("*.") else ""
    return star + read_host(name.removeprefix("*.")) + colon + port


def read_origin(text: str) -> str:
    """A web origin as browsers send it (RFC 6454): scheme, host and, where it is not the scheme's own, the port."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("http", "https") or not rest or "/" in rest:
        raise Wrong("is not an origin", 'write it as in "https://app.example" or "http://localhost:3000"')
    return text.lower()


def read_token(text: str) -> str:
    """A field name or a method (RFC 9110 5.6.2)."""
    if not _TOKEN.fullmatch(text):
        raise Wrong("is not an HTTP token", "use letters, digits and -")
    return text


def read_listen(text: str, schemes: tuple[str, ...]) -> Listen:
    """`scheme://address:port`; port 0 lets the kernel choose. Only addresses: a name could resolve to anything."""
    scheme, host, port, path = read_url(text, schemes, default_port=False)
    if path:
        raise Wrong("has a path", "a listener is only scheme, address and port")
    if host == "localhost":
        raise Wrong("names a host", f"name the address: {scheme}://127.0.0.1:{port} or {scheme}://[::1]:{port}")
    if not is_address(host):
        raise Wrong("names a host", "a listener needs an address of this machine")
    return Listen(scheme, host, port)


def read_url(text: str, schemes: tuple[str, ...], *, default_port: bool = True) -> tuple[str, str, int, str]:
    """(scheme, host, port, path) of a URL that holds nothing else. Path "" for none; "/" alone counts as none."""
    if re.search(r"[\x00-\x20\x7f]", text):
        raise Wrong("has a space or control character", "remove it")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as exc:
        raise Wrong("is not a URL", f'write it as in "{schemes[0]}://host:port", ports from 0 to 65535') from exc
    if parts.scheme not in schemes or "://" not in text:
        raise Wrong("has no scheme that is possible here", f"use {' or '.join(f'{name}://' for name in schemes)}")
    if parts.username is not None:
        raise Wrong("carries a user name or password", "credentials belong in headers, where they are never printed")
    if parts.query or parts.fragment:
        raise Wrong("has a query or fragment", "end it after the path")
    host = read_host(f"[{parts.hostname}]" if is_address(parts.hostname or "") else parts.hostname or "")
    if port is None and not default_port:
        raise Wrong("has no port", f'add one, as in "{parts.scheme}://127.0.0.1:8443"')
    chosen = DEFAULT_PORTS[parts.scheme] if port is None else port
    if default_port and chosen == 0:
        raise Wrong("has port 0", "name the port that the server listens on")
    return parts.scheme, host, chosen, "" if parts.path == "/" else parts.path


def show_url(scheme: str, host: str, port: int, path: str = "") -> str:
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}" + ("" if port == DEFAULT_PORTS.get(scheme) else f":{port}") + path
