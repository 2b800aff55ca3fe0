"""Fetches the wheels that a GPU machine without a network lacks: ``make gpu-wheels``.

``python -m baton.benchmarks.gpu.wheels FOLDER [--python 3.12]``: versions are those of
``requirements.lock``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

from .machine import CARRIED, ROOT

_GLIBC = (17, 24, 26, 27, 28, 31, 34, 35)


def pins(lock: str) -> list[str]:
    """``name==version`` of each package that is carried; KeyError for one the lock lacks."""
    found = dict(re.findall(r"^([\w.-]+)==([\w.]+)", lock, re.MULTILINE))
    return [f"{name}=={found[name]}" for name in CARRIED]


def main() -> int:
    """Download; pip's exit code."""
    parser = argparse.ArgumentParser(prog="gpu-wheels", description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--python", default="3.12", help="version on the GPU machine")
    options = parser.parse_args()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={options.python}"]
    command += ["--platform=manylinux2014_x86_64", f"--dest={options.folder}"]
    command += [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    lock = (ROOT / "requirements.lock").read_text("utf-8")
    return subprocess.run([*command, *pins(lock)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
