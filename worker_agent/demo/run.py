"""One run of the demo, from the first process to the report.

The order: start the coordinator and all ranks; replay; wait until the last wave has ended; read the coordinator's view;
stop the ranks and take their counters; stop the coordinator; make every output again on one rank alone; report. A
process that ends in between ends the replay, and what has no answer by then is reported as lost.

A signal only sets a mark, which every wait looks at. So it never meets a half-started process, and a second one can
make the stop a hasty one.
"""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Self

import msgspec
from rich.console import Console

from ...proto.messages import Kind
from ..errors import NotReadyError
from ..front_end import FrontEnd
from .chaos import Chaos
from .display import Display, Progress, StatusWatch, make_display
from .fleet import ChildEndedError, DemoFleet, StartTimeoutError
from .replay import Outcome, Replay, schedule
from .report import DeploymentSeen, RankFinal, Report, deployment_report, make_report
from .trace import CONTEXT_TOKENS_PER_TOKEN, GENERATED_TOKENS_PER_TOKEN, Slice
from .wire import GenerateRequest

FRONT_END_READY_S = 30.0
REST_S = 10.0
"""From the last answer until the coordinator must know that the last wave is over."""
REPLAY_STOP_S = 5.0
TURN_S = 0.05


class InterruptedRunError(Exception):
    """A signal asks for the end of the demo."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)

    @property
    def exit_status(self) -> int:
        """What a shell would tell of a process that this signal has ended."""
        return 128 + self.number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"


class Interrupts:
    """Marks the signals that ask for an end, while it is entered."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: it is to go on without its terminal
            self._before[number] = signal.signal(number, self._mark)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def check(self) -> None:
        """Raise `InterruptedRunError` if a signal has come."""
        if self._numbers:
            raise InterruptedRunError(self._numbers[0])

    def hurry(self) -> bool:
        """Whether another one has come since: the user does not want to wait."""
        return len(self._numbers) > 1

    def _mark(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)


class Options(msgspec.Struct, frozen=True):
    """What to run."""

    config: Path
    slice: Slice
    speed: float
    exchange: str | None = None
    chaos: bool = False


def run_demo(options: Options, folder: Path, interrupts: Interrupts, console: Console) -> Report:
    """Run the demo and return its report; no process is left when it returns or raises.

    Args:
        options: What to run.
        folder: For logs.
        interrupts: Entered.
        console: Where to show progress.

    Raises:
        FleetError: The processes could not be started.
        InterruptedRunError: A signal has come.
    """
    with make_display(console) as display:
        return _Run(options, folder, interrupts, display).run()


