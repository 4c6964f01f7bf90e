"""Loading: every problem in one go with its place, sources, defaults, and nothing secret in any of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.effect import NO_EFFECT
from config.load import ConfigError, Loaded, default_config, find_file, load, load_text
from config.model import DnsUpstream, Edge, Listen, Pool, Probe, Secret, Zone
from config.schema import ROOT
from config.show import as_json, as_toml
from config.tables import Table, Tables

SECRET_LINE = re.compile(r"(redis|token|webhook) =")
HERE = Path(__file__).parent
EXAMPLE = HERE.parent.parent / "config" / "example.toml"
POOL = '[[pool]]\nname = "p"\nhosts = ["p.localhost"]\n[[pool.edge]]\nid = "e"\nurl = "https://e.test"\n'


def read(text: str, environ: dict[str, str] | None = None, base: Path = HERE) -> Loaded:
    return load_text(text, "headrace.toml", environ or {"HOME": "/home/u"}, base=base)


def problems(text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, environ)
    return [str(problem) for problem in caught.value.problems]


def test_the_example_is_the_default_spelt_out() -> None:
    environ = {"HOME": "/home/u"}
    assert load(EXAMPLE, environ).config == default_config(environ) == load(None, environ).config


def test_the_whole_interface_is_read_into_the_model() -> None:
    loaded = load(HERE / "full.toml", {"HOME": "/home/u", "KEY": "sk-1"})
    config = loaded.config
    assert config.resolver.zones == (Zone("corp.example", (DnsUpstream("udp", "10.0.0.53", 53),), "validate"),)
    assert config.resolver.trust_anchors == str(HERE / "anchors.ds")
    assert config.resolver.records[0].ttl_s == 60
    assert config.proxy.listen[1] == Listen("h3", "127.0.0.1", 8443)
    assert config.proxy.max_header_bytes == 32 * 1024
    assert config.pools[0].edges[0].headers["authorization"] == Secret("Bearer sk-1")
    assert config.pools[0].edges[0].base_path == "/base"
    assert config.pools[0].hedge.after == 0.25
    assert config.pools[0].probe == Probe(interval_s=10.0, timeout_s=2.0, path="/healthz")
    assert config.pools[0].llm.heartbeat_s == 15.0
    assert config.pools[0].priorities[0].urgency == 1
    assert config.telemetry.labels == {"session": "x-session-id"}


def test_every_problem_is_found_in_one_go_with_its_place() -> None:
    text = """\
