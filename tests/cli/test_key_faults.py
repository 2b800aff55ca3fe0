"""Every command reports a fault of the key folder in one sentence before it starts anything."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from baton.cli.command import main
from baton.runtime.keys.keyring import make_folder

pytestmark = pytest.mark.integration

NOWHERE = "tcp://127.0.0.1:1"


def spoil_missing(folder, file):
    (folder / f"{file}.key").unlink()
    (folder / "client.key").unlink(missing_ok=True)
    return rf"no .*(client|{file})\.key"


def spoil_mode(folder, file):
    (folder / f"{file}.key").chmod(0o644)
    return f"{file}.key has mode 0644, others may use it: chmod 600"


def spoil_folder(folder, file):
    folder.chmod(0o777)
    return "has mode 0777, others may write to it: chmod 700"


def spoil_kind(folder, file):
    other = "decode" if file != "decode" else "prefill"
    shutil.copy2(folder / f"{other}.key", folder / f"{file}.key")
    return f"is for role {other}"


def spoil_link(folder, file):
    """A link does not hide the wrong mode of its target."""
    aside = folder.parent / f"aside-{file}"
    (folder / f"{file}.key").rename(aside)
    aside.chmod(0o644)
    (folder / f"{file}.key").symlink_to(aside)
    return "has mode 0644, others may use it"


def spoil_dangling(folder, file):
    (folder / f"{file}.key").unlink()
    (folder / f"{file}.key").symlink_to("/nowhere")
    return f"cannot read .*{file}.key: No such file"


def spoil_list(folder, file):
    (folder / "allowed.toml").chmod(0o666)
    return "allowed.toml has mode 0666, others may write to it"


def spoil_all(folder, file):
    shutil.rmtree(folder)
    return "create it with baton keygen"


FAULTS = [
    spoil_missing, spoil_mode, spoil_folder, spoil_kind, spoil_link, spoil_dangling, spoil_list,
    spoil_all,
]  # fmt: skip


def process(module: str, **config):
    """Return a function that runs a worker's or router's command line like its supervisor."""

    def run(tmp_path, folder, _capsys):
        path = tmp_path / f"{module}.json"
        path.write_text(json.dumps({**config, "keys": str(folder)}))
        python_path = os.pathsep.join(filter(None, sys.path))
        done = subprocess.run(
            [sys.executable, "-P", "-m", f"baton.{module}", "--config", str(path)],
            env={**os.environ, "PYTHONPATH": python_path},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def verb(*words: str):
    """Return a function that runs a command; the fault ends the command early."""

    def run(tmp_path, folder, capsys):
        (tmp_path / "x.whl").touch()
        made = [word.replace("TMP", str(tmp_path)) for word in words]
        code = main([*made, "--keys", str(folder)])
        return code, *capsys.readouterr()

    return run


NOWHERE_ELSE = {
    "routers": {"router": NOWHERE},
    "runner": {"model": "/nowhere"},
    "endpoint": NOWHERE,
}
CLUSTER = ("--transport", "tcp", "--address", "tcp://127.0.0.1:0")
HOSTS = ("--head", "10.0.0.1", "--prefill", "10.0.0.2", "--decode", "10.0.0.3")
PROCESSES = {
    "router": process("router", client_address=NOWHERE, worker_address=NOWHERE),
    "prefill": process("prefill_worker", worker_id="prefill-0", **NOWHERE_ELSE),
    "decode": process("decode_worker", worker_id="decode-0", **NOWHERE_ELSE),
}
VERBS = {
    "serve": ("router", verb("serve", *CLUSTER)),
    "launch": ("decode", verb("launch", *CLUSTER)),
    "status": ("operator", verb("status", "--address", NOWHERE)),
    "generate": ("operator", verb("generate", "--address", NOWHERE, "hello")),
    "wait-ready": ("operator", verb("wait-ready", "--address", NOWHERE)),
    "scale": ("operator", verb("scale", "decode=1", "--admin", NOWHERE)),
    "ray-config": ("operator", verb("ray-config", *HOSTS, "--wheel", "TMP/x.whl")),
}
EVERY = [
    *((name, file, run, fault) for name, (file, run) in VERBS.items() for fault in FAULTS
      if name != "launch" or fault is spoil_mode),  # starts processes; tested below
    *((name, name, run, spoil_mode) for name, run in PROCESSES.items()),
]  # fmt: skip
IDS = [f"{name}-{fault.__name__.removeprefix('spoil_')}" for name, _, _, fault in EVERY]


@pytest.mark.parametrize(("name", "file", "run", "fault"), EVERY, ids=IDS)
def test_a_fault_is_said_before_anything_starts(
    tmp_path, monkeypatch, capsys, name, file, run, fault
):
    folder, scratch = tmp_path / "keys", tmp_path / "tmp"
    make_folder(folder)
    scratch.mkdir()
    for variable in [v for v in os.environ if v.startswith("BATON_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    said = fault(folder, file)
    if name == "ray-config":  # it checks the keys of every host
        said = "has no operator key" if fault in (spoil_missing, spoil_kind) else said
    code, out, errors = run(tmp_path, folder, capsys)
    assert code not in (0, None)
    lines = [line for line in errors.splitlines() if line]
    assert len(lines) == 1 and re.search(said, lines[0]), (said, errors)
    assert "10.0.0.1" not in out
    left = [path.name for path in scratch.rglob("*") if not path.is_dir()]
    assert [name for name in left if not name.endswith(".log")] == []  # launch leaves its log
