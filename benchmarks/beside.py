"""The hot paths of this checkout beside those of another one, in turns.

Run it before a change of a hot path lands. Each side runs its own code in separate processes under
the benchmarks of this checkout, so only the code differs. If the other checkout is too old for
them, it runs its own benchmark of that name, and the table says so.

OTHER is a folder or a commit, for which a temporary worktree is made. All figures are amounts of
work per second or per CPU-second, so a ratio above 1 means that this checkout is faster. The exit
code is 1 if a median ratio is below ``--limit``.

    python -m baton.benchmarks beside OTHER [router core gateway handoff] [--rounds 7]
        [--seconds 2] [--limit 0.95]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from .scratch import scratch_folder

PATHS = ("router", "core", "gateway", "handoff")
"""Benchmarks with a function ``figures``."""
HERE = Path(__file__).resolve().parents[1]
Figures = dict[str, float]


@dataclass
class Side:
    """A checkout, and the folder from which its code runs under this checkout's benchmarks."""

    checkout: Path
    packages: Path
    old: set[str] = field(default_factory=set)  # benchmarks for which the checkout is too old

    def figures(self, name: str, seconds: float) -> Figures:
        """Measure one hot path once."""
        if name not in self.old:
            asked = ["baton.benchmarks.beside", "--figures", name, "--seconds", str(seconds)]
            done = _run(asked, self.packages)
            if done.returncode == 0:
                found: Figures = json.loads(done.stdout.splitlines()[-1])
                return found
            if "ImportError" not in done.stderr and "ModuleNotFoundError" not in done.stderr:
                raise RuntimeError(f"{name} failed in {self.checkout}:\n{done.stderr}")
            self.old.add(name)
        own = [f"baton.benchmarks.{name}", "--seconds", str(seconds)]
        return printed_figures(_run(own, self.checkout / "src").stdout)


def _run(arguments: list[str], packages: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(packages), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-P", "-m", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def printed_figures(text: str) -> Figures:
    """Return the figures in the output of an older benchmark: a name per line, then its value."""
    found = re.findall(r"^(\S.*?) {2,}([\d,]+)\b", text, re.MULTILINE)
    return {name: float(value.replace(",", "")) for name, value in found}


def overlay(checkout: Path, folder: Path) -> Path:
    """Return a folder for PYTHONPATH with a checkout's packages and this checkout's benchmarks."""
    package = folder / "baton"
    package.mkdir(parents=True)
    for one in (checkout / "src" / "baton").iterdir():
        if one.name not in ("benchmarks", "__pycache__"):
            (package / one.name).symlink_to(one.resolve())
    (package / "benchmarks").symlink_to(HERE / "benchmarks")
    return folder


@contextmanager
def checkout_of(name: str) -> Iterator[Path]:
    """Yield a folder with the sources of ``name``, a folder or a commit."""
    if (Path(name) / "src" / "baton").is_dir():
        yield Path(name).resolve()
        return
    with scratch_folder() as scratch:
        tree = scratch / "tree"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), name], check=True)
        try:
            for kernels in (HERE / "engine" / "kernels").glob("_cpu*.so"):
                shutil.copy(kernels, tree / "engine" / "kernels")
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def compare(names: list[str], sides: list[Side], rounds: int, seconds: float) -> list[float]:
    """Print a line per figure that both sides have; return the median ratios."""
    print(f"{'work per second or CPU-second':<54}{'this':>12}{'other':>12}{'ratio':>8}   of rounds")
    ratios = []
    for name in names:
        found: list[list[Figures]] = [[], []]
        for turn in range(rounds):
            for index in (0, 1) if turn % 2 else (1, 0):
                found[index].append(sides[index].figures(name, seconds))
        here, there = found
        for row in [row for row in here[0] if row in there[0]]:
            pairs = [(one[row], other[row]) for one, other in zip(here, there, strict=True)]
            if all(map(all, pairs)):  # an older benchmark may find no time to measure
                ratios.append(show(f"{name}: {row}", pairs))
        if name in sides[1].old:
            print(f"  {name}: the other checkout ran its own benchmark, which is older")
    return ratios


def show(name: str, pairs: list[tuple[float, float]]) -> float:
    """Print a figure of both sides in all rounds; return the median ratio."""
    each = sorted(one / other for one, other in pairs)
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(each)
    spread = f"{each[0]:.3f} to {each[-1]:.3f}"
    print(f"{name:<54}{ours:>12,.0f}{theirs:>12,.0f}{ratio:>8.3f}   {spread}", flush=True)
    return ratio


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks beside", description=__doc__)
    parser.add_argument("other", nargs="?", metavar="OTHER", help="a folder or a commit")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PATHS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each part of a round")
    parser.add_argument("--limit", type=float, default=0.95, help="least median ratio")
    parser.add_argument("--figures", choices=PATHS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.figures:
        measured = import_module(f"{__package__}.{options.figures}").figures(options.seconds)
        print(json.dumps(measured))
        return 0
    unknown = [name for name in options.names if name not in PATHS]
    if unknown or not options.other:
        parser.error(f"unknown hot path {unknown[0]!r}" if unknown else "which other checkout?")
    with scratch_folder() as scratch, checkout_of(options.other) as other:
        sides = [
            Side(checkout, overlay(checkout, scratch / name))
            for name, checkout in (("this", HERE), ("other", other))
        ]
        names = options.names or list(PATHS)
        ratios = compare(names, sides, options.rounds, options.seconds)
    if not ratios:
        print("no figure was measured on both sides", file=sys.stderr)
        return 1
    return int(min(ratios) < options.limit)


if __name__ == "__main__":
    sys.exit(main())
