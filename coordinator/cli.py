"""The door of the console script.

Importing this file loads nothing but the standard library: the base install (an agent inside an engine) has no click,
and must say so in a sentence and not in a traceback. The commands themselves are in commands.py.
"""

import sys

_EXTRAS = {
    "server": ("click", "yaml", "uvicorn", "starlette", "prometheus_client"),
    "demo": ("torch", "rich"),
}


def main() -> None:
    """Run the command line; ends the process with its exit code.

    0: done. 1: failed, or an extra is not installed. 2: wrong usage. 78: the configuration cannot be used.
    """
    try:
        from .commands import cli

        cli(prog_name="wavekeeper")
    except ModuleNotFoundError as error:
        for extra, modules in _EXTRAS.items():
            if error.name in modules:
                who = "wavekeeper's commands need" if extra == "server" else f"this command needs {error.name}, from"
                print(f"{who} the {extra} extra: pip install 'wavekeeper[{extra}]'", file=sys.stderr)
                sys.exit(1)
        raise
