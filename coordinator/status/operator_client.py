"""What `wavekeeper hold`, `resume`, `scale` and `recover` do: ask, wait until it is so, and tell an exit code."""

import sys
import time
import urllib.parse
from collections.abc import Callable

import msgspec

from ...proto.messages import Phase
from ..core.holds import AWAKE, HoldWish, ResumeWish
from ..core.regroups import RecoverWish, RegroupState, ScaleWish
from ..core.view import DeploymentView
from .client import AskError, ask

LOOK_S = 0.1


def hold(url: str, deployment: str, wish: HoldWish, wait_s: float) -> int:
    """Hold a deployment and wait until every rank is held. Returns 0 when it is, 1 when not."""
    return _to_phase(url, deployment, "hold", wish, (Phase.HELD,), wait_s)


def resume(url: str, deployment: str, wish: ResumeWish, wait_s: float) -> int:
    """Let a deployment go on and wait until it does."""
    return _to_phase(url, deployment, "resume", wish, AWAKE, wait_s)


def regroup(url: str, deployment: str, verb: str, wish: ScaleWish | RecoverWish, wait_s: float) -> int:
    """Change the ranks of a deployment and wait until that is done or rolled back. Returns 0 when it is done."""
    view = _ask_and_look(url, deployment, verb, wish, _regroup_is_over, wait_s)
    if view is None:
        return 1
    state = view.regroup.state if view.regroup is not None else RegroupState.ROLLED_BACK
    detail = view.regroup.detail if view.regroup is not None else "the coordinator knows of no change"
    print(f"{deployment}: {state}" + (f": {detail}" if detail else f"; {view.waits_for}"))
    return 0 if state is RegroupState.DONE else 1


def _to_phase(
    url: str, deployment: str, verb: str, wish: HoldWish | ResumeWish, goal: tuple[Phase, ...], wait_s: float
) -> int:
    view = _ask_and_look(url, deployment, verb, wish, lambda view: view.phase in goal, wait_s)
    if view is None:
        return 1
    print(f"{deployment} is {view.phase} at wave {view.wave}" + (f": {view.waits_for}" if view.waits_for else ""))
    return 0 if view.phase in goal else 1


def _regroup_is_over(view: DeploymentView) -> bool:
    return view.regroup is None or view.regroup.state.is_over


def _ask_and_look(
    url: str,
    deployment: str,
    verb: str,
    wish: msgspec.Struct,
    is_over: Callable[[DeploymentView], bool],
    wait_s: float,
) -> DeploymentView | None:
    """Ask for it and look until it is over or the wait is. None: it was refused, and that was said."""
    path = f"/v1/deployments/{urllib.parse.quote(deployment, safe='')}"
    until = time.monotonic() + wait_s
    try:
        ask(url, f"{path}:{verb}", wish)
        view = msgspec.json.decode(ask(url, path), type=DeploymentView)
        while not is_over(view) and time.monotonic() < until:
            time.sleep(LOOK_S)  # an operator's command looks again; nothing is synchronised by it
            view = msgspec.json.decode(ask(url, path), type=DeploymentView)
    except AskError as error:
        print(error, file=sys.stderr)
        return None
    return view
