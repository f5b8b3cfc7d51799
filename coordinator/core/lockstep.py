"""Life of a lockstep (MoE) deployment.

    GATHERING --all ranks registered--> FORMING --all formed--> IDLE(w) --start asked for--> STARTING(w)
    STARTING(w) --all acknowledged--> RUNNING(w) --any rank says that w has ended--> IDLE(w+1)
    IDLE / STARTING / RUNNING --hold--> HOLDING --every rank held at one wave--> HELD --resume--> RESUMING --> IDLE
    any --a rank is lost--> FAULTED --every place taken again, nobody left in the old exchange--> FORMING (epoch+1)

The law of this file: the coordinator is the sequencer. Whatever ranks must do alike is a command in `_log`, numbered,
the same for all and in the same order; each is sent again until its number is acknowledged. What this file believes
of a rank is only what the rank has said of itself (`At`): running is published on acknowledgement, never on sending,
and the end of a wave on a rank's word. Everything that follows is decided in `_advance`, from the state alone, after
each event: so a lost, doubled or late message can delay a decision but not change it.
"""

from ...proto.messages import (
    At,
    Fault,
    FirstRequest,
    Form,
    FormFailed,
    FromRank,
    Halted,
    Mode,
    NeedWave,
    Phase,
    RefusalReason,
    Register,
    Start,
    Started,
    WaveComplete,
    cut,
)
from .events import Level, Send
from .holds import AWAKE
from .members import NEVER_MS, MemberRecord, choose_exchange
from .regrouping import Regrouping
from .replies import refused
from .specs import DeploymentSpec, FleetSpec
from .waiting import names, stall_text, stalled

FORM_RETRY_MS = 1_000
FORM_RETRY_MS_MAX = 30_000
RETURN_MS = 2_500
"""How far apart the ranks of a living group may come to a new coordinator: a second each of backing off from connecting
and from registering, and some for the way."""
ASKS_MAX = 256
"""Remembered front-ends that asked for a start; one of them would be enough, the others are shown."""

_FORMED = (*AWAKE, Phase.HOLDING, Phase.HELD, Phase.RESUMING)
_FORMED_MODES = (Mode.IDLE, Mode.RUNNING, Mode.HELD)


