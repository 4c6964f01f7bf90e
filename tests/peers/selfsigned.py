"""A certificate that vouches for itself, with its key, in one PEM file."""

from __future__ import annotations

import datetime
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


def write(
    path: Path,
    common_name: str,
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None,
    password: bytes = b"",
) -> str:
    """For localhost and 127.0.0.1, one day; returns the path."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    path.write_bytes(certificate.public_bytes(Encoding.PEM) + private)
    return str(path)
