"""Choosing a backend."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.engine.kernels.load import load_backend


def test_numpy_is_always_there():
    backend = load_backend("numpy")
    assert backend.name == "numpy"
    assert not backend.row_independent


def test_numerics_name_the_instruction_set(compiled):
    assert compiled.name == "cpu"
    assert compiled.row_independent
    assert load_backend("auto").name == "cpu"
    _, revision, isa = compiled.numerics.split("-")
    assert int(revision) >= 1
    assert load_backend("cpu", isa=isa).numerics == compiled.numerics


def test_auto_falls_back_when_the_extension_was_not_built(monkeypatch):
    monkeypatch.delitem(sys.modules, "baton.engine.kernels.cpu", raising=False)
    monkeypatch.setitem(sys.modules, "baton.engine.kernels.cpu", None)
    assert load_backend("auto").name == "numpy"
    with pytest.raises(ImportError):
        load_backend("cpu")


def test_unknown_names_raise():
    with pytest.raises(ValueError, match="tpu"):
        load_backend("tpu")


def test_unknown_instruction_set_raises(compiled):
    with pytest.raises(ValueError, match="avx1024"):
        load_backend("cpu", isa="avx1024")


def test_kernels_of_other_sources_are_as_good_as_none():
    """As after an update of a checkout that was not installed again."""
    program = (
        "import baton.engine.kernels.load as k, baton.engine.kernels._cpu as c;"
        "del c.quantized_kinds;"
        "print(k.load_backend().numerics); print(k.compiled_kernels_problem())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    numerics, problem = done.stdout.splitlines()
    assert numerics.startswith("numpy-")
    assert problem.startswith("they were built from other sources: ")
