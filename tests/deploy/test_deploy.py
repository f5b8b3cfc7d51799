"""What lies in deploy/: each file is read by the program that it is for, or by the product itself, as far as this can
be done without Docker, a cluster or systemd as process 1. Where a tool is not installed the test says so and is
skipped; `.ci/run` installs the ones that pip has.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from wavekeeper.coordinator.commands import DEFAULT_URL, cli
from wavekeeper.coordinator.config import EXIT_CONFIG, Config, CoordinatorConfig
from wavekeeper.coordinator.config_load import parse_config

from .sandbox import missing, values

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
UNIT = DEPLOY / "systemd" / "wavekeeper.service"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
SANDBOX = Path(__file__).with_name("sandbox.py")

MANIFESTS = sorted(set(KUBERNETES.glob("*.yaml")) - {KUBERNETES / "kustomization.yaml"})
UNIT_EXPOSURE_MAX = 20  # of 100, as `systemd-analyze security` counts it; most services of a distribution have 90
PROBES = ("startup", "liveness", "readiness")
WAVEKEEPER = (sys.executable, "-I", "-m", "wavekeeper.coordinator")
START_S_MAX = 60
STOP_S_MAX = 15


def manifest(name: str) -> Any:
    """Return one Kubernetes object."""
    return yaml.safe_load((KUBERNETES / f"{name}.yaml").read_text())


def pod() -> Any:
    """Return the pod's part of the StatefulSet."""
    return manifest("statefulset")["spec"]["template"]["spec"]


def container() -> Any:
    """Return the only container of the pod."""
    (only,) = pod()["containers"]
    return only


def config_texts() -> dict[str, str]:
    """Return the text of every configuration in deploy/, the one inside the ConfigMap included, by its place."""
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in DEPLOY.glob("config/*.yaml")}
    for name, text in manifest("configmap")["data"].items():
        texts[f"deploy/kubernetes/configmap.yaml: {name}"] = text
    return texts


def ports_of(config: Config | CoordinatorConfig) -> tuple[int, int, int]:
    """Return the ports of control, feed and http."""
    coordinator = config.coordinator if isinstance(config, Config) else config
    return coordinator.control.bind_endpoint.port, coordinator.feed.bind_endpoint.port, coordinator.http.port


PORTS = dict(zip(("control", "feed", "http"), ports_of(CoordinatorConfig()), strict=True))


def parsed(words: list[str]) -> dict[str, Any]:
    """Return the options of a command line of `wavekeeper`, as the product's own parser reads them; runs nothing."""
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None, f"`wavekeeper` has no command {words[0]!r}"
    return command.make_context(words[0], words[1:]).params


def instruction(name: str) -> str:
    """Return what the last instruction of that name in the Dockerfile says."""
    joined = DOCKERFILE.read_text().replace("\\\n", " ")
    return str(re.findall(rf"^{name} +(.*)$", joined, re.MULTILINE)[-1]).strip()


def tool(name: str) -> str:
    """Return the path of a tool, beside this interpreter or on the PATH; skips the test without it."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (pip install --group deploy, or see deploy/README.md)")
    return found


def output_of(*command: str | Path) -> tuple[int, str]:
    """Run a checker; returns its exit code and all that it said."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout


# Configurations


@pytest.mark.parametrize("place", config_texts())
def test_every_configuration_in_deploy_loads(place: str) -> None:
    assert parse_config(config_texts()[place], place).deployments


def test_the_pod_tells_its_peers_the_name_that_its_service_gives_it() -> None:
    config = parse_config(manifest("configmap")["data"]["config.yaml"], "configmap").coordinator
    stateful, service = manifest("statefulset"), manifest("service")
    name = f"{stateful['metadata']['name']}-0.{service['metadata']['name']}"
    for address, port in ((config.control, PORTS["control"]), (config.feed, PORTS["feed"])):
        assert address.bind_endpoint.is_wildcard
        assert address.advertised_endpoint(port).text == f"tcp://{name}:{port}"


