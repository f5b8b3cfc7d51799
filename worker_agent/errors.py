"""Errors that an engine can meet, each with its facts as fields and what to do next in its text."""

from enum import StrEnum

from ..proto.errors import RowInvalidError
from ..proto.messages import Mismatch, RefusalReason


class AgentError(Exception):
    """Base of everything that the agent raises by itself."""


class RegistrationRefusedError(AgentError):
    """The coordinator refused this rank; a changed configuration is needed."""

    def __init__(self, reason: RefusalReason, detail: str, mismatches: tuple[Mismatch, ...] = ()) -> None:
        self.reason = reason
        self.detail = detail
        self.mismatches = mismatches
        super().__init__(reason, detail, mismatches)

    def __str__(self) -> str:
        differing = "".join(f"; {m.key}: expected {m.expected!r}, got {m.got!r}" for m in self.mismatches)
        return f"registration refused ({self.reason}): {self.detail}{differing}"


class NotReadyError(AgentError):
    """The deployment was not ready in time; `waited_for` says who or what was missing."""

    def __init__(self, waited_for: str, waited_s: float) -> None:
        self.waited_for = waited_for
        self.waited_s = waited_s
        super().__init__(waited_for, waited_s)

    def __str__(self) -> str:
        return f"not ready after {self.waited_s:.1f} s: waited for {self.waited_for}"


class LossPolicy(StrEnum):
    """What a rank does when its coordinator is lost. A running wave goes on in any case until the policy's moment."""

    HOLD = "hold"  # go on, start nothing new, wait for a coordinator for ever
    DRAIN = "drain"  # leave as soon as no wave runs and no work is left
    EXIT = "exit"  # leave at once; the others lose a rank


class CoordinatorLostError(AgentError):
    """The coordinator has been silent for longer than `dead_after_ms`, and the policy is to leave: close the agent."""

    def __init__(self, silent_s: float, policy: LossPolicy) -> None:
        self.silent_s = silent_s
        self.policy = policy
        super().__init__(silent_s, policy)

    def __str__(self) -> str:
        return f"the coordinator has been silent for {self.silent_s:.1f} s; the policy is to {self.policy}"


class AgentClosedError(AgentError):
    """The agent has been closed; nothing more can be asked of it."""


class StepSkippedError(AgentError):
    """A turn was left without `step()` while a wave ran; the group was told, and every rank leaves the step."""


class RankFailedError(AgentError):
    """Some ranks put an error into their row: every rank leaves this step by this same error."""

    def __init__(self, ranks: tuple[int, ...], wave: int, step: int) -> None:
        self.ranks = ranks
        self.wave = wave
        self.step = step
        super().__init__(ranks, wave, step)

    def __str__(self) -> str:
        names = ", ".join(map(str, self.ranks))
        return f"rank {names} reported a local error at wave {self.wave} step {self.step}; no rank ran this step"


class RankLostError(AgentError):
    """The group lost `rank`, and this rank has left the exchange at (`wave`, `step`).

    The exchange of this epoch is over. Keep calling `wait()`: a replacement or a shrink forms the next epoch.
    """

    def __init__(self, rank: int | None, wave: int, step: int, reason: str) -> None:
        self.rank = rank
        self.wave = wave
        self.step = step
        self.reason = reason
        super().__init__(rank, wave, step, reason)

    def __str__(self) -> str:
        who = "a rank" if self.rank is None else f"rank {self.rank}"
        return f"lost {who} at wave {self.wave} step {self.step}: {self.reason}"


class ExchangeError(AgentError):
    """Base of what an exchange raises. The group is unusable afterwards: form a new one."""


class ExchangeUnavailableError(ExchangeError):
    """This exchange cannot be used here; the text says what is missing and what would work."""


class ExchangeTimeoutError(ExchangeError):
    """`missing` ranks did not arrive at an exchange within its deadline."""

    def __init__(self, backend: str, missing: tuple[int, ...], timeout_ms: int, where: str = "") -> None:
        self.backend = backend
        self.missing = missing
        self.timeout_ms = timeout_ms
        self.where = where
        super().__init__(backend, missing, timeout_ms, where)

    def __str__(self) -> str:
        names = ", ".join(map(str, self.missing)) or "unknown"
        at = f" at {self.where}" if self.where else ""
        return f"{self.backend} exchange{at}: rank {names} did not arrive within {self.timeout_ms} ms"


class ExchangeBrokenError(ExchangeError):
    """A peer's connection broke; `lost` names the ranks, where the transport can tell."""

    def __init__(self, backend: str, lost: tuple[int, ...], detail: str) -> None:
        self.backend = backend
        self.lost = lost
        self.detail = detail
        super().__init__(backend, lost, detail)

    def __str__(self) -> str:
        names = ", ".join(map(str, self.lost)) or "unknown"
        return f"{self.backend} exchange broke (lost rank: {names}): {self.detail}"


class ExchangeInterruptedError(ExchangeError):
    """Somebody called `interrupt()`: a fault was announced, or the agent closes."""


def blamed(error: Exception) -> int | None:
    """The rank that an exchange's error names first, if it names one."""
    match error:
        case ExchangeTimeoutError(missing=(rank, *_)) | ExchangeBrokenError(lost=(rank, *_)):
            return int(rank)
        case RowInvalidError(owner=owner):
            return owner
        case _:
            return None
