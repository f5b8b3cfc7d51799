"""A front-end's side of the protocol: pure. Follows the feed, picks a rank, asks for a start.

The law of this file: a front-end's own counts are its own. A snapshot or update brings what the ranks say of
themselves; it never erases what this front-end knows to be in flight. Updates are applied in order and without gaps,
or a snapshot is asked for again.
"""

from collections import Counter, deque
from random import Random

import msgspec

from ..proto.messages import (
    Attach,
    Attached,
    DeploymentState,
    Detach,
    FirstRequest,
    FromFrontEnd,
    GetSnapshot,
    Kind,
    Message,
    Phase,
    RankState,
    Rejected,
    Snapshot,
    Update,
)

ASK_AGAIN_MS = 500
"""A start is asked for once for each wave that seems idle, and again when that much later it still does."""
ATTACH_MS = 500
TWO_CHOICES_FROM = 32
"""With that many ranks, two are drawn and the better one taken: looking at all of them makes every front-end pick
the same one.
"""
KV_PRESSURE_FROM = 0.5
UPDATES_KEPT_MAX = 1_000
REMEMBER_MS = 5_000
"""How long ranks are believed to serve that a restarted coordinator does not know yet; they come within about 2.5 s."""
SILENT_MS = 5_000
"""No update for so long (the keepalive is 1 s): the feed or the coordinator is lost."""

_AWAKE = (Phase.STARTING, Phase.RUNNING)


class Received(msgspec.Struct, frozen=True):
    """A message of the coordinator or the feed."""

    message: Message


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class Send(msgspec.Struct, frozen=True):
    """Send to the coordinator; dropped when there is no connection."""

    message: FromFrontEnd


class Subscribe(msgspec.Struct, frozen=True):
    """Subscribe to this deployment's topic at this feed, instead of whatever was subscribed before."""

    feed: str


class Changed(msgspec.Struct, frozen=True):
    """The known state has changed."""


Effect = Send | Subscribe | Changed


class Choice(msgspec.Struct, frozen=True):
    """Where a request goes. Give it back to `done` when the request is over."""

    rank: int
    incarnation: str
    serve: str
    wave: int


