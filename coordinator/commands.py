"""The commands of `wavekeeper`.

Data goes to stdout, everything else to stderr. Each command imports what it needs when it runs, so that
`wavekeeper --help` and the health check of a container cost little.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from .config import Config

DEFAULT_URL = "http://127.0.0.1:9257"


class LazyGroup(click.Group):
    """A group that knows some commands only by the place of their code, and loads it when one is called.

    `lazy` maps a command to `(module:attribute, short help)`; the module is relative to this package.
    """

    def __init__(self, *, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands; loads none."""
        return sorted([*super().list_commands(ctx), *self._lazy])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return the command of that name, loaded; None if there is none."""
        if name not in self._lazy:
            return super().get_command(ctx, name)
        module, _, attribute = self._lazy[name][0].partition(":")
        command = getattr(import_module(module, __package__), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands into the help; click's own would load each one for its short help."""
        rows = [(name, command.get_short_help_str(80)) for name, command in self.commands.items()]
        rows += [(name, short_help) for name, (_, short_help) in self._lazy.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


def finish(code: int) -> NoReturn:
    """End the command with an exit code."""
    click.get_current_context().exit(code)


def read_config(file: Path, sets: tuple[str, ...]) -> "Config":
    """Load a configuration: file, environment, flags.

    If it cannot be used, all mistakes go to stderr, one a line, and the command ends with 78.
    """
    from .config import ConfigError
    from .config_load import load_config

    try:
        return load_config(file, environ=os.environ, sets=sets)
    except ConfigError as error:
        click.echo(error, err=True)
        finish(error.exit_code)


set_option = click.option(
    "--set", "sets", multiple=True, metavar="KEY.PATH=VALUE", help="Override a key, as in coordinator.http.port=0."
)
url_option = click.option(
    "--url", envvar="WAVEKEEPER_URL", default=DEFAULT_URL, show_default=True, help="Where the coordinator answers HTTP."
)


@click.group(
    cls=LazyGroup,
    lazy={
        "config": (".config_cli:config", "Check, show and describe configuration files."),
        "bench": ("..worker_agent.bench.cli:bench", "Measure what coordination costs here."),
        "demo": ("..worker_agent.demo.cli:demo", "Run a small fleet on this machine and watch its waves."),
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
def cli() -> None:
    """Coordinate data-parallel LLM serving: waves for MoE deployments, nothing for dense ones.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 78 the configuration cannot be used.
    """


@cli.command()
@click.option(
    "--config",
    "config_file",
    required=True,
    envvar="WAVEKEEPER_CONFIG",
    type=click.Path(path_type=Path),
    help="The configuration, a YAML file.",
)
@set_option
@click.option("--log-format", type=click.Choice(["auto", "text", "json"]), help="Overrides coordinator.log.format.")
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the real addresses there (JSON) once everything is bound.",
)
def serve(config_file: Path, sets: tuple[str, ...], log_format: str | None, ready_file: Path | None) -> None:
    """Run a coordinator until SIGTERM or SIGINT."""
    if log_format is not None:
        sets = (*sets, f"coordinator.log.format={log_format}")
    config = read_config(config_file, sets)
    from .logs import configure
    from .service import serve as run_service

    configure(config.coordinator.log.level, config.coordinator.log.format)
    finish(run_service(config, ready_file=ready_file))


@cli.command()
@url_option
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
@click.option("--why", is_flag=True, help="One sentence for each deployment: what it waits for.")
def status(url: str, as_json: bool, why: bool) -> None:
    """Print where every deployment stands."""
    from .status.client import print_status

    finish(print_status(url, as_json, why))


@cli.command()
@click.argument("deployment")
@url_option
@click.option(
    "--mode",
    type=click.Choice(["wait", "now", "keep"]),
    default="wait",
    show_default=True,
    help="Finish running work first, abort it, or keep it where it is.",
)
@click.option("--key", default="", help="Your own name of this operation: asking again with it is not a second one.")
@click.option("--refuse", is_flag=True, help="Turn new requests away meanwhile, instead of remembering them.")
@click.option("--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait until every rank is held.")
def hold(deployment: str, url: str, mode: str, key: str, refuse: bool, wait_s: float) -> None:
    """Hold a lockstep deployment (for a weight update, for sleep): all ranks stop at the same step."""
    from ..proto.messages import HoldMode
    from .core.holds import HoldWish
    from .status.operator_client import hold as ask_for_hold

    finish(ask_for_hold(url, deployment, HoldWish(HoldMode(mode), key, refuse), wait_s))


@cli.command()
@click.argument("deployment")
@url_option
@click.option("--operation", type=int, help="The hold that is meant; otherwise whichever is in force.")
@click.option("--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait until all have resumed.")
def resume(deployment: str, url: str, operation: int | None, wait_s: float) -> None:
    """Let a held deployment go on."""
    from .core.holds import ResumeWish
    from .status.operator_client import resume as ask_to_resume

    finish(ask_to_resume(url, deployment, ResumeWish(operation), wait_s))


@cli.command()
@click.argument("deployment")
@url_option
@click.option("--to", "size", type=int, required=True, help="Ranks that shall make up the group: 0 to N-1.")
@click.option("--deadline", "deadline_s", default=60.0, show_default=True, help="Seconds until it is rolled back.")
def scale(deployment: str, url: str, size: int, deadline_s: float) -> None:
    """Change how many ranks make up a lockstep deployment, within its configured dp_size.

    The old group serves until the new ranks are registered; then the wave ends, and the new group is formed. What
    does not come true in time is rolled back, and says who did not come.
    """
    from .core.regroups import ScaleWish
    from .status.operator_client import regroup

    finish(regroup(url, deployment, "scale", ScaleWish(size, deadline_s), deadline_s + 10))


@cli.command()
@click.argument("deployment")
@url_option
@click.option("--shrink", is_flag=True, required=True, help="Go on with the ranks that are left.")
@click.option("--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait until it is done.")
def recover(deployment: str, url: str, shrink: bool, wait_s: float) -> None:
    """Let a faulted deployment go on without waiting for replacements."""
    from .core.regroups import RecoverWish
    from .status.operator_client import regroup

    finish(regroup(url, deployment, "recover", RecoverWish(shrink), wait_s))


@cli.command()
@url_option
def healthcheck(url: str) -> None:
    """Succeed if the coordinator is alive (for HEALTHCHECK and ExecStartPost)."""
    from .status.client import healthcheck as check_health

    finish(check_health(url))


@cli.command()
def version() -> None:
    """Print the version."""
    click.echo(f"wavekeeper {installed_version('wavekeeper')}")