class _Run:
    def __init__(self, options: Options, folder: Path, interrupts: Interrupts, display: Display) -> None:
        self._options = options
        self._interrupts = interrupts
        self._display = display
        self._began_s = time.monotonic()
        self._failure = ""
        self._chaos: Chaos | None = None
        self._fleet = DemoFleet(
            options.config,
            folder,
            check=interrupts.check,
            hurry=interrupts.hurry,
            exchange=options.exchange,
        )

    def run(self) -> Report:
        """See `run_demo`."""
        self._say_what_comes()
        with self._fleet as fleet, ExitStack() as stack:
            addresses = fleet.start(self._display.say)
            front_ends = {d.name: FrontEnd.connect(addresses.control, deployment=d.name) for d in fleet.deployments}
            for front_end in front_ends.values():
                stack.callback(front_end.close)
            watch = stack.enter_context(StatusWatch(addresses.http))
            for front_end in front_ends.values():
                self._wait_ready(front_end)
            jobs = schedule(self._options.slice.arrivals, list(front_ends), self._options.speed)
            replay = Replay(jobs, front_ends)
            stack.callback(replay.stop, "the demo was stopped", REPLAY_STOP_S)
            if self._options.chaos:
                self._chaos = Chaos(fleet, replay, watch, self._display.say)
            self._replay(replay, watch)
            views = self._views_at_rest(replay, watch)
            stack.close()
            finals = fleet.stop_ranks()
        return self._report(replay, views, finals)

    def _say_what_comes(self) -> None:
        slice, speed = self._options.slice, self._options.speed
        again = f" (it has {slice.rows_read}, so it is begun again)" if slice.repeated else ""
        self._display.say(f"{len(slice.arrivals)} requests of {slice.source}{again}")
        self._display.say(
            f"sent {speed:g} x as fast as they came, with 1 token for {CONTEXT_TOKENS_PER_TOKEN} of a prompt and 1 for "
            f"{GENERATED_TOKENS_PER_TOKEN} generated ones"
        )

    def _wait_ready(self, front_end: FrontEnd) -> None:
        until_s = time.monotonic() + FRONT_END_READY_S
        while True:
            self._interrupts.check()
            self._fleet.raise_if_ended()
            try:
                front_end.wait_ready(TURN_S)
                return
            except NotReadyError as error:
                if time.monotonic() > until_s:
                    raise StartTimeoutError((error.waited_for,), FRONT_END_READY_S) from error

    def _replay(self, replay: Replay, watch: StatusWatch) -> None:
        """Run the replay, and the chaos, to their end, or until a process ends that nobody has killed."""
        replay.start()
        while not (replay.finished and (self._chaos is None or self._chaos.finished)) and not self._something_ended():
            self._interrupts.check()
            self._disturb()
            self._show("replaying", replay, watch)
            time.sleep(TURN_S)
        replay.stop("the demo ended before", REPLAY_STOP_S)
        replay.raise_failure()
        self._show("all answered", replay, watch)

    def _disturb(self) -> None:
        if self._chaos is not None:
            try:
                self._chaos.turn()
            except StartTimeoutError as error:
                self._failure = f"chaos: {error}"
                self._display.say(self._failure)

    def _views_at_rest(self, replay: Replay, watch: StatusWatch) -> Mapping[str, DeploymentSeen]:
        """The coordinator's view, once it knows of the last wave's end; after a failure, of whatever is."""
        until_s = time.monotonic() + REST_S
        while True:
            views = watch.read()
            if self._something_ended() or (views and all(view.at_rest for view in views.values())):
                return views or {}
            if time.monotonic() > until_s:
                self._failure = f"the deployments were not at rest {REST_S:g} s after the last answer"
            self._interrupts.check()
            self._show("waiting for the last wave to end", replay, watch)
            time.sleep(TURN_S)

    def _something_ended(self) -> bool:
        """Whether the run has failed; a process that has ended is such a failure."""
        if not self._failure:
            try:
                self._fleet.raise_if_ended()
            except ChildEndedError as error:
                self._failure = str(error)
                self._display.say(self._failure)
        return bool(self._failure)

    def _show(self, stage: str, replay: Replay, watch: StatusWatch) -> None:
        for line in replay.news():
            self._display.say(line)
        elapsed_s = time.monotonic() - self._began_s
        self._display.update(Progress(stage, elapsed_s, replay.tallies, watch.seen, watch.age_s))

    def _report(
        self, replay: Replay, views: Mapping[str, DeploymentSeen], finals: Mapping[str, list[RankFinal]]
    ) -> Report:
        deployments = {}
        chaos = self._chaos.done if self._chaos is not None else []
        for deployment in self._fleet.deployments:
            outcomes = [outcome for outcome in replay.outcomes if outcome.deployment == deployment.name]
            self._display.say(f"making the outputs of {deployment.name} again on one rank alone")
            deployments[deployment.name] = deployment_report(
                deployment.kind,
                deployment.dp_size,
                outcomes,
                finals[deployment.name],
                views.get(deployment.name),
                self._outputs_alone(deployment.kind, outcomes),
                coordinator_restarted=self._chaos is not None,
            )
        return make_report(
            self._options.slice,
            speed=self._options.speed,
            replay_s=replay.elapsed_s,
            elapsed_s=time.monotonic() - self._began_s,
            deployments=deployments,
            failure=self._failure,
            chaos=chaos,
        )

    def _outputs_alone(self, kind: Kind, outcomes: list[Outcome]) -> dict[str, list[int]]:
        """The outputs of the completed requests as one rank alone makes them, by request id."""
        # Here and not above: until the fleet has stopped, its ranks need the processors and we need to hear signals.
        import torch

        from .engine import generate_alone
        from .model import DenseDecoder, LocalAllToAll, ModelConfig, MoeDecoder

        def completed() -> Iterator[GenerateRequest]:
            for outcome in outcomes:
                self._interrupts.check()
                if not outcome.error:
                    yield outcome.request

        torch.set_num_threads(1)  # its matrices are too small to share
        model = MoeDecoder(ModelConfig(), LocalAllToAll()) if kind.lockstep else DenseDecoder(ModelConfig())
        return generate_alone(model, completed())