class FrontEndCore:
    """What one front-end knows of one deployment."""

    def __init__(self, deployment: str, front_end: str, random: Random, now_ms: int) -> None:
        self.deployment = deployment
        self.front_end = front_end
        self.state: DeploymentState | None = None
        self.term = 0
        self.seq = 0
        self.kind: Kind | None = None
        self.rejected: Rejected | None = None
        self.dropped: Counter[str] = Counter()
        self.in_flight: Counter[tuple[int, str]] = Counter()
        self.asks = 0
        self.heard_ms = now_ms
        self._random = random
        self._feed = ""
        self._synced = False
        self._kept: deque[Update] = deque(maxlen=UPDATES_KEPT_MAX)
        self._unseen: Counter[tuple[int, str]] = Counter()
        """Requests sent to a rank since its last load report: the report cannot have them."""
        self._turn = 0
        self._attach_ms = now_ms
        self._asked_for: tuple[int, int, int] | None = None
        self._asked_ms = 0
        self._now_ms = now_ms
        self._remembered: dict[int, RankState] = {}
        """Ranks that were up when the coordinator restarted, and that the new one has not heard of yet."""
        self._forget_ms = 0
        self._out: list[Effect] = []

    # --- the door of the thread that talks ---------------------------------------------------------------------------

    def handle(self, event: Received | Tick, now_ms: int) -> list[Effect]:
        """Change the state by one event and return what must be done."""
        self._now_ms = now_ms
        if isinstance(event, Received):
            self.heard_ms = now_ms
            self._message(event.message)
        if now_ms >= self._attach_ms and (not self._synced or now_ms - self.heard_ms >= SILENT_MS):
            self._attach_ms = now_ms + ATTACH_MS
            self._say(Attach(front_end=self.front_end, deployment=self.deployment))
            if self._feed:
                self._say(GetSnapshot(front_end=self.front_end, deployment=self.deployment))
        return self._flush()

    def next_deadline_ms(self, now_ms: int) -> int:
        """When a `Tick` must come at the latest."""
        return self._attach_ms if not self._synced else max(self._attach_ms, self.heard_ms + SILENT_MS)

    # --- the door of whoever sends requests --------------------------------------------------------------------------

    @property
    def synced(self) -> bool:
        """Whether the state is complete and current."""
        return self._synced

    def pick(self, now_ms: int) -> tuple[Choice | None, list[Effect]]:
        """Choose a rank for one request and count it; None when no rank is up.

        The score is what the rank has said of its queue plus what was sent since, but never less than what is in
        flight from here; it grows with KV cache pressure. Ties rotate. An idle lockstep deployment is asked to start.
        """
        self._now_ms = now_ms
        ranks = self._ranks_up()
        if not ranks:
            return None, []
        if len(ranks) >= TWO_CHOICES_FROM:
            ranks = self._random.sample(ranks, 2)
        self._turn += 1
        first = self._turn % len(ranks)
        best = min(ranks[first:] + ranks[:first], key=self._score)
        key = best.rank, best.incarnation
        self.in_flight[key] += 1
        self._unseen[key] += 1
        self._ask(best.rank, now_ms)
        assert self.state is not None
        return Choice(best.rank, best.incarnation, best.serve, self.state.wave), self._flush()

    def done(self, choice: Choice) -> None:
        """The request of this choice is over, well or badly."""
        key = choice.rank, choice.incarnation
        self.in_flight[key] -= 1
        if self.in_flight[key] <= 0:
            del self.in_flight[key]
            self._unseen.pop(key, None)

    def leave(self) -> list[Effect]:
        """This front-end stops."""
        self._say(Detach(front_end=self.front_end))
        return self._flush()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _message(self, message: Message) -> None:
        match message:
            case Attached(deployment=self.deployment) if message.term >= self.term:
                self.kind, self.rejected = message.kind, None
                if message.feed != self._feed:
                    self._feed = message.feed
                    self._out.append(Subscribe(message.feed))
                self._say(GetSnapshot(front_end=self.front_end, deployment=self.deployment))
            case Snapshot(deployment=self.deployment) if message.term >= self.term:
                self._snapshot(message)
            case Update(deployment=self.deployment) if message.term >= self.term:
                self._update(message)
            case Rejected():
                self.rejected = message
                self._out.append(Changed())
            case _:
                self.dropped["stale"] += 1

    def _snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.term == self.term and snapshot.seq < self.seq:
            self.dropped["stale"] += 1
            return
        self._seen(snapshot.state.ranks)
        if snapshot.term > self.term:
            self._remember(snapshot.state)
        self.term, self.seq, self.state = snapshot.term, snapshot.seq, snapshot.state
        self.kind = snapshot.state.kind
        self._synced = True
        kept, self._kept = list(self._kept), deque(maxlen=UPDATES_KEPT_MAX)
        for update in kept:
            if update.term == self.term:
                self._update(update)
        self._out.append(Changed())

    def _remember(self, fresh: DeploymentState) -> None:
        """A coordinator that has just begun knows no ranks yet, but those that we know serve on."""
        coming = {rank.rank for rank in fresh.ranks if not rank.up}
        known = self.state.ranks if self.state is not None else []
        self._remembered = {rank.rank: rank for rank in known if rank.up and rank.rank in coming}
        self._forget_ms = self._now_ms + REMEMBER_MS

    def _ranks_up(self) -> list[RankState]:
        ranks = self.state.ranks if self.state is not None else []
        if self._now_ms >= self._forget_ms:
            self._remembered.clear()
        now = {rank.rank: rank for rank in ranks if rank.up}
        return [rank for _, rank in sorted({**self._remembered, **now}.items())]

    def _update(self, update: Update) -> None:
        if update.term > self.term or not self._synced or self.state is None:
            self._kept.append(update)
            self._resync()
        elif update.seq > self.seq + 1:
            self._kept.append(update)
            self.dropped["gap"] += 1
            self._resync()
        elif update.seq <= self.seq:
            self.dropped["stale"] += 1
        else:
            changed = {rank.rank: rank for rank in update.ranks}
            self._seen(update.ranks)
            self.state = msgspec.structs.replace(
                self.state,
                phase=update.phase,
                epoch=update.epoch,
                wave=update.wave,
                dp_size=update.dp_size,
                refuses=update.refuses,
                ranks=[changed.get(rank.rank, rank) for rank in self.state.ranks],
            )
            self.seq = update.seq
            self._out.append(Changed())

    def _resync(self) -> None:
        if self._synced:
            self._synced = False
            self._say(GetSnapshot(front_end=self.front_end, deployment=self.deployment))

    def _seen(self, ranks: list[RankState]) -> None:
        """A newer report of a rank has in it what was sent to that rank before."""
        known = {rank.rank: rank for rank in self.state.ranks} if self.state is not None else {}
        for rank in ranks:
            before = known.get(rank.rank)
            if before is None or (before.incarnation, before.load_number) != (rank.incarnation, rank.load_number):
                self._unseen.pop((rank.rank, rank.incarnation), None)

    def _score(self, rank: RankState) -> float:
        key = rank.rank, rank.incarnation
        reported = rank.load.running + rank.load.waiting
        # What was sent since the last report, as far as it is still out: a rank may have no reason to report.
        queue = max(reported + min(self._unseen[key], self.in_flight[key]), self.in_flight[key])
        pressure = max(0.0, rank.load.kv_cache_usage - KV_PRESSURE_FROM)
        return queue + (1 + rank.load.waiting) * 4 * pressure

    def _ask(self, rank: int, now_ms: int) -> None:
        state = self.state
        if state is None or not state.kind.lockstep or state.phase in _AWAKE:
            return
        asked_for = self.term, state.epoch, state.wave
        if asked_for == self._asked_for and now_ms - self._asked_ms < ASK_AGAIN_MS:
            return
        self._asked_for, self._asked_ms = asked_for, now_ms
        self.asks += 1
        self._say(
            FirstRequest(
                front_end=self.front_end,
                deployment=self.deployment,
                ask=self.asks,
                wave=state.wave,
                rank=rank,
                term=self.term,
            )
        )

    def _say(self, message: FromFrontEnd) -> None:
        self._out.append(Send(message))

    def _flush(self) -> list[Effect]:
        effects, self._out = self._out, []
        return effects
