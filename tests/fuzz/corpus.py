"""Requests that two readers may count differently: the corpus, made by combining what was found in the wild.

Each case says what a second request would look like inside it (`/x/NUMBER`). `alone`: whoever reads it by RFC 9112 or 9113
sees one request at most, so that an `/x/` at an origin is a hole. Where it is False the bytes are two lawful requests, and
the proxy's count must be the origin's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

Pairs = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Case:
    """`h1` holds raw bytes; `fields`, `body` and `trailers` are what h2 and h3 send in their own frames."""

    number: int
    family: str
    version: str
    h1: bytes = b""
    fields: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    trailers: tuple[tuple[bytes, bytes], ...] = ()
    alone: bool = True


HOST = b"o.localhost"

TRANSFER = [
    b"", b"Transfer-Encoding: chunked", b"Transfer-Encoding:chunked", b"Transfer-Encoding: Chunked",
    b"Transfer-Encoding : chunked", b"Transfer-Encoding\t: chunked", b" Transfer-Encoding: chunked",
    b"Transfer-Encoding: xchunked", b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding: identity, chunked",
    b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding: identity", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked;q=1", b'Transfer-Encoding: "chunked"', b"Transfer-Encoding: chunked\x00",
    b"Transfer-Encoding: \x0bchunked", b"Transfer-Encoding: chunked\x0c", b"Transfer-Encoding:\r\n chunked",
    b"Transfer-Encoding:\n chunked", b"X: x\nTransfer-Encoding: chunked", b"X: x\rTransfer-Encoding: chunked",
    b"X: x\r\n\tTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked", b"Transfer_Encoding: chunked",
    b"Transfer-Encoding\x00: chunked", b"\x00Transfer-Encoding: chunked", b"Transfer-Encoding: chunk\xc3\xa9d",
    b"Transfer-Encoding:", b"Transfer-Encoding: ,chunked", b"Transfer-Encoding: chunked,",
    b"Content-Encoding: chunked\r\nTransfer-Encoding: cow",
]  # fmt: skip
LENGTH = [
    b"", b"Content-Length: {n}", b"Content-Length: 0", b"Content-Length: +{n}", b"Content-Length: -1",
    b"Content-Length: {n}, {n}", b"Content-Length: {n}, 0", b"Content-Length: {n}\r\nContent-Length: 0",
    b"Content-Length: 0\r\nContent-Length: {n}", b"Content-Length : {n}", b"Content-Length: 0x4",
    b"Content-Length: {n}\x00", b"Content-Length: 0{n}", b"Content-Length: {n}.0",
    b"Content-Length: 18446744073709551620", b"Content-Length:", b"Content-Length: 1 0", b"Content-Length:\r\n 4",
    b"Content-Length: \xb2",
]  # fmt: skip
SIZE_LINES = [
    b"{n};ext\r\n", b"{n};ext=\"a\"\r\n", b"{n} \r\n", b"{n}\t;a\r\n", b" {n}\r\n", b"0x{n}\r\n", b"+{n}\r\n",
    b"-{n}\r\n", b"{n}\n", b"{n}\r", b"{n}\r\r\n", b"{n}\x00\r\n", b"{n}g\r\n", b"{n}_0\r\n", b"{n}.\r\n",
    b"\r\n{n}\r\n", b"fffffffffffffffff{n}\r\n", b"00000000000000000{n}\r\n", b"{n};a\n\r\n", b"{n};a\rb\r\n",
    b"{n};\"\r\n", b"\r\n", b"{n},{n}\r\n", b"{n}{n}{n}{n}{n}{n}{n}{n}\r\n", b"{n}\x0b\r\n", b"\xef\xbc\x95\r\n",
]  # fmt: skip
CHUNK_ENDS = [b"\r\n", b"\n", b"\r", b"", b"XX", b"\r\r\n", b"\n\r\n", b" \r\n"]
LAST = [
    b"0\r\n\r\n", b"0\n\n", b"0\r\n\n", b"0\n\r\n", b"00\r\n\r\n", b"0;x\r\n\r\n", b"0 \r\n\r\n", b"0\r\n",
    b"0\r\r\n\r\n", b"0x0\r\n\r\n", b"-0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0\r\nContent-Length: 50\r\n\r\n",
    b"0\r\nTransfer-Encoding: chunked\r\n\r\n", b"0\r\nHost: evil\r\n\r\n", b"0\r\nX\r\n\r\n", b"0\r\n X: y\r\n\r\n",
    b"0\r\nX: y\n\r\n", b"0\r\nX: y\r\n\n", b"0\r\nX : y\r\n\r\n", b"0\r\nX: \x00\r\n\r\n",
    b"0\r\nConnection: close\r\n\r\n",
]  # fmt: skip
START = [
    b"GET  {t} HTTP/1.1", b"GET\t{t}\tHTTP/1.1", b" GET {t} HTTP/1.1", b"GET {t} HTTP/1.1 ", b"GET {t} http/1.1",
    b"GET {t} HTTP/1.10", b"GET {t} HTTP/2.0", b"GET {t} HTTP/0.9", b"GET {t}", b"GET {t} HTTP/1.1 HTTP/1.1",
    b"GET {t}\x00 HTTP/1.1", b"GET {t}\r HTTP/1.1", b"GET {t}\x0bx HTTP/1.1", b"GET {t} x HTTP/1.1",
    b"GE T {t} HTTP/1.1", b"G@T {t} HTTP/1.1", b"get {t} HTTP/1.1", b"PRI * HTTP/2.0", b"TRACE {t} HTTP/1.1",
    b"CONNECT {t} HTTP/1.1", b"OPTIONS * HTTP/1.1", b"GET * HTTP/1.1", b"GET http://{h}{t} HTTP/1.1",
    b"GET http://evil.test{t} HTTP/1.1", b"GET http://{h}@evil.test{t} HTTP/1.1", b"GET http:///{t} HTTP/1.1",
    b"GET http://{h}:x{t} HTTP/1.1", b"GET ftp://{h}{t} HTTP/1.1", b"GET {h}{t} HTTP/1.1", b"GET {t}#f HTTP/1.1",
    b"GET {t}\xff HTTP/1.1", b"GET /{t} HTTP/1.1", b"GET {t}/../x HTTP/1.1", b"GET {t}%0d%0aX:y HTTP/1.1",
    b"GET {t} HTTP/1.1\r", b"GET {t} HTTP/1,1", b"\x16\x03\x01 {t} HTTP/1.1", b"GET {t} HTTP/1.1\x00",
    b"QUERY {t} HTTP/1.1", b"M-SEARCH {t} HTTP/1.1", b"HEAD {t} HTTP/1.1", b"DELETE {t} HTTP/1.1",
]  # fmt: skip
EXTRA = [
    b"Host: {h}\r\nHost: {h}", b"Host: {h}\r\nHost: evil.test", b"Host: {h}, evil.test", b"Host: {h}/x",
    b"Host: {h} x", b"Host: a@{h}", b"Host : {h}", b"", b"Host:\r\n {h}", b"Host: {h}\r\nX: y\r\n z",
    b"Host: {h}\r\nX y: z", b"Host: {h}\r\n: z", b"Host: {h}\r\nX", b"Host: {h}\r\nX: a\x00b", b"Host: {h}\nX: y",
    b"Host: {h}\r\nX: a\rb", b"Host: {h}\r\n\rX: y", b"Host: {h}\r\nConnection: Content-Length",
    b"Host: {h}\r\nConnection: Transfer-Encoding", b"Host: {h}\r\nConnection: close, Host",
    b"Host: {h}\r\nConnection: Authorization\r\nAuthorization: a", b"Host: {h}\r\nX\xc2\xa0: y",
    b"Host: {h}\r\nX(): y",
    b"Host: {h}\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA",
    b"Host: {h}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAA==\r\nSec-WebSocket-Version: 13",
    b"Host: {h}\r\nConnection: Upgrade\r\nUpgrade: foo", b"Host: {h}\r\nExpect: 100-continue",
    b"Host: {h}\r\nExpect: 100-continuE, x", b"Host: {h}\r\nExpect: y", b"Host: {h}\r\nTE: trailers, chunked",
    b"Host: {h}\r\nTrailer: Content-Length", b"Host: {h}\r\nProxy-Connection: keep-alive",
    b"Host: {h}\r\nKeep-Alive: 3",
]  # fmt: skip


def hidden(number: int) -> bytes:
    return b"GET /x/%d HTTP/1.1\r\nHost: %b\r\n\r\n" % (number, HOST)


class Numbered:
    """Gives each case its number and its name."""

    def __init__(self) -> None:
        self._next = 0

    def h1(self, family: str, made: bytes, *, alone: bool = True) -> Case:
        """`made` uses {t} for the case's own target and {x} for the hidden request."""
        self._next += 1
        inside = hidden(self._next)
        made = made.replace(b"{x-size}", b"%d" % len(inside)).replace(b"{x}", inside)
        raw = made.replace(b"{t}", b"/c/%d" % self._next).replace(b"{h}", HOST)
        return Case(self._next, family, "h1", raw, alone=alone)

    def framed(self, family: str, version: str, fields: Pairs, body: bytes, trailers: Pairs) -> Case:
        self._next += 1
        target = b"/c/%d" % self._next

        def fill(pairs: Pairs) -> tuple[tuple[bytes, bytes], ...]:
            return tuple((n.replace(b"{t}", target), v.replace(b"{t}", target)) for n, v in pairs)

        return Case(
            self._next, family, version, b"", fill(fields), body.replace(b"{x}", hidden(self._next)), fill(trailers)
        )


