"""Builds the optional C kernels; without a compiler the NumPy reference serves instead."""

from pathlib import Path

from setuptools import Extension, setup

CSRC = Path("engine/kernels/csrc")

setup(
    ext_modules=[
        Extension(
            "baton.engine.kernels._cpu",
            sources=sorted(str(path) for path in CSRC.glob("*.c")),
            depends=sorted(str(path) for path in CSRC.glob("*.h")),
            # Rounding is part of the contract: no contraction but the FMAs written out.
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno"],
            optional=True,
        )
    ]
)
