"""The proxies that are measured over HTTP/1.1, each with one process or thread that works, all with the same origin.

Those that are not installed are left out, and the notes say so. What comes from pip has an environment of its own:
`python3 -m venv bench/.peers && bench/.peers/bin/pip install -r bench/peers.txt`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.measure import Server, free_port

Make = Callable[[ExitStack, int], tuple[Server, int]]

PEERS = Path(__file__).parent / ".peers" / "bin"
ANSWER = (
    '{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,"message":'
    '{"role":"assistant","content":"I help."},"finish_reason":"stop"}],'
    '"usage":{"prompt_tokens":9,"completion_tokens":8,"total_tokens":17}}'
)
"""A chat completion of 240 bytes, which LiteLLM reads and the others pass on."""

NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/error.log error; worker_processes 1;
events {{ worker_connections 2048; }}
http {{
  access_log off; client_max_body_size 0; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 10000000;
  {rest}
}}
"""


def origin(stack: ExitStack) -> int:
    server, port = stack.enter_context(Server("origin")), free_port()
    rest = (
        f"server {{ listen 127.0.0.1:{port}; default_type application/json; location / {{ return 200 '{ANSWER}'; }} }}"
    )
    file = server.write("nginx.conf", NGINX.format(folder=server.folder, rest=rest))
    server.start(["nginx", "-c", file, "-e", str(server.folder / "error.log")], port)
    return port


def nginx(stack: ExitStack, upstream: int, buffers: str = "") -> tuple[Server, int]:
    server, port = stack.enter_context(Server("nginx")), free_port()
    rest = f"""
      {buffers}
      upstream o {{ server 127.0.0.1:{upstream}; keepalive 128; keepalive_requests 10000000; }}
      server {{ listen 127.0.0.1:{port}; location / {{
        proxy_pass http://o; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
        proxy_request_buffering off; }} }}"""
    file = server.write("nginx.conf", NGINX.format(folder=server.folder, rest=rest))
    server.start(["nginx", "-c", file, "-e", str(server.folder / "error.log")], port)
    return server, port


def nginx_wide(stack: ExitStack, upstream: int) -> tuple[Server, int]:
    """With buffers of the size that ours are: its own of 8 and 16 KiB cost it a system call each."""
    buffers = (
        "client_body_buffer_size 256k; proxy_buffer_size 256k; proxy_buffers 4 256k; proxy_busy_buffers_size 512k;"
    )
    return nginx(stack, upstream, buffers)


def haproxy(stack: ExitStack, upstream: int) -> tuple[Server, int]:
    server, port = stack.enter_context(Server("haproxy")), free_port()
    file = server.write(
        "haproxy.cfg",
        f"""
global
  nbthread 1
defaults
  mode http
  timeout client 60s
  timeout server 60s
  timeout connect 5s
  option http-no-delay
frontend f
  bind 127.0.0.1:{port}
  default_backend b
backend b
  http-reuse always
  server s 127.0.0.1:{upstream}
""",
    )
    server.start(["haproxy", "-f", file], port)
    return server, port


def start_headrace(
    stack: ExitStack,
    upstream: int,
    listen: Sequence[str],
    port: int,
    *,
    serves: str,
    pem: tuple[object, object] | None = None,
) -> Server:
    """The daemon with one pool of one edge, ready on `port`. `serves`: the pool's line for its hosts or path; `pem`:
    certificate and key."""
    server = stack.enter_context(Server("headrace"))
    tls = f'[tls]\ncert_file = "{pem[0]}"\nkey_file = "{pem[1]}"' if pem is not None else ""
    file = server.write(
        "headrace.toml",
        f"""
state_dir = "{server.folder}/state"
log = {{ level = "warning" }}
[resolver]
listen = []
[proxy]
listen = {list(listen)}
{tls}
[admin]
listen = "http://127.0.0.1:{free_port()}"
[[pool]]
name = "bench"
{serves}
[[pool.edge]]
id = "origin"
url = "http://127.0.0.1:{upstream}"
max_active = 10000
""",
    )
    server.start([sys.executable, "-m", "headrace", "run", "--config", file], port)
    return server


