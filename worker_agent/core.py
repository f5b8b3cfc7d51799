"""One rank's side of the protocol: pure, the counterpart of `coordinator/core/lockstep.py`.

The law of this file: a rank never starts a wave by itself, not even one that holds work; it asks. It applies the
commands of its term in order of their number and acknowledges the highest applied (`At.applied`). Whatever it sends
carries its whole position, so losing a message costs at most one heartbeat. A rank that is still reading the last
exchange of wave w keeps `Start(w+1)` until it has ended w.

Events come in through `handle` (from the control thread) and through `begin`, `finish`, `fail` and `leave_for_fault`
(from the engine's thread); the shell holds one lock around all of them. Effects come out; `now_ms` is monotonic
milliseconds.
"""

from collections import Counter
from random import Random

import msgspec

from ..proto.messages import (
    Command,
    Fault,
    Form,
    Formed,
    FormFailed,
    Goodbye,
    Halted,
    HeldAt,
    Hold,
    HoldMode,
    Leave,
    Mode,
    NeedWave,
    Pulse,
    Refused,
    RegisterAgain,
    Resume,
    Resumed,
    Start,
    Started,
    ToRank,
    WaveComplete,
    Welcome,
    cut,
)
from ..proto.rows import Position, Row
from .events import (
    Alarm,
    Build,
    BuildFailed,
    Built,
    BusyUntil,
    Closing,
    Effect,
    Event,
    Hook,
    Identity,
    Interrupt,
    LoadChanged,
    LostRank,
    Note,
    Received,
    Tick,
    Wake,
)
from .plan import Plan
from .voice import REGISTER_MS, Voice

PENDING_MAX = 64
"""Commands kept until an earlier one has been applied; the coordinator sends again what does not fit."""


