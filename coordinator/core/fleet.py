"""The one door of the core: `handle(event, now_ms) -> effects`, `next_deadline_ms(now_ms)`, `check()`, `story`.

It finds the deployment that an event belongs to, and knows nothing of waves. Time enters only as `now_ms`, monotonic
milliseconds. `story` keeps the latest events that had an effect, for status and for errors.
"""

from collections import Counter, deque
from collections.abc import Iterator

import msgspec

from ...proto.messages import (
    Attach,
    Attached,
    Detach,
    FirstRequest,
    FromRank,
    GetSnapshot,
    Goodbye,
    Heartbeat,
    LoadReport,
    Message,
    RefusalReason,
    Register,
    Rejected,
    RejectReason,
)
from .deployment import Deployment
from .events import Answer, Effect, Ended, Event, Junk, Level, Note, Received, Send, Tick, Wished
from .holds import Refusal
from .independent import Independent
from .lockstep import Lockstep
from .replies import no_such_deployment, refused, register_again
from .specs import FleetSpec

STORY_MAX = 512
TERM_MAX = 1 << 52
"""No term gets there: a clock's milliseconds take a hundred thousand years; a message can carry twice that."""


class Scene(msgspec.Struct, frozen=True):
    """One event and what came of it."""

    now_ms: int
    event: Event
    effects: list[Effect]


