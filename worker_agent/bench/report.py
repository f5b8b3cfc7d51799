"""What a benchmark has found: a table for people, JSON for programs. Plain data; no torch."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """One way of one number of ranks. Times in microseconds, one step each, whole rows in and the plan out."""

    backend: str
    ranks: int
    steps: int
    p50_us: float
    """The median rank's median."""
    p99_us: float
    """The worst rank's."""
    max_us: float
    peer: str = ""
    """What engines use today, measured by the same processes in the same run."""
    peer_p50_us: float | None = None
    ratio_p50: float | None = None
    """How many times longer the peer takes."""


class Report(msgspec.Struct, frozen=True):
    """One run of one benchmark."""

    machine: dict[str, str]
    options: dict[str, str]
    results: list[Result]


def machine() -> dict[str, str]:
    """Where this was measured."""
    return {
        "cpu": _cpu(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "wavekeeper": _version("wavekeeper"),
    }


def compared(found: list[Result], peers: dict[int, tuple[str, float]]) -> list[Result]:
    """Put the peer of the same number of ranks beside each result."""
    return [_beside(result, *peers[result.ranks]) if result.ranks in peers else result for result in found]


def table(report: Report) -> str:
    """For people."""
    lines = [f"{name}: {value}" for name, value in report.machine.items()]
    lines += [f"{name}: {value}" for name, value in report.options.items() if value]
    head = ("ranks", "backend", "p50 us", "p99 us", "max us", "peer", "peer p50 us", "times")
    rows = [head, *(_cells(result) for result in report.results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines.append("")
    for row in rows:
        cells = [
            cell.ljust(width) if column in (1, 5) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _cells(result: Result) -> tuple[str, ...]:
    peer = f"{result.peer_p50_us:,.1f}" if result.peer_p50_us is not None else ""
    ratio = f"{result.ratio_p50:,.1f}" if result.ratio_p50 is not None else ""
    times = f"{result.p50_us:,.1f}", f"{result.p99_us:,.1f}", f"{result.max_us:,.1f}"
    return str(result.ranks), result.backend, *times, result.peer, peer, ratio


def _beside(result: Result, peer: str, peer_p50_us: float) -> Result:
    ratio = round(peer_p50_us / result.p50_us, 1)
    return msgspec.structs.replace(result, peer=peer, peer_p50_us=peer_p50_us, ratio_p50=ratio)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
