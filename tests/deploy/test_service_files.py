"""The Dockerfile, the compose file and the systemd unit agree with the command and the tree.

No Docker daemon and no systemd is needed. The health check runs in tests/cluster.
"""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from baton.cli.command import build_parser
from baton.cli.serve import settings_of
from baton.cli.settings import from_environment, resolve
from baton.deploy.config import ServeSettings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy/docker"
UNIT = ROOT / "deploy/systemd/baton.service"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their text, in order."""
    text = re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def of(kind: str) -> list[str]:
    return [text for name, text in instructions() if name == kind]


def serves(words: list[str]) -> ServeSettings:
    """The settings of a command line without its program; the command must be ``serve``."""
    arguments = build_parser().parse_args(words)
    assert words[0] == "serve"
    return settings_of(arguments)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for field in ServeSettings.__struct_fields__:
        monkeypatch.delenv(f"BATON_{field.upper()}", raising=False)


def variables() -> dict[str, str]:
    """The variables of the image's last stage."""
    return dict(word.split("=", 1) for text in of("ENV") for word in shlex.split(text))


def test_the_image_has_no_compiler_and_no_root():
    first, last = of("FROM")
    assert first.endswith(" AS build")
    assert last == first.removesuffix(" AS build")
    assert "slim" in last
    stages = [name for name, _ in instructions()]
    second = instructions()[len(stages) - stages[::-1].index("FROM") :]
    assert not any("gcc" in text for _, text in second)
    (user,) = of("USER")
    assert int(user) > 0
    assert stages.index("USER") < stages.index("ENTRYPOINT")


def test_the_image_copies_what_exists_and_ignores_what_it_needs_not():
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    assert {".git", ".venv*", "tests"} <= set(ignored)
    for text in of("COPY"):
        *sources, _ = (word for word in text.split() if not word.startswith("--"))
        for source in sources:
            assert text.startswith("--from=build /opt/baton ") or (ROOT / source).exists(), source
            assert source.partition("/")[0] not in ignored
    for needed in ("src", "pyproject.toml", "setup.py", "README.md", "LICENSE", "deploy", "engine"):
        assert needed not in ignored
        assert (ROOT / needed).exists()
    (constraints,) = re.findall(r"pip install [^&]* -c (\S+)", " ".join(of("RUN")))
    assert (ROOT / constraints).is_file()
    assert any("import baton.engine.kernels._cpu" in text for text in of("RUN"))


def test_the_image_serves_where_its_port_and_health_check_are():
    given = variables()
    settings = resolve({}, given, None)
    assert set(from_environment(given)) == {"http_host", "http_port", "api_key_file"}
    assert of("EXPOSE") == [str(settings.http_port)]
    (health,) = of("HEALTHCHECK")
    assert "/opt/baton/ready.py" in health
    assert any(text.endswith(" /opt/baton/ready.py") for text in of("COPY"))
    assert of("ENTRYPOINT") == ['["baton"]']
    (command,) = of("CMD")
    assert serves(yaml.safe_load(command)) == ServeSettings()


def test_the_compose_file_starts_that_image():
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    (service,) = compose["services"].values()
    context = (DOCKER / service["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / service["build"]["dockerfile"]).samefile(DOCKER / "Dockerfile")
    settings = serves(service["command"])
    assert (settings.prefill, settings.decode) == (1, 2)
    assert resolve({}, service["environment"], None).log_format == "json"
    assert set(service["secrets"]) == set(compose["secrets"])
    (secret,) = service["secrets"]
    assert variables()["BATON_API_KEY_FILE"] == f"/run/secrets/{secret}"
    (port,) = service["ports"]
    assert port == f"127.0.0.1:{of('EXPOSE')[0]}:{of('EXPOSE')[0]}"
    assert int(service["stop_grace_period"].removesuffix("s")) > settings.grace + 5
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["init"]


def test_the_key_file_is_neither_committed_nor_copied_into_the_image():
    (secret,) = yaml.safe_load((DOCKER / "compose.yaml").read_text())["secrets"].values()
    file = f"deploy/docker/{secret['file']}"
    assert f"> {file}" in (ROOT / "docs/operations/service.md").read_text()
    assert file in (DOCKER / "Dockerfile.dockerignore").read_text().split()
    assert f"/{file}" in (ROOT / ".gitignore").read_text().split()


def unit() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(UNIT)
    return parser["Service"]


def test_the_unit_starts_serve_and_gives_it_time_to_end(tmp_path):
    _, *words = shlex.split(unit()["ExecStart"])
    file = tmp_path / "baton.toml"
    file.write_text("decode = 2\n")
    settings = serves([str(file) if word == "/etc/baton/baton.toml" else word for word in words])
    assert settings.decode == 2
    assert int(unit()["TimeoutStopSec"]) > settings.grace + 5
    assert unit()["Type"] == "notify" and unit()["TimeoutStartSec"] == "infinity"
    assert (unit()["KillMode"], unit()["RestartPreventExitStatus"]) == ("mixed", "2")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is missing")
def test_systemd_accepts_the_unit(tmp_path):
    text = UNIT.read_text().replace("/opt/baton/bin/baton", sys.executable)
    (tmp_path / UNIT.name).write_text(re.sub(r"(User|Group)=.*", r"\1=root", text))
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / UNIT.name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")
