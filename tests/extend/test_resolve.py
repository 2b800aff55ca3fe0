"""Classes are found by name; each problem is one typed error that says what is missing."""

import subprocess
import sys

import pytest

from baton.extend import DECIDER, FAMILY, METRIC, ORDER, POLICY, ExtensionError, resolve
from baton.proto.errors import ConfigError

from ..processes import alive, wait_until

GOOD = """
class Good:
    def choose(self, request, workers):
        return workers[0]
"""
CASES = {
    "no_colon": ("", "nothing", "not of the form package.module:Class"),
    "not a name": ("", "a-b:C", "not of the form package.module:Class"),
    "no_module": ("", "{m}_elsewhere:C", "no module {m}_elsewhere in "),
    "no_package": ("", "{m}_elsewhere.part:C", "no module {m}_elsewhere in "),
    "no_import": ("import numpyy", "{m}:C", "importing {m} raised ModuleNotFoundError: No module"),
    "bad_syntax": (
        "x = 1\nclass C", "{m}:C",
        "importing {m} raised SyntaxError: expected ':' ({folder}/{m}.py, line 2)",
    ),
    "exits": ("import sys; sys.exit(3)", "{m}:C", "importing {m} raised SystemExit: 3"),
    "no_class": ("x = 1", "{m}:Gone", "{m}.py has no Gone"),
    "a_number": ("x = 1", "{m}:x", "x is no class, but int"),
    "raises": (
        "class C:\n    def __init__(self):\n        raise OSError('no file')", "{m}:C",
        "C() raised OSError: no file ({folder}/{m}.py, line 3)",
    ),
    "wants_more": (
        "\nclass C:\n    def __init__(self, size): ...", "{m}:C",
        "missing 1 required positional argument: 'size' ({folder}/{m}.py, line 2)",
    ),
    "no_text": (
        "class E(Exception):\n    def __str__(self):\n        raise OSError\nraise E", "{m}:C",
        "importing {m} raised E: it has no text",
    ),
    "made_without_text": (
        "class C(Exception):\n    def __init__(self):\n        raise self\n    __str__ = 1",
        "{m}:C",
        "C() raised C: it has no text",
    ),
    "raising_module": (
        "def __getattr__(name):\n    raise KeyError(name)", "{m}:C", "C raised KeyError: 'C'",
    ),
    "raising_method": (
        "class C:\n    @property\n    def choose(self):\n        raise OSError('no file')", "{m}:C",
        "choose raised OSError: no file ({folder}/{m}.py, line 4)",
    ),
    "raising_default": (
        "class C:\n    __repr__ = 1\nC.choose = lambda self, one=C(): 1", "{m}:C",
        "does not take 2 arguments",
    ),
    "no_method": ("class C: ...", "{m}:C", "C has no method choose"),
    "no_call": ("class C:\n    choose = 3", "{m}:C", "C has no method choose"),
    "few_arguments": (
        "class C:\n    def choose(self, workers): ...", "{m}:C",
        "choose(workers) does not take 2 arguments",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """Imports leave the path as it was."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_class_of_the_folder(tmp_path):
    (tmp_path / "own_good.py").write_text(GOOD)
    made = resolve(POLICY, "own_good:Good", str(tmp_path))
    assert made.choose(None, ["first"]) == "first"


def test_a_class_of_a_package(tmp_path):
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "part.py").write_text(GOOD)
    assert resolve(POLICY, "own_package.part:Good", str(tmp_path)) is not None


def test_the_folder_hides_no_other_module(tmp_path):
    (tmp_path / "json.py").write_text("raise ValueError")
    (tmp_path / "own_json.py").write_text("import json\njson.loads('1')\n" + GOOD)
    resolve(POLICY, "own_json:Good", str(tmp_path))


@pytest.mark.parametrize("case", CASES)
def test_what_is_missing_is_named(case, tmp_path):
    module = f"own_{case.replace(' ', '_')}"
    source, name, words = CASES[case]
    (tmp_path / f"{module}.py").write_text(source)
    with pytest.raises(ExtensionError) as caught:
        resolve(POLICY, name.format(m=module), str(tmp_path))
    assert words.format(m=module, folder=tmp_path) in str(caught.value)
    assert "resolve.py" not in str(caught.value)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("point", "method"),
    [
        (POLICY, "choose"),
        (DECIDER, "local"),
        (ORDER, "rank"),
        (METRIC, "ended"),
        (FAMILY, "config"),
    ],
)
def test_every_point_checks_its_methods(point, method, tmp_path):
    (tmp_path / "own_empty.py").write_text("class Empty: ...")
    with pytest.raises(ExtensionError, match=f"Empty has no method {method}"):
        resolve(point, "own_empty:Empty", str(tmp_path))


def check(folder, *named):
    command = [sys.executable, "-P", "-m", "baton.extend.check", str(folder), *named]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_check_prints_one_line(tmp_path):
    (tmp_path / "own_loud.py").write_text("print('hello')\n" + GOOD)
    assert check(tmp_path, "policy=own_loud:Good").returncode == 0
    failed = check(tmp_path, "policy=own_loud:Good", "metric=own_loud:Good")
    assert failed.returncode == 1
    assert failed.stdout == "--metric own_loud:Good: Good has no method ended\n"


def test_the_check_of_a_killed_process_ends(tmp_path):
    (tmp_path / "own_slow.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    check = [sys.executable, "-P", "-m", "baton.extend.check", str(tmp_path), "policy=own_slow:One"]
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({check!r})"], cwd=tmp_path
    )
    noted = tmp_path / "pid"
    wait_until(lambda: noted.exists() and noted.read_text(), what="the check")
    parent.kill()
    parent.wait()
    wait_until(lambda: not alive(int(noted.read_text())), what="the check's end")
