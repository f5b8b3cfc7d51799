"""The coordinator's process: receive, decode, handle, perform. It has no `if` about waves.

    transport.receive --> core.handle(event, now_ms) --> effects --> transport.send / publish, log
                          core.handle(Tick(), now_ms)    on every turn, busy or quiet, so input cannot starve time

One thread owns the core. The HTTP server runs on another and gets read-only views by asking: a question is answered
between two turns. A broken invariant stops the process: a coordinator that counts waves wrongly hangs every
accelerator, and a restart rebuilds everything from the ranks.
"""

import asyncio
import logging
import os
import secrets
import signal
import time
from collections import deque
from concurrent.futures import Future
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import FrameType

import msgspec

from ..proto.process_identity import has_ended
from .config import EXIT_CONFIG, Config, config_hash
from .core import (
    Answer,
    DeploymentSpec,
    Effect,
    Ended,
    Event,
    Fleet,
    FleetSpec,
    Junk,
    Note,
    Publish,
    Send,
    Tick,
    Wished,
)
from .core.events import Wish
from .core.holds import Operation, Refusal
from .core.regroups import Regroup
from .core.view import FleetView, fleet_view
from .status.app import ServiceInfo, StatusUnavailableError, make_app
from .status.server import HttpBindError, StatusServer
from .term import TermError, begin_term, keep_term
from .transport import BindError, Transport

log = logging.getLogger("wavekeeper.coordinator")

POLL_MS_MAX = 1_000
ANSWER_S_MAX = 1.0
"""Longest wait of an HTTP request for the service's thread; longer means that it hangs, and /livez says so."""
HTTP_STOP_S_MAX = 3.0
LOOK_MS = 200
"""How often ranks of this machine are looked for in /proc; some microseconds each."""
JUNK_LOG_MS = 10_000
"""One line for each reason of dropped frames in this time; the counters have them all."""


