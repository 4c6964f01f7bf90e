"""What `headrace env` prints, as bash itself understands it, and that undoing leaves nothing behind."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from config.model import Config, Edge, Listen, Pool, Proxy, Tls
from headrace import trust
from headrace.environment import Shell, render, wanted

OPENAI = Pool("openai", (Edge("o", "https", "api.openai.com", 443),), path="/openai")
ANTHROPIC = Pool("anthropic", (Edge("a", "https", "api.anthropic.com", 443),), path="/anthropic")
HTTP, HTTPS = Listen("http", "127.0.0.1", 8080), Listen("https", "127.0.0.1", 8443)


def config(
    state: Path, *listens: Listen, pools: tuple[Pool, ...] = (OPENAI, ANTHROPIC), tls: Tls | None = None
) -> Config:
    return Config(state_dir=state, proxy=Proxy(listen=listens), pools=pools, tls=tls or Tls())


def bash(script: str, environ: dict[str, str]) -> dict[str, str]:
    """The environment after bash ran the script, without bash's own."""
    run = subprocess.run(
        ["bash", "--norc", "-euc", f"{script}\nenv -0"], env=environ, capture_output=True, text=True, check=True
    )
    pairs = (entry.split("=", 1) for entry in run.stdout.split("\0") if entry)
    return {name: value for name, value in pairs if name not in ("_", "SHLVL", "PWD", "OLDPWD")}


def dotenv(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))


PATH = {"PATH": "/usr/bin:/bin"}


def test_sdks_are_pointed_at_the_plain_listener_by_path(tmp_path: Path) -> None:
    after = bash(render(config(tmp_path, HTTPS, HTTP), "bash", PATH, undo=False), PATH)
    assert after["OPENAI_BASE_URL"] == "http://127.0.0.1:8080/openai/v1"
    assert after["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080/anthropic"
    assert after["NO_PROXY"] == after["no_proxy"] == "localhost,127.0.0.1,::1"


@pytest.mark.parametrize(
    ("listen", "pools", "url"),
    [
        (Listen("http", "0.0.0.0", 80), (OPENAI,), "http://127.0.0.1:80/openai/v1"),
        (Listen("http", "::", 8080), (OPENAI,), "http://[::1]:8080/openai/v1"),
        (HTTPS, (OPENAI,), "https://127.0.0.1:8443/openai/v1"),
        (HTTP, (Pool("gpu", (Edge("v", "http", "10.0.0.2", 8000),), path="/gpu"),), "http://127.0.0.1:8080/gpu/v1"),
        (
            HTTP,
            (Pool("gpu", (Edge("v", "http", "h", 1, base_path="/v1"),), path="/gpu/"),),
            "http://127.0.0.1:8080/gpu",
        ),
        (
            HTTP,
            (Pool("x", (Edge("o", "https", "api.openai.com", 443),), hosts=("x.localhost",)),),
            "http://x.localhost:8080/v1",
        ),
        (HTTP, (ANTHROPIC,), None),
    ],
    ids=["any v4", "any v6", "https only", "one self-hosted pool", "edge with its version", "by host", "no openai"],
)
def test_base_url_fits_listener_and_pool(
    tmp_path: Path, listen: Listen, pools: tuple[Pool, ...], url: str | None
) -> None:
    assert wanted(config(tmp_path, listen, pools=pools)).values.get("OPENAI_BASE_URL") == url


def test_trust_is_pointed_at_the_bundle_with_the_systems_roots(tmp_path: Path) -> None:
    trust.ensure_ca(tmp_path)
    values = wanted(config(tmp_path, HTTP, HTTPS)).values
    bundle = str(tmp_path / "ca" / "bundle.pem")
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CODEX_CA_CERTIFICATE"):
        assert values[name] == bundle
    assert values["NODE_EXTRA_CA_CERTS"] == str(tmp_path / "ca" / "ca.pem")


def test_without_the_systems_roots_no_trust_store_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "system_roots", lambda: None)
    trust.ensure_ca(tmp_path)
    said = render(config(tmp_path, HTTPS), "bash", PATH, undo=False)
    assert "export SSL_CERT_FILE" not in said and "export NODE_EXTRA_CA_CERTS" in said
    assert "roots were not found" in said