class Lockstep(Regrouping):
    """A deployment whose ranks step together."""

    def __init__(self, spec: DeploymentSpec, fleet: FleetSpec, term: int, now_ms: int) -> None:
        super().__init__(spec, fleet, term, now_ms)
        self.phase = Phase.GATHERING
        self.group = ""
        self.exchange = ""
        self.exchange_reason = ""
        self.fault = ""
        self.asks: dict[str, int] = {}
        """Who asked for a start that has not been served, and since when."""
        self._served_asks: dict[str, int] = {}
        self._form_failures = 0
        self._retry_form_ms = 0
        self._wave_broken = False
        """The last fault met a wave: its number is used up."""

    # --- what ranks and front-ends say -------------------------------------------------------------------------------

    def _heard(self, record: MemberRecord, message: FromRank, now_ms: int) -> None:
        if isinstance(message, Started | NeedWave | WaveComplete):
            self.wave_messages += 1
        match message:
            case FormFailed() if message.at.epoch == self.epoch and self.phase is Phase.FORMING:
                self._form_failed = f"rank {record.rank}: {message.reason}"
            case Halted() if message.at.epoch == self.epoch and self.phase not in (Phase.FAULTED, Phase.FORMING):
                if message.lost in (None, record.rank):
                    self._break(record.rank, f"rank {record.rank} left its exchange: {message.reason}", now_ms)
                else:
                    reason = f"rank {message.lost} is lost, says rank {record.rank}: {message.reason}"
                    self._break(message.lost, reason, now_ms)
            case _:
                super()._heard(record, message, now_ms)

    def _asked(self, message: FirstRequest, now_ms: int) -> None:
        self.wave_messages += 1
        if message.ask <= self._served_asks.get(message.front_end, -1):
            self._drop("stale")  # doubled on the way: it has had its effect
            return
        self._served_asks.pop(message.front_end, None)
        self._served_asks[message.front_end] = message.ask
        while len(self._served_asks) > ASKS_MAX:
            del self._served_asks[next(iter(self._served_asks))]
        if message.wave < self.wave:
            self._drop("stale")  # sent before the last wave ended; its request is on the way all the same
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            return  # the rank that gets the request sees the running wave, or asks by itself when that has ended
        if len(self.asks) < ASKS_MAX:
            self.asks.setdefault(f"front-end {message.front_end}", now_ms)

    def _gone(self, record: MemberRecord, reason: str, now_ms: int) -> None:
        if self.phase is not Phase.GATHERING and record.rank in self.members.places:
            self._break(record.rank, f"rank {record.rank} {reason}", now_ms)

    def _register(self, peer: bytes, register: Register, now_ms: int) -> None:
        record = self.members.get(register.rank)
        if record is not None and record.incarnation != register.incarnation and self._is_placed(record):
            if 0 < record.at.epoch < register.at.epoch:  # it was in a later group, in the other one's place
                self._fence(record, register.at.epoch, now_ms)
        super()._register(peer, register, now_ms)

    def _fence(self, record: MemberRecord, epoch: int, now_ms: int) -> None:
        """A zombie that was here first: a coordinator before us had given it up, and its place to another life."""
        detail = (
            f"rank {record.rank} was another life when epoch {epoch} was formed; you are of epoch {record.at.epoch}"
        )
        self._out.append(Send(record.peer, refused(record.register, self.term, RefusalReason.FENCED, detail)))
        self._lose(record, detail, now_ms)

    def _seq_before_joining(self) -> int:
        """A rank that comes back from silence may still sit in the broken exchange: it must hear of the fault."""
        return self._phase_seq - 1 if self.phase is Phase.FAULTED else self.seq

    # --- what follows ------------------------------------------------------------------------------------------------

    def _advance(self, now_ms: int) -> None:
        while self._advance_once(now_ms):
            pass
        self._resend(now_ms)

    def _advance_once(self, now_ms: int) -> bool:
        """Make at most one transition; True if one was made."""
        if self.phase in _FORMED and (out := [r.rank for r in self.members.group() if self._has_left(r.at)]):
            self._break(out[0], f"rank {names(out)} left the exchange", now_ms)
            return True
        if self._regrouping(now_ms):
            return True
        match self.phase:
            case Phase.GATHERING:
                return self._gathering(now_ms)
            case Phase.FORMING:
                return self._forming(now_ms)
            case Phase.IDLE:
                return self._idle(now_ms)
            case Phase.STARTING:
                return self._starting(now_ms)
            case Phase.RUNNING:
                return self._ended(now_ms)
            case Phase.FAULTED:
                return self._faulted(now_ms)
            case Phase.HOLDING:
                return self._holding(now_ms)
            case Phase.RESUMING:
                return self._resuming(now_ms)
            case Phase.HELD:
                return self._held(now_ms)
            case Phase.SERVING:
                return False  # no phase of a lockstep deployment

    def _gathering(self, now_ms: int) -> bool:
        self._learn_places()
        self._learn_hold(now_ms)
        if self.members.full and all(map(self._is_placed, self.members.group())):
            return self._fence_zombies(now_ms) or self._adopt(now_ms) or self._form(now_ms, "all ranks are registered")
        if now_ms >= self._orphans_due_ms():
            orphans, missing = self._orphans(), self.members.missing()
            waited_ms = now_ms - min(record.joined_ms for record in orphans)
            # A new term found a part of a group: those who are missing died while nobody watched.
            self.epoch = max(record.at.epoch for record in orphans)
            self.wave = max(self.wave, *(record.at.wave for record in orphans))
            self._break(missing[0], f"rank {names(missing)} did not come back within {waited_ms} ms", now_ms)
            return True
        return False

    def _learn_places(self) -> None:
        """Which ranks made up the group before this coordinator began; a scaled group stays scaled."""
        known = [record for record in self.members if record.register.group_ranks and self._is_placed(record)]
        if known:
            newest = max(known, key=lambda record: record.at.epoch)
            places = tuple(newest.register.group_ranks)
            if places != self.members.places and max(places) < self.spec.dp_size:
                self.members.move(places)

    def _fence_zombies(self, now_ms: int) -> bool:
        """Turn out who is here in the place of another life of its rank, as the members of the newest group know."""
        members = self.members.group()
        epoch = max(record.at.epoch for record in members)
        zombies = [
            after
            for record, after in zip(members, members[1:] + members[:1], strict=True)
            if record.at.epoch == epoch and 0 < after.at.epoch < epoch
            if record.register.group_next not in ("", after.incarnation)
        ]
        for record in zombies:
            self._fence(record, epoch, now_ms)
        return bool(zombies)

    def _orphans_due_ms(self) -> int:
        """Until when the rest of a group that was there before us may come back, if some of it has and some has not."""
        joined = [record.joined_ms for record in self._orphans()] if self.members.missing() else []
        return min(joined) + self.timing.dead_after_ms + RETURN_MS if joined else NEVER_MS

    def _orphans(self) -> list[MemberRecord]:
        """Ranks of a group that was there before us."""
        return [r for r in self.members.group() if r.at.mode in _FORMED_MODES and self._is_placed(r)]

    def _adopt(self, now_ms: int) -> bool:
        """After a restart: all ranks are there and belong to one group, so nothing has to be formed."""
        members = self.members.group()
        groups = {record.register.group for record in members}
        if any(record.at.epoch < self.epoch for record in members) or max(r.at.wave for r in members) < self.wave:
            return False  # of this very term, and given up since
        if len(groups) != 1 or "" in groups or any(record.at.mode not in _FORMED_MODES for record in members):
            return False
        places = [record.at for record in members]
        self.group = groups.pop()
        self.epoch = places[0].epoch
        self.wave = max(at.wave for at in places)
        self._wave_broken = False
        self.exchange = choose_exchange(self.spec, [record.register for record in members])[0]
        self.exchange_reason = "kept: the ranks were already formed when this coordinator began"
        self._enter(Phase.IDLE, now_ms, f"adopted epoch {self.epoch} at wave {self.wave}")
        if any(at.mode is Mode.RUNNING and at.wave == self.wave for at in places):
            self._start("a wave was running when this coordinator began", now_ms)
        if self.operation is not None and self.operation.over:
            self._resume(now_ms, "nobody wants it any more")
        elif self.operation is not None:
            self._hold(now_ms)
        return True

    def _form(self, now_ms: int, why: str) -> bool:
        self.epoch = 1 + max([self.epoch, *(record.at.epoch for record in self.members)])
        self.wave = max([self.wave + self._wave_broken, *(record.at.wave for record in self.members)])
        self._wave_broken = False
        if self.operation is not None and self.operation.over:
            self.operation = None  # no rank of a new group is held
        self.group = f"{self._fleet.boot[:8]}-{self.term}-{self.epoch}"
        self.exchange, self.exchange_reason = choose_exchange(self.spec, [r.register for r in self.members.group()])
        self._form_failed, self._retry_form_ms = "", 0
        self._append(
            self._command(
                Form,
                group=self.group,
                exchange=self.exchange,
                wave=self.wave,
                members=[record.public() for record in self.members.group()],
            ),
            now_ms,
        )
        self._enter(Phase.FORMING, now_ms, f"epoch {self.epoch}: {why}; exchange {self.exchange}")
        return True

    def _forming(self, now_ms: int) -> bool:
        if all(self._has_formed(record.at) for record in self.members.group()):
            self._form_failures = 0
            self._enter(Phase.IDLE, now_ms, f"epoch {self.epoch} is formed at wave {self.wave}")
            return True
        waited_ms = now_ms - self.phase_since_ms
        busy = now_ms < self.members.busy_until_ms(self._not_formed())
        if not self._form_failed and waited_ms >= self.timing.form_timeout_ms and not busy:
            self._form_failed = f"rank {names(self._not_formed())} did not form within {waited_ms} ms"
        if not self._form_failed:
            return False
        if not self._retry_form_ms:
            pause_ms = min(FORM_RETRY_MS << self._form_failures, FORM_RETRY_MS_MAX)
            self._form_failures = min(self._form_failures + 1, 10)
            self._retry_form_ms = now_ms + pause_ms
            self._note(Level.WARNING, f"epoch {self.epoch} could not be formed ({self._form_failed})")
        if now_ms < self._retry_form_ms:
            return False
        return self._form(now_ms, f"the last try failed ({self._form_failed})")

    def _idle(self, now_ms: int) -> bool:
        if self._ended(now_ms):
            return True
        if self.operation is not None:  # a fault came between: the operator's wish stands
            return self._hold(now_ms)
        holders = [r.rank for r in self.members.group() if self._asks(r.at)]
        if not self.asks and not holders:
            return False
        why = f"rank {names(holders)} holds work" if holders else next(iter(self.asks)) + " asked"
        return self._start(why, now_ms)

    def _start(self, why: str, now_ms: int) -> bool:
        self.asks.clear()
        self._append(self._command(Start, wave=self.wave), now_ms)
        self._enter(Phase.STARTING, now_ms, f"wave {self.wave}: {why}")
        return True

    def _starting(self, now_ms: int) -> bool:
        if self._ended(now_ms):
            return True
        if not self._behind():
            self._count_wave()
            self._enter(Phase.RUNNING, now_ms, f"wave {self.wave}: every rank has acknowledged")
            return True
        return self._not_acknowledged(f"the start of wave {self.wave}", now_ms)

    def _ended(self, now_ms: int) -> bool:
        """A rank that stands at a later wave is proof that all ranks saw the end of this one."""
        wave = max((record.at.wave for record in self.members if record.at.epoch == self.epoch), default=0)
        if wave <= self.wave:
            return False
        self._count_wave()  # it may have been so short that its end came before the last acknowledgement
        ended, self.wave = self.wave, wave
        self._enter(Phase.IDLE, now_ms, f"wave {ended} has ended")
        return True

    def _break(self, lost: int, reason: str, now_ms: int) -> None:
        """The group of this epoch is over. Tell those who are left, unless they know."""
        if self.phase is Phase.FAULTED:
            return
        if self.phase is Phase.RESUMING:
            self.operation = None  # it has been resumed: the next group is not held
        self.fault = reason = cut(reason)
        running = any(record.at.mode is Mode.RUNNING for record in self.members.group())
        self._wave_broken = running or self.phase in (Phase.STARTING, Phase.RUNNING)
        self._append(self._command(Fault, lost=lost, reason=reason), now_ms)
        self._enter(Phase.FAULTED, now_ms, reason, Level.ERROR)

    def _faulted(self, now_ms: int) -> bool:
        if not len(self.members):
            self._enter(Phase.GATHERING, now_ms, "every rank is gone")
            return True
        if not self.members.full or self._still_inside():
            return False
        return self._form(now_ms, f"every place is taken again after a fault ({self.fault})")

    # --- small questions ---------------------------------------------------------------------------------------------

    def next_deadline_ms(self, now_ms: int) -> int:
        """When `tick` must be called again at the latest."""
        deadlines = [super().next_deadline_ms(now_ms)]
        if (regroup := self.regroup_in_progress) is not None:
            deadlines.append(max(regroup.deadline_ms, now_ms + 1))
        match self.phase:
            case Phase.GATHERING:
                deadlines.append(self._orphans_due_ms())
            case Phase.FORMING:
                deadlines.append(self._retry_form_ms or self._patience_ends_ms(self.timing.form_timeout_ms))
            case Phase.STARTING | Phase.HOLDING | Phase.RESUMING if self._behind():
                deadlines.append(self._patience_ends_ms(self.timing.start_ack_timeout_ms))
            case _:
                pass  # nothing else waits for time alone
        return min(deadlines)

    def _patience_ends_ms(self, timeout_ms: int) -> int:
        """When this phase has taken too long; announced long operations extend it."""
        everybody = [record.rank for record in self.members]
        return max(self.phase_since_ms + timeout_ms, self.members.busy_until_ms(everybody))

    def ready(self, now_ms: int) -> bool:
        """Whether requests can be served: formed, not broken or held, and nobody keeps a running wave waiting."""
        return self.phase in AWAKE and not self._stalled(now_ms)

    def _stalled(self, now_ms: int) -> list[MemberRecord]:
        if self.phase not in (Phase.STARTING, Phase.RUNNING, Phase.HOLDING):
            return []
        return stalled(self.members, self.phase_since_ms, self.timing.stall_after_ms, now_ms)

    def waits_for(self, now_ms: int) -> str:
        """One sentence: what this deployment waits for, or an empty text."""
        since = f"since {(now_ms - self.phase_since_ms) / 1000:.1f} s"
        if stuck := self._stalled(now_ms):
            return stall_text(self.wave, stuck, self.timing.stall_after_ms, now_ms)
        match self.phase:
            case Phase.GATHERING if self.members.missing():
                return f"waits for rank {names(self.members.missing())} to register, {since}"
            case Phase.GATHERING:
                unplaced = [record.rank for record in self.members.group() if not self._is_placed(record)]
                return f"waits for rank {names(unplaced)} to say where it stands, {since}"
            case Phase.FORMING if self._form_failed:
                return f"forms epoch {self.epoch} again soon: {self._form_failed}"
            case Phase.FORMING:
                outside = [r for r in self._not_formed() if r not in self._building()] or self._not_formed()
                return f"waits for rank {names(outside)} to form epoch {self.epoch}, {since}"
            case Phase.STARTING:
                late = self._behind()
                return f"waits for rank {names(late)} to acknowledge the start of wave {self.wave}, {since}"
            case Phase.HOLDING:
                return f"waits for rank {names(self._not_held())} to be held, {since}"
            case Phase.HELD:
                return f"is held by operation {self.operation.number if self.operation else '?'}, {since}"
            case Phase.FAULTED if self.members.missing():
                return f"faulted ({self.fault}); waits for rank {names(self.members.missing())} to register, {since}"
            case Phase.RESUMING:
                return f"waits for rank {names(self._behind())} to resume, {since}"
            case Phase.FAULTED if self._behind():
                return f"faulted ({self.fault}); waits for rank {names(self._behind())} to hear of it, {since}"
            case Phase.FAULTED:
                inside = names(self._still_inside())
                return f"faulted ({self.fault}); waits for rank {inside} to leave the broken step, {since}"
            case _:
                return self._regroup_waits_for(now_ms)

    def check(self) -> None:
        """Raise AssertionError if an invariant of this deployment is broken."""
        super().check()
        if self.phase is Phase.RUNNING:
            assert not self._behind(), f"running was published, but rank {names(self._behind())} has not acknowledged"
        if self.phase is Phase.HELD:
            assert not self._not_held(), f"held was published, but rank {names(self._not_held())} is not"
        if self.phase in _FORMED:
            assert self.members.full, f"{self.phase} without rank {names(self.members.missing())}"
            waves = [record.at.wave for record in self.members if record.at.epoch == self.epoch]
            highest = max(waves, default=0)
            assert highest <= self.wave, f"a rank is at wave {highest}, the deployment at {self.wave}"

    def _has_formed(self, at: At) -> bool:
        return at.epoch == self.epoch and at.term == self.term and at.mode in _FORMED_MODES

    def _asks(self, at: At) -> bool:
        """A rank of this very wave that holds work and runs nothing."""
        return at.has_work and at.mode is Mode.IDLE and at.wave == self.wave

    def _has_left(self, at: At) -> bool:
        """A rank that has halted says so in every message, so a lost `Halted` is not the end of it."""
        return at.mode is Mode.HALTED and at.epoch == self.epoch

    def _not_formed(self) -> list[int]:
        return [record.rank for record in self.members.group() if not self._has_formed(record.at)]

    def _building(self) -> list[int]:
        """Ranks that build the exchange of this epoch, and wait for others in it."""
        return [r.rank for r in self.members.group() if r.at.epoch == self.epoch and r.at.mode is Mode.FORMING]

    def _still_inside(self) -> list[int]:
        """Ranks that have not left the broken exchange, or not heard that it is broken."""
        outside = (Mode.JOINING, Mode.HALTED)
        return [r.rank for r in self.members.group() if r.at.mode not in outside or r.applied < self._phase_seq]