class Service:
    """A coordinator with its sockets bound. `run` returns when `stop` was called."""

    def __init__(self, config: Config) -> None:
        self.config = config
        own = config.coordinator
        self._term = begin_term(own.state_file)
        self.transport = Transport(own.control.bind_endpoint, own.feed.bind_endpoint)
        self.control = own.control.advertised_endpoint(self.transport.control_port).text
        self.feed = own.feed.advertised_endpoint(self.transport.feed_port).text
        try:
            self.http = StatusServer(make_app(self, self), own.http.host, own.http.port)
        except HttpBindError:
            self.transport.close()
            raise
        self._fleet = Fleet(self._fleet_spec(), monotonic_ms())
        self._began_ms = monotonic_ms()
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        self._config_hash = config_hash(config)
        self._stopping = ""
        self._questions: deque[Future[FleetView]] = deque()
        self._wishes: deque[Wished] = deque()
        self._unanswered: dict[int, Future[Operation | Regroup | Refusal]] = {}
        self._tokens = count(1)
        self._junk_logged_ms: dict[str, int] = {}
        self._checked_ms = 0
        self._looked_ms = 0

    def run(self) -> None:
        """Serve until `stop`. Raises AssertionError when an invariant is broken."""
        self.http.start()
        log.info(
            "serving %d deployments in term %d",
            len(self._fleet.deployments),
            self._fleet.term,
            extra={"fields": {"control": self.control, "feed": self.feed, "http": self.http.endpoint}},
        )
        try:
            while not self._stopping:
                self.turn(POLL_MS_MAX)
            log.info("stopping: %s", self._stopping)
            self._perform(self._fleet.farewell(self._stopping))
        finally:
            self.http.stop(HTTP_STOP_S_MAX)
            self.transport.close()

    @property
    def term(self) -> int:
        """The term that this coordinator leads in."""
        return self._fleet.term

    def stop(self, reason: str) -> None:
        """Ask `run` to end. From any thread, or a signal handler."""
        self._stopping = self._stopping or reason
        self.transport.wake()

    def turn(self, timeout_ms: int) -> None:
        """Handle what has arrived or come due, then return."""
        now_ms = monotonic_ms()
        left_ms = self._fleet.next_deadline_ms(now_ms) - now_ms
        events = self.transport.receive(max(0, min(timeout_ms, left_ms, LOOK_MS)))
        now_ms = monotonic_ms()
        effects: list[Effect] = []
        wishes = [self._wishes.popleft() for _ in range(len(self._wishes))]
        turn: list[Event] = [*events, *wishes, *self._ended(now_ms), Tick()]
        for event in turn:
            if isinstance(event, Junk):
                self._log_junk(event, now_ms)
            effects += self._fleet.handle(event, now_ms)
        self._perform(effects)
        if now_ms - self._checked_ms >= POLL_MS_MAX or any(isinstance(effect, Note) for effect in effects):
            self._checked_ms = now_ms
            self._fleet.check()
        while self._questions:
            question = self._questions.popleft()
            if question.set_running_or_notify_cancel():  # whoever asked may have given up
                view = fleet_view(self._fleet, now_ms)
                question.set_result(msgspec.structs.replace(view, dropped={**view.dropped, **self.transport.dropped}))

    async def fleet(self) -> FleetView:
        """Everything, for the status endpoint. Called on the HTTP server's thread.

        Raises:
            StatusUnavailableError: The service's thread did not answer in time.
        """
        question: Future[FleetView] = Future()
        self._questions.append(question)
        self.transport.wake()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(question), ANSWER_S_MAX)
        except TimeoutError:
            raise StatusUnavailableError(f"the coordinator's loop did not answer within {ANSWER_S_MAX:g} s") from None

    async def wish(self, deployment: str, wish: Wish) -> Operation | Regroup | Refusal:
        """An operator's wish, for the status endpoint. Called on the HTTP server's thread.

        Raises:
            StatusUnavailableError: The service's thread did not answer in time; the wish may still come true.
        """
        token = next(self._tokens)
        answer: Future[Operation | Regroup | Refusal] = Future()
        self._unanswered[token] = answer
        self._wishes.append(Wished(token, deployment, wish))
        self.transport.wake()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), ANSWER_S_MAX)
        except TimeoutError:
            raise StatusUnavailableError(f"the coordinator's loop did not answer within {ANSWER_S_MAX:g} s") from None
        finally:
            self._unanswered.pop(token, None)

    def info(self) -> ServiceInfo:
        """What is true of this process, whatever its loop does."""
        return ServiceInfo(
            version=version("wavekeeper"),
            started_at=self._started_at,
            uptime_s=(monotonic_ms() - self._began_ms) / 1000,
            control=self.control,
            feed=self.feed,
            http=self.http.endpoint,
            config_hash=self._config_hash,
            stopping=bool(self._stopping),
        )

    def _ended(self, now_ms: int) -> list[Ended]:
        """Ranks of this machine whose process is gone; looked for now and then, since nobody else tells."""
        if now_ms - self._looked_ms < LOOK_MS:
            return []
        self._looked_ms = now_ms
        return [
            Ended(name, record.rank, record.incarnation)
            for name, deployment in self._fleet.deployments.items()
            for record in deployment.members
            if record.register.process and has_ended(record.register.process)
        ]

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message):
                    self.transport.send(peer, message)
                case Publish(deployment=deployment, message=message):
                    self.transport.publish(deployment, message)
                case Answer(token=token, answer=answer):
                    waiting = self._unanswered.get(token)
                    if waiting is not None and waiting.set_running_or_notify_cancel():
                        waiting.set_result(answer)
                case Note(level=level, text=text, deployment=deployment):
                    fields = {"deployment": deployment} if deployment else {}
                    log.log(logging.getLevelNamesMapping()[level.upper()], text, extra={"fields": fields})
        if self._fleet.term != self._term:
            self._term = self._fleet.term
            keep_term(self.config.coordinator.state_file, self._term)

    def _log_junk(self, junk: Junk, now_ms: int) -> None:
        if now_ms - self._junk_logged_ms.get(junk.reason, -JUNK_LOG_MS) >= JUNK_LOG_MS:
            self._junk_logged_ms[junk.reason] = now_ms
            log.warning("dropped a frame (%s): %s", junk.reason, junk.detail)

    def _fleet_spec(self) -> FleetSpec:
        own = self.config.coordinator
        return FleetSpec(
            boot=secrets.token_hex(8),
            term=self._term,
            deployments=tuple(
                DeploymentSpec(
                    name=deployment.name,
                    kind=deployment.kind,
                    dp_size=deployment.dp_size,
                    exchange=deployment.exchange.value if deployment.exchange else "",
                    settings=deployment.settings,
                )
                for deployment in self.config.deployments
            ),
            feed=self.feed,
            timing=own.timing,
            publish_interval_ms=own.publish.interval_ms,
            publish_keepalive_ms=own.publish.keepalive_ms,
        )


def serve(config: Config, *, ready_file: Path | None = None) -> int:
    """Run a coordinator until SIGTERM or SIGINT; return the process's exit code.

    Args:
        config: A valid configuration.
        ready_file: Gets a JSON object with the real addresses, the pid and the term once everything is bound.
    """
    try:
        service = Service(config)
    except (BindError, HttpBindError, TermError) as error:
        log.error("%s", error)
        return EXIT_CONFIG if isinstance(error, TermError) else 1
    _stop_on_signals(service)
    if ready_file is not None:
        _announce(service, ready_file)
    try:
        service.run()
    except Exception:
        log.critical("the coordinator stops: its state cannot be trusted any more", exc_info=True)
        return 1
    return 0


def monotonic_ms() -> int:
    """The clock of the shell."""
    return time.monotonic_ns() // 1_000_000


def _stop_on_signals(service: Service) -> None:
    """The first signal stops cleanly; a second one ends the process as it would have without us."""

    def handler(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        service.stop(signal.Signals(number).name)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, handler)


def _announce(service: Service, ready_file: Path) -> None:
    """Write the ready file whole: whoever sees it can read it."""
    facts = {
        "control": service.control,
        "feed": service.feed,
        "http": service.http.endpoint,
        "pid": os.getpid(),
        "term": service.term,
    }
    fresh = ready_file.with_name(ready_file.name + ".new")
    fresh.write_bytes(msgspec.json.encode(facts) + b"\n")
    os.replace(fresh, ready_file)