def head(*lines: bytes, start: bytes = b"POST {t} HTTP/1.1") -> bytes:
    return b"\r\n".join([start, b"Host: {h}", *(line for line in lines if line)]) + b"\r\n\r\n"


def lengths_and_codings(new: Numbered) -> Iterator[Case]:
    """Every spelling of the one beside every spelling of the other, with a body that each reader ends elsewhere."""
    for transfer, length in product(TRANSFER, LENGTH):
        if not transfer and length in (b"", b"Content-Length: {n}", b"Content-Length: 0", b"Content-Length: 0{n}"):
            continue  # lawful: what follows the body is another request
        lawful = {b"Transfer-Encoding: chunked", b"Transfer-Encoding:chunked", b"Transfer-Encoding: Chunked"}
        # A coding that is no field name's or no field at all leaves the length in charge, and the rest is lawful.
        other_name = transfer.startswith(b"Transfer_")
        for body, n in ((b"0\r\n\r\n{x}", 5), (b"3c\r\n{x}", 4)):
            alone = transfer not in lawful or bool(length)
            yield new.h1(
                "length and coding",
                head(transfer, length.replace(b"{n}", b"%d" % n)) + body,
                alone=alone and not other_name,
            )


def chunk_syntax(new: Numbered) -> Iterator[Case]:
    coded = head(b"Transfer-Encoding: chunked")
    for line, end in product(SIZE_LINES, CHUNK_ENDS):
        yield new.h1("chunk size", coded + line.replace(b"{n}", b"5") + b"hello" + end + b"0\r\n\r\n{x}", alone=False)
    for last in LAST:
        yield new.h1("last chunk", coded + b"5\r\nhello\r\n" + last + b"{x}", alone=False)


