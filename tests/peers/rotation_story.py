"""The life of a ticket ring, told by whatever interpreter runs this: `python rotation_story.py CERT STATE_DIR`. Stdlib only.

Prints one JSON line that `tests/proxy/test_tls.py` judges.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from config.model import Tickets
from proxy.io.tls import TicketRing, TlsIdentity
from tests.peers.handshake import shake


async def story(cert: str, state_dir: Path) -> dict[str, object]:
    rules = Tickets(keep=1)
    ring = TicketRing(rules, state_dir=state_dir)
    identity = TlsIdentity(cert, cert, ring=ring)
    one, two = identity.context(["h2", "http/1.1"]), identity.context([])
    client = ssl.create_default_context(cafile=cert)
    told: dict[str, object] = {"supported": ring.supported, "why_not": ring.why_not}

    shaken = shake(one, client)
    told["first"], told["hint_s"] = shaken.resumed, shaken.session.ticket_lifetime_hint
    shaken = shake(two, client, shaken.session)
    told["other context"] = shaken.resumed
    await ring.rotate()
    shaken = shake(one, client, shaken.session)
    told["old key, after a rotation"] = shaken.resumed
    await ring.rotate()
    shaken = shake(two, client, shaken.session)
    told["renewed under the new key, which is now old"] = shaken.resumed
    restarted = TlsIdentity(cert, cert, ring=TicketRing(rules, state_dir=state_dir)).context([])
    kept = shaken.session
    shaken = shake(restarted, client, kept)
    told["another process"] = shaken.resumed
    await ring.rotate()
    await ring.rotate()
    shaken = shake(one, client, kept)
    told["key dropped"] = shaken.resumed
    told["missed"] = ring.snapshot().missed
    return told


if __name__ == "__main__":
    print(json.dumps(asyncio.run(story(sys.argv[1], Path(sys.argv[2])))))
