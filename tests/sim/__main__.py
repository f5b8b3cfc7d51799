"""`python -I tests/sim/__main__.py sim|explore|mutations ...`: what `make sim`, `make explore` and a test run.

The checkout goes to the end of the path, so that nothing in it (`proto/`, `docs/`) hides a library.
"""

import sys
from importlib import import_module
from pathlib import Path

COMMANDS = {"sim": "run", "explore": "explore", "mutations": "mutations"}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(COMMANDS)} ...")
    sys.path.append(str(Path(__file__).parents[2]))
    sys.exit(import_module(f"tests.sim.{COMMANDS[sys.argv[1]]}").main(sys.argv[2:]))
