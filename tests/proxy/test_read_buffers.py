"""An idle TLS connection holds no memory that only others have used."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from headrace.lab.ca import ThrowAwayCa

STORY = """
import asyncio, ssl, sys
import uvloop
from config.model import Listen
from headrace.allocator import keep_blocks
from proxy.io.inbound_tcp import listen_tcp
from proxy.io.read_buffers import give_back
from tests.patience import no_hang
from tests.peers.services import ByHand

REQUEST = b"GET /x HTTP/1.1\\r\\nhost: localhost\\r\\nx-wide: " + b"x" * 30_000 + b"\\r\\n\\r\\n"
ANSWER = b"HTTP/1.1 200 OK\\r\\n"


async def main() -> None:
    keep_blocks()
    used = [b"\\xff" * (256 * 1024) for _ in range(64)]
    del used  # the next blocks of this size are here
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=sys.argv[1])
    server.load_cert_chain(sys.argv[2], sys.argv[3])
    service = ByHand()
    service.on_exchange = lambda exchange: exchange.answer()
    listener = await listen_tcp(Listen("https", "127.0.0.1", 0), service, tls=server)
    async with no_hang():
        reader, writer = await asyncio.open_connection(*listener.address, ssl=client, server_hostname="localhost")
        while not any(type(connection).__name__ == "H1ServerConnection" for connection in service.connections):
            await asyncio.sleep(0)
        (rim,) = service.connections
        transport = rim.wire.transport
        print("of others:", bytes(transport.get_extra_info("uvloop.sslproto").get_buffer(1)[8192:-4096]).count(0xFF))
        writer.write(REQUEST)
        await reader.readuntil(ANSWER)
        print("again:", give_back(transport))
        writer.write(REQUEST)
        await reader.readuntil(ANSWER)
    writer.transport.abort()
    listener.close()
    for connection in list(service.connections):
        connection.close_now()


uvloop.run(main())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap's ways are glibc's")
def test_read_buffer_of_an_idle_connection_holds_no_pages_that_others_have_used(ca: ThrowAwayCa) -> None:
    argv = [sys.executable, "-W", "error", "-c", STORY, str(ca.ca_file), str(ca.cert_file), str(ca.key_file)]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == ["of others: 0", "again: True"]
