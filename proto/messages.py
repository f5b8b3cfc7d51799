"""Every message of the control plane and the feed, grouped by sender.

The law of this file: a message from a rank carries its whole position (`At`) and a number that only grows within one
incarnation. So any later message of a rank makes up for a lost earlier one, and an earlier one that comes late is
recognised and dropped. Commands to a rank are numbered within a term (`seq`), acknowledged by `At.applied` and sent
again until they are.

Rules of change: a new field has a default; a field never changes its type or meaning; a field is never removed within
one protocol version.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

DP_SIZE_MAX = 4096

Rank = Annotated[int, Meta(ge=0, lt=DP_SIZE_MAX, description="global DP rank; local rank and node are attributes")]
Term = Annotated[
    int, Meta(ge=0, lt=1 << 53, description="leadership number of the coordinator; grows with each leader or restart")
]
Epoch = Annotated[int, Meta(ge=0, lt=1 << 31, description="topology version of a deployment; 0 = no group yet")]
Wave = Annotated[int, Meta(ge=0, lt=1 << 31, description="count of running -> idle cycles; never goes back")]
Step = Annotated[int, Meta(ge=0, lt=1 << 31, description="lockstep step within a wave, from 1; 0 = none yet")]
Seq = Annotated[int, Meta(ge=0, description="number of a command within a term, from 1")]
Count = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$(?!\n)", max_length=63)]
Incarnation = Annotated[
    str, Meta(pattern=r"^[0-9a-f]{16}$(?!\n)", description="random id of one life of a rank's process")
]
TEXT_MAX = 2048
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Address = Annotated[str, Meta(max_length=256)]
Word = Annotated[str, Meta(max_length=64)]
Setting = Annotated[str, Meta(max_length=1024)] | int | float | bool | None


def cut(text: str) -> str:
    """`text`, short enough for a `Text`: a reason that is too long must not make a message that nobody can read."""
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 4] + " ..."


class Kind(StrEnum):
    """What a deployment serves: a `moe` deployment runs in lockstep, a `dense` one is independent."""

    MOE = "moe"
    DENSE = "dense"

    @property
    def lockstep(self) -> bool:
        """Whether the ranks of such a deployment share layers and so must step together."""
        return self is Kind.MOE


class Phase(StrEnum):
    """Where a deployment is. A dense one is always `serving`; all others belong to lockstep deployments (DESIGN.md
    section 5).
    """

    SERVING = "serving"
    GATHERING = "gathering"  # waiting for ranks to register
    FORMING = "forming"  # all registered; the exchange is being built and tried
    IDLE = "idle"
    STARTING = "starting"  # a start is out and not yet acknowledged by all
    RUNNING = "running"
    HOLDING = "holding"
    HELD = "held"
    RESUMING = "resuming"
    FAULTED = "faulted"


class Mode(StrEnum):
    """Where one rank is. A dense rank is always `serving`."""

    SERVING = "serving"
    JOINING = "joining"  # registered, but not part of a formed group
    FORMING = "forming"  # building the exchange
    IDLE = "idle"
    RUNNING = "running"
    HELD = "held"
    HALTED = "halted"  # has left its exchange because of a fault; waits for a new epoch


class Activity(StrEnum):
    """What the engine's thread is doing right now, for people who ask who waits for whom."""

    IDLE = "idle"  # blocked in wait()
    STEPPING = "stepping"  # between two exchanges: scheduling or in the model
    EXCHANGING = "exchanging"  # inside the exchange, waiting for the others
    BUSY = "busy"  # in an announced long operation


