"""All backends and instruction sets of this machine, a float64 oracle, and poisoned outputs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.kernels.backend import Backend
from baton.engine.kernels.load import load_backend
from baton.engine.kernels.reference import NumpyBackend

Array = npt.NDArray[np.generic]


def rounds(numerics: str) -> bool:
    """Whether products with bfloat16 weights, and their models' attention, round to bfloat16."""
    return numerics.endswith(("amx", "bf16"))


def instruction_sets() -> list[str]:
    if importlib.util.find_spec("baton.engine.kernels._cpu") is None:
        return []
    from baton.engine.kernels import _cpu

    return [name for _, name, *_ in _cpu.instruction_sets()]


ISAS = instruction_sets()
ROUNDING = ["amx", "avx512bf16"]
"""Instruction sets with products of bfloat16."""
KNOWN = ["amx", "avx512bf16", "avx512", "avx2", "plain"]


def or_skipped(names: Sequence[str], suffix: str = "") -> list[object]:
    """Parameters of instruction sets; those that this machine lacks are skipped."""
    marks = {isa: pytest.mark.skip(f"no {isa} kernels here") for isa in {*names} - {*ISAS}}
    return [
        pytest.param(f"{isa}{suffix}", marks=marks[isa]) if isa in marks else f"{isa}{suffix}"
        for isa in names
    ]


COMPILED = or_skipped(KNOWN)


@pytest.fixture(params=["numpy", *COMPILED])
def backend(request: pytest.FixtureRequest) -> Backend:
    return (
        load_backend("numpy")
        if request.param == "numpy"
        else load_backend("cpu", isa=request.param)
    )


@pytest.fixture(params=COMPILED)
def compiled(request: pytest.FixtureRequest) -> Backend:
    """Backends that promise row independence."""
    return load_backend("cpu", isa=request.param)


@pytest.fixture(scope="session")
def oracle() -> NumpyBackend:
    return NumpyBackend(np.float64)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture
def poisoned() -> Iterator[Callable[..., npt.NDArray[np.float32]]]:
    """Make outputs full of NaN between guard words; afterwards the guards must stand."""
    made: list[npt.NDArray[np.float32]] = []
    guard = 64

    def make(*shape: int) -> npt.NDArray[np.float32]:
        memory = np.full(int(np.prod(shape)) + 2 * guard, np.nan, np.float32)
        memory[:guard] = memory[-guard:] = 7.0
        made.append(memory)
        return memory[guard:-guard].reshape(shape)

    yield make
    for memory in made:
        assert (memory[:guard] == 7.0).all(), "written before the output"
        assert (memory[-guard:] == 7.0).all(), "written past the output"
