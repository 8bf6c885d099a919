"""The files of deploy/, as far as they can be judged where there is no Docker and no cluster."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import printed

from sglang_smc.command.cli import COMMANDS
from sglang_smc.upstream import SUPPORTED

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GRAFANA = ROOT / "examples" / "grafana"
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
TWO_NODES = "leaderworkerset.yaml"
KUBERNETES = ("kubernetes.yaml", TWO_NODES)
# As LeaderWorkerSet sets them.
SECOND_POD = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "first.pod"}
COMPOSE = [DEPLOY / "compose.yaml", DEPLOY / "compose.gpu.yaml"]
DASHBOARDS = GRAFANA / "docker-compose.yaml"
UNIT = DEPLOY / "sglang-smc.service"


def tool(name: str) -> str:
    """A linter beside this Python or on the path; the test is skipped, and says so, without it."""
    found = shutil.which(
        name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def read(path: Path) -> Any:
    """A YAML file; of Kubernetes' the first document."""
    return next(yaml.safe_load_all(path.read_text()))


# --- Linters

SCHEMA = "--builtin-schema"
RELEASE = ROOT / ".github" / "workflows" / "release.yml"
LINTED: list[tuple[str, list[str | Path]]] = [
    ("hadolint", [DEPLOY / name for name in DOCKERFILES]),
    ("check-jsonschema", [SCHEMA, "vendor.compose-spec", *COMPOSE, DASHBOARDS]),
    ("check-jsonschema", [SCHEMA, "vendor.github-workflows", RELEASE]),
    ("kubernetes-validate", ["--strict", DEPLOY / "kubernetes.yaml"]),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("linter", "words"), LINTED)
def test_linters_take_the_files(linter: str, words: list[str | Path]) -> None:
    printed(tool(linter), *words)


@pytest.mark.nightly
def test_kubernetes_takes_the_pods_of_a_leader_worker_set(tmp_path: Path) -> None:
    """No schema of LeaderWorkerSet itself comes with the linter."""
    found = tmp_path / "pod.json"
    kind = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a-pod"}}
    found.write_text(json.dumps({**kind, "template": pod(TWO_NODES)}))
    printed(tool("kubernetes-validate"), "--strict", found)


@pytest.mark.nightly
def test_docker_compose_reads_them() -> None:
    docker = tool("docker")
    if subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker has no compose")
    for files in (COMPOSE[:1], COMPOSE):
        printed(docker, "compose", *(f"--file={file}" for file in files), "config", "--quiet")


@pytest.mark.nightly
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/sglang-smc/bin/python", sys.executable))
    words = [tool("systemd-analyze"), "verify", str(copy)]  # it ends well where it only warns
    assert not subprocess.run(words, capture_output=True, check=True).stderr


# --- Command lines


def dockerfile_words(name: str, instruction: str) -> list[str]:
    (line,) = re.findall(rf"^{instruction} (\[.*\])$", (DEPLOY / name).read_text(), re.M)
    return json.loads(line)


def pod(name: str) -> dict[str, Any]:
    """The template of the pods of a file for Kubernetes."""
    spec = read(DEPLOY / name)["spec"]
    return spec.get("leaderWorkerTemplate", {}).get("workerTemplate") or spec["template"]


def container(name: str) -> dict[str, Any]:
    (found,) = pod(name)["spec"]["containers"]
    return found


def servers() -> Iterator[tuple[str, list[str]]]:
    """The words behind `python` wherever a server is started."""
    given = ["--model-path=t", "--speculative-draft-model-path=d"]  # as the image's user adds them
    yield "Dockerfile", [*dockerfile_words("Dockerfile", "ENTRYPOINT")[1:], *given]
    for path in COMPOSE:
        yield path.name, read(path)["services"]["server"]["command"][1:]
    for name in KUBERNETES:
        found = container(name)
        words = " ".join([*found["command"][1:], *found["args"]])
        yield name, re.sub(r"\$\((\w+)\)", lambda of: SECOND_POD[of[1]], words).split()
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text().replace("\\\n", " "), re.M)
    yield UNIT.name, shlex.split(line)[1:]


def test_sglang_takes_the_command_lines() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    for name, words in servers():
        assert words[:2] == ["-m", "sglang.launch_server"], name
        found = parser.parse_args(words[2:])
        assert found.speculative_algorithm == "SMC"
        assert found.model_path and found.speculative_draft_model_path
        assert (found.port, found.enable_metrics) == (30000, True)
    name, command = dockerfile_words("Dockerfile.cpu", "CMD")
    assert name == "sglang-smc" and command in COMMANDS


# --- What hangs together


def test_images_hold_the_newest_release_and_files_that_are_there() -> None:
    assert f"lmsysorg/sglang:v{SUPPORTED[-1]}\n" in (DEPLOY / "Dockerfile").read_text()
    assert f"'sglang=={SUPPORTED[-1]}'" in (DEPLOY / "Dockerfile.cpu").read_text()

    copied: set[str] = set()
    let_in = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M)
    for name in DOCKERFILES:
        lines = re.findall(r"^COPY (?!--from)(.*) \S+$", (DEPLOY / name).read_text(), re.M)
        sources = [source for line in lines for source in line.split()]
        assert sources and all((ROOT / source).exists() for source in sources)
        assert len(set(sources)) == len(sources)
        copied |= set(sources)
    assert copied == set(let_in)


def option(words: list[str], name: str) -> str:
    """The value of a flag, in either spelling."""
    (found,) = re.findall(rf"{name}[= ](\S+)", " ".join(words))
    return found


