"""One inference edge: an application that speaks three APIs, over h1, h2 and h3 on one port number.

    TcpListener (h1, h2, WebSocket) --.
                                       >-- LabEdge.__call__ -- dialects -- Controls say how badly
    QuicListener (h3) ----------------'

`kill` is what kill -9 does to a process: the listener is gone, connections are reset, h3 falls silent. `restart` brings
it back on the same port.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from urllib.parse import parse_qs

from headrace.lab import dialects, media, metrics
from headrace.lab.asgi import Exchange, Receive, Scope, Send, compact, headers_of, serve_http
from headrace.lab.ca import ThrowAwayCa
from headrace.lab.controls import Controls, Tally
from headrace.lab.dialects import CHAT, MESSAGES, RESPONSES, Dialect
from headrace.lab.listener import Connection, TcpListener
from headrace.lab.ports import bind_pair
from headrace.lab.prompt import Prompt, Refused
from headrace.lab.quic import H3ServerConnection, QuicListener
from headrace.lab.websocket import serve_websocket

MODELS = ("lab-small", "lab-large", "text-embedding-lab")
DIALECTS: dict[str, Dialect] = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}
FAILURES = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error", 529: "overloaded_error"}


class LabEdge:
    """A real server on loopback. `url_of` turns an edge's id into its URL, for the redirects of a draining edge."""

    def __init__(self, edge_id: str, host: str, ca: ThrowAwayCa, url_of: Callable[[str], str]) -> None:
        self.id = edge_id
        self.host = host
        self.port = 0
        self.controls = Controls()
        self.tally = Tally()
        self.alive = False
        self._ca = ca
        self._url_of = url_of
        self._tcp: TcpListener | None = None
        self._quic: QuicListener | None = None

    @property
    def url(self) -> str:
        return f"https://{self.host}:{self.port}"

    @property
    def connections(self) -> int:
        """Open connections, TCP and QUIC."""
        return (len(self._tcp.connections) if self._tcp else 0) + (len(self._quic.connections) if self._quic else 0)

    @property
    def accepted(self) -> int:
        """TCP connections accepted since the last start."""
        return self._tcp.accepted if self._tcp else 0

    async def start(self) -> None:
        """Listen; the port is the kernel's the first time and the same ever after."""
        tcp, udp = bind_pair(self.port)
        self.port = tcp.getsockname()[1]
        context = self._ca.server_context(["h2", "http/1.1"])
        self._tcp = TcpListener(self, tls=context, alt_svc=f'h3=":{self.port}"; ma=3600')
        self._quic = QuicListener(self, cert_file=self._ca.cert_file, key_file=self._ca.key_file)
        await self._tcp.start(tcp)
        await self._quic.start(udp)
        self.alive = True

    async def kill(self) -> None:
        """Gone at once, as by kill -9."""
        self.alive = False
        if self._tcp is not None and self._quic is not None:
            await asyncio.gather(self._tcp.stop(), self._quic.stop())

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    def freeze(self) -> None:
        """Every open connection stays open and says nothing more, not even to a PING."""
        for connection in self._all():
            connection.freeze()

    def thaw(self) -> None:
        for connection in self._all():
            connection.thaw()

    def cut_connections(self) -> None:
        """Reset what is connected over TCP and go on listening."""
        for connection in tuple(self._tcp.connections) if self._tcp else ():
            connection.cut()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return

        def on_cancelled(_: Exchange) -> None:
            self.tally.add("cancelled")

        await serve_http(scope, receive, send, self._answer, on_cancelled)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._arrived(headers_of(scope), scope["http_version"])
        self.tally.enter(+1)
        # Dying is part of the lab: a kill cancels the session, whose client sees a reset.
        try:
            model = parse_qs(scope["query_string"].decode("latin-1")).get("model", [MODELS[0]])[0]
            await serve_websocket(scope, receive, send, self.controls, self.tally, self._location, model)
        finally:
            self.tally.enter(-1)

    async def _answer(self, exchange: Exchange) -> None:
        exchange.fields = self._own_fields(exchange)
        if await self._answer_aside(exchange):
            return
        self._arrived(exchange.headers, exchange.version)
        self.tally.enter(+1)
        try:
            await self._answer_call(exchange)
        except Refused as refused:
            self.tally.add("refused")
            await self._refuse(exchange, refused)
        finally:
            self.tally.enter(-1)

    async def _answer_aside(self, exchange: Exchange) -> bool:
        """Health, metrics and greetings: neither counted as calls nor subject to the controls of calls."""
        if self.controls.silent:
            return False
        if exchange.path == "/health":
            await exchange.respond(200, b"")
        elif exchange.path == "/metrics":
            text = metrics.render(self.controls, self.tally, MODELS[0])
            await exchange.respond(200, text, "text/plain; version=0.0.4; charset=utf-8")
        elif exchange.path in {"/", "/api/hello"}:
            await exchange.respond(200, f"headrace lab {self.id}\n".encode(), "text/plain; charset=utf-8")
        else:
            return False
        return True

    async def _answer_call(self, exchange: Exchange) -> None:
        controls = self.controls
        if controls.silent:
            await asyncio.Event().wait()
        if controls.drain_to:
            self.tally.add("redirected")
            location = self._location(exchange.path, exchange.query)
            await exchange.respond(307, b"", "text/plain", [("location", location)])
            return
        self._check_key(exchange)
        if status := controls.take_failure():
            raise Refused(status, FAILURES.get(status, "server_error"), f"the lab was told to answer {status}")
        await asyncio.sleep(controls.first_byte_s)
        await self._route(exchange)
        self.tally.add("answered")

    async def _route(self, exchange: Exchange) -> None:
        if exchange.path in DIALECTS and exchange.method == "POST":
            await self._infer(exchange, DIALECTS[exchange.path])
        elif exchange.path == "/v1/models":
            await exchange.respond(200, dialects.models(MODELS))
        elif exchange.path == "/v1/embeddings" and exchange.method == "POST":
            await exchange.respond(200, dialects.embeddings(exchange.body))
        elif exchange.path.startswith("/echo"):
            await exchange.respond(200, _echo(exchange))
        elif not await media.answer(exchange):
            raise Refused(404, "invalid_request_error", f"unknown url: {exchange.method} {exchange.path}")

    async def _infer(self, exchange: Exchange, dialect: Dialect) -> None:
        prompt = dialect.read(exchange.body, self.controls.tokens)
        if prompt.stream:
            await exchange.begin_stream()
            await self._stream(exchange, dialect, prompt)
            return
        await asyncio.sleep(self.controls.first_token_s + self.controls.token_s * max(0, len(prompt.tokens) - 1))
        self.tally.add("tokens", len(prompt.tokens))
        await exchange.respond(200, dialect.whole(prompt))

    async def _stream(self, exchange: Exchange, dialect: Dialect, prompt: Prompt) -> None:
        made = 0
        for is_token, event in dialect.stream(prompt):
            if is_token:
                if made == self.controls.cut_after:
                    self.tally.add("cut")
                    exchange.finished = True
                    exchange.cut()
                    return
                await asyncio.sleep(self.controls.token_s if made else self.controls.first_token_s)
                made += 1
                self.tally.add("tokens")
            await exchange.event(event)
        await exchange.end_stream()

    async def _refuse(self, exchange: Exchange, refused: Refused) -> None:
        dialect = DIALECTS.get(exchange.path, CHAT)
        extra = [("x-should-retry", "true")] if refused.status in {429, 503, 529} else []
        if refused.status in {429, 503, 529} and self.controls.retry_after_s:
            wait = self.controls.retry_after_s
            extra += [("retry-after", f"{wait:g}"), ("retry-after-ms", str(round(wait * 1000)))]
        await exchange.respond(refused.status, dialect.error(refused), extra=extra)

    def _check_key(self, exchange: Exchange) -> None:
        key, headers = self.controls.require_key, exchange.headers
        if key and headers.get("authorization") != f"Bearer {key}" and headers.get("x-api-key") != key:
            raise Refused(401, "invalid_request_error", "incorrect API key provided")

    def _location(self, path: str, query: str) -> str:
        return self._url_of(self.controls.drain_to) + path + (f"?{query}" if query else "")

    def _arrived(self, headers: dict[str, str], version: str) -> None:
        self.tally.arrive(headers.get("x-lab-request") or headers.get("x-request-id", ""), version)

    def _own_fields(self, exchange: Exchange) -> list[tuple[str, str]]:
        digest = hashlib.sha256(exchange.body).hexdigest()
        name = "request-id" if exchange.path == "/v1/messages" else "x-request-id"
        return [
            ("x-lab-edge", self.id),
            ("x-lab-version", exchange.version),
            ("x-lab-body-sha256", digest),
            (name, f"req_{digest[:24]}"),
            ("x-ratelimit-limit-requests", "60"),
            ("x-ratelimit-remaining-requests", "59"),
        ]

    def _all(self) -> Sequence[Connection | H3ServerConnection]:
        tcp = self._tcp.connections if self._tcp else set()
        quic = self._quic.connections if self._quic else set()
        return [*tcp, *quic]


def _echo(exchange: Exchange) -> bytes:
    """What arrived, for those who want to know whether a relay changed it."""
    target = exchange.path + (f"?{exchange.query}" if exchange.query else "")
    digest = hashlib.sha256(exchange.body).hexdigest()
    about = {"method": exchange.method, "target": target, "version": exchange.version, "headers": exchange.headers}
    return compact(about | {"body_sha256": digest, "body_bytes": len(exchange.body)})
