"""What a rank says of itself, and when: registration with a bounded back-off, heartbeats, loads. Pure; the base of
`RankCore`.

The law of this file: every message carries the rank's whole position and a number that grows, so whoever hears a
later one has missed nothing that matters. Nothing is queued for a coordinator that is not there.
"""

from random import Random
from typing import Any

from ..proto.messages import (
    Activity,
    At,
    FromRank,
    Heartbeat,
    HoldOrder,
    Load,
    LoadReport,
    Mode,
    NeedWave,
    Refused,
    Register,
    Started,
    Timing,
    WaveComplete,
)
from .events import Effect, Identity, Send
from .stepper import Stepper

REGISTER_MS = 200
REGISTER_MS_MAX = 1_000
"""Bounded, so that a returning coordinator is found within about a second."""
LOAD_INTERVAL_MS = 50
NEVER_MS = 1 << 62


class Voice:
    """Identity, position and timers of one rank."""

    def __init__(self, identity: Identity, random: Random, now_ms: int) -> None:
        self.identity = identity
        self.kind = identity.kind
        self.stepper = Stepper(identity.rank)
        self.mode = Mode.JOINING if identity.kind.lockstep else Mode.SERVING
        self.term = 0
        self.applied = 0
        self.registered = False
        self.refused: Refused | None = None
        self.timing = Timing()
        self.feed = ""
        self.hold: HoldOrder | None = None
        """The hold that this rank has applied and not yet been resumed from."""
        self.resumed = 0
        """Number of the last hold that this rank was commanded to end."""
        self.group = ""
        self.group_ranks: tuple[int, ...] = ()
        """Ranks of the group, in the order of their places."""
        self.group_rank = 0
        """This rank's place in its group: index in the tuples of a plan. An independent rank is a group of its own."""
        self.group_next = ""
        """Incarnation of the member after this one."""
        self.exchange = ""
        self.heard_ms = now_ms
        self.load = Load()
        self.closed = False
        self.activity = Activity.IDLE
        self.activity_since_ms = now_ms
        self._random = random
        self._number = 0
        self._attempt = 1
        """Number from which a registration says where this rank stands now; older ones are copies of the past."""
        self._register_ms = now_ms
        self._register_pause_ms = REGISTER_MS
        self._heartbeat_ms = now_ms
        self._busy_until_ms = 0
        self._load_dirty = False
        self._load_sent_ms = now_ms - LOAD_INTERVAL_MS
        self._out: list[Effect] = []

    def at(self) -> At:
        """This rank's whole position."""
        return At(
            mode=self.mode,
            term=self.term,
            epoch=self.stepper.epoch,
            applied=self.applied,
            wave=self.stepper.wave,
            step=self.stepper.step,
            has_work=self.stepper.has_work,
            hold=self.hold is not None,
        )

    def next_deadline_ms(self) -> int:
        """When a `Tick` must come at the latest."""
        if self.closed:
            return NEVER_MS
        if not self.registered:
            return self._register_ms if self.refused is None or self.refused.retry else NEVER_MS
        if self._load_dirty:
            return min(self._heartbeat_ms, self._load_sent_ms + LOAD_INTERVAL_MS)
        return self._heartbeat_ms

    def _register_again(self, now_ms: int) -> None:
        if self.registered or self._register_ms > now_ms + REGISTER_MS:
            self._register_ms = now_ms
            self._register_pause_ms = REGISTER_MS
        self._unregister()

    def _unregister(self) -> None:
        if self.registered:
            self.registered = False
            self._attempt = self._number + 1

    def _on_time(self, now_ms: int) -> None:
        if self.closed:
            return
        if not self.registered:
            if now_ms >= self._register_ms and (self.refused is None or self.refused.retry):
                self._register(now_ms)
            return
        if now_ms >= self._heartbeat_ms:
            self._heartbeat_ms = now_ms + self.timing.heartbeat_ms
            self._send(
                Heartbeat,
                activity=self.activity,
                age_ms=max(0, now_ms - self.activity_since_ms),
                busy_ms=max(0, self._busy_until_ms - now_ms),
                counters=self.stepper.counters(),
            )
        if self._load_dirty and now_ms >= self._load_sent_ms + LOAD_INTERVAL_MS:
            self._load_dirty, self._load_sent_ms = False, now_ms
            self._send(LoadReport, load=self.load)

    def _register(self, now_ms: int) -> None:
        self._send(
            Register,
            group=self.group,
            group_ranks=list(self.group_ranks),
            group_next=self.group_next,
            hold=self.hold,
            resumed=self.resumed,
            **self.identity.of_registration(),
        )
        self._load_dirty = True  # a new term has not heard it yet
        self._schedule_register(now_ms)

    def _schedule_register(self, now_ms: int) -> None:
        self._register_ms = now_ms + round(self._register_pause_ms * (0.75 + self._random.random() / 2))
        self._register_pause_ms = min(self._register_pause_ms * 2, REGISTER_MS_MAX)

    def _send(self, message_type: type[FromRank], /, **fields: Any) -> None:
        if issubclass(message_type, Started | NeedWave | WaveComplete):
            self.stepper.wave_messages += 1
        self._number += 1
        message = message_type(
            deployment=self.identity.deployment,
            rank=self.identity.rank,
            incarnation=self.identity.incarnation,
            number=self._number,
            at=self.at(),
            **fields,
        )
        self._out.append(Send(message))

    def _flush(self) -> list[Effect]:
        effects, self._out = self._out, []
        return effects
