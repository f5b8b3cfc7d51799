"""Who may import whom, and how large a room may get. Read from the sources, so that a line which never runs counts too.

The laws: decide in pure code, act in thin code; `proto` knows neither side; the two sides never know each other; torch
is loaded by the few files that are about torch. An exception stands in a table below, with its reason.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("proto", "coordinator", "worker_agent")

# The command line of the contract's page: it reads and writes a file, and nothing imports it.
TOOLS = ("proto/document", "proto/process_identity")

# Decisions, and what they are made of. Time, randomness and the network are arguments here.
PURE = (
    "coordinator/core/*",
    "worker_agent/attribution",
    "worker_agent/core",
    "worker_agent/events",
    "worker_agent/errors",
    "worker_agent/front_end_core",
    "worker_agent/plan",
    "worker_agent/stepper",
    "worker_agent/voice",
    "proto/*",
)

# What pure code may use of the standard library: nothing here can wait, look at a clock, throw dice or reach outside.
# So asyncio, socket, threading, time, random, logging and os are out, and so is whatever wraps them.
PURE_LIBRARY = {"abc", "bisect", "collections", "collections.abc", "contextlib", "dataclasses", "enum", "functools"}
PURE_LIBRARY |= {"hashlib", "heapq", "ipaddress", "itertools", "math", "operator", "re", "struct", "types", "typing"}
PURE_LIBRARY |= {"zlib"}
PURE_NAMES = {"random.Random"}  # the type of a generator that is handed in, never the module's own
PURE_BUILTINS_FORBIDDEN = {"open", "print", "input", "breakpoint", "exec", "eval", "__import__"}

# The command lines may know both sides: `wavekeeper demo` starts a coordinator and ranks.
COMMAND_LINES = (
    "coordinator/cli",
    "coordinator/commands",
    "coordinator/config_cli",
    "worker_agent/bench/cli",
    "worker_agent/demo/cli",
)

DEMO = ("worker_agent/demo/*", "worker_agent/bench/*")
"""Commands of their own extra, not of an agent inside an engine; the benchmark's peers are torch's."""
TORCH_EXCHANGE = ("worker_agent/exchange/torch_dist",)
TORCH = {"torch", "torch_npu", "numpy"}

# The distribution that a module comes from, where the names differ.
DISTRIBUTIONS = {"zmq": "pyzmq", "yaml": "pyyaml", "prometheus_client": "prometheus-client"}

FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 60
LONGER_FILES = {"proto/messages": "the whole contract in one place: most lines are fields and what they mean"}


def modules() -> list[str]:
    """Return every module of the product, as `package/folder/module` or `package/folder/__init__`."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return sorted(file.relative_to(ROOT).with_suffix("").as_posix() for file in files)


MODULES = modules()


def are(patterns: Iterable[str]) -> list[str]:
    """Return the modules that one of the patterns means: a module, or `folder/*` for all below it."""
    exact = set(patterns)
    folders = tuple(pattern[:-1] for pattern in exact if pattern.endswith("/*"))
    return [module for module in MODULES if module in exact or module.startswith(folders)]


def are_not(patterns: Iterable[str]) -> list[str]:
    """Return all other modules."""
    return sorted(set(MODULES) - set(are(patterns)))


def pure() -> list[str]:
    """Return the modules that decide."""
    return sorted(set(are(PURE)) - set(are(TOOLS)))


def nobody(offenders: Mapping[str, object]) -> None:
    """Fail if a module is given together with something that it should not do; name them all."""
    told = "\n".join(f"{module}: {what}" for module, what in offenders.items() if what)
    assert not told, told


@cache
def tree(module: str) -> ast.Module:
    """Return the module's syntax tree."""
    return ast.parse((ROOT / f"{module}.py").read_text(), module)


def imports(module: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of every import, those inside functions and `if TYPE_CHECKING:` included.

    A module of ours is written as `package/folder/module`, a foreign one as in the source; the name is empty where a
    whole module is imported.
    """
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            below = node.module.split(".") if node.module else []
            base = "/".join([*module.split("/")[: -node.level], *below])
            for alias in node.names:
                inner = f"{base}/{alias.name}"
                is_module = inner in MODULES or f"{inner}/__init__" in MODULES
                yield (inner, "") if is_module else (base, alias.name)


def ours(module: str) -> set[str]:
    """Return the modules of ours that this one imports; a package under its `/__init__`."""
    targets = {target for target, _ in imports(module) if target.split("/")[0] in PACKAGES}
    return {target if target in MODULES else f"{target}/__init__" for target in targets}


def foreign(module: str) -> dict[str, str]:
    """Return what this module imports of others: what is written -> the module that it is in."""
    pairs = ((target, name) for target, name in imports(module) if target.split("/")[0] not in PACKAGES)
    return {f"{target}.{name}" if name else target: target for target, name in pairs}


def third_party(module: str) -> set[str]:
    """Return the distributions outside the standard library that this module needs."""
    tops = {target.split(".")[0] for target in foreign(module).values()} - sys.stdlib_module_names
    return {DISTRIBUTIONS.get(top, top) for top in tops}


def sides(module: str) -> set[str]:
    """Return the packages of ours that this module imports from."""
    return {target.split("/")[0] for target in ours(module)}


def extra(name: str) -> set[str]:
    """Return the distributions of an extra of pyproject.toml, or of the base install for `base`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] if name == "base" else project["optional-dependencies"][name]
    return {re.split(r"[^A-Za-z0-9_-]", requirement)[0].lower() for requirement in requirements}


