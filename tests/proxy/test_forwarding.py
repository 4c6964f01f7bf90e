"""Which names a browser may be tunnelled to, and the PAC file that tells it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from proxy.forwarding import AllowList, pac_file, target_of

ALLOW = AllowList(["*.openai.com", "chatgpt.com", "lab.test:8443"])


@pytest.mark.parametrize(
    ("host", "port", "allowed"),
    [
        ("api.openai.com", 443, True),
        ("a.b.openai.com", 443, True),
        ("openai.com", 443, False),
        ("evilopenai.com", 443, False),
        ("chatgpt.com", 443, True),
        ("chatgpt.com", 22, False),
        ("lab.test", 8443, True),
        ("lab.test", 443, False),
    ],
)
def test_the_list_decides_by_whole_labels_and_port(host: str, port: int, allowed: bool) -> None:
    assert ALLOW.allows(host, port) is allowed


@pytest.mark.parametrize(
    "target", [b"host", b"host:", b":443", b"host:0", b"host:99999", b"host:x", b"a/b:443", b"u@h:443"]
)
def test_a_malformed_target_is_none(target: bytes) -> None:
    assert target_of(target) is None


def test_targets_lose_case_brackets_and_the_final_dot() -> None:
    assert target_of(b"API.Test.:443") == ("api.test", 443)
    assert target_of(b"[::1]:443") == ("::1", 443)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run JavaScript")
def test_the_pac_file_sends_listed_https_names_here_and_others_direct() -> None:
    script = pac_file(ALLOW.patterns, "127.0.0.1:8080").decode()
    ask = "".join(
        f"console.log(FindProxyForURL({url!r}, {host!r}));"
        for url, host in [
            ("https://API.openai.com/", "API.openai.com"),
            ("wss://chatgpt.com/", "chatgpt.com"),
            ("http://chatgpt.com/", "chatgpt.com"),
            ("https://openai.com/", "openai.com"),
            ("https://evilopenai.com/", "evilopenai.com"),
        ]
    )
    node = shutil.which("node")
    assert node is not None
    said = subprocess.run([node, "-e", script + ask], capture_output=True, text=True, check=True).stdout.split("\n")
    here = "PROXY 127.0.0.1:8080; DIRECT"
    assert said[:5] == [here, here, "DIRECT", "DIRECT", "DIRECT"]


def test_no_pattern_breaks_out_of_the_script() -> None:
    assert b'["\\"];alert(1)//"]' in pac_file(['"];alert(1)//'], "127.0.0.1:8080")
