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
from typing import Any, NamedTuple

import pytest
import yaml
from programs import printed

from sglang_smc.tools.command.cli import COMMANDS
from sglang_smc.upstream import SUPPORTED

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GRAFANA = ROOT / "examples" / "grafana"
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
COMPOSE = ("compose.yaml", "compose.gpu.yaml")
UNIT = DEPLOY / "sglang-smc.service"
SERVER = ["-m", "sglang.launch_server"]


def tool(name: str) -> str:
    """A linter beside this Python or on the path; the test is skipped, and says so, without it."""
    found = shutil.which(
        name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


# --- Linters

SCHEMA = ("--builtin-schema", "vendor.compose-spec")
LINTED: list[tuple[str, list[str | Path]]] = [
    ("hadolint", [DEPLOY / name for name in DOCKERFILES]),
    (
        "check-jsonschema",
        [*SCHEMA, *(DEPLOY / name for name in COMPOSE), GRAFANA / "docker-compose.yaml"],
    ),
    (
        "check-jsonschema",
        [SCHEMA[0], "vendor.github-workflows", ROOT / ".github" / "workflows" / "release.yml"],
    ),
    ("kubernetes-validate", ["--strict", DEPLOY / "kubernetes.yaml"]),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("linter", "words"), LINTED)
def test_linters_take_the_files(linter: str, words: list[str | Path]) -> None:
    printed(tool(linter), *words)


@pytest.mark.nightly
def test_docker_compose_reads_them() -> None:
    docker = tool("docker")
    if subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker has no compose")
    for names in (COMPOSE[:1], COMPOSE):
        files = [word for name in names for word in ("-f", DEPLOY / name)]
        printed(docker, "compose", *files, "config", "--quiet")


@pytest.mark.nightly
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    # It looks for the program.
    copy.write_text(UNIT.read_text().replace("/opt/sglang-smc/bin/python", sys.executable))
    # It ends well where it only warns.
    words = [tool("systemd-analyze"), "verify", str(copy)]
    assert not subprocess.run(words, capture_output=True, check=True).stderr


# --- Command lines


def dockerfile_words(name: str, instruction: str) -> list[str]:
    (line,) = re.findall(rf"^{instruction} (\[.*\])$", (DEPLOY / name).read_text(), re.M)
    return json.loads(line)


def container() -> dict[str, Any]:
    deployment, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return found


def unit_words() -> list[str]:
    text = UNIT.read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
    return shlex.split(line)


def servers() -> Iterator[tuple[str, list[str]]]:
    """The words behind `python` wherever a server is started."""
    given = ["--model-path=t", "--speculative-draft-model-path=d"]  # as the image's user adds them
    yield "Dockerfile", [*dockerfile_words("Dockerfile", "ENTRYPOINT")[1:], *given]
    for name in COMPOSE:
        yield name, read(name)["services"]["server"]["command"][1:]
    yield "kubernetes.yaml", [*container()["command"][1:], *container()["args"]]
    yield UNIT.name, unit_words()[1:]


def test_sglang_takes_the_command_lines() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    for name, words in servers():
        assert words[:2] == SERVER, name
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

    let_in = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M)
    for name in DOCKERFILES:
        lines = re.findall(r"^COPY (?!--from)(.*) \S+$", (DEPLOY / name).read_text(), re.M)
        sources = [source for line in lines for source in line.split()]
        assert sources and all((ROOT / source).exists() for source in sources)
        assert sorted(sources) == sorted(let_in)


def test_prometheus_asks_the_server_of_the_compose_file() -> None:
    (included,) = read("compose.yaml")["include"]
    assert (DEPLOY / included["path"]).resolve() == GRAFANA / "docker-compose.yaml"
    (job,) = yaml.safe_load((GRAFANA / "prometheus.yaml").read_text())["scrape_configs"]
    command = " ".join(read("compose.yaml")["services"]["server"]["command"])
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert f"--host={host} --port={port}" in command


def option(words: list[str], name: str) -> str:
    """The value of a flag, in either spelling."""
    text = " ".join(words)
    (found,) = re.findall(rf"{name}[= ](\S+)", text)
    return found


def listens() -> dict[tuple[str, str], str]:
    """Where what the files start listens: (file, what) -> address and port."""
    found = {
        (name, "server"): f"{option(words, '--host')}:{option(words, '--port')}"
        for name, words in servers()
    }
    services = yaml.safe_load((GRAFANA / "docker-compose.yaml").read_text())["services"]
    settings = services["grafana"]["environment"]
    address = f"{settings['GF_SERVER_HTTP_ADDR']}:{settings['GF_SERVER_HTTP_PORT']}"
    prometheus = option(services["prometheus"]["command"], "--web.listen-address")
    return {
        **found,
        ("examples/grafana", "Prometheus"): prometheus,
        ("examples/grafana", "Grafana"): address,
    }


