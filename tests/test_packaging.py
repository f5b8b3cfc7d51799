"""What is installed: the packages, the contents of the wheel, the dependencies. And what no file here may name."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
CODE = {"wavekeeper.coordinator": "coordinator", "wavekeeper.proto": "proto", "wavekeeper.worker_agent": "worker_agent"}
EXAMPLES = {"wavekeeper.deploy": "deploy/config"}  # the demo starts from one of them
SETUPTOOLS_LEAST = 77  # older ones refuse `license = "Apache-2.0"`

DATA = {
    "wavekeeper/proto/PROTOCOL.md",
    "wavekeeper/deploy/demo.yaml",
    *(f"wavekeeper/{folder}/py.typed" for folder in CODE.values()),
}

# Written in pieces, so that this file does not name them either.
REGISTRIES = ["py" + "pi.org", "python" + "hosted", "npm" + "js.", "crates" + ".io", "deb.debian" + ".org"]
REGISTRIES += ["proxy.golang" + ".org", "conda" + ".anaconda", "docker" + ".io", "quay" + ".io", "ghcr" + ".io"]
PLACES = [r"/home/\w", r"/Users/\w", r"/root\b", "/work" + "/", r"/opt/(pypi|wheels)", re.escape(str(ROOT))]


def git(*arguments: str) -> str:
    """Return what git says about this checkout; skips the test where there is none."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout: there is no list of files to go by")
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def own_files() -> list[Path]:
    """Return every file of the repository: tracked, or about to be."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [path for path in (ROOT / name for name in names if name) if path.is_file() and not path.is_symlink()]


def installed() -> dict[str, str]:
    """Return where each module of the checkout lies in the wheel: `wavekeeper/proto/rows.py` -> its package."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            inner = file.relative_to(ROOT / folder)
            name = ".".join([package, *inner.parent.parts])
            found[f"{name.replace('.', '/')}/{inner.name}"] = name
    return found


# Built once, in a copy: setuptools would put whatever an earlier build left in build/ into the wheel.
@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the source archive, and the wheel that was built from it."""
    if find_spec("build") is None:
        pytest.skip("build is not installed (pip install --group dev)")
    if int(version("setuptools").split(".")[0]) < SETUPTOOLS_LEAST:
        pytest.skip(f"setuptools {version('setuptools')} is too old to build this (make installs a newer one)")
    source = tmp_path_factory.mktemp("source")
    for file in own_files():
        copy = source / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    # Without a target: first the source archive, then the wheel out of it, so the archive must hold all it needs.
    command = [sys.executable, "-Im", "build", "--no-isolation", "--outdir", str(source / "dist"), str(source)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return source / "dist"


@pytest.fixture(scope="module")
def in_wheel(dist: Path) -> set[str]:
    """The names of the files in the wheel."""
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def in_sdist(dist: Path) -> set[str]:
    """The names of the files in the source archive, without its first folder."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


# A package that is missing in the list works in an editable install, and is missing in the wheel.
def test_the_list_of_packages_is_what_the_folders_hold() -> None:
    assert SETUPTOOLS["packages"] == sorted(set(installed().values()))


def test_users_import_every_folder_under_the_project_s_name() -> None:
    assert FOLDERS == CODE | EXAMPLES


def test_the_type_checker_s_links_lead_to_the_same_folders() -> None:
    links = ROOT / ".src" / "wavekeeper"
    if not links.exists():
        pytest.skip("not a checkout: the source archive carries no links")
    assert {link.name: link.resolve() for link in links.iterdir()} == {name: ROOT / name for name in CODE.values()}


def test_an_engine_gets_two_libraries_and_no_more() -> None:
    names = {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in PROJECT["project"]["dependencies"]}
    assert names == {"msgspec", "pyzmq"}


def test_no_version_of_torch_is_pinned() -> None:
    # Each engine pins its own: ours would make wavekeeper uninstallable beside it.
    for name, requirements in PROJECT["project"]["optional-dependencies"].items():
        assert not any(re.match(r"torch.*(==|<|~=)", requirement) for requirement in requirements), name


def test_the_wheel_holds_the_product_and_nothing_else(in_wheel: set[str]) -> None:
    strangers = {name for name in in_wheel if not re.match(r"wavekeeper(-[^/]+\.dist-info)?/", name)}
    assert strangers == set()
    # A namespace: an `__init__` there would shut out other distributions of the project.
    assert "wavekeeper/__init__.py" not in in_wheel


def test_the_wheel_holds_every_module(in_wheel: set[str]) -> None:
    assert {name for name in in_wheel if name.endswith(".py")} == set(installed())


def test_the_wheel_holds_what_was_compiled_and_its_types_and_the_source_archive_its_sources(
    in_wheel: set[str], in_sdist: set[str]
) -> None:
    for module in SETUPTOOLS["ext-modules"]:
        path = module["name"].replace(".", "/")
        assert f"{path}.pyi" in in_wheel
        assert [name for name in in_wheel if name.startswith(f"{path}.") and name.endswith(".so")]
        assert set(module["sources"]) <= in_sdist


def test_the_wheel_holds_types_configurations_the_contract_and_its_vectors(in_wheel: set[str]) -> None:
    assert DATA - in_wheel == set()
    assert any(re.fullmatch(r"wavekeeper/proto/vectors/[^/]+\.json", name) for name in in_wheel)


def test_the_wheel_holds_the_arrivals_that_the_demo_replays(in_wheel: set[str]) -> None:
    assert any(re.fullmatch(r"wavekeeper/worker_agent/demo/[^/]+\.csv", name) for name in in_wheel)


def test_the_wheel_holds_the_licence(in_wheel: set[str]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in in_wheel)


def test_the_source_archive_holds_what_operators_and_packagers_need(in_sdist: set[str]) -> None:
    wanted = {"LICENSE", "README.md", "Makefile", "CONTRIBUTING.md", "deploy/README.md", "tests/test_packaging.py"}
    assert wanted - in_sdist == set()
    carried = {file.relative_to(ROOT).as_posix() for file in own_files() if file.is_relative_to(ROOT / "deploy")}
    assert carried - in_sdist == set()
    assert {name for name in in_sdist if "__pycache__" in name} == set()


def lines_of_own_files() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of each line of each text file of the repository."""
    for file in own_files():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            yield f"{file.relative_to(ROOT)}:{number}", line


def test_no_file_names_a_package_registry_or_a_place_on_somebody_s_machine() -> None:
    forbidden = re.compile("|".join([*map(re.escape, REGISTRIES), *(rf"(?<![\w.-]){place}" for place in PLACES)]))
    # This file's own patterns are the one place where they may stand.
    own = f"{Path(__file__).relative_to(ROOT)}:"
    hits = [f"{place}: {line.strip()[:120]}" for place, line in lines_of_own_files() if forbidden.search(line)]
    assert [hit for hit in hits if not hit.startswith(own)] == []
