"""The feed of one deployment: what front-ends are told, and when.

An update is published at once when the phase, epoch or wave changes, `interval_ms` after a load has changed, and
every `keepalive_ms` in any case, so that a front-end can tell a quiet deployment from a lost feed. Updates are
numbered without gaps within a term. All of it is driven by deadlines that the service asks for on every turn, so no
amount of input can starve it (vLLM's coordinator publishes only when a poll finds nothing to read, and was measured
silent for seconds with 64 engines).
"""

from collections.abc import Callable

from ...proto.messages import DeploymentState, RankState, Snapshot, Update


class Feed:
    """Numbers the updates of one deployment within one term."""

    def __init__(self, deployment: str, term: int, interval_ms: int, keepalive_ms: int) -> None:
        self._deployment = deployment
        self._term = term
        self._interval_ms = interval_ms
        self._keepalive_ms = keepalive_ms
        self._seq = 0
        self._published: DeploymentState | None = None
        self._published_ms: int | None = None
        self._changed = True
        self._head: object = None
        self.longest_gap_ms = 0

    def touch(self) -> None:
        """Some rank's entry may have changed."""
        self._changed = True

    def deadline_ms(self, now_ms: int) -> int:
        """When `due` should be asked again."""
        if self._published_ms is None:
            return now_ms
        return self._published_ms + (self._interval_ms if self._changed else self._keepalive_ms)

    def due(self, head: object, now_ms: int, make_state: Callable[[int], DeploymentState]) -> Update | None:
        """The next update, if it is time for one. `head` is whatever must be published at once when it changes."""
        urgent = self._published_ms is None or head != self._head
        if not urgent and now_ms < self.deadline_ms(now_ms):
            return None
        before, state = self._published, make_state(now_ms)
        if self._published_ms is not None:
            self.longest_gap_ms = max(self.longest_gap_ms, now_ms - self._published_ms)
        self._seq += 1
        self._published, self._published_ms, self._changed, self._head = state, now_ms, False, head
        return Update(
            deployment=self._deployment,
            term=self._term,
            seq=self._seq,
            phase=state.phase,
            epoch=state.epoch,
            wave=state.wave,
            dp_size=state.dp_size,
            refuses=state.refuses,
            ranks=_changed_ranks(before, state),
        )

    def snapshot(self, state: DeploymentState) -> Snapshot:
        """The whole state, as of the newest update. A front-end drops updates up to `seq`."""
        return Snapshot(deployment=self._deployment, term=self._term, seq=self._seq, state=state)


def _changed_ranks(before: DeploymentState | None, state: DeploymentState) -> list[RankState]:
    """Ranks whose entry differs; an older load of the same number is not a difference by itself."""
    known = {rank.rank: _without_age(rank) for rank in before.ranks} if before is not None else {}
    return [rank for rank in state.ranks if known.get(rank.rank) != _without_age(rank)]


def _without_age(rank: RankState) -> tuple[object, ...]:
    return rank.up, rank.incarnation, rank.serve, rank.load, rank.load_number
