"""What an engine does when an operator holds or scales its deployment, or a rank is lost.

All but `rank_lost` are called on the engine's own thread, from inside `RankAgent.wait`.
"""

import logging

from ..proto.messages import HoldMode, HoldOrder
from .events import Hook, LostRank

log = logging.getLogger("wavekeeper.agent")


class EngineHooks:
    """Override what your engine needs; the defaults do nothing."""

    def hold(self, mode: HoldMode) -> None:
        """An operator wants the deployment held: admit nothing new.

        `wait`: finish what runs, the wave ends by itself. `now`: abort what runs. `keep`: leave requests where they
        are. In the last two the group stops at the next step that all ranks reach with this wish.
        """

    def device_idle(self) -> None:
        """The group has stopped. Return when this rank's device is idle (synchronise it): then it is reported as
        held.
        """

    def resume(self) -> None:
        """The hold is over: admit requests again."""

    def spare(self) -> None:
        """The group goes on without this rank, which holds requests: give them back, nothing of them will run here.

        Rare: a rank that leaves has finished its work, so these were sent to it before its senders knew. Called again
        if more come. A later scaling may take the rank back in.
        """

    def rank_lost(self, rank: int | None, reason: str) -> None:
        """The group of a running wave is broken. Called on the agent's control thread, at once and without its lock.

        The exchange is interrupted anyway, and the engine's thread gets `RankLostError` from its next call of the
        agent. Only what it may wait in by itself is left to do here: abort the engine's own collectives
        (`ProcessGroup.abort` of an NCCL group), or they end no sooner than at their own time-out. Must not block.
        """


def call_hook(hooks: EngineHooks, hook: Hook, hold: HoldOrder | None) -> None:
    """Call the one that is due; a hold that has been ended meanwhile is not told."""
    match hook:
        case Hook.HOLD:
            if hold is not None:
                hooks.hold(hold.hold_mode)
        case Hook.DEVICE_IDLE:
            hooks.device_idle()
        case Hook.RESUME:
            hooks.resume()
        case Hook.SPARE:
            hooks.spare()


def raise_alarm(hooks: EngineHooks, lost: LostRank) -> None:
    """Call `rank_lost`; what goes wrong in it must not end the control thread."""
    try:
        hooks.rank_lost(lost.rank, lost.reason)
    except Exception:
        log.exception("the engine's hook for a lost rank failed")
