"""Command lines that work against a demo that was kept: it prints them, the README shows them, a test runs them.

Theory: a line is written once, with shell variables for what differs from run to run; `exports` gives these their values.
Rules for editing: 1. a line is what a user would type, in any POSIX shell and in fish; 2. it ends by itself; 3. it also
goes into the README and gets its expectation in tests/e2e/test_tries.py, and both are checked.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.lab.story import Stage

BODY = """'{"model": "lab-small", "stream": true, "messages": [{"role": "user", "content": "hi"}]}'"""
CURL_CHAT = f"--cacert $CA $HTTPS/lab/v1/chat/completions \\\n  -d {BODY}"
KDIG = "kdig @127.0.0.1"
DNS_TRUST = "+tls-ca=$CA +tls-hostname=localhost answer.lab.example"

OPENAI = """OPENAI_BASE_URL=$HTTP/lab/v1 OPENAI_API_KEY=any python -c '
from openai import OpenAI
for event in OpenAI().chat.completions.create(model="lab-small", stream=True, messages=[{"role": "user", "content": "hi"}]):
    print(event.choices[0].delta.content or "", end="", flush=True)'"""

ANTHROPIC = """ANTHROPIC_BASE_URL=$HTTP/lab ANTHROPIC_API_KEY=any python -c '
from anthropic import Anthropic
with Anthropic().messages.stream(model="lab-small", max_tokens=64, messages=[{"role": "user", "content": "hi"}]) as stream:
    for text in stream.text_stream: print(text, end="", flush=True)'"""

NODE = """node -e '
fetch(process.env.HTTP + "/lab/v1/chat/completions", {method: "POST", body: JSON.stringify(
  {model: "lab-small", stream: true, messages: [{role: "user", content: "hi"}]})}
).then(async answer => { for await (const part of answer.body) process.stdout.write(part) })'"""

WEBSOCKET = """python -c '
import sys; from websockets.sync.client import connect
with connect(sys.argv[1]) as session: print(session.recv())' "$WS/lab/v1/realtime?model=lab-small\""""

CHROMIUM = """chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \\
  --disable-component-update --disable-sync --user-data-dir=$(mktemp -d) --proxy-pac-url=$HTTP/proxy.pac \\
  --ignore-certificate-errors-spki-list=$LAB_SPKI --dump-dom $EDGE/"""


@dataclass(frozen=True, slots=True)
class Try:
    """A line to try, the program that it needs, and what it shows."""

    name: str
    command: str

    @property
    def tool(self) -> str:
        """The first word that is not an assignment."""
        return next(word for word in self.command.split() if "=" not in word)


TRIES: Sequence[Try] = (
    Try("stream over HTTP/1.1", f"curl -N --http1.1 {CURL_CHAT}"),
    Try("stream over HTTP/2", f"curl -N --http2 {CURL_CHAT}"),
    Try("openai, only the base URL changed", OPENAI),
    Try("anthropic, only the base URL changed", ANTHROPIC),
    Try("fetch of Node", NODE),
    Try("WebSocket", WEBSOCKET),
    Try("DNS over UDP", f"{KDIG} -p $DNS answer.lab.example"),
    Try("DNS over TCP", f"{KDIG} -p $DNS +tcp answer.lab.example"),
    Try("DNS over TLS", f"{KDIG} -p $DOT +tls {DNS_TRUST}"),
    Try("DNS over HTTPS", f"{KDIG} -p $DOH +https=/dns-query {DNS_TRUST}"),
    Try("browser through the PAC file", CHROMIUM),
    Try("slow an edge", """curl $LAB/edges/edge-a -d '{"first_token_s": 1.5}'"""),
    Try("kill an edge", "curl -X POST $LAB/edges/edge-b/kill"),
    Try("see its state", "headrace edges"),
    Try("see where the time went", "headrace requests"),
)


def exports(stage: Stage) -> dict[str, str]:
    """The variables that the lines use, for this run."""
    ports, lab = stage.daemon.ports, stage.lab
    return {
        "HTTP": ports.http_url,
        "HTTPS": ports.https_url,
        "WS": ports.http_url.replace("http:", "ws:"),
        "DNS": str(ports.dns),
        "DOT": str(ports.dot),
        "DOH": str(ports.https),
        "CA": str(stage.daemon.ca_file),
        "EDGE": next(iter(lab.edges.values())).url,
        "LAB": lab.control.url,
        "LAB_SPKI": lab.ca.key_hash(),
        "HEADRACE_CONFIG": str(stage.daemon.config_file),
    }


def invitation(stage: Stage) -> list[str]:
    """What a kept demo says: the exports for another terminal, then the lines."""
    named = " ".join(f"{name}={shlex.quote(value)}" for name, value in exports(stage).items())
    lines = ["", "still running; Ctrl-C ends it. In another terminal:", "", f"export {named}"]
    if shutil.which("headrace") is None:
        # Found by nobody: `make demo` installs into a virtual environment.
        lines.append(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}{os.pathsep}$PATH")
    lines.append("")
    for each in TRIES:
        lines += [f"# {each.name}", each.command]
    return lines
