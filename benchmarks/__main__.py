"""All measurements, one after the other: ``python -m baton.benchmarks [NAME ...]``.

Each runs in a separate process and prints its figures beside its peers and limits. With
``--peer-python PATH`` (a Python that has torch and transformers; by default the environment
``make test-oracle`` makes, when it is there) the engine is measured beside transformers.
``beside OTHER`` compares hot paths with another checkout instead (:mod:`.beside`).
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

from . import beside
from .scratch import leave_on_signals
from .tables import section

ORDER = (
    "codec",
    "kernels",
    "quantized",
    "engine",
    "threads",
    "device_idle",
    "loading",
    "speech",
    "vision",
    "pictures",
    "handoff",
    "loop",
    "router",
    "core",
    "lone",
    "gateway",
    "overload",
    "cluster",
    "cancel",
    "burst",
    "autoscale",
    "modes",
)
ORACLE_PYTHON = Path(".venv-oracle/bin/python")


def processor() -> str:
    """Model name and number of usable cores."""
    name = platform.processor() or "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = names[0].partition(":")[2].strip() if names else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"


def run(command: list[str]) -> tuple[int, str]:
    """Run one measurement and return its exit code and what it printed.

    Whatever ends this process lets the measurement clean up first.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    lines = []
    try:
        for line in child.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        return child.wait(), "".join(lines)
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()


def main() -> int:
    """Run the chosen measurements. The exit code is 0 if all of them ran."""
    if sys.argv[1:2] == ["beside"]:
        leave_on_signals()
        return beside.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ORDER)}")
    parser.add_argument("--peer-python", help="a Python with torch and transformers")
    parser.add_argument("--vllm-python", help="a Python with vLLM's CPU build")
    parser.add_argument("--router-python", help="a Python with sglang-router or vllm-router")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="write date, commit and tables in Markdown"
    )
    options = parser.parse_args()
    leave_on_signals()
    unknown = [name for name in options.names if name not in ORDER]
    if unknown:
        parser.error(f"unknown measurement {unknown[0]!r}; known: {', '.join(ORDER)}")
    peer = options.peer_python or (str(ORACLE_PYTHON) if ORACLE_PYTHON.exists() else "")
    python = platform.python_version()
    print(f"{processor()}; Python {python}", flush=True)
    failed: list[str] = []
    written: list[str] = []
    for name in options.names or ORDER:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, "-m", f"baton.benchmarks.{name}"]
        if name in ("engine", "speech", "vision", "pictures") and peer:
            command += ["--peer-python", peer]
        if name == "engine" and options.vllm_python:
            command += ["--vllm-python", options.vllm_python]
        if name == "gateway" and options.router_python:
            command += ["--peer-python", options.router_python]
        code, output = run(command)
        if code:
            failed.append(name)
        elif options.table:  # after each one: a later one may fail
            written.append(section(name, output, f"{processor()}, Python {python}"))
            options.table.write_text("\n".join(written))
    if failed:
        print(f"\nfailed: {', '.join(failed)}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
