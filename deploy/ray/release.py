"""Installing a wheel of Baton on every node of a running cluster, before ``baton rollout``.

Ray transports the wheel: a task on each node writes the file and installs it into the environment
of that node's Ray. So the same command works for fixed hosts and cloud nodes, with or without
containers. Running processes keep their loaded version; processes started later use the new one.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import email
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from baton import DISTRIBUTION
from baton.proto.errors import ConfigError
from baton.runtime.process.memory import size_text
from baton.runtime.small_files import check_file

from .connect import RAY_VERSION, connect

INSTALL_TIMEOUT = 600.0
"""Seconds for all nodes, including the download of new requirements."""
FOLDER = "~/.baton"
_MAX_WHEEL_BYTES = 256 << 20


class Wheel(NamedTuple):
    """A wheel's file name, its version and its bytes."""

    name: str
    version: str
    data: bytes


def read_wheel(path: Path) -> Wheel:
    """Read a wheel of Baton. Raises ConfigError if it is missing or needs another Ray."""
    try:
        check_file(path)
        if path.stat().st_size > _MAX_WHEEL_BYTES:
            raise ConfigError(f"{path} is larger than {size_text(_MAX_WHEEL_BYTES)}")
        with zipfile.ZipFile(path) as archive:
            found = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
            text = archive.read(found[0]).decode("utf-8", "replace") if found else ""
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from None
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError):
        raise ConfigError(
            f"{path} is not a wheel; create one with `pip wheel --no-deps .`"
        ) from None
    metadata = email.message_from_string(text)
    if path.suffix != ".whl" or metadata["Name"] != DISTRIBUTION:
        raise ConfigError(f"{path} is not a wheel of {DISTRIBUTION}")
    pins = [line.split(";")[0].strip() for line in metadata.get_all("Requires-Dist", [])]
    if f"ray=={RAY_VERSION}" not in pins:
        wanted = next((pin for pin in pins if pin.startswith("ray=")), "another Ray")
        raise ConfigError(
            f"{path.name} needs {wanted} and this cluster runs Ray {RAY_VERSION}: end the cluster "
            "(baton down, ray down) and start it with a cluster file for that wheel"
        )
    return Wheel(path.name, str(metadata["Version"]), path.read_bytes())


def install_everywhere(wheel: Wheel, ray_address: str = "auto") -> dict[str, str]:
    """Install on all live nodes in parallel. Returns each node's error by address, or ''.

    Raises ConfigError or ConnectionLost if the cluster cannot be joined.
    """
    ray = connect(ray_address)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(install_here)
    given = ray.put(wheel.data)
    running: dict[Any, str] = {}
    for node in ray.nodes():
        if node["Alive"]:
            pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ticket = task.options(scheduling_strategy=pinned).remote(wheel.name, given)
            running[ticket] = str(node["NodeManagerAddress"])
    ray.wait(list(running), num_returns=len(running), timeout=INSTALL_TIMEOUT)
    return {address: _result(ray, ticket) for ticket, address in running.items()}


def _result(ray: Any, ticket: Any) -> str:
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return str(ray.get(ticket, timeout=0))
    except GetTimeoutError:
        return f"not installed after {INSTALL_TIMEOUT:g} s"
    except RayError as problem:
        return f"the node failed: {str(problem).strip().splitlines()[-1][:300]}"


def install_here(name: str, data: bytes) -> str:
    """Install a wheel into this interpreter's environment. Returns the error, or ''."""
    folder = Path(FOLDER).expanduser()
    try:
        (folder / "wheel").mkdir(mode=0o700, parents=True, exist_ok=True)
        wheel = folder / "wheel" / name
        draft = wheel.with_suffix(".draft")
        draft.write_bytes(data)
        draft.rename(wheel)
        problem = _pip("--no-deps", "--force-reinstall", str(wheel)) or _requirements()
        if not problem:  # what the setup commands of on-premises.yaml compare with
            (folder / "installed").write_bytes(data)
    except OSError as error:
        return f"{error.strerror}: {error.filename}"
    return problem


def _requirements() -> str:
    """Install the new wheel's requirements with the versions of its constraints file."""
    extras = "ray,cuda" if importlib.util.find_spec("cupy") else "ray"
    where = "import baton; print(baton.__path__[0])"
    found = subprocess.run(  # noqa: S603 -- our own interpreter
        [sys.executable, "-P", "-c", where], capture_output=True, text=True
    )
    if found.returncode:
        return f"the new wheel cannot be imported: {_last_line(found.stderr)}"
    constraints = f"{found.stdout.strip()}/deploy/ray/constraints.txt"
    return _pip("--constraint", constraints, f"{DISTRIBUTION}[{extras}]")


def _pip(*words: str) -> str:
    done = subprocess.run(  # noqa: S603 -- our own interpreter
        [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
         "--no-input", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return f"pip install {words[-1]} failed: {_last_line(done.stdout)}" if done.returncode else ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines or ["no message"])[-1][:300]
