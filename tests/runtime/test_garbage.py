"""Garbage collection: off during the imports of a process, and on after them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.deploy.config import demo_model_folder
from baton.runtime.process.garbage import end_of_imports

ROOT = Path(__file__).parents[2]
TURNS_OFF = "    gc.disable()  # until baton.runtime.process.garbage.end_of_imports\n"
MODULES = {
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for folder in (ROOT / "src" / "baton").iterdir()
    if folder.is_symlink()
    for path in folder.resolve().rglob("*.py")
    if TURNS_OFF in path.read_text("utf-8")
}
LIMITS = [str(1 << 30), "10"]
ARGUMENTS = {
    "cli": ["completion", "bash"],
    "engine.grammar.trial": [str(demo_model_folder()), "1024", "2", "1.0"],
    "images.guarded_worker": LIMITS,
    "text.guarded_worker": ["template", *LIMITS],
}
NOTED = """
import gc, os, runpy, sys
from baton.runtime.process import garbage

def ended():
    os._exit(3 if not gc.isenabled() else 4)

garbage.end_of_imports = ended
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def test_collection_is_on_after_the_imports():
    assert gc.isenabled()
    kept = gc.get_freeze_count()
    end_of_imports()
    assert gc.get_freeze_count() == kept  # nobody turned it off
    gc.disable()
    end_of_imports()
    assert gc.isenabled()
    assert gc.get_freeze_count() > kept


@pytest.mark.parametrize("module", sorted({*MODULES, "cli"}))
def test_every_process_that_turns_collection_off_ends_its_imports(module):
    ended = subprocess.run(
        [sys.executable, "-P", "-c", NOTED, f"baton.{module}", *ARGUMENTS.get(module, [])],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert ended.returncode == 3, ended.stderr.decode()


def test_the_programs_are_found():
    assert len(MODULES) >= 9
