"""What both kinds of deployment share: registration, liveness, loads, the feed, and the counting of what is dropped.

`Lockstep` and `Independent` fill in what a rank's arrival, report and loss mean. Effects are collected in `_out` and
handed over by the public methods; nothing else leaves this file.
"""

from collections import Counter

from ...proto.messages import (
    At,
    DeploymentState,
    FirstRequest,
    FromRank,
    GetSnapshot,
    Heartbeat,
    Leave,
    LoadReport,
    Phase,
    Pulse,
    RankState,
    RefusalReason,
    Register,
    Rejected,
    RejectReason,
    ToRank,
    Welcome,
)
from .events import Effect, Ended, Level, Note, Publish, Send, Wish
from .feed import Feed
from .holds import Operation, Refusal
from .members import MemberRecord, Members
from .regroups import Regroup
from .replies import refused, register_again
from .specs import DeploymentSpec, FleetSpec
from .waiting import names

PLACE_MAX = 1 << 30
"""No epoch or wave of a deployment ever gets there; far below what a message can carry."""


class Deployment:
    """One deployment in one term. The base of the two lives."""

    def __init__(self, spec: DeploymentSpec, fleet: FleetSpec, term: int, now_ms: int) -> None:
        self.spec = spec
        self.timing = fleet.timing
        self.term = term
        self.phase = Phase.SERVING
        self.phase_since_ms = now_ms
        self.epoch = 0
        self.wave = 0
        self.seq = 0
        self.members = Members(spec, fleet.timing.dead_after_ms)
        self.dropped: Counter[str] = Counter()
        self.wave_messages = 0
        """Wave messages sent and received; stays 0 for a dense deployment, and is counted, not assumed."""
        self.lost_ranks = 0
        self._fleet = fleet
        self._feed = Feed(spec.name, term, fleet.publish_interval_ms, fleet.publish_keepalive_ms)
        self._out: list[Effect] = []

    # --- events in, effects out --------------------------------------------------------------------------------------

    def on_rank(self, peer: bytes, message: FromRank, now_ms: int) -> list[Effect]:
        """Handle one message of a rank."""
        record = self.members.of(message)
        before = record.at if record is not None else None
        if self._is_impossible(message.at):
            self._drop("impossible")
        elif isinstance(message, Register):
            if self.members.is_late(message):
                self._drop("stale")
            else:
                self._register(peer, message, now_ms)
        elif record is None:
            self._from_stranger(peer, message)
        elif not self.members.hear(record, message, peer, self.term, now_ms):
            self._drop("stale")
        else:
            self._heard(record, message, now_ms)
            if isinstance(message, Heartbeat | LoadReport) and before is not None and message.at.is_at(before):
                # Nothing that a decision stands on has changed, and time has its own event: with a hundred ranks and
                # fifty reports a second of each, looking at all ranks for every one of them would take a core.
                return self._publish(now_ms)
        return self.tick(now_ms)

    def on_first_request(self, peer: bytes, message: FirstRequest, now_ms: int) -> list[Effect]:
        """Handle a front-end's wish for a start."""
        if message.rank is not None and message.rank >= self.spec.dp_size:
            detail = f"rank must be in 0..{self.spec.dp_size - 1}, got {message.rank}"
            self._reject(peer, RejectReason.RANK_OUT_OF_RANGE, detail)
        elif why := self._turned_away():
            self._reject(peer, RejectReason.HELD, why)
        else:
            self._asked(message, now_ms)
        return self.tick(now_ms)

    def on_get_snapshot(self, peer: bytes, message: GetSnapshot, now_ms: int) -> list[Effect]:
        """Answer a front-end with the whole state."""
        effects = self.tick(now_ms)  # first what is due, so that the snapshot is not older than the feed
        return [*effects, Send(peer, self._feed.snapshot(self.state(now_ms)))]

    def on_ended(self, event: Ended, now_ms: int) -> list[Effect]:
        """A process on this machine has ended without a word: no need to wait for its silence."""
        record = self.members.get(event.rank)
        if record is not None and record.incarnation == event.incarnation:
            self._lose(record, "its process has ended", now_ms)
        return self.tick(now_ms)

    def on_wish(self, wish: Wish, now_ms: int) -> tuple[Operation | Regroup | Refusal, list[Effect]]:
        """Handle an operator's wish."""
        answer = self._wished(wish, now_ms)
        return answer, self.tick(now_ms)

    def tick(self, now_ms: int) -> list[Effect]:
        """Let time pass: liveness, deadlines, re-sending, publication."""
        for record, reason in self.members.overdue(now_ms):
            self._lose(record, reason, now_ms)
        self._advance(now_ms)
        return self._publish(now_ms)

    def _publish(self, now_ms: int) -> list[Effect]:
        """Publish what is due, and hand over everything that has come of this event."""
        head = (self.phase, self.epoch, self.wave, self.refuses, self.members.version)
        update = self._feed.due(head, now_ms, self.state)
        if update is not None:
            self._out.append(Publish(self.spec.name, update))
        effects, self._out = self._out, []
        return effects

    def excuse(self, paused_ms: int) -> None:
        """We were not there for so long: no deadline of others has passed in that time."""
        self.members.excuse(paused_ms)
        self.phase_since_ms += paused_ms

    def next_deadline_ms(self, now_ms: int) -> int:
        """When `tick` must be called again at the latest."""
        return min(self._feed.deadline_ms(now_ms), self.members.look_again_ms)

    # --- what people and front-ends see ------------------------------------------------------------------------------

    def state(self, now_ms: int) -> DeploymentState:
        """As front-ends see it."""
        return DeploymentState(
            name=self.spec.name,
            kind=self.spec.kind,
            dp_size=self.spec.dp_size,
            phase=self.phase,
            epoch=self.epoch,
            wave=self.wave,
            refuses=self.refuses,
            ranks=[self._rank_state(rank, now_ms) for rank in range(self.spec.dp_size)],
        )

    @property
    def longest_feed_gap_ms(self) -> int:
        """The longest time between two updates of the feed."""
        return self._feed.longest_gap_ms

    def waits_for(self, now_ms: int) -> str:
        """One sentence: what this deployment waits for, or an empty text."""
        missing = self.members.missing()
        return f"waits for rank {names(missing)} to register" if missing else ""

    @property
    def refuses(self) -> bool:
        """Whether new requests are turned away for now."""
        return False

    def ready(self, now_ms: int) -> bool:
        """Whether requests can be served."""
        return True

    def check(self) -> None:
        """Raise AssertionError if an invariant of this deployment is broken."""
        for record in self.members:
            assert record.rank < self.spec.dp_size, f"rank {record.rank} is out of range"
            assert record.register.kind is self.spec.kind, f"rank {record.rank} is of the other kind"
            assert record.applied <= self.seq, f"rank {record.rank} acknowledged {record.applied} of {self.seq}"

    # --- for the two kinds -------------------------------------------------------------------------------------------

    def _seq_before_joining(self) -> int:
        """Number of the newest command that a rank which joins now need not know."""
        return self.seq

    def _heard(self, record: MemberRecord, message: FromRank, now_ms: int) -> None:
        """A rank has said something new."""
        match message:
            case Heartbeat():
                pulse = Pulse(
                    deployment=self.spec.name,
                    rank=record.rank,
                    incarnation=record.incarnation,
                    term=self.term,
                    seq=self.seq,
                )
                self._send(record, pulse)
            case LoadReport():
                self._feed.touch()
            case Leave():
                self._lose(record, f"left: {message.reason or 'no reason given'}", now_ms)
            case _:
                pass  # the kinds know what it means

    def _gone(self, record: MemberRecord, reason: str, now_ms: int) -> None:
        """A rank has been given up."""

    def _turned_away(self) -> str:
        """Why a start that is asked for now is refused, or an empty text."""
        return ""

    def _asked(self, message: FirstRequest, now_ms: int) -> None:
        """A front-end asks for a start."""

    def _wished(self, wish: Wish, now_ms: int) -> Operation | Regroup | Refusal:
        """An operator asks for a hold or its end."""
        detail = (
            f"{self.spec.name} is dense: its ranks share nothing that could be held or regrouped; drain them one by one"
        )
        return Refusal("dense", detail)

    def _advance(self, now_ms: int) -> None:
        """Whatever follows from the state as it is now."""

    # --- inside ------------------------------------------------------------------------------------------------------

    def _register(self, peer: bytes, register: Register, now_ms: int) -> None:
        refusal = self.members.refusal(register, self.term, now_ms)
        if refusal is not None:
            self._out.append(Send(peer, refusal))
            self._drop(f"refused_{refusal.reason.value}")
            differing = "".join(f"; {m.key}: expected {m.expected!r}, got {m.got!r}" for m in refusal.mismatches)
            if not refusal.retry:
                self._note(Level.WARNING, f"refused rank {register.rank}: {refusal.detail}{differing}")
            return
        known = self.members.of(register) is not None
        self.members.unfence(register)
        record = self.members.accept(register, peer, self.term, self._seq_before_joining(), now_ms)
        self._feed.touch()
        if not known:
            self._note(Level.INFO, f"rank {record.rank} registered from {register.host} as {record.incarnation}")
        self._send(record, self._welcome(record))

    def _welcome(self, record: MemberRecord) -> Welcome:
        return Welcome(
            deployment=self.spec.name,
            rank=record.rank,
            incarnation=record.incarnation,
            term=self.term,
            answers=record.register.number,
            seq=record.applied,
            epoch=self.epoch,
            wave=self.wave,
            phase=self.phase,
            timing=self.timing,
            boot=self._fleet.boot,
            feed=self._fleet.feed,
            spare=self._is_left_out(record),
        )

    def _is_left_out(self, record: MemberRecord) -> bool:
        """Whether there is a group, and this rank is no part of it."""
        return False

    def _is_impossible(self, at: At) -> bool:
        """Acknowledges what was never commanded, or stands where the next place could not be told any more."""
        return (at.term == self.term and at.applied > self.seq) or max(at.epoch, at.wave) >= PLACE_MAX

    def _from_stranger(self, peer: bytes, message: FromRank) -> None:
        """Somebody who is not registered: a zombie is told so, any other is asked to register."""
        if message.rank >= self.spec.dp_size:
            self._drop("rank_out_of_range")
            detail = f"rank must be in 0..{self.spec.dp_size - 1}, got {message.rank}"
            self._out.append(Send(peer, refused(message, self.term, RefusalReason.RANK_OUT_OF_RANGE, detail)))
        elif self.members.get(message.rank) is not None and self.members.is_fenced(message):
            self._drop("fenced")
            detail = f"rank {message.rank} is not, or no longer, incarnation {message.incarnation}"
            self._out.append(Send(peer, refused(message, self.term, RefusalReason.FENCED, detail)))
        elif not isinstance(message, Leave):
            self._drop("unregistered")
            self._out.append(Send(peer, register_again(message, self.term)))

    def _lose(self, record: MemberRecord, reason: str, now_ms: int) -> None:
        self.members.lose(record)
        self.lost_ranks += 1
        self._feed.touch()
        self._note(Level.WARNING, f"rank {record.rank} ({record.incarnation}) is gone: {reason}")
        self._gone(record, reason, now_ms)

    def _rank_state(self, rank: int, now_ms: int) -> RankState:
        record = self.members.get(rank)
        if record is None:
            return RankState(rank=rank)
        return RankState(
            rank=rank,
            up=True,
            incarnation=record.incarnation,
            serve=record.register.serve,
            load=record.load,
            load_number=record.load_number,
            load_age_ms=now_ms - record.load_ms if record.load_number else 0,
        )

    def _send(self, record: MemberRecord, message: ToRank) -> None:
        self._out.append(Send(record.peer, message))

    def _reject(self, peer: bytes, reason: RejectReason, detail: str) -> None:
        self._drop(f"rejected_{reason.value}")
        self._out.append(Send(peer, Rejected(reason=reason, detail=detail, deployment=self.spec.name)))

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1

    def _enter(self, phase: Phase, now_ms: int, reason: str, level: Level = Level.INFO) -> None:
        self._note(level, f"{self.phase} -> {phase}: {reason}")
        self.phase, self.phase_since_ms = phase, now_ms

    def _note(self, level: Level, text: str) -> None:
        self._out.append(Note(level, text, self.spec.name))
