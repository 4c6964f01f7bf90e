"""The lab's control listener: plain HTTP on loopback, for people with curl and for tests in another process.

GET  /                       every edge: URL, alive, controls, counts; and the nameserver's question count
POST /edges/ID  {"key": …}   set controls (see `Controls`); {} resets them
POST /edges/ID/VERB          kill, restart, freeze, thaw, cut
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from headrace.lab.asgi import Exchange, Receive, Scope, Send, serve_http
from headrace.lab.edge import LabEdge
from headrace.lab.listener import TcpListener
from headrace.lab.nameserver import Nameserver
from headrace.lab.ports import bind_tcp


class ControlListener:
    """Serves the three forms above for a lab's edges."""

    def __init__(self, edges: Mapping[str, LabEdge], nameserver: Nameserver) -> None:
        self._edges = edges
        self._nameserver = nameserver
        self._listener = TcpListener(self, tls=None)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        listening = bind_tcp()
        self.port = listening.getsockname()[1]
        await self._listener.start(listening)

    async def stop(self) -> None:
        await self._listener.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await serve_http(scope, receive, send, self._answer, lambda _: None)

    async def _answer(self, exchange: Exchange) -> None:
        # A page in a browser must not switch edges off: it could rebind a name to 127.0.0.1, but not send this Host.
        if exchange.headers.get("host") != f"127.0.0.1:{self.port}" or "origin" in exchange.headers:
            await _say(exchange, 403, {"error": f"this listener answers to Host 127.0.0.1:{self.port} alone"})
            return
        steps = [step for step in exchange.path.split("/") if step]
        if exchange.method == "GET" and not steps:
            await _say(exchange, 200, self._view())
        elif exchange.method == "POST" and len(steps) in {2, 3} and steps[0] == "edges" and steps[1] in self._edges:
            await self._change(exchange, self._edges[steps[1]], steps[2] if len(steps) == 3 else "")
        else:
            await _say(exchange, 404, {"error": f"no such place: {exchange.method} {exchange.path}"})

    async def _change(self, exchange: Exchange, edge: LabEdge, verb: str) -> None:
        if verb in {"kill", "restart"}:
            await (edge.kill() if verb == "kill" else edge.restart())
        elif verb in {"freeze", "thaw", "cut"}:
            {"freeze": edge.freeze, "thaw": edge.thaw, "cut": edge.cut_connections}[verb]()
        elif verb:
            await _say(exchange, 404, {"error": f"no such verb: {verb}"})
            return
        elif problem := _set_controls(edge, exchange.body):
            await _say(exchange, 400, {"error": problem})
            return
        await _say(exchange, 200, _edge_view(edge))

    def _view(self) -> dict[str, Any]:
        edges = {edge_id: _edge_view(edge) for edge_id, edge in self._edges.items()}
        return {"edges": edges, "nameserver": {"asked": self._nameserver.asked}}


def _set_controls(edge: LabEdge, body: bytes) -> str:
    """Set or reset an edge's controls; the problem when that cannot be, else ""."""
    try:
        wanted = json.loads(body or b"{}")
        if not isinstance(wanted, dict):
            return "expected a JSON object of controls"
        if wanted:
            edge.controls.change(wanted)
        else:
            edge.controls.reset()
    except ValueError as exc:
        return str(exc)
    return ""


def _edge_view(edge: LabEdge) -> dict[str, Any]:
    return {"url": edge.url, "alive": edge.alive, "controls": asdict(edge.controls), **edge.tally.view()}


async def _say(exchange: Exchange, status: int, value: object) -> None:
    await exchange.respond(status, json.dumps(value, indent=2).encode() + b"\n")
