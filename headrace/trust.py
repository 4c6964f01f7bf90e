"""Be the certificate authority of this machine's own listeners, and of nothing else.

Theory: with no certificate configured, a CA is made once and kept in `state_dir/ca`. It is bound by name constraints
(RFC 5280 4.2.1.10) to localhost, the configured pool hosts and the listen addresses, so whoever steals its key can
impersonate nothing that headrace does not serve anyway. It issues one certificate, for names one by one: clients
refuse `*.localhost`, as a wildcard right below a top-level domain.

      ca.pem, ca-key.pem    the authority, ten years; made anew when a name is asked for that it may not vouch for
      server.pem            certificate, chain and key in one file, so that its replacement is one rename; 90 days
      bundle.pem            the system's roots and ours: what SSL_CERT_FILE may name, for it replaces the system's
      judged.json           that all of this was found good, and until when: see `judged`

Everything is for its owner alone. A file that others could read or that is damaged is made anew.
"""

from __future__ import annotations

import fcntl
import logging
import os
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace.judged import Judgement, remember
from headrace.state import ca_folder, ensure_folder, write_private

CA_LIFE = timedelta(days=3650)
LEAF_LIFE = timedelta(days=90)
RENEW_BEFORE = timedelta(days=30)
BACKDATE = timedelta(hours=1)
"""A clock that was set back a little must not make a fresh certificate one of the future."""

SYSTEM_ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch, Alpine
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",  # Alpine, macOS, the BSDs
)

Network = IPv4Network | IPv6Network
logger = logging.getLogger("headrace.trust")


@dataclass(frozen=True, slots=True)
class Scope:
    """Names that a certificate is for, or that an authority may vouch for."""

    hosts: tuple[str, ...]
    networks: tuple[Network, ...]

    @classmethod
    def of(cls, hosts: Sequence[str], addresses: Sequence[str]) -> Scope:
        """Lower case, ASCII, sorted, each once. ValueError for what is neither a host name nor an address."""
        asked = {host.rstrip(".").encode("idna").decode().lower() for host in hosts if not _is_address(host)}
        literal = [*addresses, *(host for host in hosts if _is_address(host))]
        networks = {ip_network(address.strip("[]")) for address in literal}
        return cls(tuple(sorted(asked)), tuple(sorted(networks, key=str)))

    def __str__(self) -> str:
        return ", ".join((*self.hosts, *map(_address, self.networks)))

    def outside(self, names: Scope) -> Scope | None:
        """What of `names` it may not vouch for; None when it may for all.

        RFC 5280: a permitted name covers itself and what is below it, a permitted network its addresses.
        """
        hosts = tuple(h for h in names.hosts if not any(h == own or h.endswith("." + own) for own in self.hosts))
        networks = tuple(network for network in names.networks if not self._covers(network))
        return Scope(hosts, networks) if hosts or networks else None

    def _covers(self, network: Network) -> bool:
        return any(network.version == own.version and network.subnet_of(own) for own in self.networks)  # type: ignore[arg-type]


LOCAL = Scope(("localhost",), (ip_network("127.0.0.0/8"), ip_network("::1/128")))


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def ensure_ca(state_dir: Path, *, at: datetime | None = None) -> Path:
    """The CA's certificate, made if there is none; also refreshes the bundle. Raises OSError."""
    with _locked(state_dir):
        _authority(state_dir, LOCAL, at or datetime.now(UTC))
    return ca_path(state_dir)


def issue(
    state_dir: Path, hosts: Sequence[str], addresses: Sequence[str], *, at: datetime | None = None
) -> tuple[Path, Path]:
    """Certificate and key files for these names: the ones at hand while they fit and have 30 days, else new ones.

    The two are one file. Call it at start, on reload, and once a day; then let the listeners reload. Raises OSError,
    and ValueError for a name that is none.
    """
    now = at or datetime.now(UTC)
    names = Scope.of(hosts, addresses)
    with _locked(state_dir):
        authority = _authority(state_dir, names, now)
        path = ca_folder(state_dir) / "server.pem"
        if not _still_good(path, names, authority, now):
            _write_leaf(path, names, authority, now)
            logger.info("issued a certificate for %s", names)
        _remember(path, [*hosts, *addresses], authority)
    return path, path


