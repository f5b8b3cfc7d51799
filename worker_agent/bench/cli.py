"""`wavekeeper bench`: its options and its exit status. torch is imported by the ranks' processes alone."""

import sys
from pathlib import Path

import click
import msgspec

BACKENDS = ("shm", "gloo", "nccl", "hccl")


class Numbers(click.ParamType[tuple[int, ...]]):
    """`2,4,8`."""

    name = "N,N,..."

    def convert(
        self, value: str | tuple[int, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Several numbers of at least 1."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"must be numbers with commas between them, got {value!r}", param, ctx)
        if min(numbers) < 1:
            self.fail(f"every number must be at least 1, got {value!r}", param, ctx)
        return numbers


class Backends(click.ParamType[tuple[str, ...]]):
    """`shm,gloo`."""

    name = "NAME,NAME,..."

    def convert(
        self, value: str | tuple[str, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Several names of backends."""
        names = value if isinstance(value, tuple) else tuple(value.split(","))
        if unknown := [name for name in names if name not in BACKENDS]:
            self.fail(f"must be of {', '.join(BACKENDS)}, got {', '.join(unknown)}", param, ctx)
        return names


@click.group()
def bench() -> None:
    """Measure what coordination costs here, beside what engines use today."""


@bench.command()
@click.option("--backends", type=Backends(), default="shm,gloo", show_default=True, help="Exchanges to measure.")
@click.option("--ranks", type=Numbers(), default="2,4,8", show_default=True, help="Numbers of ranks, one process each.")
@click.option("--steps", type=click.IntRange(10), default=2_000, show_default=True, help="Steps of each.")
@click.option("--skew", "skew_us", type=click.FloatRange(0), default=0.0, help="Let ranks come up to so many us late.")
@click.option("--device", default="cpu", show_default=True, help="cuda or npu: rank r takes its r-th device.")
@click.option(
    "--busy-stream", "busy_ms", type=click.FloatRange(0), default=0.0, help="Queue so many ms of work before each step."
)
@click.option("--no-peer", is_flag=True, help="Without what engines use today (it needs torch).")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results there.")
def exchange(
    backends: tuple[str, ...],
    ranks: tuple[int, ...],
    steps: int,
    skew_us: float,
    device: str,
    busy_ms: float,
    no_peer: bool,
    json_path: Path | None,
) -> None:
    """One step's exchange, from the engine's row to the plan.

    The peer is vLLM's: an all_reduce of int32 [4, ranks] over gloo, or, where nccl is measured, over NCCL in the
    compute stream. `agent.step` is the whole call that an engine makes, over shared memory.
    """
    from .exchange import BenchFailedError, Options, run
    from .report import table

    if busy_ms and device == "cpu":
        raise click.UsageError("--busy-stream needs --device cuda or npu: a CPU has no stream")
    if device == "cpu" and (wanted := [name for name in backends if name in ("nccl", "hccl")]):
        raise click.UsageError(f"--backends {','.join(wanted)} needs --device {'cuda' if 'nccl' in wanted else 'npu'}")
    options = Options(
        backends=backends,
        ranks=ranks,
        steps=steps,
        peer=not no_peer,
        device=device,
        skew_us=skew_us,
        busy_ms=busy_ms,
    )
    try:
        report = run(options, lambda text: print(text, file=sys.stderr, flush=True))
    except BenchFailedError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    print(table(report))
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
