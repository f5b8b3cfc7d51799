"""`wavekeeper demo`: its options, its exit status, and the folder of its logs. What it does is in run.py.

Only what `--help` needs is imported here; torch and rich belong to an extra that may not be installed.
"""

import shutil
import sys
import tempfile
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import click

from .trace import Slice, TraceError, parse_slice, read_slice

NEARBY_TRACE = Path("../shared/traces/azure-llm-2023-conv.csv")
PACKAGED_TRACE = "trace_excerpt.csv"
PACKAGED_CONFIG = "demo.yaml"

REQUESTS = 60
REQUESTS_MAX = 100_000
SPEED = 1.5
"""60 requests of the conversation trace come within 30 s, so here within 20 s; its bursts and its gaps stay."""


class Logs:
    """The folder of the processes' logs. Removed at the end, unless the user named it or something has failed."""

    def __init__(self, named: Path | None) -> None:
        self.keep = named is not None
        if named is not None:
            named.mkdir(parents=True, exist_ok=True)
        self.folder = named or Path(tempfile.mkdtemp(prefix="wavekeeper-demo-"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.keep or kind is not None:
            print(f"the logs are in {self.folder}", file=sys.stderr)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="The coordinator's YAML; by default a packaged one.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help=f"A CSV of the Azure LLM inference traces; by default {NEARBY_TRACE} or, without it, a packaged excerpt.",
)
@click.option(
    "--requests", type=click.IntRange(1, REQUESTS_MAX), default=REQUESTS, show_default=True, help="How many to send."
)
@click.option(
    "--speed",
    type=click.FloatRange(0, min_open=True),
    default=SPEED,
    show_default=True,
    help="How much faster than in the trace.",
)
@click.option("--json", type=click.Path(path_type=Path, dir_okay=False), help="Write the report there.")
@click.option(
    "--exchange",
    type=click.Choice(["shm", "gloo", "auto"]),
    help="How MoE ranks swap their rows; by default what the configuration says.",
)
@click.option("--chaos", is_flag=True, help="Kill the coordinator twice and a dense rank once while it runs.")
@click.option("--keep-logs", type=click.Path(path_type=Path, file_okay=False), help="Leave the processes' logs there.")
def demo(
    config: Path | None,
    trace: Path | None,
    requests: int,
    speed: float,
    json: Path | None,
    exchange: str | None,
    chaos: bool,
    keep_logs: Path | None,
) -> None:
    """Run a small fleet on this machine and watch its waves.

    Starts a coordinator and every rank of its deployments (by default 4 MoE and 2 dense ranks), replays requests of a
    real trace, and reports what the coordination has cost. Every output is compared with that of one rank alone.

    Exits with 0 when nothing was lost and all checks hold, with 1 otherwise. With --chaos the requests that a killed
    rank had taken are reported, and are not lost ones.
    """
    for module in ("torch", "rich"):
        if find_spec(module) is None:  # before anything is started; the caller says what to install
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    if json is not None and not json.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {json.parent} to write it to", param_hint="--json")
    try:
        slice = chosen_slice(trace, requests)
    except TraceError as error:
        click.echo(error, err=True)
        click.get_current_context().exit(1)
    click.get_current_context().exit(_run(slice, speed, exchange, chaos, config, keep_logs, json))


def chosen_slice(trace: Path | None, requests: int) -> Slice:
    """Return the slice to replay: of the trace that was asked for, of one that lies nearby, or of the packaged excerpt.

    Raises:
        TraceError: It cannot be used.
    """
    if trace is not None or NEARBY_TRACE.is_file():
        return read_slice(trace or NEARBY_TRACE, requests)
    excerpt = files(__package__) / PACKAGED_TRACE
    return parse_slice(excerpt.read_text().splitlines(), f"the packaged {PACKAGED_TRACE}", requests)


def _run(
    slice: Slice,
    speed: float,
    exchange: str | None,
    chaos: bool,
    config: Path | None,
    keep_logs: Path | None,
    json: Path | None,
) -> int:
    """Run the demo and return the exit status; whatever ends it early is told in a sentence."""
    import msgspec
    from rich.console import Console

    from .fleet import FleetError
    from .report import report_view
    from .run import InterruptedRunError, Interrupts, Options, run_demo

    console = Console()
    packaged = as_file(files("wavekeeper.deploy") / PACKAGED_CONFIG)
    with packaged as packaged_config, Interrupts() as interrupts, Logs(keep_logs) as logs:
        try:
            options = Options(config or packaged_config, slice, speed, exchange, chaos)
            report = run_demo(options, logs.folder, interrupts, console)
        except FleetError as error:
            logs.keep = True
            click.echo(error, err=True)
            return 1
        except InterruptedRunError as error:
            click.echo(f"{error}; all processes have ended", err=True)
            return error.exit_status
        logs.keep |= not report.ok
        console.print(report_view(report))
        if json is not None:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        return 0 if report.ok else 1
