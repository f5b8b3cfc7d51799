"""What `wavekeeper demo --chaos` does to its own fleet while requests are replayed.

The coordinator is killed twice (SIGKILL, then another one on the same ports), and in between a rank of a dense
deployment, while it holds requests if it ever does; its replacement is started at once. Only the requests that were out
to that rank may fail, and they are told apart from lost ones.

The laws of this file: the main thread calls `turn` and is never kept waiting by it; the next blow falls only when the
last one has been made up for; every wait for that has a deadline and says for whom.
"""

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from ...proto.messages import Kind
from .display import StatusWatch
from .fleet import DemoDeployment, FleetError, StartTimeoutError
from .replay import Replay
from .report import Disturbance

FIRST_BLOW, RANK_BLOW, LAST_BLOW = 0.2, 0.4, 0.65
"""Which part of all requests has ended when each comes; what is left shows how it goes on."""
BACK_S_MAX = 60.0
"""A replacement waits until the rank before it counts as dead, and loads torch first."""


class ChaosFleet(Protocol):
    """What chaos needs of a `DemoFleet`."""

    deployments: list[DemoDeployment]

    def restart_coordinator(self) -> None:
        """Kill it and start another one on its ports; does not wait."""
        ...

    def coordinator_is_back(self) -> bool:
        """Whether the new one has its ports."""
        ...

    def replace_rank(self, deployment: str, rank: int) -> None:
        """Kill it and start its replacement; does not wait."""
        ...

    def rank_is_back(self, deployment: str, rank: int) -> bool:
        """Whether the replacement serves."""
        ...

    def serve_address(self, deployment: str, rank: int) -> str:
        """Where this rank takes requests."""
        ...


class Chaos:
    """The blows of one run, in order. `turn` is called again and again until `finished`."""

    def __init__(self, fleet: ChaosFleet, replay: Replay, watch: StatusWatch, say: Callable[[str], None]) -> None:
        """Raises FleetError if there is no dense rank to kill."""
        self.finished = False
        self.done: list[Disturbance] = []
        self._fleet = fleet
        self._replay = replay
        self._watch = watch
        self._say = say
        self._began_s = time.monotonic()
        dense = [deployment for deployment in fleet.deployments if deployment.kind is Kind.DENSE]
        if not dense:
            raise FleetError("--chaos kills a rank of a dense deployment, and the configuration has none")
        self._dense = dense[0]
        self._script = self._blows()

    def turn(self) -> None:
        """Do what is due.

        Raises:
            StartTimeoutError: What was killed did not come back.
        """
        if not self.finished and next(self._script, "over") == "over":
            self.finished = True

    def _blows(self) -> Iterator[None]:
        yield from self._until_ended(FIRST_BLOW)
        yield from self._kill_coordinator()
        yield from self._until_ended(RANK_BLOW)
        yield from self._kill_rank()
        yield from self._until_ended(LAST_BLOW)
        yield from self._kill_coordinator()

    def _until_ended(self, share: float) -> Iterator[None]:
        while self._ended() < share:
            yield

    def _ended(self) -> float:
        tallies = self._replay.tallies.values()
        return sum(tally.ended for tally in tallies) / sum(tally.total for tally in tallies)

    def _kill_coordinator(self) -> Iterator[None]:
        while not self._replay.out() and not self._replay.finished:
            yield  # with nothing to serve its death would show nothing
        killed_s, out = time.monotonic(), len(self._replay.out())
        self._say(f"chaos: the coordinator is killed with {out} requests out; another one starts on its ports")
        self._fleet.restart_coordinator()
        yield from self._until_back("the coordinator", killed_s, self._fleet.coordinator_is_back, out)

    def _kill_rank(self) -> Iterator[None]:
        rank = self._busiest()
        while rank is None and not self._replay.finished:
            yield
            rank = self._busiest()
        name, rank = self._dense.name, rank or 0
        killed_s = time.monotonic()
        # Given up first: a request that was sent between the two would fail without being counted here.
        out = self._replay.lose_rank(self._fleet.serve_address(name, rank), "its rank was killed")
        self._fleet.replace_rank(name, rank)
        what = f"rank {rank} of {name}"
        self._say(f"chaos: {what} is killed with {out} requests out; its replacement starts")
        yield from self._until_back(what, killed_s, lambda: self._fleet.rank_is_back(name, rank), out)

    def _busiest(self) -> int | None:
        """The rank with the most requests out; None while there is none."""
        out = [choice.rank for deployment, choice in self._replay.out() if deployment == self._dense.name]
        return max(out, key=out.count) if out else None

    def _until_back(self, what: str, killed_s: float, is_back: Callable[[], bool], out: int) -> Iterator[None]:
        while not (is_back() and self._all_ready(killed_s)):
            if time.monotonic() - killed_s > BACK_S_MAX:
                raise StartTimeoutError((what,), BACK_S_MAX)
            yield
        back_s = time.monotonic() - killed_s
        self._say(f"chaos: {what} is back after {back_s:.1f} s")
        self.done.append(Disturbance(what, round(killed_s - self._began_s, 3), round(back_s, 3), out))

    def _all_ready(self, since_s: float) -> bool:
        """Whether a status that is newer than `since_s` shows every rank up and every deployment ready."""
        age_s = self._watch.age_s
        if age_s is None or age_s >= time.monotonic() - since_s:
            return False
        views = self._watch.seen.values()
        return bool(views) and all(view.ready and all(rank.up for rank in view.ranks) for view in views)
