"""Kernel sets of the devices, behind one Backend protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import Backend


def load_backend(name: str = "auto", *, isa: str | None = None) -> Backend:
    """Return a kernel set: ``cpu`` (compiled), ``numpy``, or ``auto``: cpu where it was built.

    ``isa`` forces an instruction set of the cpu backend (tests); None takes the best one.

    Raises:
        ValueError: unknown name, or an instruction set this machine does not have.
        ImportError: ``cpu`` was asked for and the extension was not built.

    """
    if name not in ("auto", "cpu", "numpy"):
        raise ValueError(f"unknown backend {name!r}; choose auto, cpu or numpy")
    if name != "numpy":
        try:
            from .cpu import CpuBackend

            return CpuBackend(isa)
        except ImportError:
            if name == "cpu":
                raise
    from .reference import NumpyBackend

    return NumpyBackend()
