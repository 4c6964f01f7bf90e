"""The local CA vouches for what headrace serves and for nothing else, as OpenSSL, curl and Python judge it."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aioquic.quic.configuration import QuicConfiguration
from cryptography import x509

from headrace import trust
from headrace.trust import LOCAL, Scope

HOSTS = ["localhost", "openai.localhost", "anthropic.localhost"]
ADDRESSES = ["127.0.0.1", "::1"]
NOW = datetime.now(UTC)


def openssl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)


def alternatives(path: Path) -> tuple[list[str], list[str]]:
    leaf = x509.load_pem_x509_certificate(path.read_bytes())
    named = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return named.get_values_for_type(x509.DNSName), [str(a) for a in named.get_values_for_type(x509.IPAddress)]


def test_openssl_verifies_the_leaf_for_each_of_its_names(tmp_path: Path) -> None:
    ca = trust.ensure_ca(tmp_path)
    cert, _ = trust.issue(tmp_path, HOSTS, ADDRESSES)
    assert alternatives(cert) == (sorted(HOSTS), sorted(ADDRESSES))
    base = ("verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", ca)
    for host in HOSTS:
        assert openssl(*base, "-verify_hostname", host, cert).returncode == 0
    for address in ADDRESSES:
        assert openssl(*base, "-verify_ip", address, cert).returncode == 0
    assert openssl(*base, "-verify_hostname", "other.localhost", cert).returncode != 0


async def serve(cert: Path) -> asyncio.Server:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    return await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)


async def curl(*arguments: str) -> str:
    run = await asyncio.create_subprocess_exec(
        "curl", "-sS", "--max-time", "60", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await run.communicate()
    return said.decode()


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
async def test_curl_and_python_connect_by_name_and_by_address(tmp_path: Path) -> None:
    ca = trust.ensure_ca(tmp_path)
    cert, _ = trust.issue(tmp_path, HOSTS, ADDRESSES)
    server = await serve(cert)
    port = server.sockets[0].getsockname()[1]
    to_us = f"::127.0.0.1:{port}"
    for host in (*HOSTS, "127.0.0.1"):
        assert await curl("--cacert", str(ca), "--connect-to", to_us, f"https://{host}/") == "ok"
    assert "SSL" in await curl("--cacert", str(ca), "--connect-to", to_us, "https://api.openai.com/")
    bundle = trust.bundle_path(tmp_path)
    assert bundle is not None
    context = ssl.create_default_context(cafile=str(bundle))
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="openai.localhost")
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("hosts", "addresses"), [(["api.openai.com"], []), (["localhost", "localhost.evil"], []), ([], ["192.0.2.1"])]
)
def test_whoever_has_the_key_can_impersonate_nothing_else(
    tmp_path: Path, hosts: list[str], addresses: list[str]
) -> None:
    ca = trust.ensure_ca(tmp_path)
    stolen = trust._read_authority(tmp_path)
    assert stolen is not None
    forged = tmp_path / "forged.pem"
    trust._write_leaf(forged, Scope.of(hosts, addresses), stolen, NOW)
    said = openssl("verify", "-CAfile", ca, forged)
    assert said.returncode != 0 and "permitted subtree violation" in said.stderr


def test_ca_cannot_make_another_ca_and_serves_servers_only(tmp_path: Path) -> None:
    said = openssl("x509", "-in", trust.ensure_ca(tmp_path), "-noout", "-text").stdout
    assert "Name Constraints: critical" in said
    assert "CA:TRUE, pathlen:0" in said and "TLS Web Server Authentication" in said and "prime256v1" in said


def test_ca_is_made_once_and_the_certificate_kept(tmp_path: Path) -> None:
    ca = trust.ensure_ca(tmp_path).read_bytes()
    first = trust.issue(tmp_path, HOSTS, ADDRESSES)[0].read_bytes()
    assert trust.issue(tmp_path, [*reversed(HOSTS), "LOCALHOST."], ADDRESSES)[0].read_bytes() == first
    assert trust.ensure_ca(tmp_path).read_bytes() == ca


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    trust.ensure_ca(tmp_path)
    trust.issue(tmp_path, HOSTS, ADDRESSES)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "ca").iterdir()}
    assert modes == dict.fromkeys(("ca.pem", "ca-key.pem", "server.pem", "bundle.pem", "judged.json"), 0o600)
    assert stat.S_IMODE((tmp_path / "ca").stat().st_mode) == 0o700


def test_changed_names_are_issued_anew_by_the_same_ca(tmp_path: Path) -> None:
    ca = trust.ensure_ca(tmp_path).read_bytes()
    trust.issue(tmp_path, HOSTS, ADDRESSES)
    cert, _ = trust.issue(tmp_path, [*HOSTS, "vllm.localhost"], ["127.0.0.1", "127.0.0.53"])
    assert alternatives(cert)[0] == sorted([*HOSTS, "vllm.localhost"])
    assert trust.ensure_ca(tmp_path).read_bytes() == ca


def test_certificate_near_its_end_is_issued_anew(tmp_path: Path) -> None:
    first = trust.issue(tmp_path, HOSTS, ADDRESSES)[0].read_bytes()
    assert trust.issue(tmp_path, HOSTS, ADDRESSES, at=NOW + timedelta(days=59))[0].read_bytes() == first
    assert trust.issue(tmp_path, HOSTS, ADDRESSES, at=NOW + timedelta(days=61))[0].read_bytes() != first


def test_ca_near_its_end_is_made_anew_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ca = trust.ensure_ca(tmp_path).read_bytes()
    assert trust.ensure_ca(tmp_path, at=NOW + timedelta(days=3600)).read_bytes() != ca
    assert "must be told again" in caplog.text


def test_name_outside_the_constraints_makes_a_ca_that_may_vouch_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = trust.ensure_ca(tmp_path)
    before = ca.read_bytes()
    cert, _ = trust.issue(tmp_path, [*HOSTS, "llm.corp.example"], [*ADDRESSES, "192.0.2.7"])
    assert ca.read_bytes() != before and "may not vouch for llm.corp.example, 192.0.2.7\n" in caplog.text
    assert openssl("verify", "-CAfile", ca, "-verify_hostname", "llm.corp.example", cert).returncode == 0
    assert openssl("verify", "-CAfile", ca, "-verify_ip", "192.0.2.7", cert).returncode == 0
    kept = ca.read_bytes()
    trust.issue(tmp_path, HOSTS, ADDRESSES)
    assert ca.read_bytes() == kept, "a CA that may vouch for more is not thrown away"


@pytest.mark.parametrize("spoil", ["readable", "cut", "foreign"])
def test_ca_that_must_not_be_believed_is_made_anew(
    tmp_path: Path, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    ca = trust.ensure_ca(tmp_path)
    before = ca.read_bytes()
    key = tmp_path / "ca" / "ca-key.pem"
    if spoil == "readable":
        key.chmod(0o644)
    elif spoil == "cut":
        key.write_bytes(key.read_bytes()[:40])
    else:
        trust.ensure_ca(tmp_path / "other")
        shutil.copy(tmp_path / "other" / "ca" / "ca-key.pem", key)
    assert trust.ensure_ca(tmp_path).read_bytes() != before
    assert "made anew" in caplog.text and stat.S_IMODE(key.stat().st_mode) == 0o600


def test_bundle_holds_the_systems_roots_and_ours(tmp_path: Path) -> None:
    ca = trust.ensure_ca(tmp_path).read_text()
    roots, bundle = trust.system_roots(), trust.bundle_path(tmp_path)
    assert roots is not None and bundle is not None
    assert bundle.read_text() == roots.read_text().rstrip() + "\n" + ca


def test_bundle_is_never_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust.ensure_ca(tmp_path)
    monkeypatch.setattr(trust, "system_roots", lambda: None)
    trust.ensure_ca(tmp_path)
    assert trust.bundle_path(tmp_path) is None


def test_quic_takes_the_same_file(tmp_path: Path) -> None:
    cert, key = trust.issue(tmp_path, HOSTS, ADDRESSES)
    quic = QuicConfiguration(is_client=False)
    quic.load_cert_chain(str(cert), str(key))
    assert quic.private_key is not None and quic.certificate is not None and len(quic.certificate_chain) == 1


def test_scope_covers_names_below_and_addresses_inside() -> None:
    assert LOCAL.outside(Scope.of(["a.localhost", "[::1]"], ["127.9.9.9"])) is None
    assert (
        str(LOCAL.outside(Scope.of(["a.localhost", "notlocalhost"], ["10.0.0.1", "::1"]))) == "notlocalhost, 10.0.0.1"
    )
    assert Scope.of(["Bücher.localhost", "127.0.0.1"], []) == Scope.of(["xn--bcher-kva.localhost"], ["127.0.0.1"])


def test_what_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"."):
        trust.issue(tmp_path, ["a..b"], [])
    with pytest.raises(ValueError, match="not-an-address"):
        trust.issue(tmp_path, [], ["not-an-address"])
