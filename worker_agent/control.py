"""The control thread of one rank: it alone talks to the coordinator, and it never waits for the engine.

    link --> core.handle --> effects --> link, engine thread (condition), builder thread

The engine's thread and this one share the core under one lock. Exchanges are built on a thread of their own, because
building waits for other ranks while heartbeats must go on.
"""

import logging
import threading
import time
from collections import deque

from ..proto.messages import Load
from .client import Link
from .core import RankCore
from .errors import ExchangeError
from .events import (
    Alarm,
    Build,
    BuildFailed,
    Built,
    BusyUntil,
    Closing,
    Effect,
    Event,
    Interrupt,
    LoadChanged,
    LostRank,
    Note,
    Received,
    Send,
    Tick,
    Wake,
)
from .exchange.base import Exchange
from .forming import Builder
from .hooks import EngineHooks, raise_alarm

log = logging.getLogger("wavekeeper.agent")

POLL_MS_MAX = 1_000
JOIN_S_MAX = 5.0


def monotonic_ms() -> int:
    """The clock of the shells."""
    return time.monotonic_ns() // 1_000_000


class Control:
    """Runs a `RankCore` against a real coordinator."""

    def __init__(self, core: RankCore, link: Link, builder: Builder, hooks: EngineHooks) -> None:
        self.core = core
        self.changed = threading.Condition()
        """Held around every use of the core; notified when a waiter should look again."""
        self.exchange: Exchange | None = None
        self.gathering = False
        """The engine's thread is inside `exchange.gather`, and closes the exchange itself when it is thrown out."""
        self.broken: BaseException | None = None
        """What ended the control thread, if it was a bug."""
        self._link = link
        self._builder = builder
        self._hooks = hooks
        self._alarms: list[LostRank] = []
        self._outbox: deque[Send] = deque()
        self._sleeps_until_ms = 0
        """Until when the control thread waits for messages; 0 while it is awake."""
        self._thread = threading.Thread(target=self._run, name="wavekeeper-control", daemon=True)

    def start(self) -> None:
        """Begin to talk."""
        self._thread.start()

    def event(self, event: Event) -> None:
        """Hand an event to the core. Any thread."""
        with self.changed:
            self.perform(self.core.handle(event, monotonic_ms()))

    def silent_ms(self) -> int:
        """For how long nothing has been heard of the coordinator."""
        return monotonic_ms() - self.core.heard_ms

    def report_load(self, load: Load) -> None:
        """The engine's queue has changed. Any thread."""
        self.event(LoadChanged(load))

    def announce_busy(self, busy_ms: int) -> None:
        """The engine begins a long operation, or, with 0, has ended it. Any thread."""
        self.event(BusyUntil(monotonic_ms() + busy_ms if busy_ms else 0))

    def close(self, reason: str) -> None:
        """Say goodbye and stop, within a few seconds at most."""
        if not self.core.closed:
            self.event(Closing(reason))
        self._thread.join(JOIN_S_MAX)

    def perform(self, effects: list[Effect]) -> None:
        """Do what the core asks for. The caller holds `changed`."""
        for effect in effects:
            match effect:
                case Send():
                    self._outbox.append(effect)
                case Wake():
                    self.changed.notify_all()
                case Build():
                    name = f"wavekeeper-form-{effect.form.epoch}"
                    threading.Thread(target=self._form, args=(effect,), name=name, daemon=True).start()
                case Interrupt():
                    self._give_up_exchange()
                case Alarm(lost=lost):
                    self._alarms.append(lost)
                case Note(text=text):
                    identity = self.core.identity
                    log.info("%s rank %d: %s", identity.deployment, identity.rank, text)
        if self._sleeps_until_ms and (self._outbox or self.core.next_deadline_ms() < self._sleeps_until_ms):
            self._link.wake()

    def _run(self) -> None:
        try:
            while not self._turn():
                pass
        except BaseException as error:  # a bug of ours: the engine must hear of it, not hang
            log.exception("the control thread of wavekeeper's agent failed")
            with self.changed:
                self.broken = error
                self._give_up_exchange()
                self.changed.notify_all()
        finally:
            self._link.close()

    def _turn(self) -> bool:
        """Receive, handle, let time pass, send. True when there is nothing left to do."""
        with self.changed:
            now_ms = monotonic_ms()
            wait_ms = max(0, min(self.core.next_deadline_ms() - now_ms, POLL_MS_MAX))
            if self._outbox or self.core.closed:
                wait_ms = 0
            self._sleeps_until_ms = now_ms + wait_ms
        messages = self._link.receive(wait_ms)
        with self.changed:
            self._sleeps_until_ms = 0
            events: list[Event] = [Received(message) for message in messages]
            for event in [*events, Tick()]:
                self.perform(self.core.handle(event, monotonic_ms()))
            closed = self.core.closed
            outgoing, alarms = list(self._outbox), self._alarms
            self._outbox.clear()
            self._alarms = []
        for lost in alarms:
            raise_alarm(self._hooks, lost)
        for send in outgoing:
            self._link.send(send.message)
        return closed

    def _give_up_exchange(self) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.interrupt()
            if not self.gathering:
                exchange.close()

    def _form(self, build: Build) -> None:
        """On the builder's thread: build, try, hand over."""
        epoch, group = build.form.epoch, build.form.group
        try:
            exchange = self._builder.build(build.form, self.core.timing.form_timeout_ms)
        except ExchangeError as error:
            self.event(BuildFailed(group, str(error)))
            return
        except Exception as error:  # whatever a transport raises must not leave the others waiting without a word
            log.exception("the exchange of epoch %d could not be built", epoch)
            self.event(BuildFailed(group, f"{type(error).__name__}: {error}"))
            return
        with self.changed:
            effects = self.core.handle(Built(group, exchange.name, exchange.process_groups), monotonic_ms())
            wanted = self.core.group == group and not self.core.closed
            if wanted:
                self.exchange = exchange
            self.perform(effects)
        if not wanted:
            exchange.close()  # a newer epoch, a fault or the end came meanwhile