def ca_path(state_dir: Path) -> Path:
    return ca_folder(state_dir) / "ca.pem"


def own_names(cert_file: str) -> list[str]:
    """The host names in a certificate, wildcards left out; [] when it cannot be read."""
    try:
        certificate = x509.load_pem_x509_certificate(Path(cert_file).read_bytes())
        named = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return []
    return [name.lower() for name in named.get_values_for_type(x509.DNSName) if not name.startswith("*")]


def bundle_path(state_dir: Path) -> Path | None:
    """The system's roots and ours in one file; None when there is none, as where the system's roots were not found."""
    path = ca_folder(state_dir) / "bundle.pem"
    return path if path.exists() else None


def system_roots() -> Path | None:
    """The file with the roots that this system trusts. Never SSL_CERT_FILE: that may name our own bundle."""
    compiled_in = ssl.get_default_verify_paths().openssl_cafile
    for candidate in (*SYSTEM_ROOTS, compiled_in):
        if candidate and Path(candidate).is_file():
            return Path(candidate)
    return None


# -------------------------------------------------------------------------------------------------- the authority


def _authority(state_dir: Path, names: Scope, now: datetime) -> _Authority:
    """The kept CA if it may vouch for `names` and will outlive a leaf, else a new one."""
    kept = _read_authority(state_dir)
    if kept is None:
        return _make_authority(state_dir, names, now)
    if (outside := _scope_of(kept.certificate).outside(names)) is not None:
        logger.warning("a new local CA is made, for the old one may not vouch for %s", outside)
    elif kept.certificate.not_valid_after_utc - now < LEAF_LIFE:
        logger.warning(
            "a new local CA is made, for the old one ends on %s", kept.certificate.not_valid_after_utc.date()
        )
    else:
        _refresh_bundle(state_dir)
        return kept
    logger.warning("programs that were told to trust the old CA must be told again: headrace env")
    return _make_authority(state_dir, names, now)


def _read_authority(state_dir: Path) -> _Authority | None:
    key_file = ca_folder(state_dir) / "ca-key.pem"
    try:
        if key_file.stat().st_mode & 0o077:
            logger.warning("%s could be read by others: the local CA is made anew", key_file)
            return None
        key = load_pem_private_key(key_file.read_bytes(), None)
        certificate = x509.load_pem_x509_certificate(ca_path(state_dir).read_bytes())
        _scope_of(certificate)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, x509.ExtensionNotFound) as exc:
        logger.warning("the local CA in %s cannot be used (%s) and is made anew", key_file.parent, exc)
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        logger.warning("the local CA in %s has a key of another one and is made anew", key_file.parent)
        return None
    return _Authority(certificate, key)