class RankCore(Voice):
    """The state of one rank."""

    def __init__(self, identity: Identity, random: Random, now_ms: int) -> None:
        super().__init__(identity, random, now_ms)
        self.lost: LostRank | None = None
        """Set while the engine has yet to learn that its step is over."""
        self.build_failed = ""
        self.dropped: Counter[str] = Counter()
        self._hook: Hook | None = None
        """What the engine has yet to be told, or asked, about a hold."""
        self._pending: dict[int, Command] = {}
        self._form: Form | None = None
        """The newest group that is to be built, or is being built."""
        self._build_waits = False
        self._is_spare = False
        """A group was formed without this rank."""

    # --- the control thread's door -----------------------------------------------------------------------------------

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Change the state by one event and return what must be done, in order."""
        match event:
            case Received(message=ToRank() as message) if message.incarnation == self.identity.incarnation:
                self._message(message, now_ms)
            case Received():
                self.dropped["misdirected"] += 1
            case BusyUntil(until_ms=until_ms):
                self._busy_until_ms = until_ms
                self._heartbeat_ms = now_ms
            case LoadChanged(load=load):
                self._load_dirty = self._load_dirty or load != self.load
                self.load = load
            case Built():
                self._built(event, now_ms)
            case BuildFailed() if self._is_awaited(event.group):
                self.build_failed = event.reason
                self._send(FormFailed, reason=cut(event.reason))
            case BuildFailed() | Tick():
                pass  # a failure of a group that is over means nothing; time is looked at below
            case Closing():
                self.closed = True
                self._send(Leave, reason=cut(event.reason), counters=self.stepper.counters())
                self._out += [Interrupt(), Wake()]
        self._on_time(now_ms)
        return self._flush()

    # --- the engine thread's door ------------------------------------------------------------------------------------

    @property
    def must_step(self) -> bool:
        """Whether the engine has to call `step` now: a wave runs, or an independent rank holds work."""
        return self.stepper.running if self.kind.lockstep else self.stepper.has_work

    def begin(self, row: Row) -> tuple[Row, Position]:
        """Begin a step of the running wave. A hold that does not wait for work is a bit in the row, once the engine
        knows.
        """
        if self.hold is not None and self.hold.hold_mode is not HoldMode.WAIT and self._hook is None:
            row = msgspec.structs.replace(row, hold_requested=True)
        return self.stepper.begin(row)

    @property
    def hook_due(self) -> Hook | None:
        """What must be called on the engine's thread before anything else."""
        if self._hook is None and self.hold is not None and self.mode is Mode.IDLE:
            return Hook.DEVICE_IDLE
        if self._hook is None and self._is_spare and self.stepper.has_work:
            return Hook.SPARE
        return self._hook

    def take_hook(self) -> Hook | None:
        """`hook_due`, to be called now; `hook_done` must follow."""
        hook = self.hook_due
        if hook is Hook.SPARE:
            self.stepper.forget_work()  # what comes from now on is told again
        return hook

    def hook_done(self, hook: Hook) -> list[Effect]:
        """The engine has been told; after DEVICE_IDLE this rank is held, after SPARE it has no work."""
        if hook is Hook.SPARE:
            self._heartbeat_ms = 0
        elif hook is Hook.DEVICE_IDLE:
            if self.hold is not None and self.mode is Mode.IDLE:
                self.mode = Mode.HELD
                self._say_held()
        elif self._hook is hook:
            self._hook = None
        return self._flush()

    def begin_failure(self, row: Row) -> tuple[Row, Position]:
        """Begin whatever exchange the others wait in, to tell them that this rank cannot go on."""
        return self.stepper.begin_failure(row)

    def work_arrived(self) -> list[Effect]:
        """A request has been queued at this rank: if no wave runs, ask for one."""
        had_work = self.stepper.has_work
        self.stepper.work_arrived()
        if not had_work:
            self._ask_if_needed()
        self._out.append(Wake())
        return self._flush()

    def finish(self, plan: Plan, exchange_us: float, waited_us: float = 0.0) -> list[Effect]:
        """The exchange that was begun has given this plan, after waiting for the others for so long."""
        steps = plan.step
        if self.stepper.finish(plan, exchange_us, waited_us):
            self.mode = Mode.IDLE
            self._send(
                WaveComplete,
                steps=steps,
                empty=self.stepper.last_wave_was_empty,
                counters=self.stepper.counters(),
            )
            self._apply_pending()
            self._ask_if_needed()
        return self._flush()

    def fail(self, reason: str, lost: int | None) -> list[Effect]:
        """The exchange failed under our hands: this epoch is over for us."""
        self._halt(reason, lost)
        return self._flush()

    def leave_for_fault(self) -> tuple[LostRank | None, list[Effect]]:
        """Whom we have lost, if the engine has not been told yet; it has now, and has left its step."""
        lost = self.lost
        if lost is not None:
            self._halt(lost.reason, lost.rank)
        return lost, self._flush()

    # --- what is true now --------------------------------------------------------------------------------------------

    def waits_for(self, now_ms: int) -> str:
        """What this rank waits for, in words."""
        silent_s = (now_ms - self.heard_ms) / 1000
        if not self.registered:
            if self.refused is not None:
                return f"registration: {self.refused.detail}"
            return f"the coordinator to answer (silent for {silent_s:.1f} s)"
        match self.mode:
            case Mode.JOINING if self._is_spare:
                return "an operator to scale the deployment up: this rank is a spare"
            case Mode.JOINING | Mode.HALTED:
                return "the other ranks of the deployment to register"
            case Mode.FORMING:
                return f"the exchange of epoch {self.stepper.epoch} to form" + (
                    f" ({self.build_failed})" if self.build_failed else ""
                )
            case Mode.HELD:
                return "the operator to resume"
            case _:
                return "work" if not self.stepper.has_work else "a wave to start"

    # --- messages ----------------------------------------------------------------------------------------------------

    def _message(self, message: ToRank, now_ms: int) -> None:
        if message.term < self.term:
            self.dropped["stale_term"] += 1
            if isinstance(message, RegisterAgain):  # a coordinator behind our term: only our registration can tell it
                self._register_again(now_ms)
            return
        self.heard_ms = now_ms
        match message:
            case Welcome():
                self._welcome(message, now_ms)
            case Refused():
                self._refused(message, now_ms)
            case RegisterAgain():
                self._register_again(now_ms)
            case Pulse() if message.term > self.term:
                self._register_again(now_ms)
            case Command():
                self._command(message, now_ms)
            case Goodbye(reason=reason):
                self._out.append(Note(f"the coordinator has stopped ({reason or 'no reason given'})"))
            case _:
                pass  # a pulse of our term: being heard was all

    def _welcome(self, message: Welcome, now_ms: int) -> None:
        if message.answers < self._attempt or (self.registered and message.term > self.term):
            self.dropped["late_welcome"] += 1  # it answers a copy of the past: where we stand now is not known there
            if message.term > self.term:
                self._register_again(now_ms)
            return
        if message.term > self.term:
            self.term, self.applied = message.term, message.seq
            self._pending.clear()  # commands of an older term are void
        self.applied = max(self.applied, message.seq)
        self._pending = {seq: command for seq, command in self._pending.items() if seq > self.applied}
        if not self.registered:
            self._out.append(Note(f"registered in term {self.term} as incarnation {self.identity.incarnation}"))
        self.registered, self.refused = True, None
        self.timing, self.feed = message.timing, message.feed
        self._register_pause_ms = REGISTER_MS
        self._heartbeat_ms = now_ms  # says at once where we stand in this term
        if message.spare and not self._is_spare:
            self._change_group(None, f"epoch {message.epoch} was formed without this rank")
        self._apply_pending()
        self._out.append(Wake())

    def _refused(self, message: Refused, now_ms: int) -> None:
        self._unregister()
        self.refused = message
        if message.retry:
            self._schedule_register(now_ms)
        self._out += [Note(f"registration refused ({message.reason}): {message.detail}"), Wake()]

    def _command(self, command: Command, now_ms: int) -> None:
        if command.term > self.term or not self.registered:
            self.dropped["unregistered"] += 1
            self._register_again(now_ms)
        elif command.seq <= self.applied:
            self.dropped["repeated"] += 1
            self._heartbeat_ms = now_ms  # our acknowledgement was lost: say it again
        elif len(self._pending) < PENDING_MAX or command.seq == self.applied + 1:
            self._pending[command.seq] = command
            self._apply_pending()

    def _apply_pending(self) -> None:
        """Apply what is next in order; a start that is too early waits, and so does what comes after it."""
        while (command := self._pending.get(self.applied + 1)) is not None:
            if isinstance(command, Start) and self._too_early(command):
                if not isinstance(self._pending.get(command.seq + 1), Fault | Form):
                    return  # nothing has made it void
            del self._pending[command.seq]
            self.applied = command.seq
            match command:
                case Form():
                    self._apply_form(command)
                case Start():
                    self._apply_start(command)
                case Fault():
                    self._apply_fault(command)
                case Hold():
                    self._apply_hold(command)
                case Resume():
                    self._apply_resume(command)
                case _:
                    self.dropped["unknown_command"] += 1

    def _too_early(self, start: Start) -> bool:
        stepper = self.stepper
        if start.epoch != stepper.epoch:
            # Commands come in order, so its `Form` has been applied: either that waits for the engine, or this rank is
            # a spare, and no start of that group concerns it.
            return start.epoch > stepper.epoch and self._build_waits
        return self.mode is Mode.FORMING or (stepper.running and start.wave > stepper.wave)

    def _apply_start(self, start: Start) -> None:
        stepper = self.stepper
        stepper.wave_messages += 1
        here = start.epoch == stepper.epoch and start.wave == stepper.wave
        if self.mode is Mode.IDLE and self.hold is None and here:
            stepper.begin_wave()
            self.mode = Mode.RUNNING
            self._out.append(Wake())
        if stepper.running and here:
            self._send(Started)
        else:
            self._heartbeat_ms = 0  # void for us, but the acknowledgement is waited for

    def _apply_hold(self, hold: Hold) -> None:
        self.hold = hold.order
        if self.mode is Mode.HELD:
            self._say_held()  # a new coordinator says it again
        else:
            self._hook = Hook.HOLD
            self._heartbeat_ms = 0
        self._out.append(Wake())

    def _apply_resume(self, resume: Resume) -> None:
        self._end_hold()
        self.resumed = resume.operation
        if self.mode is Mode.HELD:
            self.mode = Mode.IDLE
        self._send(Resumed)
        self._ask_if_needed()
        self._out.append(Wake())

    def _end_hold(self) -> None:
        """The engine is told that a hold is over only if it was told of the hold."""
        if self.hold is not None:
            self._hook = None if self._hook is Hook.HOLD else Hook.RESUME
            self.hold = None

    def _say_held(self) -> None:
        assert self.hold is not None
        wave, step = self.stepper.ended_at
        self._send(HeldAt, operation=self.hold.operation, wave=wave, step=step)

    def _ask_if_needed(self) -> None:
        """Also under a hold: the work waits for its end, and is shown to wait."""
        if self.mode in (Mode.IDLE, Mode.HELD) and self.stepper.has_work:
            self._send(NeedWave)

    def _apply_form(self, form: Form) -> None:
        ours = any(member.rank == self.identity.rank for member in form.members)
        if ours and (form.epoch <= self.stepper.epoch or form.wave < self.stepper.wave):
            self.dropped["stale_form"] += 1  # nothing goes back; our position, said at once, shows what is so
            self._heartbeat_ms = 0
            return
        self._change_group(form if ours else None, f"the group was formed anew as epoch {form.epoch}")

    def _change_group(self, form: Form | None, why: str) -> None:
        """Out of the present group, whatever goes on in it; then into the next one, or, without one, to the spares."""
        if self.stepper.running and self.lost is None:
            self._lose(None, why)
        self._out.append(Interrupt())
        self._end_hold()  # if the operator's wish still stands, it comes again after this
        self._form, self.group, self.exchange, self.build_failed = form, "", "", ""
        if self.lost is None:
            self._build()
        else:
            self._build_waits = True

    def _apply_fault(self, fault: Fault) -> None:
        if self.mode in (Mode.JOINING, Mode.HALTED):
            self._heartbeat_ms = 0  # nothing to leave, but the acknowledgement is waited for
        elif self.stepper.running:
            self._lose(fault.lost, fault.reason)
        else:
            self._halt(fault.reason, fault.lost)

    # --- the group ---------------------------------------------------------------------------------------------------

    def _lose(self, lost: int | None, reason: str) -> None:
        """The engine is in a wave of a broken group: get it out; it will be told at its next call."""
        self.lost = LostRank(lost, self.stepper.wave, self.stepper.step + self.stepper.inside, reason)
        self._out += [Interrupt(), Alarm(self.lost), Wake()]

    def _halt(self, reason: str, lost: int | None) -> None:
        """The engine has left: nothing of ours is in the old exchange any more."""
        self.lost = None
        self.stepper.leave()
        self.mode, self.group = Mode.HALTED, ""
        self._out += [Interrupt(), Note(f"halted: {reason}"), Wake()]
        self._send(Halted, reason=cut(reason), lost=lost)
        if self._build_waits:
            self._build_waits = False
            self._build()
        else:
            self._apply_pending()

    def _build(self) -> None:
        """The engine is out of the old exchange."""
        form = self._form
        self._is_spare = form is None
        if form is None:  # alive, and part of nothing
            self.mode, self.group_ranks, self.group_rank, self.group_next = Mode.JOINING, (), 0, ""
            self._heartbeat_ms = 0
            self._out.append(Wake())
            return
        self.group_ranks = tuple(member.rank for member in form.members)
        self.group_rank = self.group_ranks.index(self.identity.rank)
        self.group_next = form.members[(self.group_rank + 1) % len(form.members)].incarnation
        self.stepper.rank = self.group_rank
        self.mode = Mode.FORMING
        self.stepper.epoch, self.stepper.wave, self.stepper.step = form.epoch, form.wave, 0
        self.stepper.attribution.waited_us = 0  # in another group
        self.stepper.ended_at = form.wave, 0
        self._out.append(Build(form))
        self._heartbeat_ms = 0

    def _is_awaited(self, group: str) -> bool:
        """Whether this is the group that is being built now. Its token says so: terms may form equal epochs."""
        return self.mode is Mode.FORMING and self._form is not None and self._form.group == group

    def _built(self, event: Built, now_ms: int) -> None:
        if self._form is None or not self._is_awaited(event.group):
            self.dropped["late_build"] += 1  # the shell gives that exchange up
            return
        self.mode, self.group, self.exchange = Mode.IDLE, self._form.group, event.exchange
        self.stepper.process_groups += event.process_groups
        self.stepper.preflights += 1
        self._send(Formed, exchange=event.exchange)
        if not self.registered:
            self._attempt = self._number + 1  # registrations that are on the way do not name this group
            self._register_ms = now_ms
        self._out += [Note(f"epoch {self.stepper.epoch} is formed over {event.exchange}"), Wake()]
        self._apply_pending()