class At(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank's whole position: what it has applied and where it stands."""

    mode: Mode
    term: Term = 0
    epoch: Epoch = 0
    applied: Seq = 0
    wave: Wave = 0
    step: Step = 0
    has_work: bool = False
    """Holds work that no running wave will surely see."""
    hold: bool = False
    """Has been told to hold and not yet to resume."""

    def is_at(self, other: "At") -> bool:
        """Whether both stand at the same place, the step aside: nothing that is decided depends on that."""
        return (
            self.wave == other.wave
            and self.mode is other.mode
            and self.has_work == other.has_work
            and self.applied == other.applied
            and self.epoch == other.epoch
            and self.term == other.term
            and self.hold == other.hold
        )


class Load(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank's queue. Requests are counts; `kv_cache_usage` is 0..1; tokens are those not yet computed."""

    running: Count = 0
    waiting: Count = 0
    kv_cache_usage: Annotated[float, Meta(ge=0, le=1)] = 0.0
    waiting_tokens: Count = 0


class Costs(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one rank costs its group, and the group it."""

    exchange_us: Count = 0
    """Time inside exchanges, all together."""
    waited_us: Count = 0
    """The part of it that was spent waiting for the others."""
    last_arrivals: Count = 0
    """Exchanges in which this rank was the last to arrive: the others waited for it."""
    forced_eager: Count = 0
    """Steps that ran without a graph because of this rank, though another one had one."""
    forced_padding: Count = 0
    """Steps in which others were padded to this rank's batch."""
    padding_tokens: Count = 0
    """Tokens that this rank fed beyond its own, a dummy's included."""


class Counters(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank has done since its incarnation began. A dense rank's group figures are counted, not assumed."""

    waves: Count = 0
    empty_waves: Count = 0
    steps: Count = 0
    dummy_steps: Count = 0
    steps_after_last_work: Count = 0
    """The most exchanges that any one wave went on for after the last one in which a rank had work."""
    group_operations: Count = 0
    """Exchanges of steps; the pre-flight exchange of each forming is counted apart."""
    preflights: Count = 0
    process_groups: Count = 0
    wave_messages: Count = 0
    exchange_p50_us: float = 0.0
    exchange_p99_us: float = 0.0
    costs: Costs = Costs()


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank as the others must know it to build the exchange."""

    rank: Rank
    incarnation: Incarnation
    host: Address
    rendezvous: Address = ""
    """`tcp://host:port`, where this rank listens for a process group's store; bound before it was said."""


class Mismatch(msgspec.Struct, frozen=True):
    """One setting on which a rank differs from its group."""

    key: str
    expected: Setting
    got: Setting


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The one budget of time, shared at registration; milliseconds. Relations are checked where it is loaded."""

    heartbeat_ms: Annotated[
        int, Meta(ge=10, le=60_000, description="how often a rank shows that it lives, in milliseconds")
    ] = 500
    stall_after_ms: Annotated[
        int, Meta(ge=20, le=3_600_000, description="silence of a rank after which status names it, in milliseconds")
    ] = 5_000
    dead_after_ms: Annotated[
        int, Meta(ge=30, le=3_600_000, description="silence of a rank after which it counts as lost, in milliseconds")
    ] = 5_000
    step_deadline_ms: Annotated[
        int, Meta(ge=50, le=86_400_000, description="longest wait for the slowest rank of a step, in milliseconds")
    ] = 60_000
    start_ack_timeout_ms: Annotated[
        int,
        Meta(ge=20, le=600_000, description="longest wait for a rank's acknowledgement of a start, in milliseconds"),
    ] = 2_000
    form_timeout_ms: Annotated[
        int,
        Meta(ge=100, le=3_600_000, description="longest wait for the exchange to be built, in milliseconds"),
    ] = 60_000


class HoldMode(StrEnum):
    """What happens to running work: finished first, aborted, or kept where it is."""

    WAIT = "wait"
    NOW = "now"
    KEEP = "keep"


class HoldOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator's hold. Ranks carry it, so that a coordinator that restarts finds it again."""

    operation: Count
    hold_mode: HoldMode = HoldMode.WAIT
    key: Address = ""
    """The operator's own name of it."""
    refuse: bool = False
    """Starts that are asked for meanwhile are turned away."""
    regroup: bool = False
    """Not an operator's own: the group stops because its ranks change. It ends with the coordinator that ordered it."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="t", tag=str.lower):
    """Base of everything that travels."""


# --- from a rank ------------------------------------------------------------------------------------------------


class FromRank(Message, frozen=True, kw_only=True):
    """Identity on the wire is (deployment, rank, incarnation)."""

    deployment: Name
    rank: Rank
    incarnation: Incarnation
    number: Count
    """Grows with every message of an incarnation, re-connections included."""
    at: At


class Register(FromRank, frozen=True, kw_only=True):
    """I am this rank; may I join? Sent until `Welcome` or a final `Refused` comes; again whenever a new term
    appears.
    """

    kind: Kind
    dp_size: Annotated[int, Meta(ge=1, le=DP_SIZE_MAX)]
    hold: HoldOrder | None = None
    """The hold that this rank is under."""
    resumed: Count = 0
    """Number of the last hold that this rank was commanded to end; if one rank was, all are."""
    group: str = ""
    """Token of the group that this rank's exchange belongs to; empty when it has none."""
    group_ranks: Annotated[list[Rank], Meta(max_length=DP_SIZE_MAX)] = []
    """The ranks of that group, in order."""
    group_next: Word = ""
    """Incarnation of the member after this one in that group, the first one after the last. All together say who was
    in it, so that a new coordinator knows a zombie, whose rank had been given to another life.
    """
    settings: Annotated[dict[Word, Setting], Meta(max_length=256)] = {}
    """Everything else that changes what the group does: graph buckets, thresholds, row layout, versions."""
    host: Address = ""
    """Identity of the machine: ranks with the same text share memory."""
    process: Address = ""
    """Words of `process_identity`: a coordinator on the same machine notices at once when this process has ended."""
    rendezvous: Address = ""
    exchanges: Annotated[list[Word], Meta(max_length=16)] = []
    """Exchanges that this rank could use, best first."""
    serve: Address = ""
    """Where front-ends send requests; opaque to the coordinator."""
    attributes: Annotated[dict[Word, Address], Meta(max_length=32)] = {}
    """For display: node, local rank, pid, engine, device."""


class Formed(FromRank, frozen=True, kw_only=True):
    """The exchange of `at.epoch` works: the pre-flight exchange has passed."""

    exchange: str


class FormFailed(FromRank, frozen=True, kw_only=True):
    """The exchange of `at.epoch` could not be built; `reason` names who or what was missing."""

    reason: Text


class Started(FromRank, frozen=True, kw_only=True):
    """I run wave `at.wave` (the acknowledgement of `Start`)."""


class NeedWave(FromRank, frozen=True, kw_only=True):
    """I hold work and am not running."""


class WaveComplete(FromRank, frozen=True, kw_only=True):
    """Wave `at.wave - 1` has ended for me after `steps` exchanges."""

    steps: Count
    empty: bool = False
    """No forward was run in it: the start was there before the request."""
    counters: Counters = Counters()


class HeldAt(FromRank, frozen=True, kw_only=True):
    """I am held since the exchange of (`wave`, `step`) and my device is idle."""

    operation: Count
    wave: Wave
    step: Step


class Resumed(FromRank, frozen=True, kw_only=True):
    """The hold is over for me."""


class Halted(FromRank, frozen=True, kw_only=True):
    """I have left my exchange for good. `lost` names whom I blame, if I know."""

    reason: Text
    lost: Rank | None = None


class Heartbeat(FromRank, frozen=True, kw_only=True):
    """I live. `age_ms` tells how long the engine's thread has been in `activity`."""

    activity: Activity = Activity.IDLE
    age_ms: Count = 0
    busy_ms: Count = 0
    """The announced rest of a long operation: compiling, capturing graphs, loading weights."""
    counters: Counters = Counters()


class LoadReport(FromRank, frozen=True, kw_only=True):
    """My queue, as of now."""

    load: Load


class Leave(FromRank, frozen=True, kw_only=True):
    """I stop on purpose."""

    reason: Text = ""
    counters: Counters = Counters()


# --- to a rank -------------------------------------------------------------------------------------------------------


class ToRank(Message, frozen=True, kw_only=True):
    """Addressed to one incarnation: another life of the same rank ignores it."""

    deployment: Name
    rank: Rank
    incarnation: Incarnation
    term: Term


class Welcome(ToRank, frozen=True, kw_only=True):
    """You are registered in this term. The next command has number `seq + 1`; `epoch` and `wave` say where the
    deployment stands.
    """

    answers: Count
    """Number of the `Register` that this answers: a late copy of an old one says where the rank stood then."""
    seq: Seq
    epoch: Epoch
    wave: Wave
    phase: Phase
    timing: Timing
    boot: str
    """Random id of this life of the coordinator."""
    feed: str = ""
    spare: bool = False
    """The group of `epoch` was formed without you: whatever exchange you still are in is over."""


class RefusalReason(StrEnum):
    """Why a registration was refused. The last three may pass; the others need a changed configuration."""

    UNKNOWN_DEPLOYMENT = "unknown_deployment"
    KIND_MISMATCH = "kind_mismatch"
    SETTINGS_MISMATCH = "settings_mismatch"
    RANK_OUT_OF_RANGE = "rank_out_of_range"
    BAD_ADDRESS = "bad_address"
    NO_COMMON_EXCHANGE = "no_common_exchange"
    DUPLICATE_RANK = "duplicate_rank"
    FENCED = "fenced"
    NOT_LEADER = "not_leader"


class Refused(ToRank, frozen=True, kw_only=True):
    """You are not registered. `retry` tells whether asking again may help (a duplicate may die)."""

    reason: RefusalReason
    detail: Text
    mismatches: list[Mismatch] = []
    retry: bool = False


class RegisterAgain(ToRank, frozen=True, kw_only=True):
    """I do not know you: I have restarted, or I had given you up."""


class Pulse(ToRank, frozen=True, kw_only=True):
    """I live, and this is the number of my newest command."""

    seq: Seq


class Command(ToRank, frozen=True, kw_only=True):
    """One step of the history that every rank of the deployment applies in the same order."""

    epoch: Epoch
    seq: Seq


class Form(Command, frozen=True, kw_only=True):
    """Leave the old exchange, build this one, try it with one pre-flight exchange, and say `Formed`.

    Places in the exchange are those in `members`, which need not be all ranks; who is not among them is a spare from
    now on.
    """

    group: str
    exchange: str
    wave: Wave
    members: list[Member]


class Start(Command, frozen=True, kw_only=True):
    """Begin wave `wave`; keep this until the wave before it has ended for you."""

    wave: Wave


class Hold(Command, frozen=True, kw_only=True):
    """Stop together at the first exchange at which all rows carry the wish (or, in `wait` mode, when the wave ends)."""

    order: HoldOrder


class Resume(Command, frozen=True, kw_only=True):
    """The hold is over."""

    operation: Count


class Fault(Command, frozen=True, kw_only=True):
    """The group of `epoch` is broken: leave its exchange now and say `Halted`."""

    lost: Rank
    reason: Text


class Goodbye(ToRank, frozen=True, kw_only=True):
    """I stop on purpose; a running wave goes on without me."""

    reason: Text = ""


# --- from a front-end ------------------------------------------------------------------------------------------------


class FromFrontEnd(Message, frozen=True, kw_only=True):
    """`front_end` is a random id of one life of a front-end."""

    front_end: Incarnation


class Attach(FromFrontEnd, frozen=True, kw_only=True):
    """Where is the feed, and does this deployment exist?"""

    deployment: Name


class GetSnapshot(FromFrontEnd, frozen=True, kw_only=True):
    """Send me the whole state: I have just subscribed, or I have seen a gap or a new term."""

    deployment: Name


class FirstRequest(FromFrontEnd, frozen=True, kw_only=True):
    """I am sending a request to `rank` (absent: unknown) while I believe the deployment idle in `wave`."""

    deployment: Name
    ask: Count
    """Grows with every request of this kind from this front-end, so that a doubled one is known."""
    wave: Wave
    rank: Rank | None = None
    term: Term = 0


class Detach(FromFrontEnd, frozen=True, kw_only=True):
    """I stop on purpose."""


# --- to a front-end --------------------------------------------------------------------------------------------------


class RankState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a front-end needs to know of a rank."""

    rank: Rank
    up: bool = False
    incarnation: str = ""
    serve: str = ""
    load: Load = Load()
    load_number: Count = 0
    """Tells one report from the next, so that own counts are not taken off twice."""
    load_age_ms: Count = 0
    """Age of `load` when this was published; 0 with `load_number` 0 means never reported."""


class DeploymentState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The whole of a deployment, for front-ends."""

    name: Name
    kind: Kind
    dp_size: Count
    phase: Phase
    epoch: Epoch = 0
    wave: Wave = 0
    refuses: bool = False
    """Held, and new requests are not to be sent: a front-end tells its caller to try again."""
    ranks: list[RankState] = []


class Attached(Message, frozen=True, kw_only=True):
    """The feed is at `feed`; subscribe to the topic of `deployment`, then ask for a snapshot."""

    deployment: Name
    term: Term
    feed: str
    kind: Kind


class Snapshot(Message, frozen=True, kw_only=True):
    """All of the state as of update `seq` of this term."""

    deployment: Name
    term: Term
    seq: Seq
    state: DeploymentState


class Update(Message, frozen=True, kw_only=True):
    """The state after update `seq`: the deployment's own fields, and those ranks that changed. Published even when
    nothing did.
    """

    deployment: Name
    term: Term
    seq: Seq
    phase: Phase
    epoch: Epoch = 0
    wave: Wave = 0
    dp_size: Count = 0
    refuses: bool = False
    ranks: list[RankState] = []


class RejectReason(StrEnum):
    """Why something from a front-end had no effect."""

    MALFORMED = "malformed"
    UNKNOWN_DEPLOYMENT = "unknown_deployment"
    RANK_OUT_OF_RANGE = "rank_out_of_range"
    HELD = "held"


class Rejected(Message, frozen=True, kw_only=True):
    """What you sent had no effect."""

    reason: RejectReason
    detail: Text
    deployment: str = ""


FromRankMessage = (
    Register
    | Formed
    | FormFailed
    | Started
    | NeedWave
    | WaveComplete
    | HeldAt
    | Resumed
    | Halted
    | Heartbeat
    | LoadReport
    | Leave
)
ToRankMessage = Welcome | Refused | RegisterAgain | Pulse | Form | Start | Hold | Resume | Fault | Goodbye
FromFrontEndMessage = Attach | GetSnapshot | FirstRequest | Detach
ToFrontEndMessage = Attached | Snapshot | Update | Rejected
WireMessage = FromRankMessage | ToRankMessage | FromFrontEndMessage | ToFrontEndMessage
