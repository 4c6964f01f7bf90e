"""A throw-away certificate authority, made for one lab and gone with its folder.

Strict verifiers (VERIFY_X509_STRICT, the default since Python 3.13) ask for key identifiers and a critical keyUsage, so
both certificates carry what RFC 5280 4.2.1 demands.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=2)
CLOCK_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class ThrowAwayCa:
    """Files of a CA and of the one certificate it issued; keys are readable by their owner alone."""

    ca_file: Path
    cert_file: Path
    key_file: Path

    def server_context(self, alpn: Sequence[str]) -> ssl.SSLContext:
        """A server's TLS context with this certificate, TLS 1.2 and up."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.cert_file, self.key_file)
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context

    def client_context(self, alpn: Sequence[str] = ()) -> ssl.SSLContext:
        """A client's TLS context that trusts this CA and no other."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca_file)
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context

    def key_hash(self) -> str:
        """SHA-256 of the certificate's public key in base64, by which a browser accepts exactly this certificate."""
        key = x509.load_pem_x509_certificate(self.cert_file.read_bytes()).public_key()
        der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        return base64.b64encode(hashlib.sha256(der).digest()).decode()


def issue(folder: Path, names: Sequence[str]) -> ThrowAwayCa:
    """Make a CA and a server certificate for `names` (host names and addresses alike) in `folder`."""
    ca_key, leaf_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _authority(ca_key)
    leaf = _leaf(authority, ca_key, leaf_key, names)
    made = ThrowAwayCa(folder / "lab-ca.pem", folder / "lab-cert.pem", folder / "lab-key.pem")
    made.ca_file.write_bytes(_pem(authority))
    made.cert_file.write_bytes(_pem(leaf) + _pem(authority))
    _write_private(made.key_file, leaf_key)
    return made


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = _name("headrace lab CA, throw-away")
    return (
        _dated(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _leaf(
    authority: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    leaf_key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
) -> x509.Certificate:
    return (
        _dated(_name("headrace lab"), authority.subject, leaf_key.public_key())
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(leaf_key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _dated(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    # Made with its mode: a chmod afterwards leaves a moment in which anybody may open it.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(pem)
