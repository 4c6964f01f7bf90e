"""Join a client's and an edge's WebSocket after the upgrade: bytes through, pings on both legs, honest endings.

Theory: two sides. Bytes of one go to the other at once; control frames of ours go in between whole frames only.

      client  -- bytes -->  scanner  -- edge.data -->   edge        our pings to the edge: masked
              <- client.data --  scanner  <-- bytes --              our pings to the client: not

How it ends. A peer's close frame passes like any frame, with its code and text. An end (FIN) is a half-close: the other
direction goes on. But a peer that died says FIN just as well, and its counterpart must not linger. So after a FIN we
*probe*: pings at once and soon after. A peer that is gone answers the first with RST, the next one meets it, and the rim
tells us by an abort; a peer that only half-closed swallows them. In the table, 1011 is `Code.INTERNAL`:

      edge lost                        client gets close 1011 at a boundary, else its stream is aborted
      edge ends without a close frame  client -> edge goes on; after GRACE_S the client gets close 1011
      client lost                      edge aborted
      client ends                      edge ended; edge -> client goes on
      a peer silent for pong_timeout   close 1011 on both legs
      edge lost before it said a word  with `reconnect`: another edge, the opening said again
      drain                            close 1001 (or 1012) on both legs

Tasks: none. One call_later at a time, for the first thing that is due; cancelled when the tunnel is finished.
Rules for editing: 1. nothing here awaits; 2. on_finished is called once, last; 3. every wait has a deadline in `_dues`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from config.model import WebSocket
from proxy.io.websocket_side import Side
from proxy.messages import NOBODY, Abort, Cause, Leg, Party, Stage
from proxy.websocket import MAX_KEPT, Beat, Code, Opening, Pulse
from resolver.io.clock import now as boottime

PROBES_S = (0.0, 0.05, 0.25, 0.6)
"""When, after its FIN, a peer is pinged."""
GRACE_S = 1.0
"""How long an edge may have half-closed before the client is told."""
CLOSE_WAIT_S = 5.0
"""For the other half of a close handshake, and for the FINs after it; then the legs are aborted."""
REOPEN_WAIT_S = 30.0
MAX_REOPENINGS = 3
SLEPT_S = 5.0
"""A timer later than this: the machine slept, nobody is judged for that silence."""


@dataclass(frozen=True, slots=True)
class TunnelEnd:
    """How a tunnel ended. `code`: the close code that was agreed or sent, None when there was none.

    `cause` None: cleanly, by a close frame or by FINs of both. `bytes_up` came from the client.
    """

    by: Party
    cause: Cause | None
    code: int | None = None
    detail: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    reopened: int = 0


class _State(Enum):
    RELAYING = "relaying"
    REOPENING = "reopening"  # the edge is lost, another one is being dialled, the client is paused
    CLOSING = "closing"  # we are sending close frames of our own
    FINISHED = "finished"


class WebSocketTunnel:
    """Becomes the receiver of both legs. Made right after the client was told 101 (or 200).

    `reconnect` asks the owner for another edge, while the client has heard no message (or, with on_edge_failure =
    "replay", between messages). The owner answers with `attach(edge)` or with `give_up(abort)`; the new edge must
    have accepted the same subprotocol and extensions as the first, for the client was told those.
    """

    def __init__(
        self,
        client: Leg,
        edge: Leg,
        config: WebSocket,
        *,
        on_finished: Callable[[TunnelEnd], None],
        reconnect: Callable[[], None] | None = None,
        clock: Callable[[], float] = boottime,
    ) -> None:
        self.clock = clock
        self._config = config
        self._on_finished = on_finished
        self._reconnect = reconnect
        self._state = _State.RELAYING
        self._ours = os.urandom(8)  # no peer's own pong begins like it by chance
        self._pings = 0
        self._verdict: TunnelEnd | None = None
        self._deadline: float | None = None
        self._reopened = 0
        self._replays = config.on_edge_failure == "replay" and config.replay_messages > 0
        self._opening = Opening(config.replay_messages if self._replays else 0)
        self._held_up: list[bytes] = []  # what the client said while it had no edge: the opening, then what came late
        if reconnect is None:
            self._opening.forget()
        self.client = self._side(client, Party.CLIENT)
        self.edge = self._side(edge, Party.EDGE)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._arm()

    @property
    def finished(self) -> bool:
        return self._state is _State.FINISHED

    def drain(self, code: int = Code.GOING_AWAY) -> None:
        """We go: both peers get a close frame (1001, or 1012 for a restart) at the next boundary, then up to 5 s."""
        if self._state in (_State.RELAYING, _State.REOPENING):
            self._close_both(TunnelEnd(Party.US, Cause.REFUSED, int(code), "the proxy is stopping"))

    def attach(self, edge: Leg) -> None:
        """Another edge accepted the upgrade: it gets what the client said, and the tunnel goes on."""
        if self._state is not _State.REOPENING:
            edge.abort(Abort(Party.CLIENT, Stage.BODY, Cause.CANCELLED, "the client left while this edge was dialled"))
            return
        self._state, self._deadline = _State.RELAYING, None
        self.edge = self._side(edge, Party.EDGE)
        if said := b"".join(self._held_up):
            edge.data(said)
        self._held_up.clear()
        self.client.resume()
        self._arm()

    def give_up(self, abort: Abort) -> None:
        """No other edge could be had: the client is told."""
        if self._state is _State.REOPENING:
            self._lose_edge(abort)

    # ---------------------------------------------------------------- called by the sides

    def pass_on(self, side: Side, passed: bytes, boundary: int) -> None:
        """Bytes that `side` said and that its scanner let through."""
        if side is self.client:
            self._opening.add(passed, side.scanner)
            if self._state is _State.REOPENING:
                self._hold_up(passed)
                return
        elif side.scanner.spoken and not self._replays:
            self._opening.forget()
        side.other.send(passed, boundary)

    def on_close_frame(self, side: Side) -> None:
        """`side` closes; its frame has gone to the other one, unless that one had a close of ours already."""
        self._note(TunnelEnd(side.party, None, side.scanner.close_code))
        if self._state is _State.REOPENING:
            self._answer_for_edge()
            self._await_closes()
            return
        side.other.close_sent = True
        self._settle()

    def on_side_ended(self, side: Side) -> None:
        """A FIN: a half-close, or all that is left of a peer."""
        if self._state is not _State.RELAYING:
            self._settle()
        elif side is self.client or side.closed or side.scanner.broken:
            side.other.shut_down()
            self._settle()
        elif side.close_sent:
            self._answer_for_edge()
        elif self._may_reopen():
            side.abort(Abort(Party.US, Stage.BODY, Cause.LOST, "ended before its first message"))
            self._reopen()
        elif side.scanner.at_boundary:
            self._settle()
        else:
            self._lose_edge(Abort(Party.EDGE, Stage.BODY, Cause.LOST, "the edge ended inside a frame"))

    def on_side_lost(self, side: Side, abort: Abort) -> None:
        """A leg died."""
        if side is self.client and not (side.closed and side.close_sent):
            self._note(TunnelEnd(Party.CLIENT, abort.cause, None, abort.detail))
            self.edge.abort(Abort(Party.CLIENT, Stage.BODY, Cause.CANCELLED, abort.detail))
            self._finish()
        elif side.closed or self._state is _State.CLOSING:
            self._settle()
        elif side.close_sent:
            self._answer_for_edge()
        elif self._may_reopen():
            self._reopen()
        else:
            self._lose_edge(abort)

    # ---------------------------------------------------------------- endings

    def _answer_for_edge(self) -> None:
        """The client closed and the edge went without the other half of the handshake, as many do: we say it."""
        code = self.client.scanner.close_code
        self.client.say_close(Code.NORMAL if code in (None, Code.NO_STATUS) else code, "")
        self._settle()

    def _lose_edge(self, abort: Abort) -> None:
        """The edge is no more. The client learns it by a close frame, or by an abort where no frame may stand."""
        self._note(TunnelEnd(Party.EDGE, abort.cause, Code.INTERNAL, abort.detail))
        self.edge.abort(Abort(Party.US, Stage.BODY, abort.cause, abort.detail))
        if self.client.at_boundary or self.client.mute:
            self.client.say_close(Code.INTERNAL, "the connection to the edge was lost")
        else:
            self.client.abort(Abort(Party.EDGE, Stage.BODY, abort.cause, abort.detail))
        self._await_closes()

    def _close_both(self, end: TunnelEnd) -> None:
        assert end.code is not None
        self._note(end)
        for side in (self.client, self.edge):
            side.say_close(end.code, end.detail)
        self._await_closes()

    def _await_closes(self) -> None:
        self._state, self._deadline = _State.CLOSING, None
        for side in (self.client, self.edge):
            side.resume()  # its own close frame has to be heard
        self._settle()

    def _settle(self) -> None:
        """Shut what is done, finish when both are, and see that nothing waits for ever."""
        if self._state is _State.FINISHED:
            return
        both = (self.client, self.edge)
        if all(side.done for side in both):
            for side in both:
                side.shut_down()
        # After a close handshake we wait for the peers' FINs: a socket closed too early may lose them our last bytes.
        if all(side.gone or (side.ended_at is not None and side.shut) for side in both):
            self._finish()
            return
        closing = self._state is _State.CLOSING or any(side.close_sent for side in both)
        if closing and self._deadline is None:
            self._deadline = self.clock() + CLOSE_WAIT_S
        self._arm()

    def _note(self, end: TunnelEnd) -> None:
        if self._verdict is None:  # the first reason is the reason
            self._verdict = end

    def _finish(self) -> None:
        if self._state is _State.FINISHED:
            return
        self._state = _State.FINISHED
        if self._timer is not None:
            self._timer.cancel()
        for side in (self.client, self.edge):
            side.leg.receiver = NOBODY
        end = self._verdict or TunnelEnd(Party.CLIENT, None, None, "ended without a close frame")
        up, down = self.client.taken, self.edge.taken
        self._on_finished(TunnelEnd(end.by, end.cause, end.code, end.detail, up, down, self._reopened))

    # ---------------------------------------------------------------- another edge

    def _may_reopen(self) -> bool:
        """Another edge can take over unnoticed: the client is between messages and what it said is kept."""
        unheard = not self.edge.scanner.spoken
        return (
            self._reconnect is not None
            and self._state is _State.RELAYING
            and self._reopened < MAX_REOPENINGS
            and self._opening.whole
            and not self.client.done
            and not self.client.close_sent
            and (self._between_messages() if self._replays else unheard)
        )

    def _between_messages(self) -> bool:
        scanners = (self.client.scanner, self.edge.scanner)
        return all(scanner.at_boundary and not scanner.in_message for scanner in scanners)

    def _reopen(self) -> None:
        assert self._reconnect is not None
        self._state = _State.REOPENING
        self._reopened += 1
        self.edge.leg.receiver = NOBODY
        self.edge.gone = True
        self.client.pause()
        self._held_up = [self._opening.take()]
        self._deadline = self.clock() + REOPEN_WAIT_S
        self._arm()
        self._reconnect()

    def _hold_up(self, late: bytes) -> None:
        """The client was paused, yet a window of bytes may follow."""
        self._held_up.append(late)
        if sum(map(len, self._held_up)) > 2 * MAX_KEPT:
            self._lose_edge(Abort(Party.US, Stage.CONNECT, Cause.REFUSED, "too much was said while there was no edge"))

    # ---------------------------------------------------------------- time

    def _side(self, leg: Leg, party: Party) -> Side:
        pulse = Pulse(self._config.ping_interval_s, self._config.pong_timeout_s, self.clock())
        return Side(self, leg, party, pulse, self._ours)

    def _arm(self) -> None:
        """One timer, for the first thing that may be due."""
        if self._timer is not None:
            self._timer.cancel()
        self._due = min(self._dues(), default=self.clock() + CLOSE_WAIT_S)
        self._timer = self._loop.call_later(max(0.0, self._due - self.clock()), self._on_timer)

    def _dues(self) -> list[float]:
        dues = [] if self._deadline is None else [self._deadline]
        for side in (self.client, self.edge):
            if self._is_judged(side):
                dues.append(self._silence_ends(side) if self._cannot_be_asked(side) else side.pulse.next_at())
            if self._is_probed(side):
                assert side.ended_at is not None
                dues.append(side.ended_at + PROBES_S[side.probes])
        if self._is_client_to_be_told():
            assert self.edge.ended_at is not None
            dues.append(self.edge.ended_at + GRACE_S)
        return dues

    def _on_timer(self) -> None:
        now = self.clock()
        if now - self._due > SLEPT_S:
            for side in (self.client, self.edge):
                side.pulse.forgive(now)
        if self._deadline is not None and now >= self._deadline:
            self._on_deadline()
            return
        for side in (self.edge, self.client):
            self._probe(side, now)
            self._beat(side, now)
        if self._is_client_to_be_told() and self.edge.ended_at is not None and now >= self.edge.ended_at + GRACE_S:
            self._tell_of_half_close()
        if self._state is not _State.FINISHED:
            self._arm()

    def _on_deadline(self) -> None:
        if self._state is _State.REOPENING:
            self._lose_edge(Abort(Party.US, Stage.CONNECT, Cause.TIMED_OUT, f"no other edge in {REOPEN_WAIT_S:.0f} s"))
            return
        for side in (self.client, self.edge):
            side.abort(Abort(Party.US, Stage.BODY, Cause.TIMED_OUT, f"no end in {CLOSE_WAIT_S:.0f} s after a close"))
        self._finish()

    def _is_probed(self, side: Side) -> bool:
        relaying = self._state is _State.RELAYING and not (side.mute or side.closed)
        return relaying and side.ended_at is not None and side.probes < len(PROBES_S)

    def _probe(self, side: Side, now: float) -> None:
        if self._is_probed(side) and side.ended_at is not None and now >= side.ended_at + PROBES_S[side.probes]:
            side.probes += 1
            side.ping(self._ping_payload())

    def _is_client_to_be_told(self) -> bool:
        waits = self._state is _State.RELAYING and self.edge.ended_at is not None
        return waits and not (self.edge.closed or self.client.mute or self.client.ended_at is not None)

    def _tell_of_half_close(self) -> None:
        self._note(TunnelEnd(Party.EDGE, Cause.LOST, Code.INTERNAL, "the edge ended without a close frame"))
        self.client.say_close(Code.INTERNAL, "the edge ended without a close frame")
        self._settle()

    def _is_judged(self, side: Side) -> bool:
        """A peer that ended, was sent a close, or is being replaced owes no sign of life; one that we do not read neither."""
        relaying = self._state is _State.RELAYING or (self._state is _State.REOPENING and side is self.client)
        return relaying and not (side.done or side.close_sent or side.paused)

    def _cannot_be_asked(self, side: Side) -> bool:
        return bool(side.shut or side.owed or side.other.scanner.broken)

    def _silence_ends(self, side: Side) -> float:
        return max(side.silent_since, side.pulse.heard_at) + self._config.pong_timeout_s

    def _beat(self, side: Side, now: float) -> None:
        if not self._is_judged(side):
            return
        if self._cannot_be_asked(side):
            silent = now >= self._silence_ends(side)
        else:
            beat = side.pulse.beat(now)
            silent = beat is Beat.GIVE_UP
            if beat is Beat.PING:
                side.ping(self._ping_payload())
        if silent:
            detail = f"no frame from the {side.party.value} for {now - side.pulse.heard_at:.0f} s"
            self._close_both(TunnelEnd(side.party, Cause.TIMED_OUT, Code.INTERNAL, detail))

    def _ping_payload(self) -> bytes:
        self._pings += 1
        return self._ours + self._pings.to_bytes(4, "big")
