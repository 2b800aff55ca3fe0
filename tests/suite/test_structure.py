"""The tree keeps to the limits of structure.py, and each limit finds what breaks it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .structure import (
    MAX_CHAIN,
    MAX_LINES,
    MAX_PARAMETERS,
    circle_in,
    imports_of,
    length,
    longest_chain,
    wide_constructors,
)

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    module
    for folder in sorted((ROOT / "src" / "baton").iterdir())
    if folder.is_symlink()
    for module in folder.resolve().rglob("*.py")
]


@pytest.fixture(scope="module")
def imports():
    return imports_of("baton")


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Return the imports of a package that is made of names and their modules' text."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def plant(modules):
        folder = tmp_path / "planted"
        folder.mkdir()
        (folder / "__init__.py").touch()
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        return imports_of("planted")

    yield plant
    sys.modules.pop("planted", None)


def test_no_modules_import_each_other_in_a_circle(imports):
    assert circle_in(imports) == []


def test_no_chain_of_imports_is_too_long(imports):
    chain = longest_chain(imports)
    assert len(chain) <= MAX_CHAIN, "\n".join(chain)


def test_no_constructor_takes_too_many_parameters():
    assert [wide for module in MODULES for wide in wide_constructors(module)] == []


def test_no_module_is_too_long():
    assert [str(m.relative_to(ROOT)) for m in MODULES if length(m) > MAX_LINES] == []


def test_a_circle_is_found_also_in_functions_and_for_type_checkers(planted):
    circle = circle_in(
        planted(
            {
                "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import b\n",
                "b": "def late():\n    from . import c\n",
                "c": "from . import a\n",
            }
        )
    )
    assert set(circle) == {"planted.a", "planted.b", "planted.c"}


def test_a_chain_of_one_more_is_found(planted):
    chain = {f"m{at}": f"from . import m{at + 1}\n" for at in range(MAX_CHAIN)}
    imports = planted({**chain, f"m{MAX_CHAIN}": ""})
    assert len(longest_chain(imports)) == MAX_CHAIN + 1
    assert circle_in(imports) == []


def test_a_constructor_of_one_more_parameter_is_found(tmp_path):
    names = ", ".join(f"p{at}" for at in range(MAX_PARAMETERS))
    module = tmp_path / "wide.py"
    module.write_text(
        f"class Fits:\n    def __init__(self, {names}): ...\n"
        f"class Wide:\n    def __init__(self, {names}, *, one_more=0): ...\n"
    )
    assert list(wide_constructors(module)) == [
        f"wide.py: Wide takes {MAX_PARAMETERS + 1} parameters"
    ]
