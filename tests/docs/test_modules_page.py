"""docs/modules.md has every module of every floor, as its docstring describes it."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_modules", ROOT / "docs/make_modules.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(maker):
    assert maker.PAGE.read_text("utf-8") == maker.render(), maker.REMEDY


def test_every_linked_folder_has_a_section(maker):
    linked = {folder.name for folder in (ROOT / "src/baton").iterdir() if folder.is_symlink()}
    assert set(maker.packages()) == linked


def test_the_summary_is_the_first_sentence_on_one_line(maker, tmp_path):
    module = tmp_path / "m.py"
    module.write_text('"""Takes a | b, and\njoins them. More.\n\nEven more.\n"""\n')
    assert maker.summary(module) == "Takes a \\| b, and joins them."
    module.write_text("x = 1\n")
    assert maker.summary(module) == ""
