"""Plants small errors at random places of the product and reports which the tests catch.

``make mutants SAMPLE=100 SEED=1``. A place is a line of code, drawn uniformly; a mutant is one of
the changes possible there, first its kind and then one of it. Cosmic Ray makes the changes, and
:class:`DropStatement` and :class:`SwapArguments` make those that reviewers see most often and that
it lacks. The tests run in widening circles on a copy of the tree: files that name the module, the
folder of ``tests/`` that mirrors it, and with ``--whole`` all that ``make test`` runs. A mutant
that no test catches survives. Without effect are those of :data:`WITHOUT_EFFECT`, set aside by
hand.

A line per mutant is appended to ``--report``; those already there are not run again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
NOT_PRODUCT = {"benchmarks", "simulator", "tools", "examples", "docs", "tests", "src", "setup.py"}
WITHOUT_EFFECT = Path(__file__).with_name("mutants_without_effect.txt")
"""A mutant's id and the reason, one per line."""
CIRCLE_S = {"near": 300, "mirrored": 900, "whole": 3600}
"""Seconds after which the tests of a circle count as hanging, which catches the mutant."""


class DropStatement(Operator):
    """Leaves out an assignment or a call."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        """Positions of simple statements that are no annotation and no docstring."""
        if node.type != "simple_stmt" or node.children[0].type not in ("expr_stmt", "atom_expr"):
            return
        statement = node.children[0]
        if not any(child.type == "annassign" for child in statement.children):
            yield statement.start_pos, statement.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Replace the statement by ``pass``."""
        node.children[0] = _parsed("pass", node.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """None; Cosmic Ray's own tests would use them."""
        return ()


class SwapArguments(Operator):
    """Swaps the first two positional arguments of a call."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        """Positions of argument lists that begin with two positional arguments."""
        if node.type == "arglist" and all(
            child.type not in ("argument", "operator") for child in node.children[0:3:2]
        ):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Swap them."""
        first, second = (node.children[at].get_code(include_prefix=False) for at in (0, 2))
        prefixes = [node.children[at].get_first_leaf().prefix for at in (0, 2)]
        node.children[0] = _parsed(second, prefixes[0])
        node.children[2] = _parsed(first, prefixes[1])
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """None; Cosmic Ray's own tests would use them."""
        return ()


def _parsed(code: str, prefix: str) -> Any:
    """Return the node of an expression or a keyword with the white space before it."""
    node = parso.parse(code).children[0]
    node.get_first_leaf().prefix = prefix
    return node


OWN = {"DropStatement": DropStatement, "SwapArguments": SwapArguments}


@dataclass(frozen=True)
class Mutant:
    """One changed line. ``id``: a hash of the path and the change, not of the line's number."""

    id: str
    path: str
    line: int
    operator: str
    change: str
    code: str


def operators() -> dict[str, dict[str, type[Operator]]]:
    """Return all operators by kind: those that replace one operator by others are one kind."""
    kinds: dict[str, dict[str, type[Operator]]] = defaultdict(dict)
    for full_name in operator_names():
        name = full_name.split("/")[1]
        if not name.startswith("Variable"):  # they need names as arguments
            kinds[name.split("_")[0]][name] = get_operator(full_name)
    for name, own in OWN.items():
        kinds[name][name] = own
    return dict(kinds)


def product_files() -> list[str]:
    """Return the product's Python files that are under version control."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    return [path for path in listed if path.split("/")[0] not in NOT_PRODUCT]


def without_effect_lines(source: str) -> set[int]:
    """Return lines that run nothing: blank ones, comments, docstrings, imports, annotations."""
    lines = source.splitlines()
    left = {at for at, line in enumerate(lines, 1) if not line.strip() or line.strip()[0] in "#@"}
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left.update(range(node.lineno, node.body[0].lineno))
        if isinstance(node, ast.AnnAssign) and node.value is None:
            left.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            left.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return left


class Places:
    """The lines of the product and the mutants of each."""

    def __init__(self) -> None:
        self._sources = {path: (ROOT / path).read_text() for path in product_files()}
        self.lines = self._all_lines()
        self._kinds = operators()
        self._known: dict[str, dict[int, dict[str, list[tuple[str, int]]]]] = {}

    def _all_lines(self) -> list[tuple[str, int]]:
        found = []
        for path, source in self._sources.items():
            idle = without_effect_lines(source)
            found += [(path, n) for n in range(1, source.count("\n") + 1) if n not in idle]
        return found

    def mutant(self, path: str, line: int, draw: random.Random) -> Mutant | None:
        """Return one of the line's mutants; None if there is none."""
        if path not in self._known:
            self._known[path] = self._mutations(self._sources[path])
        by_kind = self._known[path].get(line)
        if not by_kind:
            return None
        name, occurrence = draw.choice(by_kind[draw.choice(sorted(by_kind))])
        before = self._sources[path]
        operator = self._kinds[name.split("_")[0]][name]()
        code = mutate_code(before, operator, occurrence)
        if code is None or code == before or "not not" in code:
            return None
        changed = unified_diff(before.splitlines(), code.splitlines(), n=0, lineterm="")
        change = "\n".join(
            one for one in changed if one[:3] not in ("---", "+++") and one[0] != "@"
        )
        try:
            if _without_annotations(code) == _without_annotations(before):
                return None
        except SyntaxError:
            return None
        digest = hashlib.sha256(f"{path}\n{change}".encode()).hexdigest()[:12]
        return Mutant(digest, path, line, name, change, code)

    def _mutations(self, source: str) -> dict[int, dict[str, list[tuple[str, int]]]]:
        """Return (operator, occurrence) by line and kind."""
        found: dict[int, dict[str, list[tuple[str, int]]]] = defaultdict(lambda: defaultdict(list))
        tree = parso.parse(source)
        for kind, members in self._kinds.items():
            for name, operator in members.items():
                for occurrence, ((line, _), _) in enumerate(positions(operator(), tree)):
                    found[line][kind].append((name, occurrence))
        return found


def _without_annotations(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def positions(operator: Operator, node: Any) -> Iterator[Any]:
    """Yield what an operator can change, in the order of its occurrences."""
    yield from operator.mutation_positions(node)
    for child in getattr(node, "children", ()):
        yield from positions(operator, child)


def sample(count: int, seed: int, under: str) -> list[Mutant]:
    """Return ``count`` mutants of different lines."""
    places, draw = Places(), random.Random(seed)
    lines = [line for line in places.lines if line[0].startswith(under)]
    draw.shuffle(lines)
    found: list[Mutant] = []
    for path, line in lines:
        mutant = places.mutant(path, line, draw)
        if mutant is not None:
            found.append(mutant)
        if len(found) == count:
            break
    return found


# ------------------------------------------------------------------ running the tests


class Copy:
    """A copy of the tree in which one mutant at a time is tried."""

    def __init__(self, python: str) -> None:
        self._python = python
        self.root = Path(tempfile.mkdtemp(prefix="mutants-"))
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        for name in filter(None, listed.decode().split("\0")):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
        for kernels in (ROOT / "engine/kernels").glob("_cpu*.so"):
            shutil.copy2(kernels, self.root / "engine/kernels")

    def close(self) -> None:
        """Remove the copy."""
        shutil.rmtree(self.root)

    def try_one(self, mutant: Mutant, *, whole: bool) -> tuple[str, str]:
        """Return the circle that catches a mutant, and a test that fails; two empty texts: none."""
        file = self.root / mutant.path
        before = file.read_text()
        file.write_text(mutant.code)
        try:
            for circle, tests in self._circles(mutant.path, whole=whole):
                failed = self._fails(circle, tests)
                if failed:
                    return circle, failed
        finally:
            file.write_text(before)
        return "", ""

    def _circles(self, path: str, *, whole: bool) -> Iterator[tuple[str, list[str]]]:
        folder, stem = path.split("/")[0], Path(path).stem
        mirror = self.root / "tests" / folder
        if mirror.is_dir():
            module = "baton." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            near = [
                file
                for file in sorted(mirror.rglob("test_*.py"))
                if stem in file.stem or module in file.read_text()
            ]
            yield "near", [str(file.relative_to(self.root)) for file in near]
            yield "mirrored", [f"tests/{folder}"]
        if whole:
            yield "whole", ["tests"]

    def _fails(self, circle: str, tests: list[str]) -> str:
        """Run tests until one fails; return its name, or an empty text."""
        if not tests:
            return ""
        command = [self._python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(self.root / "src"), "OMP_NUM_THREADS": "1",
                       "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
        process = subprocess.Popen(
            command, cwd=self.root, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=CIRCLE_S[circle])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return "a test hangs"
        if process.returncode in (0, 5):
            return ""
        failed = [line.split(" - ")[0] for line in output.splitlines() if line[:6] in _FAILURES]
        return failed[0] if failed else f"exit code {process.returncode}"


_FAILURES = ("FAILED", "ERROR ")


def run(mutants: list[Mutant], arguments: argparse.Namespace) -> None:
    """Try the mutants that the report lacks and add them to it."""
    report = Path(arguments.report)
    done = set(_known(report))
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        if mutant.id not in done:
            waiting.put(mutant)
    lock = threading.Lock()

    def work() -> None:
        copy = Copy(arguments.python)
        try:
            while True:
                mutant = waiting.get_nowait()
                began = time.monotonic()
                circle, test = copy.try_one(mutant, whole=arguments.whole)
                line = {**asdict(mutant), "circle": circle, "test": test,
                        "seconds": round(time.monotonic() - began, 1)}  # fmt: skip
                del line["code"]
                with lock, report.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                place = f"{mutant.path}:{mutant.line} {mutant.operator}"
                print(f"{circle or 'SURVIVES':9} {place} {test}", flush=True)
        except queue.Empty:
            pass
        finally:
            copy.close()

    threads = [threading.Thread(target=work) for _ in range(arguments.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _known(report: Path) -> dict[str, dict[str, Any]]:
    lines = report.read_text().splitlines() if report.exists() else []
    return {line["id"]: line for line in map(json.loads, lines)}


def summary(mutants: list[Mutant], report: Path) -> tuple[str, float]:
    """Return the shares caught with each survivor's change, and the percentage caught at all."""
    known = _known(report)
    idle = {
        line.split(maxsplit=1)[0]
        for line in (WITHOUT_EFFECT.read_text().splitlines() if WITHOUT_EFFECT.exists() else ())
        if line and not line.startswith("#")
    }
    tried = [known[one.id] for one in mutants if one.id in known and one.id not in idle]
    by_circle = Counter(line["circle"] for line in tried)
    caught = len(tried) - by_circle[""]
    mirrored = by_circle["near"] + by_circle["mirrored"]
    rows = [f"\nsurvived {line['id']} {line['path']}:{line['line']}\n{line['change']}"
            for line in tried if not line["circle"]]  # fmt: skip
    total = max(1, len(tried))
    text = "\n".join([
        *rows,
        f"\n{len(tried)} mutants, {len(mutants) - len(tried)} set aside or not tried",
        f"caught by the mirrored tests: {mirrored} ({mirrored / total:.0%})",
        f"caught at all: {caught} ({caught / total:.0%})",
    ])  # fmt: skip
    return text, 100 * caught / total


def main() -> int:
    """Draw a sample, try it, and print the result. Exit code 1 below ``--least`` percent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=100, help="mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: %(default)s)")
    parser.add_argument("--under", default="", help="only files whose path begins so")
    parser.add_argument("--whole", action="store_true", help="try survivors with all tests")
    parser.add_argument("--jobs", type=int, default=2, help="at a time (default: %(default)s)")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter with Baton's packages"
    )
    parser.add_argument("--report", default="build/mutants.jsonl", help="default: %(default)s")
    parser.add_argument("--list", action="store_true", help="print the sample only")
    parser.add_argument("--least", type=float, default=0.0, help="percent to be caught")
    arguments = parser.parse_args()
    Path(arguments.report).parent.mkdir(parents=True, exist_ok=True)
    mutants = sample(arguments.sample, arguments.seed, arguments.under)
    if arguments.list:
        for one in mutants:
            print(f"{one.id} {one.path}:{one.line} {one.operator}\n{one.change}\n")
        return 0
    run(mutants, arguments)
    text, percent = summary(mutants, Path(arguments.report))
    print(text)
    return int(percent < arguments.least)


if __name__ == "__main__":
    sys.exit(main())