def _make_authority(state_dir: Path, names: Scope, now: datetime) -> _Authority:
    scope = _narrowest(names)
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    # Two CAs of one name confuse clients that hold both, so each is named by its key.
    name = f"headrace local CA {identifier.digest.hex()[:8]}"
    permitted: list[x509.GeneralName] = [x509.DNSName(host) for host in scope.hosts]
    permitted += [x509.IPAddress(network) for network in scope.networks]
    certificate = (
        _builder(name, key.public_key(), now, CA_LIFE)
        .issuer_name(_named(name))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.NameConstraints(permitted_subtrees=permitted, excluded_subtrees=None), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_authority(state_dir, _Authority(certificate, key))
    logger.info("made a local CA, %s, that can vouch for %s only", name, ", ".join(scope.hosts))
    return _Authority(certificate, key)


def _write_authority(state_dir: Path, made: _Authority) -> None:
    # The key first: a crash in between leaves a pair that does not fit, which the next start replaces.
    write_private(ca_folder(state_dir) / "ca-key.pem", _key_pem(made.key))
    write_private(ca_path(state_dir), _pem(made.certificate))
    _refresh_bundle(state_dir)


def _narrowest(names: Scope) -> Scope:
    """localhost and loopback, and of `names` what these do not cover."""
    outside = LOCAL.outside(names) or Scope((), ())
    return Scope((*LOCAL.hosts, *outside.hosts), (*LOCAL.networks, *outside.networks))


def _scope_of(certificate: x509.Certificate) -> Scope:
    """What a CA is constrained to. Raises ExtensionNotFound."""
    constraints = certificate.extensions.get_extension_for_class(x509.NameConstraints).value
    permitted = constraints.permitted_subtrees or ()
    hosts = tuple(name.value for name in permitted if isinstance(name, x509.DNSName))
    networks = (name.value for name in permitted if isinstance(name, x509.IPAddress))
    return Scope(hosts, tuple(n for n in networks if isinstance(n, IPv4Network | IPv6Network)))


def _refresh_bundle(state_dir: Path) -> None:
    """Our root behind the system's. Never ours alone: SSL_CERT_FILE replaces, and every other host would fail."""
    path, roots = ca_folder(state_dir) / "bundle.pem", system_roots()
    if roots is None:
        path.unlink(missing_ok=True)
        return
    text = f"{roots.read_text('utf-8', 'replace').rstrip()}\n{ca_path(state_dir).read_text('ascii')}"
    if not path.exists() or path.read_text("utf-8", "replace") != text:
        write_private(path, text)


# -------------------------------------------------------------------------------------------------- the certificate


def _still_good(path: Path, names: Scope, authority: _Authority, now: datetime) -> bool:
    """It is for exactly these names, of this CA, unreadable to others, fits its key and has time left."""
    try:
        if path.stat().st_mode & 0o077:
            return False
        content = path.read_bytes()
        leaf, key = x509.load_pem_x509_certificate(content), load_pem_private_key(content, None)
        named = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        leaf.verify_directly_issued_by(authority.certificate)
        same_names = Scope.of(
            named.get_values_for_type(x509.DNSName), [str(one) for one in named.get_values_for_type(x509.IPAddress)]
        )
    except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    in_time = leaf.not_valid_before_utc <= now < leaf.not_valid_after_utc - RENEW_BEFORE
    return same_names == names and in_time and key.public_key() == leaf.public_key()


def _write_leaf(path: Path, names: Scope, authority: _Authority, now: datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    alternatives: list[x509.GeneralName] = [x509.DNSName(host) for host in names.hosts]
    alternatives += [x509.IPAddress(network.network_address) for network in names.networks]
    leaf = (
        _builder("headrace", key.public_key(), now, LEAF_LIFE)
        .issuer_name(authority.certificate.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_issuer_identifier(authority), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    write_private(path, _pem(leaf) + _pem(authority.certificate) + _key_pem(key))


def _remember(path: Path, asked: Sequence[str], authority: _Authority) -> None:
    """The files as they are now are good for these names, until one of them is to be renewed."""
    roots = system_roots()
    if roots is None:
        return  # they may be installed at any time, and then the bundle is made
    leaf, root = x509.load_pem_x509_certificate(path.read_bytes()), authority.certificate
    begin = max(leaf.not_valid_before_utc, root.not_valid_before_utc)
    end = min(leaf.not_valid_after_utc - RENEW_BEFORE, root.not_valid_after_utc - LEAF_LIFE)
    found = Judgement(tuple(asked), tuple(own_names(str(path))), begin.timestamp(), end.timestamp())
    remember(path.parent, found, roots=roots)


def _builder(name: str, key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + life)
    )


def _issuer_identifier(authority: _Authority) -> x509.AuthorityKeyIdentifier:
    own = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


# -------------------------------------------------------------------------------------------------- files and forms


@contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """Two daemons that start at once must not each make a CA. Held for milliseconds."""
    folder = ca_folder(state_dir)
    ensure_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _is_address(text: str) -> bool:
    try:
        ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


def _address(network: Network) -> str:
    return str(network.network_address)