def test_ports_agree_everywhere() -> None:
    expected = tuple(PORTS.values())
    for place in ("deploy/config/mixed.yaml", "deploy/kubernetes/configmap.yaml: config.yaml"):
        assert ports_of(parse_config(config_texts()[place], place)) == expected, place
    assert {port["name"]: port["containerPort"] for port in container()["ports"]} == PORTS
    assert {port["name"]: port["port"] for port in manifest("service")["spec"]["ports"]} == PORTS
    assert instruction("EXPOSE").split() == [str(port) for port in expected]
    assert f":{PORTS['http']}" in DEFAULT_URL
    readme = (DEPLOY / "README.md").read_text()
    assert all(str(port) in readme for port in expected)


# systemd


def test_the_unit_starts_a_command_that_exists() -> None:
    (start,) = values(UNIT, "ExecStart")
    program, *words = start.split()
    assert Path(program).name == "wavekeeper"
    assert parsed(words)["config_file"] == Path("/etc/wavekeeper/config.yaml")


def test_systemd_does_not_start_a_coordinator_again_whose_configuration_is_wrong() -> None:
    assert values(UNIT, "RestartPreventExitStatus") == [str(EXIT_CONFIG)]
    # That key looks at the main process alone: a check before it would fail and be started again for ever.
    assert values(UNIT, "ExecStartPre") == []


def test_the_unit_keeps_the_working_directory_out_of_python_s_path() -> None:
    assert "PYTHONSAFEPATH=1" in " ".join(values(UNIT, "Environment")).split()


def runnable_unit(folder: Path) -> Path:
    """Return a copy of the unit whose program exists on this machine, as systemd-analyze wants it."""
    (start,) = values(UNIT, "ExecStart")
    copy = folder / UNIT.name
    copy.write_text(UNIT.read_text().replace(start.split()[0], sys.executable))
    return copy


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    code, said = output_of(tool("systemd-analyze"), "verify", runnable_unit(tmp_path))
    assert (code, said) == (0, "")  # it exits with 0 even for a key that it does not know, and only warns


def test_the_unit_stays_locked_down(tmp_path: Path) -> None:
    threshold = f"--threshold={UNIT_EXPOSURE_MAX}"
    command = tool("systemd-analyze"), "--no-pager", "security", "--offline=true", threshold
    code, said = output_of(*command, runnable_unit(tmp_path))
    assert code == 0, said[-300:]


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_coordinator_lives_under_the_unit_s_system_call_rules(tmp_path: Path) -> None:
    under_the_unit = sys.executable, "-I", str(SANDBOX), str(UNIT)
    with serving(DEPLOY / "config" / "demo.yaml", tmp_path, under=under_the_unit) as url:
        assert output_of(*WAVEKEEPER, "healthcheck", "--url", url)[0] == 0


