"""A throw-away CA on disk, for peers that must be verified like everyone else."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Sequence
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM


class Authority:
    """Issues leaf certificates into `directory`; clients trust it by `ca_file`."""

    def __init__(self, directory: Path, name: str = "test authority") -> None:
        self.directory, self.name = directory, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._issued = 0

    @cached_property
    def ca_file(self) -> str:
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = self._builder(self.name, self._key, is_ca=True).add_extension(usage, critical=True)
        path = self.directory / f"ca-{id(self)}.pem"
        path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(PEM))
        return str(path)

    def issue(self, names: Sequence[str] = ("localhost",), addresses: Sequence[str] = ("127.0.0.1", "::1")) -> str:
        """A PEM file with a leaf for these names and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [*map(x509.DNSName, names), *(x509.IPAddress(ip_address(a)) for a in addresses)]
        leaf = (
            self._builder(names[0], key, is_ca=False)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self._issued += 1
        path = self.directory / f"leaf-{id(self)}-{self._issued}.pem"
        private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        path.write_bytes(leaf.public_bytes(PEM) + private)
        return str(path)

    def server_context(self, alpn: Sequence[str] = (), names: Sequence[str] = ("localhost",)) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.issue(names))
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context

    def _builder(self, subject: str, key: ec.EllipticCurvePrivateKey, *, is_ca: bool) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
