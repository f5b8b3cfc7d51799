"""From figures to the report: pure. What is said here was counted by the ranks, the coordinator or the replay.

The laws of this file:

- A figure of a lockstep deployment that must be the same on all ranks is told once, and a difference is a problem. A
  figure of an independent deployment is the sum over its ranks.
- A deployment is well if it has no problems; the demo's exit status follows from that alone.
- Coordination is what the agent did: the engine's own group, in which experts' tokens travel, is not in these figures.
"""

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...proto.messages import Activity, Counters, Kind, Load, Mode, Phase
from .replay import Outcome
from .trace import CONTEXT_TOKENS_PER_TOKEN, GENERATED_TOKENS_PER_TOKEN, Slice

FOOTNOTES = (
    "Group operations are exchanges of rows; process groups are those made for them,",
    "counted on each rank. The experts' tokens travel in one of the engine's own.",
    "Exchange times include the wait for the slowest rank: p50 of the middle rank,",
    "p99 of the worst.",
)


class RankSeen(msgspec.Struct, frozen=True):
    """One rank, as the coordinator's status shows it."""

    rank: int
    up: bool = False
    mode: Mode | None = None
    activity: Activity | None = None
    wave: int = 0
    step: int = 0
    load: Load = Load()
    counters: Counters = Counters()


class ExchangeSeen(msgspec.Struct, frozen=True):
    """The exchange that the coordinator has chosen."""

    backend: str


class DeploymentSeen(msgspec.Struct, frozen=True):
    """One deployment, as the coordinator's status shows it."""

    name: str
    kind: Kind
    phase: Phase
    ready: bool = False
    epoch: int = 0
    wave: int = 0
    waves: int = 0
    wave_messages: int = 0
    exchange: ExchangeSeen | None = None
    waits_for: str = ""
    ranks: list[RankSeen] = []

    @property
    def at_rest(self) -> bool:
        """Whether no wave runs and no rank has said that it holds requests."""
        quiet = self.phase is Phase.IDLE or not self.kind.lockstep
        return quiet and not any(rank.load.running or rank.load.waiting for rank in self.ranks)


class EngineFinal(msgspec.Struct, frozen=True):
    """What the engine of a rank has counted."""

    forwards: int = 0
    dummy_forwards: int = 0
    requests_done: int = 0
    requests_failed: int = 0


class RankFinal(msgspec.Struct, frozen=True):
    """The last event of a rank's process."""

    rank: int
    agent: Counters
    engine: EngineFinal = EngineFinal()
    torch_dist_imported: bool = False
    """Whether the exchange over torch.distributed was loaded."""
    default_group: bool = False
    """Whether the process was in a torch process group of the engine's own."""


class Percentiles(msgspec.Struct, frozen=True):
    """None: nothing was measured."""

    p50: float | None = None
    p99: float | None = None


class TraceReport(msgspec.Struct, frozen=True):
    """What was replayed."""

    source: str
    requests: int
    rows_read: int
    repeated: bool
    span_s: float
    speed: float
    replay_s: float
    context_tokens_per_token: int = CONTEXT_TOKENS_PER_TOKEN
    generated_tokens_per_token: int = GENERATED_TOKENS_PER_TOKEN


class RankReport(msgspec.Struct, frozen=True):
    """One rank's own figures."""

    rank: int
    steps: int
    group_operations: int
    dummy_steps: int
    process_groups: int
    wave_messages: int
    torch_dist_imported: bool


