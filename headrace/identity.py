"""Decide which certificate the listeners show: the configured one, or one that our own local CA issues; and keep it.

The names of the certificate are also the names under which path prefixes are served (`RouteTable.own_names`), so they are
those in the certificate itself. What reads certificates is loaded only for one that was not judged before.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from config.model import Config, Listen
from headrace import state
from headrace.judged import recall
from headrace.listeners import TLS_SCHEMES
from proxy.io.tls import TicketRing, TlsIdentity

logger = logging.getLogger("headrace.identity")


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files for the listeners, and the host names in them, wildcards left out; none when they cannot be read.

    `ca_file`: the local CA that vouches for it, "" for a configured one.
    """

    cert_file: str
    key_file: str
    ca_file: str = ""
    names: tuple[str, ...] = ()


def needs_certificate(config: Config) -> bool:
    return any(listen.scheme in TLS_SCHEMES for listen in (*config.proxy.listen, *config.resolver.listen))


def certificate_for(config: Config, folder: Path) -> Certificate:
    """The configured files, or ones issued by the local CA in `folder`. Raises OSError when it cannot be kept there."""
    if config.tls.cert_file:
        return _configured(config.tls.cert_file, config.tls.key_file)
    hosts, addresses = names_of(config)
    ca_dir = state.ca_folder(folder)
    if (judged := recall(ca_dir, [*hosts, *addresses], now=time.time())) is not None:
        server = str(ca_dir / "server.pem")
        return Certificate(server, server, str(ca_dir / "ca.pem"), judged.names)
    from headrace import trust

    ca_file = trust.ensure_ca(folder)
    cert_file, key_file = trust.issue(folder, hosts, addresses)
    return Certificate(str(cert_file), str(key_file), str(ca_file), tuple(trust.own_names(str(cert_file))))


def _configured(cert_file: str, key_file: str) -> Certificate:
    from headrace import trust

    return Certificate(cert_file, key_file, names=tuple(trust.own_names(cert_file)))


def names_of(config: Config) -> tuple[list[str], list[str]]:
    """Hosts and addresses that the issued certificate names: localhost, each pool host, each listen address."""
    hosts = ["localhost", *(host for pool in config.pools for host in pool.hosts)]
    listens: Sequence[Listen] = (*config.proxy.listen, *config.resolver.listen)
    own = [listen.host for listen in listens if not ip_address(listen.host).is_unspecified]
    addresses = ["127.0.0.1", "::1", *own]
    return list(dict.fromkeys(hosts)), list(dict.fromkeys(addresses))


class OwnIdentity:
    """The certificate of the listeners, and the TLS contexts that show it: made at start, proved again, changed over.

    Owner: the daemon, which says when. `tls` is None until something wants TLS.
    """

    def __init__(self, ring: TicketRing) -> None:
        self.certificate: Certificate | None = None
        self.tls: TlsIdentity | None = None
        self._ring = ring
        self._spare: tempfile.TemporaryDirectory[str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.certificate.names if self.certificate else ()

    def make(self, config: Config) -> None:
        """At start. Raises IdentityProblem, OSError or ValueError."""
        if needs_certificate(config):
            self.certificate = self._certificate_for(config)
            self.tls = self._context_of(self.certificate, config)

    async def prove(self, config: Config) -> Certificate | None:
        """The files that `config` wants, known to fit. Raises as `make` does, and then nothing changed."""
        if not needs_certificate(config):
            return self.certificate
        certificate = await asyncio.to_thread(self._certificate_for, config)
        proved = self._context_of(certificate, config)
        if self.tls is None:
            self.tls, self.certificate = proved, certificate
        return certificate

    def use(self, certificate: Certificate | None) -> bool:
        """Show what was proved; whether new handshakes see another certificate than before."""
        if self.tls is None or certificate is None:
            return False
        self.certificate = certificate
        if not self.tls.reload(certificate.cert_file, certificate.key_file):
            return False
        logger.info("new handshakes show the certificate in %s", certificate.cert_file)
        return True

    def _context_of(self, certificate: Certificate, config: Config) -> TlsIdentity:
        return TlsIdentity(
            certificate.cert_file, certificate.key_file, ring=self._ring, min_version=config.tls.min_version
        )

    def _certificate_for(self, config: Config) -> Certificate:
        """With a state_dir that takes no file, the local CA lives as long as this process, and is another next time."""
        if self._spare is None:
            try:
                return certificate_for(config, config.state_dir)
            except OSError as exc:
                logger.warning("the local CA cannot be kept in %s (%s): it lasts until we stop", config.state_dir, exc)
                self._spare = tempfile.TemporaryDirectory(prefix="headrace-")
        return certificate_for(config, Path(self._spare.name))

    def close(self) -> None:
        if self._spare is not None:
            self._spare.cleanup()