class Fleet:
    """All deployments of one coordinator, in one term."""

    def __init__(self, spec: FleetSpec, now_ms: int) -> None:
        self.spec = spec
        self.term = spec.term
        self.dropped: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.story: deque[Scene] = deque(maxlen=STORY_MAX)
        self.deployments: dict[str, Deployment] = {}
        self._promised_ms = now_ms
        self._begin(now_ms)

    def __repr__(self) -> str:
        inside = ", ".join(f"{d.spec.name} {d.phase} wave {d.wave}" for d in self.deployments.values())
        return f"<Fleet term {self.term}: {inside}>"

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Change the state by one event and return what must be done, in order."""
        self._excuse(now_ms)
        match event:
            case Received(peer=peer, message=message):
                self.received[type(message).__name__] += 1
                effects = self._message(peer, message, now_ms)
            case Junk():
                self.dropped[event.reason] += 1
                effects = [_rejected(event.peer, RejectReason.MALFORMED, event.detail)] if event.answerable else []
            case Ended():
                deployment = self.deployments.get(event.deployment)
                effects = deployment.on_ended(event, now_ms) if deployment is not None else []
            case Wished():
                effects = self._wish(event, now_ms)
            case Tick():
                effects = [e for d in self._all() for e in d.tick(now_ms)]
        quiet = isinstance(event, Tick) or (
            isinstance(event, Received) and isinstance(event.message, Heartbeat | LoadReport)
        )
        if not quiet or any(isinstance(effect, Note) for effect in effects):
            self.story.append(Scene(now_ms, event, effects))
        return effects

    def next_deadline_ms(self, now_ms: int) -> int:
        """When a `Tick` must come at the latest."""
        self._promised_ms = min(deployment.next_deadline_ms(now_ms) for deployment in self._all())
        return self._promised_ms

    def farewell(self, reason: str) -> list[Effect]:
        """What to say when this coordinator stops on purpose."""
        return [
            Send(
                record.peer,
                Goodbye(
                    deployment=deployment.spec.name,
                    rank=record.rank,
                    incarnation=record.incarnation,
                    term=self.term,
                    reason=reason,
                ),
            )
            for deployment in self._all()
            for record in deployment.members
        ]

    def check(self) -> None:
        """Raise AssertionError, with the latest scenes, if an invariant is broken."""
        try:
            for deployment in self._all():
                deployment.check()
        except AssertionError as error:
            tail = "\n".join(f"  {scene.now_ms} ms {scene.event}" for scene in list(self.story)[-10:])
            raise AssertionError(f"{error}; the latest events were:\n{tail}") from None

    def _excuse(self, now_ms: int) -> None:
        """Notice that we come late to our own deadline: this process was stopped, not everybody else.

        What the ranks have said meanwhile still waits to be read; without this the first message would find all the
        others silent and break groups that are in the best of health.
        """
        paused_ms = now_ms - self._promised_ms
        self._promised_ms = max(self._promised_ms, now_ms)
        if paused_ms > self.spec.timing.heartbeat_ms:
            for deployment in self._all():
                deployment.excuse(paused_ms)

    def _message(self, peer: bytes, message: Message, now_ms: int) -> list[Effect]:
        match message:
            case FromRank():
                return self._from_rank(peer, message, now_ms)
            case Attach() | GetSnapshot() | FirstRequest():
                return self._from_front_end(peer, message, now_ms)
            case Detach():
                return []
            case _:
                self.dropped["misdirected"] += 1  # a message that only a coordinator sends
                return []

    def _from_rank(self, peer: bytes, message: FromRank, now_ms: int) -> list[Effect]:
        deployment = self.deployments.get(message.deployment)
        if deployment is None:
            self.dropped["unknown_deployment"] += 1
            if not isinstance(message, Register):
                return []
            detail = no_such_deployment(message.deployment, self.deployments)
            return [Send(peer, refused(message, self.term, RefusalReason.UNKNOWN_DEPLOYMENT, detail))]
        if message.at.term >= TERM_MAX:
            self.dropped["impossible"] += 1
            return []
        if message.at.term > self.term:
            if not isinstance(message, Register):
                self.dropped["future_term"] += 1
                return [Send(peer, register_again(message, self.term))]
            if deployment.members.refusal(message, self.term, now_ms) is not None:
                return deployment.on_rank(peer, message, now_ms)
            # Nobody else leads, so this is our own past: a clock that went back, or a lost state file.
            return [*self._outgrow(message.at.term, now_ms), *self._from_rank(peer, message, now_ms)]
        return deployment.on_rank(peer, message, now_ms)

    def _from_front_end(self, peer: bytes, message: Attach | GetSnapshot | FirstRequest, now_ms: int) -> list[Effect]:
        deployment = self.deployments.get(message.deployment)
        if deployment is None:
            self.dropped["unknown_deployment"] += 1
            detail = no_such_deployment(message.deployment, self.deployments)
            return [_rejected(peer, RejectReason.UNKNOWN_DEPLOYMENT, detail, message.deployment)]
        match message:
            case Attach():
                attached = Attached(
                    deployment=message.deployment,
                    term=self.term,
                    feed=self.spec.feed,
                    kind=deployment.spec.kind,
                )
                return [Send(peer, attached)]
            case GetSnapshot():
                return deployment.on_get_snapshot(peer, message, now_ms)
            case FirstRequest():
                return deployment.on_first_request(peer, message, now_ms)

    def _wish(self, event: Wished, now_ms: int) -> list[Effect]:
        deployment = self.deployments.get(event.deployment)
        if deployment is None:
            detail = no_such_deployment(event.deployment, self.deployments)
            return [Answer(event.token, Refusal("unknown_deployment", detail))]
        answer, effects = deployment.on_wish(event.wish, now_ms)
        return [*effects, Answer(event.token, answer)]

    def _outgrow(self, seen_term: int, now_ms: int) -> list[Effect]:
        """Begin a term above `seen_term`; all ranks register again with what they know."""
        old_term, self.term = self.term, seen_term + 1
        self._begin(now_ms)
        text = f"a rank has seen term {seen_term}, above ours ({old_term}); term {self.term} begins, all register again"
        return [Note(Level.WARNING, text)]

    def _begin(self, now_ms: int) -> None:
        self.deployments = {
            spec.name: (Lockstep if spec.kind.lockstep else Independent)(spec, self.spec, self.term, now_ms)
            for spec in self.spec.deployments
        }

    def _all(self) -> Iterator[Deployment]:
        return iter(self.deployments.values())


def _rejected(peer: bytes, reason: RejectReason, detail: str, deployment: str = "") -> Send:
    return Send(peer, Rejected(reason=reason, detail=detail[:512], deployment=deployment))