wrokers = 2
[tls.tickets]
rotate_every = "48h"
[proxy]
listen = ["http://127.0.0.1:99999", "h3://127.0.0.1:1"]
[[pool]]
name = "a"
hosts = ["a.localhost"]
hedge = { after = 0 }
[[pool.edge]]
id = "x"
weight = -1
[pool.websocket]
ping_interval = "31s"
"""
    assert problems(text) == [
        "headrace.toml:1:1: wrokers: unknown key; did you mean workers?",
        'headrace.toml:3:16: tls.tickets.rotate_every: "48h" leaves one stolen key good for too long; use at most 1d',
        "headrace.toml:5:10: proxy.listen: h3://127.0.0.1:1 cannot be found by clients, "
        "who learn of HTTP/3 over https; add https://127.0.0.1:1",
        'headrace.toml:5:11: proxy.listen[0]: "http://127.0.0.1:99999" is not a URL; '
        'write it as in "https://host:port", ports from 0 to 65535',
        "headrace.toml:9:19: pool[0].hedge.after: 0 would hedge every request; use at least 50ms or remove the key",
        "headrace.toml:10:1: pool[0].edge[0]: url is missing; add it",
        "headrace.toml:12:10: pool[0].edge[0].weight: -1 is out of range; use 0 to 1000000",
        'headrace.toml:14:17: pool[0].websocket.ping_interval: "31s" is longer than middleboxes keep an idle '
        "connection; use at most 30s",
    ]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a = 1\nb = \n", "2:5"),
        ("[a\n", "1:3"),
        ('a = "x', "1:7"),
        ("a = 1\na = 2", "2:6"),
        ("[a]\n[a]\n", "2:3"),
    ],
)
def test_broken_syntax_is_named_with_line_and_column(text: str, place: str) -> None:
    (only,) = problems(text)
    assert only.startswith(f"headrace.toml:{place}: not TOML: "), only


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[resolver]\nstrategy = "fastes"', 'did you mean "fastest"?'),
        ("[resolver]\nupstreams = []", "did you mean upstream?"),
        ('[resolver]\nlisten = "udp://127.0.0.1:1"', "write an array"),
        ('[resolver]\nlisten = ["udp://127.0.0.1:1", "udp://127.0.0.1:1"]', "already [0] of this array"),
        ('[resolver]\nlisten = ["udp://0.0.0.0:53"]', "set rate_limit"),
        (
            '[resolver]\nlisten = ["tcp://127.0.0.1:8080"]\n[proxy]\nlisten = ["http://127.0.0.1:8080"]',
            "already resolver",
        ),
        ('[resolver]\nhosts_files = ["/nowhere/hosts"]', "No such file"),
        ("[resolver]\nrate_limit = true", "write a whole number"),
        ("[resolver]\nrate_limit = 1.5", "write a whole number"),
        ("[resolver]\ntimeout = 2", 'write it as a string, as in "2s"'),
        ('[resolver]\nbootstrap = []\n[[resolver.upstream]]\nurl = "tls://dns.test"', "nothing can find the address"),
        ('[[resolver.upstream]]\nurl = "tls://dns.test/x"', "tls:// ends with the host or port"),
        ('[[resolver.upstream]]\nurl = "udp://1.1.1.1"\nca_file = "/etc/hosts"', "has no TLS to verify"),
        ('[[resolver.zone]]\nname = "x"\nupstream = []', "name at least one"),
        ('[[resolver.record]]\nname = "x"\ntype = "A"\nvalue = "::1"', "not the value of a A record"),
        ('[[resolver.record]]\nname = "x"\ntype = "AX"\nvalue = "::1"', "not a record type"),
        ('[resolver.cache]\nmin_ttl = "10s"\nmax_ttl = "5s"', "is more than max_ttl"),
        ('[proxy]\nlisten = ["http://0.0.0.0:80"]', "clear text"),
        ('[proxy]\ntrusted_proxies = ["10.0.0.1/8"]', "without host bits"),
        ('[proxy.forward]\nallow = ["*"]', "is not a host name"),
        ('[tls]\ncert_file = "/etc/hosts"', "stands without key_file"),
        ('[admin]\nlisten = "http://192.168.1.1:1"', "use a loopback address"),
        ('[admin]\ntoken = "short"', "at least 16 characters"),
        ('[telemetry]\nlabels = { key = "Authorization" }', "carries secrets"),
        ("[telemetry]\nsample_ratio = 2", "use 0 to 1"),
        ('state_dir = "state"', "relative path"),
        ("workers = 0", "use 1 to 64"),
        ("pool = 1", "write it as [[pool]]"),
        ('[[pool]]\nname = "x"\nhosts = ["x"]', "edge is missing"),
        ('[[pool]]\nname = "x"\nhosts = ["x"]\nedge = []', "has no edge"),
        (POOL + POOL, '"p" is already pool[0].name in line 2'),
        (POOL + POOL, '"p.localhost" is already pool[0].hosts[0] in line 3'),
        (POOL + '[[pool.edge]]\nid = "e"\nurl = "https://f.test"', "give each edge of a pool its own id"),
        (POOL.replace('hosts = ["p.localhost"]', ""), "no request can reach this pool"),
        (POOL.replace('hosts = ["p.localhost"]', 'path = "/dns-query"'), "DNS over HTTPS"),
        (POOL.replace('hosts = ["p.localhost"]', 'path = "/"'), "every path"),
        (POOL + "standby = true", "every edge is standby"),
        (POOL.replace("https://e.test", "http://127.0.0.1:8080"), "is headrace itself"),
        (POOL + 'protocol = "h4"', "is not possible here"),
        (POOL + 'headers = { Host = "x" }', "belongs to the connection"),
        (POOL + 'headers = { a = "x\\ny" }', "remove line breaks"),
        (POOL + '[pool.websocket]\non_edge_failure = "replay"', "set replay_messages"),
        (POOL + '[pool.websocket]\npong_timeout = "20s"', "a pong would always be late"),
        (POOL + "[[pool.priority]]\npath = 'x'", "is not a request path"),
        (POOL + "[[pool.priority]]\npath = '/x'\nurgency = 8", "use 0 to 7"),
    ],
)
def test_an_unusable_value_is_refused_with_a_remedy(text: str, says: str) -> None:
    found = problems(text)
    assert any(says in problem for problem in found), found


def test_a_reserved_or_kernel_chosen_port_may_stand_twice() -> None:
    assert len(read('[proxy]\nlisten = ["https://127.0.0.1:0", "http://127.0.0.1:0"]').config.proxy.listen) == 2


def test_no_listener_at_all_is_allowed() -> None:
    config = read("[resolver]\nlisten = []\n[proxy]\nlisten = []\n[admin]\nlisten = ''").config
    assert (config.resolver.listen, config.proxy.listen, config.admin.listen) == ((), (), None)


def test_a_file_without_pools_has_none_and_says_so() -> None:
    loaded = read("")
    assert loaded.config.pools == ()
    assert [note.text for note in loaded.notes] == [
        "no [[pool]]: only DNS and the forward proxy are served, any other request gets 421"
    ]
    assert loaded.config.resolver == default_config({"HOME": "/home/u"}).resolver


def test_a_pool_inherits_the_probe_and_overrides_single_keys() -> None:
    text = '[probe]\nfall = 5\ntimeout = "1s"\n' + POOL.replace("[[pool.edge]]", "probe = { fall = 2 }\n[[pool.edge]]")
    assert read(text).config.pools[0].probe == Probe(timeout_s=1.0, fall=2)


def test_keys_without_effect_are_noted_only_when_they_would_matter() -> None:
    loaded = read(POOL + '[pool.llm]\ncache = "all"\nforce_stream = false\n[telemetry]\nwebhook = "https://h.test/x"')
    assert [str(note) for note in loaded.notes] == [
        "headrace.toml:8:9: pool[0].llm.cache: accepted, but has no effect yet",
        "headrace.toml:11:11: telemetry.webhook: accepted, but has no effect yet",
    ]


def test_values_come_from_environment_file_and_credential(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file\n")
    (tmp_path / "cred").write_text("from-credential-123456789")
    text = (
        'workers = "${WORKERS}"\n'
        + POOL.replace("e.test", "${NAME}.test")
        + 'headers = { a = "Bearer ${KEY}", b = { file = "key" }, c = "$${KEY}" }\n'
        + '[admin]\ntoken = { credential = "cred" }\n[resolver]\nbootstrap = "${BOOT}"'
    )
    environ = {"WORKERS": "2", "NAME": "e", "KEY": "k", "CREDENTIALS_DIRECTORY": str(tmp_path), "BOOT": "1.1.1.1, ::1"}
    config = read(text, environ | {"HOME": "/"}, base=tmp_path).config
    assert config.workers == 2
    assert config.pools[0].edges[0].host == "e.test"
    assert config.pools[0].edges[0].headers == {
        "a": Secret("Bearer k"),
        "b": Secret("from-file"),
        "c": Secret("${KEY}"),
    }
    assert config.admin.token == Secret("from-credential-123456789")
    assert config.resolver.bootstrap == ("1.1.1.1", "::1")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ('"${NOPE}"', "${NOPE}, which is not set"),
        ('"${EMPTY}"', "${EMPTY}, which is empty"),
        ('"${not a name}"', "without the name of a variable"),
        ('{ file = "/nowhere/key" }', "file /nowhere/key, which cannot be read (No such file or directory)"),
        ('{ credential = "c" }', "CREDENTIALS_DIRECTORY is not set"),
    ],
)
def test_a_missing_source_is_a_problem(value: str, says: str) -> None:
    (only,) = problems(f"[admin]\ntoken = {value}", {"HOME": "/", "EMPTY": ""})
    assert says in only


CANARY = "sk-canary-0123456789"


@pytest.mark.parametrize(
    "text",
    [
        '[admin]\ntoken = ["CANARY"]',
        '[telemetry]\nwebhook = "ftp://u:CANARY@h"',
        '[resolver.cache]\nredis = "CANARY"',
        POOL + 'headers = "CANARY"',
        POOL + 'headers = { authorization = "CANARY\\u0007" }',
        POOL.replace("https://e.test", "https://u:CANARY@e.test"),
        POOL.replace("https://e.test", "https://e.test/?key=CANARY"),
        POOL.replace("https://e.test", "htps://u:CANARY@e.test"),
        '[resolver]\nstrategy = "${CANARY_KEY}"',
        'workers = "${CANARY_KEY}"',
        '[resolver]\ndoh_path = "${CANARY_KEY}"',
        '[proxy]\nlisten = ["${CANARY_KEY}"]',
        'log = { level = "${CANARY_KEY}" }',
    ],
)
def test_no_problem_repeats_a_secret(text: str) -> None:
    found = problems(
        text.replace("CANARY\\", CANARY + "\\").replace("CANARY@", CANARY + "@").replace('CANARY"', CANARY + '"'),
        {"HOME": "/", "CANARY_KEY": CANARY},
    )
    assert found
    assert not any("canary-" in problem for problem in found), found


def test_the_shown_configuration_loads_again_to_the_same_and_hides_secrets() -> None:
    environ = {"HOME": "/home/u", "KEY": "sk-1"}
    loaded = load(HERE / "full.toml", environ)
    shown = as_toml(loaded, origins=True)
    assert "sk-1" not in shown
    assert "sk-literal" not in shown
    assert 'authorization = "Bearer ${KEY}"' in shown
    assert 'x-literal = "***"' in shown
    without_secrets = [line for line in shown.splitlines() if ' = "***"  #' not in line]
    again = read("\n".join(without_secrets).replace('"***"', '"sk-literal"'), environ).config
    spared = [line for line in (HERE / "full.toml").read_text().splitlines() if not SECRET_LINE.match(line)]
    assert again == read("\n".join(spared), environ).config


def test_the_origin_of_every_value_is_shown() -> None:
    environ = {"STATE_DIRECTORY": "/var/lib/headrace", "STRATEGY": "race"}
    shown = as_json(read('workers = 1\n[resolver]\nstrategy = "${STRATEGY}"\n', environ))
    assert shown["workers"] == {"value": 1, "origin": "headrace.toml:1"}
    assert shown["resolver.strategy"] == {"value": "${STRATEGY}", "origin": "headrace.toml:3 from env STRATEGY"}
    assert shown["state_dir"] == {"value": "/var/lib/headrace", "origin": "env STATE_DIRECTORY"}
    assert shown["resolver.ecs"] == {"value": "strip", "origin": "default"}


def test_the_file_is_searched_in_order(tmp_path: Path) -> None:
    user = tmp_path / "headrace" / "headrace.toml"
    user.parent.mkdir()
    user.write_text("")
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert find_file(None, environ) == user
    assert find_file(None, environ | {"HEADRACE_CONFIG": "/x.toml"}) == Path("/x.toml")
    assert find_file("/y.toml", environ | {"HEADRACE_CONFIG": "/x.toml"}) == Path("/y.toml")


def test_the_state_dir_has_its_order() -> None:
    environ = {"HOME": "/h", "XDG_STATE_HOME": "/s", "STATE_DIRECTORY": "/v:/w"}
    assert default_config(environ).state_dir == Path("/v")
    del environ["STATE_DIRECTORY"]
    assert default_config(environ).state_dir == Path("/s/headrace")
    del environ["XDG_STATE_HOME"]
    assert default_config(environ).state_dir == Path("/h/.local/state/headrace")


@pytest.mark.parametrize("content", [b"a = '\xff'", b""])
def test_a_file_that_cannot_be_read_is_one_problem(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.toml"
    if content:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(file, dict(os.environ))
    assert str(caught.value).startswith(f"{file}:1:1: ")


def test_default_pools_lead_to_both_services() -> None:
    pools = default_config({"HOME": "/"}).pools
    assert pools[0] == Pool(
        name="openai",
        edges=(Edge(id="openai-direct", scheme="https", host="api.openai.com", port=443),),
        hosts=("openai.localhost",),
        path="/openai",
    )
    assert (pools[1].path, pools[1].edges[0].host) == ("/anthropic", "api.anthropic.com")


def schema_paths(table: Table, path: str = "") -> Iterator[str]:
    for key in table.keys:
        name = f"{path}{key.name}"
        kind = key.kind.table if isinstance(key.kind, Tables) else key.kind
        yield name
        if isinstance(kind, Table):
            yield from schema_paths(kind, f"{name}.")


def test_keys_without_effect_are_keys() -> None:
    assert set(NO_EFFECT) <= set(schema_paths(ROOT))


def test_every_key_stands_in_the_example_or_needs_a_table_of_the_users_own() -> None:
    text = EXAMPLE.read_text()
    missing = [path for path in schema_paths(ROOT) if not re.search(rf"\b{path.rpartition('.')[2]}\b", text)]
    assert missing == []


def test_every_field_of_the_model_has_a_key() -> None:
    def fields_of(table: Table) -> Iterator[tuple[str, str]]:
        filled = {field for key in table.keys for field in key.targets}
        yield from ((type(table.blank).__name__, name) for name in type(table.blank).__slots__ if name not in filled)
        for key in table.keys:
            kind = key.kind.table if isinstance(key.kind, Tables) else key.kind
            if isinstance(kind, Table):
                yield from fields_of(kind)

    assert list(fields_of(ROOT)) == []
