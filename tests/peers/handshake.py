"""Whole TLS handshakes in memory, stdlib only: no socket, no loop, so that any interpreter can run them."""

from __future__ import annotations

import ssl
from typing import NamedTuple


class Shaken(NamedTuple):
    """Both ends after a handshake and one exchange of bytes, so that the client holds its ticket."""

    client: ssl.SSLObject
    server: ssl.SSLObject

    @property
    def session(self) -> ssl.SSLSession:
        session = self.client.session
        assert session is not None
        return session

    @property
    def resumed(self) -> bool:
        return bool(self.server.session_reused)

    @property
    def common_name(self) -> str:
        certificate = self.client.getpeercert()
        assert certificate
        return dict(field[0] for field in certificate["subject"])["commonName"]


def shake(server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None = None) -> Shaken:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname="localhost", session=session),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    todo = set(ends)
    for _ in range(10):
        for end in ends:
            if end in todo:
                try:
                    end.do_handshake()
                    todo.discard(end)
                except ssl.SSLWantReadError:
                    pass
    assert not todo, "the handshake did not end"
    ends[1].write(b"hi")
    assert ends[0].read(2) == b"hi"
    return Shaken(*ends)
