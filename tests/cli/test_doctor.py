"""Every problem that ``baton doctor`` finds."""

import importlib.metadata
import importlib.util
import math
import os
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

from baton.cli import doctor
from baton.cli.command import main
from baton.deploy.config import demo_flux_folder, demo_model_folder
from baton.engine.loading.checkpoint import load_checkpoint
from baton.proto.errors import CheckpointError

ROOT = Path(__file__).parents[2]


def only(check):
    """Return the only finding of a check, and its output line."""
    (finding,) = check()
    return finding.level, finding.line()


def fail(error):
    def raising(*_given):
        raise error

    return raising


def test_another_system(monkeypatch):
    monkeypatch.setattr(doctor.platform, "system", lambda: "Plan9")
    level, line = only(doctor.check_python)
    assert level == "warn"
    assert "only Linux" in line


def test_a_missing_package_is_named_and_fails_the_command(monkeypatch, capsys):
    real = importlib.metadata.version

    def version(name):
        if name == "xxhash":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    assert main(["doctor"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert line.endswith("missing: xxhash; pip install xxhash")


def test_another_projects_distribution_over_ours_is_named(monkeypatch, tmp_path):
    theirs = tmp_path / "baton-0.4.2.dist-info"
    theirs.mkdir()
    (theirs / "METADATA").write_text("Metadata-Version: 2.1\nName: baton\nVersion: 0.4.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    level, line = only(doctor.check_distribution)
    assert level == "warn"
    assert "baton 0.4.2" in line
    assert "pip uninstall baton" in line


def test_numpy_without_blas(monkeypatch):
    monkeypatch.setattr(doctor.np, "show_config", lambda **_mode: {})
    level, line = only(doctor.check_blas)
    assert level == "warn"
    assert "unknown" in line


def test_one_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3})
    level, line = only(doctor.check_processors)
    assert level == "warn"
    assert "1 compute thread per worker for a prefill and a decode worker" in line


def test_little_shared_memory(monkeypatch):
    usage = SimpleNamespace(free=8 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path: usage)
    level, line = only(doctor.check_memory)
    assert level == "warn"
    assert "8.0 MiB free" in line
    assert "--shm-size" in line


def test_no_shared_memory(monkeypatch):
    monkeypatch.setattr(doctor.Path, "is_dir", lambda _path: False)
    level, line = only(doctor.check_memory)
    assert level == "warn"
    assert "mount a tmpfs" in line


def test_a_temporary_folder_nobody_may_write_to(monkeypatch):
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: "/proc")
    level, line = only(doctor.check_ipc)
    assert level == "fail"
    assert "TMPDIR" in line


def test_no_ports(monkeypatch):
    monkeypatch.setattr(doctor, "free_ports", fail(OSError("no network")))
    level, line = only(doctor.check_ports)
    assert level == "warn"
    assert "use ipc" in line


def test_a_damaged_embedded_model(monkeypatch):
    monkeypatch.setattr(doctor, "load_checkpoint", fail(CheckpointError("it is cut off")))
    level, line = only(doctor.check_model)
    assert level == "fail"
    assert "it is cut off; install baton again" in line


def test_a_running_cluster(monkeypatch, tmp_path):
    address = f"ipc://{tmp_path}/s.sock"
    monkeypatch.setattr(doctor, "default_address", lambda: address)
    assert f"none at {address}" in only(doctor.check_cluster)[1]
    (tmp_path / "s.sock").touch()
    monkeypatch.setattr(doctor, "socket_in_use", lambda _path: True)
    assert f"running at {address}" in only(doctor.check_cluster)[1]


def test_optional_packages_are_no_fault(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    found = list(doctor.check_optional())
    assert {finding.level for finding in found} == {"ok"}
    assert "(pip install 'baton-serve[cuda]')" in found[0].line()
    extras = [
        provided.split("[")[1].split("]")[0]
        for provided in (
            line for finding in found for line in finding.line().split("'") if "[" in line
        )
    ]
    # not the installed metadata, which a checkout that changed since may leave stale
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(extras) == set(project["optional-dependencies"])


def test_a_model_folder_is_opened_and_measured(tmp_path, capsys):
    folder = demo_model_folder()
    assert main(["doctor", str(folder)]) == 0
    found = capsys.readouterr().out
    tensors = load_checkpoint(folder).tensors
    count = sum(math.prod(tensors.entry(name).shape) for name in tensors)
    assert f"demo_model: {load_checkpoint(folder).architecture}\n" in found
    assert f"{count:,} parameters" in found
    assert "of KV memory per token" in found
    assert re.search(r"speed +about [\d.]+ tokens/s for one stream.*\(measured: [\d.]+ GB/s", found)
    assert re.search(r"try +--(prefill|mode) ", found)
    assert "2048 tokens each fit into" in found
    assert main(["doctor", str(demo_flux_folder())]) == 0
    assert "picture model" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "none")]) == 1
    assert "FAIL  model" in capsys.readouterr().out