@pytest.mark.parametrize("why", ["own certificate", "no https", "no CA yet"])
def test_trust_is_left_alone_where_nothing_has_to_be_trusted(tmp_path: Path, why: str) -> None:
    if why != "no CA yet":
        trust.ensure_ca(tmp_path)
    listens = (HTTP,) if why == "no https" else (HTTP, HTTPS)
    tls = Tls("c.pem", "k.pem") if why == "own certificate" else Tls()
    said = render(config(tmp_path, *listens, tls=tls), "bash", PATH, undo=False)
    assert "CERT" not in "".join(line for line in said.splitlines() if line.startswith("export"))


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"])
def test_users_own_trust_file_is_left_alone_and_named(tmp_path: Path, name: str) -> None:
    trust.ensure_ca(tmp_path)
    before = PATH | {name: "/etc/corp.pem"}
    said = render(config(tmp_path, HTTPS), "bash", before, undo=False)
    assert bash(said, before)[name] == "/etc/corp.pem"
    assert f"{name} is yours already" in said


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"])
def test_a_variable_that_names_the_systems_roots_gets_them_and_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "roots.pem").write_text("the system's roots\n")
    monkeypatch.setattr(trust, "system_roots", lambda: tmp_path / "roots.pem")
    trust.ensure_ca(tmp_path)
    before = PATH | {name: f"{tmp_path}/./roots.pem"}
    asked = config(tmp_path, HTTPS)
    once = bash(render(asked, "bash", before, undo=False), before)
    assert once[name] == str(tmp_path / "ca" / "bundle.pem")
    assert bash(render(asked, "bash", once, undo=False), once) == once
    assert bash(render(asked, "bash", once, undo=True), once) == before


def test_proxy_exceptions_of_both_cases_are_merged_in_the_users_order(tmp_path: Path) -> None:
    before = PATH | {"NO_PROXY": "corp.example, 10.0.0.0/8,localhost", "no_proxy": "corp.example,other.example"}
    after = bash(render(config(tmp_path, HTTP), "bash", before, undo=False), before)
    assert after["no_proxy"] == after["NO_PROXY"]
    assert after["NO_PROXY"] == "corp.example,10.0.0.0/8,localhost,other.example,127.0.0.1,::1"


def test_exception_of_everything_stays(tmp_path: Path) -> None:
    before = PATH | {"NO_PROXY": "*"}
    assert bash(render(config(tmp_path, HTTP), "bash", before, undo=False), before)["no_proxy"] == "*"


@pytest.mark.parametrize(
    "mine",
    [
        {},
        {"NO_PROXY": "a b;$(touch oops) 'q' \"d\" \\", "OPENAI_BASE_URL": "https://corp.example/v1"},
        {"NO_PROXY": "localhost,127.0.0.1,::1", "NODE_EXTRA_CA_CERTS": "/etc/corp.pem", "SSL_CERT_FILE": "/x y.pem"},
    ],
    ids=["nothing set", "values that a shell would run", "values like ours"],
)
def test_undone_environment_is_what_it_was_even_after_doing_it_twice(tmp_path: Path, mine: dict[str, str]) -> None:
    trust.ensure_ca(tmp_path)
    asked = config(tmp_path, HTTP, HTTPS)
    before = PATH | mine
    once = bash(render(asked, "bash", before, undo=False), before)
    twice = bash(render(asked, "bash", once, undo=False), once)
    assert twice == once != before
    assert bash(render(asked, "bash", twice, undo=True), twice) == before


def test_undo_without_do_touches_nothing(tmp_path: Path) -> None:
    mine = PATH | {"OPENAI_BASE_URL": "https://corp.example/v1", "NO_PROXY": "localhost,127.0.0.1,::1"}
    assert bash(render(config(tmp_path, HTTP), "bash", mine, undo=True), mine) == mine


def test_dotenv_has_plain_assignments_and_says_what_to_remove(tmp_path: Path) -> None:
    text = render(config(tmp_path, HTTP), "dotenv", {"NO_PROXY": 'a b"$x'}, undo=False)
    assert dotenv(text) == {
        "OPENAI_BASE_URL": "http://127.0.0.1:8080/openai/v1",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8080/anthropic",
        "NO_PROXY": r'"a b\"\$x,localhost,127.0.0.1,::1"',
        "no_proxy": r'"a b\"\$x,localhost,127.0.0.1,::1"',
    }
    assert "OPENAI_BASE_URL=" in render(config(tmp_path, HTTP), "dotenv", {}, undo=True)


def test_fish_form_quotes_as_fish_does(tmp_path: Path) -> None:
    text = render(config(tmp_path, HTTP), "fish", {"NO_PROXY": r"it's \ $x"}, undo=False)
    assert r"set -gx HEADRACE_OLD_NO_PROXY 'it\'s \\ $x'" in text.splitlines()
    undone = render(config(tmp_path, HTTP), "fish", {"HEADRACE_SET": "OPENAI_BASE_URL"}, undo=True)
    assert undone == "set -e OPENAI_BASE_URL\nset -e HEADRACE_SET\n"


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_understands_it(tmp_path: Path) -> None:
    text = render(config(tmp_path, HTTP), "fish", {"NO_PROXY": r"it's \ $x"}, undo=False)
    run = subprocess.run(["fish", "-c", text + "echo $NO_PROXY"], capture_output=True, text=True, check=True)
    assert run.stdout == "it's \\ $x,localhost,127.0.0.1,::1\n"


@pytest.mark.parametrize("shell", ["bash", "fish", "dotenv"])
def test_nothing_to_point_at_is_said_as_a_comment(tmp_path: Path, shell: Shell) -> None:
    assert "nothing to point an SDK at" in render(config(tmp_path), shell, {}, undo=False).splitlines()[0]