@contextmanager
def serving(config: Path, folder: Path, *, under: tuple[str, ...] = ()) -> Iterator[str]:
    """Run a coordinator on free loopback ports, and end it as systemd and Kubernetes do; gives its HTTP address."""
    ready = folder / "ready.json"
    loopback = {"control.bind": "tcp://127.0.0.1:0", "feed.bind": "tcp://127.0.0.1:0"}
    loopback |= {"http.host": "127.0.0.1", "http.port": "0", "log.level": "warning"}
    sets = [f"--set=coordinator.{key}={value}" for key, value in loopback.items()]
    command = [*under, *WAVEKEEPER, "serve", f"--config={config}", f"--ready-file={ready}", *sets]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(ready, process)
            yield json.loads(ready.read_text())["http"]
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=STOP_S_MAX)
        finally:
            process.kill()
    assert process.returncode == 0, said


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the file is there. Fails at once, with what was said, when the process ends before."""
    for _ in range(START_S_MAX * 20):
        if file.exists():
            return
        try:
            process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            continue
        assert process.stderr is not None
        pytest.fail(f"it ended with {process.returncode}: {process.stderr.read()}")
    pytest.fail(f"{file.name} was not written within {START_S_MAX} s")


# Docker


def test_the_image_runs_commands_that_exist() -> None:
    assert json.loads(instruction("ENTRYPOINT")) == ["wavekeeper"]
    served = parsed(json.loads(instruction("CMD")))
    assert served["config_file"] == Path("/etc/wavekeeper/config.yaml")
    program, *words = json.loads(instruction("HEALTHCHECK").partition(" CMD ")[2])
    assert program == "wavekeeper"
    assert parsed(words)["url"] == DEFAULT_URL


def test_the_image_is_built_from_what_the_package_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {*project["tool"]["setuptools"]["package-dir"].values(), "pyproject.toml", "README.md", "LICENSE"}
    copied = set()
    for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE.read_text(), re.MULTILINE):
        *sources, _ = line.split()
        copied.update(sources)
    assert copied == needed
    sent = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split()
    assert {line.removeprefix("!") for line in sent if line.startswith("!")} == needed


def test_hadolint_finds_nothing_wrong_with_the_dockerfile() -> None:
    assert output_of(tool("hadolint"), "--no-color", DOCKERFILE) == (0, "")


# Kubernetes


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_kubernetes_knows_every_field_of_the_manifests(file: Path) -> None:
    code, said = output_of(tool("kubernetes-validate"), "--strict", file)
    assert code == 0, said
    assert "WARN" not in said, said  # an unknown kind is only warned of


def test_the_kustomization_holds_every_manifest() -> None:
    assert sorted(manifest("kustomization")["resources"]) == [file.name for file in MANIFESTS]


def test_the_manifests_belong_together() -> None:
    stateful, service, policy = manifest("statefulset"), manifest("service"), manifest("networkpolicy")
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert stateful["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    (volume,) = pod()["volumes"]
    (mount,) = container()["volumeMounts"]
    assert volume["configMap"]["name"] == manifest("configmap")["metadata"]["name"]
    assert mount["name"] == volume["name"]
    (rule,) = policy["spec"]["ingress"]
    assert {port["port"] for port in rule["ports"]} == set(PORTS)
    assert all(port["targetPort"] == port["name"] for port in service["spec"]["ports"])


def test_the_pod_serves_the_configuration_that_it_mounts() -> None:
    file = parsed(container()["args"])["config_file"]
    assert file.parent == Path(container()["volumeMounts"][0]["mountPath"])
    assert file.name in manifest("configmap")["data"]


def test_agents_can_reach_a_coordinator_that_is_not_ready_yet() -> None:
    spec = manifest("service")["spec"]
    assert spec["publishNotReadyAddresses"] is True
    assert spec["clusterIP"] == "None"


def test_one_coordinator_runs_and_a_pod_that_is_not_ready_does_not_block_its_own_update() -> None:
    spec = manifest("statefulset")["spec"]
    assert spec["replicas"] == 1
    assert spec["podManagementPolicy"] == "Parallel"


def test_a_lost_rank_does_not_restart_the_coordinator() -> None:
    probes = {name: container()[f"{name}Probe"]["httpGet"] for name in PROBES}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/livez",
        "liveness": "/livez",
        "readiness": "/readyz",
    }
    assert {probe["port"] for probe in probes.values()} == {"http"}


def answer(url: str) -> int:
    """Return the HTTP status of a GET, as a probe sees it."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_the_probes_find_a_coordinator_without_ranks_alive_but_not_ready(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(manifest("configmap")["data"]["config.yaml"])
    with serving(config, tmp_path) as url:
        probed = {name: answer(url + container()[f"{name}Probe"]["httpGet"]["path"]) for name in PROBES}
    assert probed == {"startup": 200, "liveness": 200, "readiness": 503}


def test_the_pod_runs_the_image_s_user_without_privileges() -> None:
    assert pod()["securityContext"]["runAsNonRoot"] is True
    user = f"{pod()['securityContext']['runAsUser']}:{pod()['securityContext']['runAsGroup']}"
    assert instruction("USER") == user
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_pod_runs_the_image_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert container()["image"] == f"wavekeeper:{version}"
    assert f"-t wavekeeper:{version} ." in DOCKERFILE.read_text()


def test_the_readme_names_every_file_of_deploy() -> None:
    readme = (DEPLOY / "README.md").read_text()
    files = {file for file in DEPLOY.rglob("*") if file.is_file() and file.parent.name != "__pycache__"}
    assert {file.name for file in files if file.name not in readme} == {"README.md"}
