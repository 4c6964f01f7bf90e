"""The command line as a user meets it: exit codes, data and talk apart, quiet ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace import cli

ROOT = Path(__file__).parent.parent.parent
COMMANDS = [
    "run",
    "check",
    "config",
    "query",
    "trace",
    "cache",
    "status",
    "edges",
    "requests",
    "tickets",
    "reload",
    "env",
    "demo",
]


def headrace(*args: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE", "XDG"))}
    return subprocess.run(
        [sys.executable, "-m", "headrace", *args],
        cwd=ROOT,
        env={**kept, "HOME": "/nonexistent", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration whose admin port nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = tmp_path / "headrace.toml"
    file.write_text(
        f'state_dir = "{tmp_path}/state"\n[admin]\nlisten = "http://127.0.0.1:{port}"\n'
        '[resolver]\nhosts_files = []\n[[resolver.record]]\nname = "here.test"\ntype = "A"\nvalue = "127.0.0.9"\n'
    )
    return file


@pytest.mark.parametrize("spelling", [["--version"], ["version"]])
def test_the_version_is_one_line(spelling: list[str]) -> None:
    done = headrace(*spelling)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("headrace ")
    assert done.stdout.count("\n") == 1


def test_the_version_as_json() -> None:
    assert json.loads(headrace("version", "--json").stdout)["version"] == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_help_and_has_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--help"], [command, "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(args)
        assert ended.value.code == 0
        assert command in capsys.readouterr().out


@pytest.mark.parametrize("args", [[], ["nothing"], ["query"], ["edges", "--watch", "0"], ["requests", "-n", "0"]])
def test_wrong_usage_is_2_and_leaves_stdout_empty(args: list[str]) -> None:
    done = headrace(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["edgs"], 'headrace: no "edgs" here; did you mean edges?'),
        (["tickets", "rotat"], 'headrace tickets: no "rotat" here; did you mean rotate?'),
        (["env", "zsh"], 'headrace env: no "zsh" here; known: bash, fish, dotenv'),
    ],
)
def test_a_word_that_is_not_known_gets_the_nearest_or_all_that_are(args: list[str], said: str) -> None:
    assert headrace(*args).stderr.splitlines()[0] == said


@pytest.mark.parametrize("args", [["help"], ["help", "edges"], ["edges", "--help"]])
def test_help_can_be_asked_for_in_either_order(args: list[str]) -> None:
    done = headrace(*args)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: headrace{' edges' if 'edges' in args else ''} [")


def test_check_says_every_problem_on_stderr_and_is_2(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('[resolver]\nstrategy = "fastes"\n[proxyy]\n')
    done = headrace("check", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f'{file}:2:12: resolver.strategy: "fastes" is not possible here; did you mean "fastest"? '
        'Possible: "fastest", "race", "failover", "weighted"',
        f"{file}:3:1: proxyy: unknown key; did you mean proxy?",
        f"{file}: 2 problems",
    ]


def test_check_as_json_has_each_problem_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("workers = 0")
    done = headrace("check", "--json", str(file))
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["version"], answer["ok"]) == (2, 1, False)
    assert {name: answer["problems"][0][name] for name in ("line", "column", "key")} == {
        "line": 1,
        "column": 11,
        "key": "workers",
    }


def test_check_of_a_good_file_is_0_and_changes_nothing(config: Path) -> None:
    done = headrace("check", str(config))
    assert done.returncode == 0
    assert "no [[pool]]" in done.stderr
    assert list(config.parent.iterdir()) == [config]


def test_a_file_that_is_named_and_missing_is_2() -> None:
    assert headrace("check", "/nonexistent/headrace.toml").returncode == 2
    assert headrace("run", "--config", "/nonexistent/headrace.toml").returncode == 2
    assert headrace("check", environ={"HEADRACE_CONFIG": "/nonexistent/headrace.toml"}).returncode == 2


def test_run_with_a_bad_file_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(f'state_dir = "{tmp_path}/state"\nnothing = 1\nworkers = 0\n')
    done = headrace("run", "--config", str(file))
    assert done.returncode == 2
    assert done.stderr.endswith("headrace: 2 problems in the configuration\n")
    assert not (tmp_path / "state").exists()


def test_config_show_is_toml_on_stdout_and_hides_secrets(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('[admin]\ntoken = "sk-canary-0123456789"\n')
    done = headrace("config", "show", "--origin", "--config", str(file))
    assert done.returncode == 0
    assert tomllib.loads(done.stdout)["admin"]["token"] == "***"
    assert "canary" not in done.stdout + done.stderr
    assert f"  # {file}:2" in done.stdout
    shown = json.loads(headrace("config", "show", "--json", "--config", str(file)).stdout)
    assert shown["values"]["admin.token"] == {"value": "***", "origin": f"{file}:2"}


@pytest.mark.parametrize("args", [["status"], ["edges"], ["requests"], ["tickets"], ["reload"], ["tickets", "rotate"]])
def test_asking_a_daemon_that_does_not_run_is_3(config: Path, args: list[str]) -> None:
    done = headrace(*args, "--config", str(config))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("headrace: not running")


def test_a_query_without_a_daemon_is_answered_in_the_process(config: Path) -> None:
    done = headrace("query", "here.test", "--config", str(config))
    assert (done.returncode, done.stdout) == (0, "here.test. 60 IN A 127.0.0.9\n")
    assert "resolving in this process" in done.stderr
    assert "NOERROR from local in" in done.stderr
    answer = json.loads(headrace("query", "here.test", "a", "--json", "--config", str(config)).stdout)
    assert (answer["version"], answer["rcode"], answer["source"], answer["ttl_s"]) == (1, "NOERROR", "local", 60)


@pytest.mark.parametrize("args", [["here.test", "BOGUS"], ["a..b"]])
def test_a_query_for_what_is_no_name_or_type_is_2(config: Path, args: list[str]) -> None:
    assert headrace("query", *args, "--config", str(config)).returncode == 2


def test_a_trace_that_reaches_nobody_is_1_and_tells_every_hop(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('[resolver]\ntimeout = "50ms"\nbootstrap = []\nupstream = []\n')
    done = headrace("trace", "a.test", "--root", "127.0.0.1", "--port", "1", "--json", "--config", str(file))
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["version"]) == (1, 1)
    assert [hop["address"] for hop in answer["hops"]] == ["127.0.0.1"]
    assert answer["hops"][0]["kind"] == "failed"


def test_a_reader_that_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "headrace", "config", "show"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=150)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "# defaults (no file)\n")


def test_env_says_beside_its_lines_what_an_eval_would_swallow(config: Path) -> None:
    assert "headrace: the local CA is made at the first start" in headrace("env", "--config", str(config)).stderr
    assert headrace("env", "--undo", "--config", str(config)).stderr == ""


def test_env_prints_lines_for_the_shell(config: Path) -> None:
    done = headrace("env", "dotenv")
    assert done.returncode == 0
    assert "OPENAI_BASE_URL=http://127.0.0.1:8080/openai/v1\n" in done.stdout
    assert headrace("env", environ={"SHELL": "/usr/bin/fish"}).stdout.count("set -gx OPENAI_BASE_URL") == 1


def test_a_light_command_loads_no_resolver() -> None:
    code = "import sys, headrace.cli as c; c.main(['version']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert "'asyncio'" not in done.stdout
    assert "'dns'" not in done.stdout


def test_the_daemon_loads_nothing_that_its_start_can_do_without() -> None:
    code = "import sys, headrace.daemon; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=150)
    spared = {"aioquic", "cryptography", "dns", "h2", "hypercorn"}
    spared |= {"email", "http.client", "importlib.metadata", "secrets", "statistics", "platform"}
    assert spared & set(done.stdout.split()) == set()


def test_garbage_is_looked_for_again_once_the_daemon_is_ready(config: Path) -> None:
    code = f"""
import gc, os, signal, sys, threading, time
from headrace import cli
at_start = gc.get_freeze_count()  # Python 3.12 begins with some
def watch():
    while not (gc.get_freeze_count() > at_start and gc.isenabled()):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=watch, daemon=True).start()
sys.exit(cli.main(["run", "--config", {str(config)!r}]))
"""
    text = config.read_text().replace("[resolver]", "[proxy]\nlisten = []\n[resolver]\nlisten = []")
    config.write_text(text)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