def headrace(stack: ExitStack, upstream: int) -> tuple[Server, int]:
    port = free_port()
    serves = 'hosts = ["bench.localhost"]'
    return start_headrace(stack, upstream, [f"http://127.0.0.1:{port}"], port, serves=serves), port


def start_caddy(
    stack: ExitStack, upstream: int, sites: str, port: int, *, options: str = "", within: str = ""
) -> Server:
    """Caddy with one core, a pool of connections and no buffer, for `sites`; `options` of its, `within` a site."""
    server = stack.enter_context(Server("caddy"))
    file = server.write(
        "Caddyfile",
        f"""
{{
  admin off
  auto_https off
  {options}
}}
{sites} {{
  bind 127.0.0.1
  {within}
  reverse_proxy 127.0.0.1:{upstream} {{
    flush_interval -1
    transport http {{
      keepalive_idle_conns_per_host 128
    }}
  }}
}}
""",
    )
    argv = ["caddy", "run", "--config", file, "--adapter", "caddyfile"]
    server.start(argv, port, environ={"GOMAXPROCS": "1", "HOME": str(server.folder)})
    return server


def caddy(stack: ExitStack, upstream: int) -> tuple[Server, int]:
    port = free_port()
    sites = f"http://127.0.0.1:{port}, http://bench.localhost:{port}"
    return start_caddy(stack, upstream, sites, port, options="log {\n    level ERROR\n  }"), port


def asgi(stack: ExitStack, upstream: int) -> tuple[Server, int]:
    server, port = stack.enter_context(Server("asgi")), free_port()
    program = Path(__file__).with_name("asgi_peer.py")
    argv = [str(PEERS / "python"), "-P", str(program), str(port), str(upstream)]  # -P: our folder has an http.py
    server.start(argv, port, within_s=60)
    return server, port


def litellm(stack: ExitStack, upstream: int) -> tuple[Server, int]:
    """One worker, no database, no key, no callback: as little as it can do."""
    server, port = stack.enter_context(Server("litellm")), free_port()
    file = server.write(
        "config.yaml",
        f"""
model_list:
  - model_name: bench
    litellm_params: {{model: openai/bench, api_base: "http://127.0.0.1:{upstream}/v1", api_key: sk-bench}}
litellm_settings: {{telemetry: false, num_retries: 0}}
""",
    )
    environ = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # the list of prices would else be fetched at the start
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # checking one would be work that nobody else does
        "LITELLM_LOG": "ERROR",
    }
    argv = [str(PEERS / "python"), str(PEERS / "litellm"), "--config", file, "--host", "127.0.0.1"]
    server.start([*argv, "--port", str(port), "--num_workers", "1"], port, environ=environ, within_s=120)
    return server, port


PROXIES: dict[str, Make] = {"nginx": nginx, "haproxy": haproxy, "caddy": caddy, "headrace": headrace}
"""Servers that pass bytes on, whatever they are."""

WIDE: dict[str, Make] = {"nginx-256k": nginx_wide}
"""For large bodies, beside those with their own buffers."""

APPLICATIONS: dict[str, Make] = {"hypercorn+httpx": asgi, "litellm": litellm}
"""Proxies written as applications; LiteLLM wants chat completions."""


def installed(makes: Mapping[str, Make]) -> tuple[dict[str, Make], list[str]]:
    """Those that can be started here, and a note for each other one."""
    here = {
        "headrace": True,
        "hypercorn+httpx": (PEERS / "python").exists(),
        "litellm": (PEERS / "litellm").exists(),
    }
    found = {name: make for name, make in makes.items() if here.get(name) or shutil.which(name.partition("-")[0])}
    return found, [f"left out, not installed: {name}" for name in makes if name not in found]
