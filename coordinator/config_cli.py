"""`wavekeeper config`: what a configuration says, before anything is started with it."""

import os
from pathlib import Path

import click

from .commands import finish, read_config, set_option

_file = click.argument("file", type=click.Path(path_type=Path))


@click.group()
def config() -> None:
    """Check, show and describe configuration files."""


@config.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
def check(files: tuple[Path, ...]) -> None:
    """Tell every mistake in these files.

    Exits with 78 if there is one. Environment variables count as they would for `serve`.
    """
    from .config import ConfigError
    from .config_load import load_config

    worst = 0
    for file in files:
        try:
            checked = load_config(file, environ=os.environ)
        except ConfigError as error:
            click.echo(error)  # on stdout: the mistakes are what was asked for
            worst = error.exit_code
            continue
        names = ", ".join(f"{d.name} ({d.kind}, {d.dp_size} ranks)" for d in checked.deployments)
        count = len(checked.deployments)
        click.echo(f"{file}: ok ({count} deployment{'s' * (count != 1)}: {names})")
    finish(worst)


@config.command()
@_file
@set_option
def show(file: Path, sets: tuple[str, ...]) -> None:
    """Print what takes effect.

    That is the file with its defaults, the environment variables and --set.
    """
    import msgspec
    import yaml

    from .config import config_hash

    effective = read_config(file, sets)
    click.echo(f"# config_hash: {config_hash(effective)}")
    click.echo(yaml.safe_dump(msgspec.to_builtins(effective), sort_keys=False, allow_unicode=True), nl=False)


@config.command()
def schema() -> None:
    """Print the JSON schema of the file, for editors."""
    import msgspec

    from .config import config_schema

    click.echo(msgspec.json.format(msgspec.json.encode(config_schema()), indent=2))
