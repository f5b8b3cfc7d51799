"""`FrontEnd`: what an API server or router calls to send its requests to the right rank.

    front_end = FrontEnd.connect("tcp://127.0.0.1:29560", deployment="deepseek-v3")
    front_end.wait_ready(timeout_s=600)
    with front_end.request() as choice:            # the least loaded rank; asks an idle lockstep deployment to start
        answer = send(choice.serve, prompt)

Thread-safe. A thread of its own follows the feed.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import zmq

from ..proto.codec import topic
from ..proto.messages import DeploymentState, Phase
from .client import Link
from .control import monotonic_ms
from .errors import AgentClosedError, AgentError, NotReadyError
from .front_end_core import Changed, Choice, Effect, FrontEndCore, Received, Send, Subscribe, Tick

log = logging.getLogger("wavekeeper.front_end")

POLL_MS_MAX = 1_000
JOIN_S_MAX = 5.0
_NOT_READY = (Phase.GATHERING, Phase.FORMING)


class NoRankUpError(AgentError):
    """No rank of the deployment is up, as far as this front-end knows; the request was not sent anywhere."""


class DeploymentHeldError(AgentError):
    """An operator holds the deployment and turns new requests away. Try again later; nothing was sent."""


class FrontEnd:
    """One front-end of one deployment. Made by `connect`."""

    def __init__(self, core: FrontEndCore, link: Link) -> None:
        self._core = core
        self._link = link
        self._changed = threading.Condition()
        self._outgoing: list[Send] = []
        self._feed: zmq.Socket[bytes] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="wavekeeper-front-end", daemon=True)

    @classmethod
    def connect(cls, endpoint: str, *, deployment: str) -> "FrontEnd":
        """Attach to a coordinator; returns at once. `endpoint` is its control endpoint, the feed's is learned from
        it.
        """
        name = secrets.token_hex(8)
        front_end = cls(FrontEndCore(deployment, name, Random(), monotonic_ms()), Link(endpoint, name))
        front_end._thread.start()
        return front_end

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the deployment is known and can serve: formed, or, if it is dense, with a rank up.

        Raises:
            NotReadyError: It took longer; says what was missing.
            AgentClosedError: `close` was called.
        """
        self.wait_for(_can_serve, timeout_s, "the deployment to be ready")

    def wait_for(self, condition: Callable[[DeploymentState], bool], timeout_s: float, what: str) -> DeploymentState:
        """Wait until the known state satisfies `condition`, and return it.

        Raises:
            NotReadyError: It took longer.
            AgentClosedError: `close` was called.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._closed:
                    raise AgentClosedError("the front-end is closed")
                state = self._core.state
                if self._core.synced and state is not None and condition(state):
                    return state
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise NotReadyError(f"{what} ({self._what_is_known()})", timeout_s)
                self._changed.wait(left_s)

    @property
    def state(self) -> DeploymentState | None:
        """The deployment as last heard of; None before the first snapshot."""
        return self._core.state

    def pick(self) -> Choice:
        """Choose a rank for one request and count it as in flight until `done`.

        Raises:
            NoRankUpError: No rank is up.
            DeploymentHeldError: An operator holds the deployment and turns requests away.
            AgentClosedError: `close` was called.
        """
        with self._changed:
            if self._closed:
                raise AgentClosedError("the front-end is closed")
            state = self._core.state
            if state is not None and state.refuses:
                raise DeploymentHeldError(f"{state.name} is {state.phase}: try again when it has been resumed")
            choice, effects = self._core.pick(monotonic_ms())
            self._perform(effects)
            if choice is None:
                raise NoRankUpError(f"no rank of {self._core.deployment} is up ({self._what_is_known()})")
        return choice

    def done(self, choice: Choice) -> None:
        """The request of this choice is over, well or badly."""
        with self._changed:
            self._core.done(choice)

    @contextmanager
    def request(self) -> Iterator[Choice]:
        """`pick` before, `done` after."""
        choice = self.pick()
        try:
            yield choice
        finally:
            self.done(choice)

    def close(self) -> None:
        """Detach. May be called twice."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._perform(self._core.leave())
            self._changed.notify_all()
        self._link.wake()
        self._thread.join(JOIN_S_MAX)

    def _run(self) -> None:
        try:
            while not self._turn():
                pass
        except Exception:  # a bug of ours: whoever waits must hear of it, not hang
            log.exception("the thread of a front-end failed")
            with self._changed:
                self._closed = True
                self._changed.notify_all()
        finally:
            self._link.close()

    def _turn(self) -> bool:
        with self._changed:
            now_ms = monotonic_ms()
            wait_ms = max(0, min(self._core.next_deadline_ms(now_ms) - now_ms, POLL_MS_MAX))
            if self._outgoing or self._closed:
                wait_ms = 0
        messages = self._link.receive(wait_ms)
        with self._changed:
            events: list[Received | Tick] = [Received(message) for message in messages]
            for event in [*events, Tick()]:
                self._perform(self._core.handle(event, monotonic_ms()))
            outgoing, self._outgoing = self._outgoing, []
            closed = self._closed
        for send in outgoing:
            self._link.send(send.message)
        return closed

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._outgoing.append(effect)
                    if threading.current_thread() is not self._thread:
                        self._link.wake()
                case Subscribe(feed=feed):
                    if self._feed is not None:
                        self._link.unsubscribe(self._feed)
                    self._feed = self._link.subscribe(feed, topic(self._core.deployment))
                case Changed():
                    self._changed.notify_all()

    def _what_is_known(self) -> str:
        state = self._core.state
        if self._core.rejected is not None:
            return f"rejected: {self._core.rejected.detail}"
        if state is None:
            return "the coordinator has not answered"
        up = sum(rank.up for rank in state.ranks)
        return f"phase {state.phase}, {up} of {state.dp_size} ranks up"


def _can_serve(state: DeploymentState) -> bool:
    if state.kind.lockstep:
        return state.phase not in _NOT_READY and all(rank.up for rank in state.ranks)
    return any(rank.up for rank in state.ranks)
