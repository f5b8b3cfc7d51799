"""The side that lives beside an engine: the agent of a rank, and the client of a front-end.

Reading order: `agent`, `stepping` and `turn` (what an engine's loop calls), `plan` (what a step does; pure),
`stepper` with `attribution`, `voice` and `core` (one rank's side of the protocol; pure; `events` are what goes in and
out), `control` (its thread), `forming` (its exchange), `client` (its socket), `exchange/` (how rows travel),
`forward_context` (the plan inside the model), `offline` (without a coordinator), `front_end` and `front_end_core`,
`hooks` (around a hold), `errors`, `host`; `demo/` is a small real engine, `bench/` measures.
"""

from .agent import RankAgent
from .errors import LossPolicy
from .forward_context import current
from .front_end import FrontEnd
from .hooks import EngineHooks
from .plan import Outcome, Plan, PlanSettings, Role
from .turn import Turn

__all__ = [
    "EngineHooks",
    "FrontEnd",
    "LossPolicy",
    "Outcome",
    "Plan",
    "PlanSettings",
    "RankAgent",
    "Role",
    "Turn",
    "current",
]