class DeploymentReport(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment. `problems` says, one sentence each, what is not as it must be."""

    kind: Kind
    dp_size: int
    requests_sent: int
    requests_completed: int
    requests_lost: int
    requests_failed_with_rank: int
    """Those that were out to a rank which the demo itself has killed; not among the lost ones."""
    tokens_generated: int
    waves: int
    empty_waves: int
    steps: int
    dummy_steps: int
    steps_after_last_work: int
    group_operations: int
    process_groups: int
    wave_messages: int
    exchange_backend: str | None
    exchange_us: Percentiles
    latency_s: Percentiles
    output_check: bool
    problems: list[str]
    ranks: list[RankReport]


class Disturbance(msgspec.Struct, frozen=True):
    """One process that `--chaos` has killed and replaced. Seconds; `at_s` since the replay began."""

    what: str
    at_s: float
    back_s: float
    """From the kill until the whole fleet was ready again."""
    requests_out: int
    """Requests without an answer at that moment: of the killed rank, or of all if it was the coordinator."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it; what `--json` writes."""

    ok: bool
    failure: str
    """What ended the demo before its time; empty if nothing did."""
    trace: TraceReport
    elapsed_s: float
    deployments: dict[str, DeploymentReport]
    chaos: list[Disturbance] = []


def make_report(
    slice: Slice,
    *,
    speed: float,
    replay_s: float,
    elapsed_s: float,
    deployments: Mapping[str, DeploymentReport],
    failure: str = "",
    chaos: Sequence[Disturbance] = (),
) -> Report:
    """Put the parts together and judge them."""
    trace = TraceReport(
        source=slice.source,
        requests=len(slice.arrivals),
        rows_read=slice.rows_read,
        repeated=slice.repeated,
        span_s=round(slice.span_s, 3),
        speed=speed,
        replay_s=round(replay_s, 3),
    )
    ok = not failure and not any(deployment.problems for deployment in deployments.values())
    return Report(
        ok=ok,
        failure=failure,
        trace=trace,
        elapsed_s=round(elapsed_s, 3),
        deployments=dict(deployments),
        chaos=list(chaos),
    )


def deployment_report(
    kind: Kind,
    dp_size: int,
    outcomes: Sequence[Outcome],
    finals: Sequence[RankFinal],
    seen: DeploymentSeen | None,
    expected: Mapping[str, list[int]],
    *,
    coordinator_restarted: bool = False,
) -> DeploymentReport:
    """Return the figures of one deployment.

    Args:
        kind: Its kind.
        dp_size: Its ranks.
        outcomes: Of all its requests that were sent.
        finals: The last words of its ranks; those of a rank that died are missing.
        seen: The coordinator's view of it, taken at rest before the ranks were stopped; None if there was no answer.
        expected: The output of each completed request as one rank alone makes it, by id.
        coordinator_restarted: It has then not counted what was before.
    """
    completed = [outcome for outcome in outcomes if not outcome.error]
    fallen = sum(outcome.with_rank for outcome in outcomes)
    counters = [final.agent for final in sorted(finals, key=lambda final: final.rank)]
    combine = _common if kind.lockstep else _sum
    report = DeploymentReport(
        kind=kind,
        dp_size=dp_size,
        requests_sent=len(outcomes),
        requests_completed=len(completed),
        requests_lost=len(outcomes) - len(completed) - fallen,
        requests_failed_with_rank=fallen,
        tokens_generated=sum(len(outcome.tokens) for outcome in completed),
        waves=combine([c.waves for c in counters]),
        empty_waves=combine([c.empty_waves for c in counters]),
        steps=combine([c.steps for c in counters]),
        dummy_steps=_sum([c.dummy_steps for c in counters]),
        steps_after_last_work=max((c.steps_after_last_work for c in counters), default=0),
        group_operations=combine([c.group_operations for c in counters]),
        process_groups=_sum([c.process_groups for c in counters]),
        wave_messages=_sum([c.wave_messages for c in counters]) + _own_wave_messages(seen),
        exchange_backend=seen.exchange.backend if seen is not None and seen.exchange is not None else None,
        exchange_us=_exchange_us(counters),
        latency_s=percentiles([o.latency_s for o in completed if o.latency_s is not None], digits=4),
        output_check=all(expected.get(outcome.request.id) == outcome.tokens for outcome in completed),
        problems=[],
        ranks=[_rank_report(final) for final in sorted(finals, key=lambda final: final.rank)],
    )
    problems = _problems(report, finals, seen)
    if kind.lockstep and finals and seen is not None and not coordinator_restarted and seen.waves != report.waves:
        problems.append(f"the coordinator has counted {seen.waves} waves, the ranks {report.waves}")
    return msgspec.structs.replace(report, problems=problems)


def percentiles(values: Sequence[float], *, digits: int) -> Percentiles:
    """Return the nearest-rank percentiles: values that were really measured."""
    if not values:
        return Percentiles()
    ordered = sorted(values)

    def at(percent: int) -> float:
        return round(ordered[max(0, -(-len(ordered) * percent // 100) - 1)], digits)

    return Percentiles(at(50), at(99))


def _problems(report: DeploymentReport, finals: Sequence[RankFinal], seen: DeploymentSeen | None) -> list[str]:
    problems = []
    if report.requests_lost:
        problems.append(f"{report.requests_lost} of {report.requests_sent} requests were lost")
    if not report.output_check:
        problems.append("some outputs differ from those of one rank alone")
    if missing := sorted(set(range(report.dp_size)) - {final.rank for final in finals}):
        problems.append(f"no final counters of rank {', '.join(map(str, missing))}")
    if seen is None:
        problems.append("the coordinator's view could not be read")
    return problems + (_lockstep_problems if report.kind.lockstep else _dense_problems)(report, finals)


def _lockstep_problems(report: DeploymentReport, finals: Sequence[RankFinal]) -> list[str]:
    problems = []
    for name in ("waves", "steps", "group_operations"):
        values = [getattr(final.agent, name) for final in finals]
        if len(set(values)) > 1:
            problems.append(f"the ranks differ in {name}: {values}")
    if report.group_operations != report.steps:
        problems.append(f"{report.group_operations} group operations in {report.steps} steps; must be one in each")
    if report.steps_after_last_work > 1:
        problems.append(f"a wave went on for {report.steps_after_last_work} steps after its last work; 1 is enough")
    return problems


def _dense_problems(report: DeploymentReport, finals: Sequence[RankFinal]) -> list[str]:
    zeros = ("waves", "dummy_steps", "group_operations", "process_groups", "wave_messages")
    problems = [f"{name} is {value}, must be 0" for name in zeros if (value := getattr(report, name))]
    for final in finals:
        if final.torch_dist_imported or final.default_group:
            problems.append(f"rank {final.rank} has made or loaded what only a group needs")
    return problems


def _rank_report(final: RankFinal) -> RankReport:
    agent = final.agent
    return RankReport(
        rank=final.rank,
        steps=agent.steps,
        group_operations=agent.group_operations,
        dummy_steps=agent.dummy_steps,
        process_groups=agent.process_groups,
        wave_messages=agent.wave_messages,
        torch_dist_imported=final.torch_dist_imported,
    )


def _own_wave_messages(seen: DeploymentSeen | None) -> int:
    """The coordinator's own count: its view adds what the agents had last told, and we know their final figures."""
    if seen is None:
        return 0
    return seen.wave_messages - sum(rank.counters.wave_messages for rank in seen.ranks)


def _exchange_us(counters: Sequence[Counters]) -> Percentiles:
    measured = [c for c in counters if c.group_operations]
    if not measured:
        return Percentiles()
    middle = percentiles([c.exchange_p50_us for c in measured], digits=1).p50
    return Percentiles(middle, round(max(c.exchange_p99_us for c in measured), 1))


def _common(values: Sequence[int]) -> int:
    """The value of all ranks; the largest if they differ, which `_lockstep_problems` tells."""
    return max(values, default=0)


def _sum(values: Sequence[int]) -> int:
    return sum(values)


# --- for people -----------------------------------------------------------------------------------------------------


def report_view(report: Report) -> RenderableType:
    """Return the closing tables, with what is not as it must be below them."""
    trace = report.trace
    again = f" ({trace.rows_read} different ones, begun again)" if trace.repeated else ""
    head = (
        f"{trace.requests} requests{again} of {trace.source}\n{trace.span_s:.1f} s of the trace replayed in "
        f"{trace.replay_s:.1f} s; {report.elapsed_s:.1f} s with start, stop and checks\n"
    )
    problems = [f"{name}: {problem}" for name, each in report.deployments.items() for problem in each.problems]
    killed = sum(each.requests_failed_with_rank for each in report.deployments.values())
    but = f" but what the killed rank had ({killed})" if killed else ""
    verdict = Text(f"all is well: nothing was lost{but}, every output is as of one rank alone", style="green")
    if not report.ok:
        lines = [*([report.failure] if report.failure else []), *problems]
        verdict = Text("\n".join(["not as it must be:", *lines]), style="bold red")
    notes = [Text(note, style="dim") for note in FOOTNOTES]
    blows = [Text(f"killed after {d.at_s:.1f} s, back {d.back_s:.1f} s later: {d.what}") for d in report.chaos]
    return Group(Text(head), _figures(report), Text(), _rank_table(report), Text(), *notes, *blows, verdict)


def _figures(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for name in report.deployments:
        table.add_column(name, justify="right")
    rows = [dict(_cells(deployment)) for deployment in report.deployments.values()]
    for figure in rows[0]:
        table.add_row(figure, *(row[figure] for row in rows))
    return table


def _cells(report: DeploymentReport) -> list[tuple[str, str]]:
    return [
        ("kind", f"{report.kind}, {report.dp_size} ranks"),
        ("requests sent", str(report.requests_sent)),
        ("requests completed", str(report.requests_completed)),
        ("requests lost", str(report.requests_lost)),
        ("requests failed with a killed rank", str(report.requests_failed_with_rank)),
        ("tokens generated", str(report.tokens_generated)),
        ("latency p50 / p99", _pair(report.latency_s, "s")),
        ("outputs as of one rank alone", "yes" if report.output_check else "NO"),
        ("waves (empty ones)", f"{report.waves} ({report.empty_waves})"),
        ("steps", f"{report.steps} on each rank" if report.kind.lockstep else f"{report.steps} in all"),
        ("group operations", str(report.group_operations)),
        ("dummy steps of all ranks", str(report.dummy_steps)),
        ("steps after a wave's last work", str(report.steps_after_last_work)),
        ("process groups", str(report.process_groups)),
        ("wave messages", str(report.wave_messages)),
        ("exchange", report.exchange_backend or "none"),
        ("exchange p50 / p99", _pair(report.exchange_us, "us")),
    ]


def _rank_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("rank")
    for column in ("steps", "group ops", "dummy steps", "process groups", "wave messages"):
        table.add_column(column, justify="right")
    for name, deployment in report.deployments.items():
        for rank in deployment.ranks:
            counts = (
                rank.steps,
                rank.group_operations,
                rank.dummy_steps,
                rank.process_groups,
                rank.wave_messages,
            )
            table.add_row(f"{name} {rank.rank}", *map(str, counts))
    return table


def _pair(measured: Percentiles, unit: str) -> str:
    if measured.p50 is None or measured.p99 is None:
        return "-"
    digits = 2 if unit == "s" else 0
    return f"{measured.p50:.{digits}f} / {measured.p99:.{digits}f} {unit}"