def test_prometheus_asks_the_server_of_the_compose_file() -> None:
    (included,) = read(COMPOSE[0])["include"]
    assert (DEPLOY / included["path"]).resolve() == DASHBOARDS
    (job,) = read(GRAFANA / "prometheus.yaml")["scrape_configs"]
    words = dict(servers())["compose.yaml"]
    asked = f"{option(words, '--host')}:{option(words, '--port')}"
    assert job["static_configs"][0]["targets"] == [asked]


def test_what_listens_is_what_the_page_says() -> None:
    """Compose files share the machine's network; the image is run for this machine alone."""
    page = (DEPLOY / "README.md").read_text()
    rows = re.findall(r"^\| (.*?) \| (server|Prometheus|Grafana) \| (\S+:\d+) \|", page, re.M)
    told = {
        (name if process == "server" else process): address
        for names, process, address in rows
        for name in names.split(", ")
    }
    services = read(DASHBOARDS)["services"]
    settings = services["grafana"]["environment"]
    grafana = f"{settings['GF_SERVER_HTTP_ADDR']}:{settings['GF_SERVER_HTTP_PORT']}"
    listens = {
        name: f"{option(words, '--host')}:{option(words, '--port')}" for name, words in servers()
    }
    prometheus = option(services["prometheus"]["command"], "--web.listen-address")
    assert told == {**listens, "Prometheus": prometheus, "Grafana": grafana}
    reached = {name for name, address in told.items() if not address.startswith("127.0.0.1:")}
    assert reached == {"Dockerfile", *KUBERNETES}, "what shares the machine's network is here"
    every = [one for path in (*COMPOSE, DASHBOARDS) for one in read(path)["services"].values()]
    assert not any("ports" in service for service in every)
    published = re.findall(r" -p (\S+:\d+)", (DEPLOY / "Dockerfile").read_text())
    assert published and all(one.startswith("127.0.0.1:") for one in published)
    # Nobody logs in to Grafana: its first account would be admin, with the password admin.
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false"


@pytest.mark.parametrize("name", KUBERNETES)
def test_every_kind_of_probe_asks_health_at_the_servers_port(name: str) -> None:
    found = container(name)
    (port,) = found["ports"]
    assert f"--port={port['containerPort']}" in found["args"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = found[kind]
        assert probe["httpGet"] == {"path": "/health", "port": port["name"]}
        assert probe["timeoutSeconds"] >= 20, "it waits for a request of its own"


def test_the_ranks_of_a_leader_worker_set_have_a_gpu_each() -> None:
    """Its Service sends requests to the first pod, which has the HTTP server."""
    group, service = yaml.safe_load_all((DEPLOY / TWO_NODES).read_text())
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    words = dict(servers())[TWO_NODES]
    assert SECOND_POD["LWS_GROUP_SIZE"] == str(size) == option(words, "--nnodes")
    gpus = size * container(TWO_NODES)["resources"]["limits"]["nvidia.com/gpu"]
    assert option(words, "--tp-size") == str(gpus)
    of = "leaderworkerset.sigs.k8s.io"
    asked = {f"{of}/name": group["metadata"]["name"], f"{of}/worker-index": "0"}
    assert service["spec"]["selector"] == asked


def test_systemd_lets_the_server_end_its_processes() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.M))
    assert settings["KillMode"] == "mixed", "SIGTERM for all would end the schedulers under it"
    assert settings["Restart"] == "always" and "SuccessExitStatus" not in settings


# --- The image of the demo, step by step


def steps(name: str) -> Iterator[list[str]]:
    """The instruction and the rest of each line of a Dockerfile, continuation lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / name).read_text(), flags=re.M).replace("\\\n", " ")
    return (line.split(maxsplit=1) for line in text.splitlines() if line.strip())


@pytest.mark.nightly
def test_the_steps_of_the_cpu_image_in_an_empty_environment(tmp_path: Path) -> None:
    """As `docker build` would run them, but for the operating system; it installs gigabytes."""
    root = tmp_path / "root"
    stages = 0
    environment = {**os.environ, "HOME": str(tmp_path)}
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)

    def within(words: str) -> str:
        """The image's own folders become those below ``root``."""
        return re.sub(r"(?<![\w.])/(src|wheels|models)\b", rf"{root}/\1", words)

    workdir = root
    for instruction, rest in steps("Dockerfile.cpu"):
        if instruction == "FROM":
            stages += 1
            venv = tmp_path / f"stage{stages}"
            printed(sys.executable, "-m", "venv", venv)
            environment["PATH"] = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
        elif instruction == "WORKDIR":
            workdir = Path(within(rest))
            workdir.mkdir(parents=True, exist_ok=True)
        elif instruction == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            (workdir / target).mkdir(parents=True, exist_ok=True)
            for source in sources:  # of a folder its content
                content = f"{source}/." if (ROOT / source).is_dir() else source
                printed("cp", "-r", content, workdir / target, cwd=ROOT)
        elif instruction == "RUN":
            printed("bash", "-ec", within(rest), cwd=workdir, env=environment, timeout=None)
    assert stages == 2
    assert (root / "models" / "pair" / "target" / "model.safetensors").stat().st_size > 1_000_000
    program, *words = dockerfile_words("Dockerfile.cpu", "CMD")
    where = {"cwd": tmp_path, "env": environment}
    assert "SMC, mode exact" in printed(venv / "bin" / program, *words, "--quick", **where)