def heads(new: Numbered) -> Iterator[Case]:
    for start, body in product(START, (b"", b"{x}")):
        yield new.h1("request line", start + b"\r\nHost: {h}\r\n\r\n" + body, alone=False)
    for extra, length in product(EXTRA, (b"", b"Content-Length: {x-size}", b"Transfer-Encoding: chunked")):
        lines = b"\r\n".join(line for line in (b"POST {t} HTTP/1.1", extra, length) if line)
        yield new.h1("fields", lines + b"\r\n\r\n{x}", alone=False)
    for newline in (b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n\x00"):
        yield new.h1("line ends", newline.join([b"GET {t} HTTP/1.1", b"Host: {h}", b"", b""]) + b"{x}", alone=False)
        yield new.h1("line ends", b"GET {t} HTTP/1.1" + newline + b"Host: {h}\r\n\r\n{x}", alone=False)
        yield new.h1("line ends", b"GET {t} HTTP/1.1\r\nHost: {h}" + newline + newline + b"{x}", alone=False)
    for method, version in product((b"GET", b"HEAD", b"DELETE", b"OPTIONS", b"PUT"), (b"1.0", b"1.1")):
        start = method + b" {t} HTTP/" + version
        yield new.h1("odd bodies", head(b"Content-Length: {x-size}", start=start) + b"{x}")
        yield new.h1("odd bodies", head(b"Transfer-Encoding: chunked", start=start) + b"0\r\n\r\n{x}", alone=False)
        yield new.h1("odd bodies", head(b"Connection: keep-alive", start=start) + b"{x}", alone=False)


VALUES = [b"a\r\nX: y", b"a\nb", b"a\rb", b"a\x00b", b" a", b"a ", b"\ta", b"a\r\n\r\n{x}", b"\xff", b""]
NAMES = [
    b"x\r\ny", b"x: y", b"x y", b"X-Upper", b"x\x00", b"", b"x\xff", b":x", b"x:", b"transfer-encoding: chunked\r\nx",
    b"\tx", b"(x)",
]  # fmt: skip
FORBIDDEN = [
    (b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"identity"), (b"connection", b"close"),
    (b"connection", b"content-length"), (b"keep-alive", b"3"), (b"upgrade", b"h2c"), (b"proxy-connection", b"x"),
    (b"te", b"chunked"), (b"te", b"trailers"), (b"host", b"evil.test"), (b"host", b"a, b"),
    (b"expect", b"100-continue"), (b"content-length", b"0"), (b"content-length", b"1"), (b"content-length", b"99999"),
    (b"content-length", b"+5"), (b"content-length", b"5, 5"), (b"content-length", b""), (b"content-length", b"-1"),
    (b"content-length", b"0x5"), (b"content-length", b"5\r\nx: y"), (b"cookie", b"a; b"),
    (b"content-length", b"18446744073709551616"),
]  # fmt: skip
PSEUDO = [
    [(b":path", b"{t} HTTP/1.1\r\nX: y")], [(b":path", b"{t} x")], [(b":path", b"")], [(b":path", b"{t}\x00")],
    [(b":path", b"x{t}")], [(b":path", b"*")], [(b":path", b"{t}#f")], [(b":path", b"http://evil.test{t}")],
    [(b":path", b"{t}"), (b":path", b"/x")], [], [(b":method", b"GET / HTTP/1.1\r\nX: y")], [(b":method", b"GE T")],
    [(b":method", b"")], [(b":method", b"get")], [(b":method", b"CONNECT")],
    [(b":method", b"GET"), (b":method", b"POST")], [(b":scheme", b"ftp")], [(b":scheme", b"http://evil.test/?")],
    [(b":scheme", b"")], [(b":authority", b"a\r\nX: y")], [(b":authority", b"a b")], [(b":authority", b"a@b")],
    [(b":authority", b"")], [(b":authority", b"a/b")], [(b":protocol", b"websocket")], [(b":protocol", b"x")],
    [(b":status", b"200")], [(b":x", b"y")], [(b":authority", b"a"), (b":authority", b"b")],
]  # fmt: skip


def framed(new: Numbered, version: str) -> Iterator[Case]:
    """The same ideas in h2 and h3, where a header is no line and a body has an end, on their way to HTTP/1.1."""
    bodies = (b"", b"{x}", b"0\r\n\r\n{x}")
    base: Pairs = [(b":method", b"POST"), (b":scheme", b"https"), (b":authority", HOST), (b":path", b"{t}")]
    for extra, body in product([(b"x", v) for v in VALUES] + [(n, b"y") for n in NAMES] + FORBIDDEN, bodies):
        yield new.framed("fields", version, [*base, extra], body, [])
    for change, body in product(PSEUDO, bodies):
        names = {name for name, _ in change}
        kept = [pair for pair in base if pair[0] not in names] if change else base[:3]
        yield new.framed("pseudo-fields", version, [*kept, *change], body, [])
        yield new.framed("pseudo-fields late", version, [*kept, (b"x", b"y"), *change], body, [])
    for trailer in [(b"x", v) for v in VALUES] + [(n, b"y") for n in NAMES] + FORBIDDEN + [(b":path", b"/x")]:
        yield new.framed("trailers", version, base, b"hello", [trailer])


def corpus() -> list[Case]:
    """All of it, always the same; more than two thousand."""
    new = Numbered()
    parts: Iterable[Iterator[Case]] = (
        lengths_and_codings(new), chunk_syntax(new), heads(new), framed(new, "h2"), framed(new, "h3"),
    )  # fmt: skip
    return [case for part in parts for case in part]
