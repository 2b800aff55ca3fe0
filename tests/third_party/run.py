"""Runs test files written for the pages against ``baton.proto``: ``make test-third-party``.

Ends with a table of the files: cases, passed, ended as a documented deviation says
(:mod:`.differences`), skipped, failing. Exit code 0 only if nothing fails and every file has
cases; 2 for files that are not there.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pytest import ExitCode

from .differences import explain
from .names import register

_SETTINGS = "[pytest]\ntimeout = 120\n"
"""In place of this project's: the files are not its tests."""

_OPTIONS = (
    *("-p", "no:terminal", "-p", "no:cacheprovider"),
    "--noconftest",
    "--import-mode=importlib",  # several files may have one name
    "--continue-on-collection-errors",
)


@dataclass
class FileResult:
    """What became of the cases of one file."""

    passed: int = 0
    skipped: int = 0
    differing: dict[str, list[str]] = field(default_factory=dict)  # id: cases
    failing: dict[str, str] = field(default_factory=dict)  # case: how it failed

    @property
    def cases(self) -> int:
        """Cases found; a file that cannot be imported counts as a failing case."""
        different = sum(map(len, self.differing.values()))
        return self.passed + self.skipped + different + len(self.failing)

    @property
    def is_good(self) -> bool:
        """Whether there were cases and none of them fails."""
        return self.cases > 0 and not self.failing


class Recorder:
    """Pytest plugin that sorts every case into the result of its file."""

    def __init__(self, files: list[Path]) -> None:
        self.results = {file: FileResult() for file in files}

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector):
        """A file that cannot be imported fails; what belongs to no file fails all of them."""
        report = yield
        if report.failed:
            mine = self.results.get(collector.path)
            for result in self.results.values() if mine is None else [mine]:
                result.failing["import"] = report.longreprtext
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):
        """Sort a case at its first phase that did not pass, or when its body did."""
        report = yield
        result = self.results[item.path]
        if report.skipped:
            result.skipped += 1
        elif report.failed:
            self._fail(result, item, call, report)
        elif call.when == "call":
            result.passed += 1
        return report

    def _fail(
        self,
        result: FileResult,
        item: pytest.Item,
        call: pytest.CallInfo[None],
        report: pytest.TestReport,
    ) -> None:
        name = getattr(item, "originalname", item.name)
        found = explain(name, _first_line(call)) if call.when == "call" else None
        if found is not None:
            result.differing.setdefault(found, []).append(item.name)
            return
        if call.when == "teardown" and item.name not in result.failing:
            result.passed -= 1  # its body had passed; one case is counted once
        result.failing[item.name] = report.longreprtext


def _first_line(call: pytest.CallInfo[None]) -> str:
    """Type and first line of the message a case ended with."""
    if call.excinfo is None:
        return ""
    message = str(call.excinfo.value).partition("\n")[0]
    return f"{call.excinfo.type.__name__}: {message}"


def run(files: list[Path]) -> dict[Path, FileResult]:
    """Run the files in this process, their module names mapped."""
    register()
    recorder = Recorder(files)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "pytest.ini"
        settings.write_text(_SETTINGS)
        code = pytest.main(
            [f"-c{settings}", f"--rootdir={folder}", *_OPTIONS, *map(str, files)],
            plugins=[recorder],
        )
    if code not in (ExitCode.OK, ExitCode.TESTS_FAILED, ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with {code!r}")
    return recorder.results


def table(results: dict[Path, FileResult]) -> str:
    """The results as text, one line a file, with what differs and what fails by name."""
    shown = {file: "/".join(file.parts[-2:]) for file in results}
    width = max(len("file"), *map(len, shown.values()))
    lines = [f"{'file':{width}}  cases  passed  differing  skipped  failing"]
    for file, result in results.items():
        differing = Counter({name: len(cases) for name, cases in result.differing.items()})
        lines.append(
            f"{shown[file]:{width}}  {result.cases:5}  {result.passed:6}  {differing.total():9}"
            f"  {result.skipped:7}  {len(result.failing):7}"
        )
        for name, cases in sorted(result.differing.items()):
            lines.append(f"  {name} (docs/compatibility.md): {', '.join(cases)}")
        lines += [f"  failing: {case}" for case in result.failing]
        if not result.cases:
            lines.append("  failing: no cases in it")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run the files named, print what failed and the table; see the module for the exit code."""
    files = [Path(argument).resolve() for argument in arguments]
    missing = [str(file) for file in files if not file.is_file()]
    if not files or missing:
        wrong = f"no such file: {', '.join(missing)}" if missing else "no files"
        print(f'test-third-party: {wrong}; call make test-third-party FILES="PATH ..."')
        return 2
    results = run(files)
    for result in results.values():
        for case, how in result.failing.items():
            print(f"---- {case}\n{how}\n")
    print(table(results))
    good = all(result.is_good for result in results.values())
    print("nothing differs but what is documented" if good else "some of it fails")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
