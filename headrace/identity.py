"""Decide which certificate the listeners show: the configured one, or one that our own local CA issues.

The names of the certificate are also the names under which path prefixes are served (`RouteTable.own_names`), so they are
read from the certificate itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from config.model import Config, Listen
from headrace.listeners import TLS_SCHEMES


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files for the listeners. `ca_file`: the local CA that vouches for it, "" for a configured one."""

    cert_file: str
    key_file: str
    ca_file: str = ""


def needs_certificate(config: Config) -> bool:
    return any(listen.scheme in TLS_SCHEMES for listen in (*config.proxy.listen, *config.resolver.listen))


def certificate_for(config: Config, folder: Path) -> Certificate:
    """The configured files, or ones issued by the local CA in `folder`. Raises OSError when it cannot be kept there."""
    if config.tls.cert_file:
        return Certificate(config.tls.cert_file, config.tls.key_file)
    from headrace import trust  # its X.509 costs 25 ms, which a configured certificate does not need

    ca_file = trust.ensure_ca(folder)
    cert_file, key_file = trust.issue(folder, *names_of(config))
    return Certificate(str(cert_file), str(key_file), str(ca_file))


def names_of(config: Config) -> tuple[list[str], list[str]]:
    """Hosts and addresses that the issued certificate names: localhost, each pool host, each listen address."""
    hosts = ["localhost", *(host for pool in config.pools for host in pool.hosts)]
    listens: Sequence[Listen] = (*config.proxy.listen, *config.resolver.listen)
    own = [listen.host for listen in listens if not ip_address(listen.host).is_unspecified]
    addresses = ["127.0.0.1", "::1", *own]
    return list(dict.fromkeys(hosts)), list(dict.fromkeys(addresses))


def own_names(cert_file: str) -> list[str]:
    """The host names in a certificate, wildcards left out; [] when it cannot be read."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(Path(cert_file).read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return []
    return [name.lower() for name in names.get_values_for_type(x509.DNSName) if not name.startswith("*")]