def test_what_listens_is_what_the_page_says() -> None:
    rows = re.findall(
        r"^\| (.*?) \| (server|Prometheus|Grafana) \| (\S+:\d+) \|",
        (DEPLOY / "README.md").read_text(),
        re.M,
    )
    told: dict[tuple[str, str], str] = {}
    for files, what, address in rows:
        names = ["examples/grafana"] if what != "server" else files.split(", ")
        told |= {(name, what): address for name in names}
    assert told == listens()
    reached = {name for (name, _), address in told.items() if not address.startswith("127.0.0.1:")}
    assert reached == {"Dockerfile", "kubernetes.yaml"}, "what shares the machine's network is here"


def test_nothing_is_open_beyond_what_the_page_says() -> None:
    """Compose files share the machine's network; the image is run for this machine alone."""
    grafana = yaml.safe_load((GRAFANA / "docker-compose.yaml").read_text())
    every = [*(read(name) for name in COMPOSE), grafana]
    assert all("ports" not in service for one in every for service in one["services"].values())
    published = re.findall(r" -p (\S+:\d+)", (DEPLOY / "Dockerfile").read_text())
    assert published and all(one.startswith("127.0.0.1:") for one in published)
    # Nobody logs in to Grafana: its first account would be admin, with the password admin.
    settings = grafana["services"]["grafana"]["environment"]
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false"


def test_every_kind_of_probe_asks_health_at_the_servers_port() -> None:
    found = container()
    (port,) = found["ports"]
    assert f"--port={port['containerPort']}" in found["args"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = found[kind]
        assert probe["httpGet"] == {"path": "/health", "port": port["name"]}
        assert probe["timeoutSeconds"] >= 20, "it waits for a request of its own"


def test_an_end_by_its_own_sigkill_is_a_success_for_systemd() -> None:
    """The server looks for its end every five seconds, and for its requests' before that."""
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.M))
    assert settings["SuccessExitStatus"] == "SIGKILL"
    assert settings["KillMode"] == "mixed", "SIGTERM for all would end the schedulers under it"
    assert settings["Restart"] == "always", "on-failure would leave a server that was killed down"


# --- The image of the demo, step by step


class Step(NamedTuple):
    """A line of a Dockerfile, its continuation lines joined."""

    instruction: str
    rest: str


def steps(name: str) -> list[Step]:
    text = re.sub(r"^#.*\n", "", (DEPLOY / name).read_text(), flags=re.M).replace("\\\n", " ")
    return [Step(*line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def within(root: Path, command: str) -> str:
    """The image's own folders become those below ``root``."""
    return re.sub(r"(?<![\w.])/(src|wheels|models)\b", rf"{root}/\1", command)


@pytest.mark.nightly
def test_the_steps_of_the_cpu_image_in_an_empty_environment(tmp_path: Path) -> None:
    """As `docker build` would run them, but for the operating system; it installs gigabytes."""
    root, stages = tmp_path / "root", 0
    workdir = root
    environment = {**os.environ, "HOME": str(tmp_path)}
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    for step in steps("Dockerfile.cpu"):
        if step.instruction == "FROM":
            stages += 1
            venv = tmp_path / f"stage{stages}"
            printed(sys.executable, "-m", "venv", venv)
            environment["PATH"] = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
        elif step.instruction == "WORKDIR":
            workdir = Path(within(root, step.rest))
            workdir.mkdir(parents=True, exist_ok=True)
        elif step.instruction == "COPY" and not step.rest.startswith("--from"):
            copy(step.rest.split(), workdir)
        elif step.instruction == "RUN":
            command = within(root, step.rest)
            printed("bash", "-ec", command, cwd=workdir, env=environment, timeout=None)
    assert stages == 2
    assert (root / "models" / "pair" / "target" / "model.safetensors").stat().st_size > 1_000_000
    program, *words = dockerfile_words("Dockerfile.cpu", "CMD")
    where = {"cwd": tmp_path, "env": environment}
    assert "SMC, mode exact" in printed(venv / "bin" / program, *words, "--quick", **where)


def copy(words: list[str], workdir: Path) -> None:
    """As COPY does: a folder's content into a folder, files below a folder."""
    *sources, target = words
    for source in sources:
        place = workdir / target
        if (ROOT / source).is_dir():
            junk = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, place, symlinks=True, ignore=junk)
        else:
            shutil.copy(ROOT / source, place)