@pytest.mark.parametrize("pattern", [*TOOLS, *PURE, *COMMAND_LINES, *DEMO, *TORCH_EXCHANGE, *LONGER_FILES])
def test_every_law_is_about_modules_that_exist(pattern: str) -> None:
    assert are([pattern])


# Who imports whom


def test_the_contract_knows_neither_side() -> None:
    nobody({module: sides(module) - {"proto"} for module in are(["proto/*"])})
    nobody({module: third_party(module) - {"msgspec"} for module in are(["proto/*"])})


def test_decisions_are_made_without_clock_dice_threads_or_network() -> None:
    def impure(module: str) -> list[str]:
        found = foreign(module).items()
        harmless = PURE_LIBRARY | {"msgspec"}
        return [written for written, target in found if target not in harmless and written not in PURE_NAMES]

    nobody({module: impure(module) for module in pure()})


def test_decisions_are_made_without_reading_or_printing() -> None:
    def names(module: str) -> set[str]:
        return {node.id for node in ast.walk(tree(module)) if isinstance(node, ast.Name)}

    nobody({module: names(module) & PURE_BUILTINS_FORBIDDEN for module in pure()})


def test_decisions_stand_on_decisions() -> None:
    nobody({module: ours(module) - set(pure()) for module in pure()})


def test_the_coordinator_s_core_knows_the_contract_and_nothing_else_of_ours() -> None:
    allowed = {*are(["proto/*", "coordinator/core/*"])}
    nobody({module: ours(module) - allowed for module in are(["coordinator/core/*"])})


def test_coordinator_and_agent_never_import_each_other() -> None:
    apart = set(are_not(COMMAND_LINES))
    nobody({module: sides(module) & {"worker_agent"} for module in are(["coordinator/*"]) if module in apart})
    nobody({module: sides(module) & {"coordinator"} for module in are(["worker_agent/*"]) if module in apart})


# What each part needs installed


def test_torch_is_imported_by_the_files_that_are_about_it_and_no_other() -> None:
    nobody({module: third_party(module) & TORCH for module in are_not([*TORCH_EXCHANGE, *DEMO])})


def test_an_agent_needs_the_base_install_alone() -> None:
    # The engine brings torch, and is asked for it only when that exchange is chosen.
    brought = {module: TORCH for module in are(TORCH_EXCHANGE)}
    brought |= {module: extra("demo") | extra("server") for module in are(DEMO)}
    agents = are(["worker_agent/*"])
    nobody({module: third_party(module) - extra("base") - brought.get(module, set()) for module in agents})


def test_the_coordinator_needs_the_server_extra_alone() -> None:
    allowed = extra("base") | extra("server")
    nobody({module: third_party(module) - allowed for module in are(["coordinator/*"])})


# Importing, for real


def loaded_by(module: str) -> set[str]:
    """Return the top-level modules that are there after importing one, in an interpreter of its own."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["cli", "commands", "service"])
def test_the_coordinator_s_process_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(f"wavekeeper.coordinator.{module}") & {*TORCH, "pydantic", "grpc"} == set()


@pytest.mark.parametrize("module", ["agent", "front_end"])
def test_an_engine_s_process_loads_no_more_than_it_must(module: str) -> None:
    # The engine may have its own version of any of these, or none.
    strangers = {*TORCH, "pydantic", "grpc", "click", "uvicorn", "starlette", "prometheus_client", "yaml", "rich"}
    assert loaded_by(f"wavekeeper.worker_agent.{module}") & strangers == set()


# How imports are written


def test_imports_inside_the_packages_are_relative() -> None:
    # An absolute one would load a module a second time when the checkout is on the path: as `proto.rows`, and as ours.
    absolute = {*PACKAGES, "wavekeeper"}
    nobody({module: {t for t in foreign(module).values() if t.split(".")[0] in absolute} for module in MODULES})


def test_tests_import_the_product_by_its_installed_name() -> None:
    def tops(file: Path) -> Iterator[str]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield (node.module or "").split(".")[0]

    files = sorted((ROOT / "tests").rglob("*.py"))
    nobody({str(file.relative_to(ROOT)): set(tops(file)) & set(PACKAGES) for file in files})


# Rooms


def test_every_package_lists_its_modules() -> None:
    def unlisted(package: str) -> list[str]:
        folder = package.removesuffix("__init__")
        below = {module.removeprefix(folder).split("/")[0] for module in are([f"{folder}*"])}
        words = set(re.findall(r"\w+", ast.get_docstring(tree(package)) or ""))
        return sorted(below - words - {"__init__", "__main__"})

    nobody({package: unlisted(package) for package in MODULES if package.endswith("/__init__")})


def test_every_folder_with_code_is_a_package() -> None:
    folders = {module.rpartition("/")[0] for module in MODULES}
    nobody({folder: f"{folder}/__init__" not in MODULES for folder in sorted(folders)})


def test_files_stay_readable() -> None:
    lines = {module: len((ROOT / f"{module}.py").read_text().splitlines()) for module in MODULES}
    long_ones = {module: f"{count} lines" for module, count in lines.items() if count > FILE_LINES_MAX}
    nobody({module: told for module, told in long_ones.items() if module not in LONGER_FILES})
    assert long_ones.keys() >= LONGER_FILES.keys()  # an exception that is no longer needed leaves the table


def test_functions_stay_readable() -> None:
    def long_ones(module: str) -> dict[str, int]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        functions = [node for node in ast.walk(tree(module)) if isinstance(node, kinds)]
        lines = {function.name: (function.end_lineno or 0) - function.lineno + 1 for function in functions}
        return {name: count for name, count in lines.items() if count > FUNCTION_LINES_MAX}

    nobody({module: long_ones(module) for module in MODULES})
