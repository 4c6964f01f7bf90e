"""Decide which names a browser may be tunnelled to, and write the PAC file that says so."""

from __future__ import annotations

import json
from collections.abc import Iterable


def target_of(target: bytes) -> tuple[str, int] | None:
    """`host:port` of a CONNECT target, lower case, without brackets; None when it is anything else (RFC 9110 7.1)."""
    host, colon, port = target.decode("latin-1").lower().rpartition(":")
    host = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    if not colon or not host or not port.isdigit() or not 0 < int(port[:6]) < 65536 or "/" in host or "@" in host:
        return None
    return host.removesuffix("."), int(port)


class AllowList:
    """Names that may be tunnelled to: `chatgpt.com`, `*.openai.com` (every name below it), each with `:port` when it is
    not 443."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(pattern.lower() for pattern in patterns)

    def allows(self, host: str, port: int) -> bool:
        return any(_matches(pattern, host, port) for pattern in self.patterns)


def _split(pattern: str) -> tuple[str, int]:
    name, colon, port = pattern.rpartition(":")
    return (name, int(port)) if colon else (pattern, 443)


def _matches(pattern: str, host: str, port: int) -> bool:
    name, wanted = _split(pattern)
    if port != wanted:
        return False
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def pac_file(patterns: Iterable[str], proxy: str) -> bytes:
    """JavaScript for browsers: listed names by `proxy` (host:port), falling back to direct when we do not run.

    Names are written as JSON strings, so that no pattern can break out of its quotes.
    """
    names = sorted({_split(pattern)[0] for pattern in patterns})
    exact = json.dumps([name for name in names if not name.startswith("*.")])
    below = json.dumps([name[1:] for name in names if name.startswith("*.")])
    return f"""function FindProxyForURL(url, host) {{
  var exact = {exact}, below = {below};
  host = host.toLowerCase();
  if (url.substring(0, 6) !== "https:" && url.substring(0, 4) !== "wss:") return "DIRECT";
  for (var i = 0; i < exact.length; i++) if (host === exact[i]) return {json.dumps("PROXY " + proxy + "; DIRECT")};
  for (var j = 0; j < below.length; j++)
    if (host.length > below[j].length && host.substring(host.length - below[j].length) === below[j])
      return {json.dumps("PROXY " + proxy + "; DIRECT")};
  return "DIRECT";
}}
""".encode()
