"""Builds the optional C kernels; without a compiler the NumPy reference serves instead."""

from pathlib import Path

from setuptools import Extension, setup

# Through the package's link, so that one path is right in a checkout and in a source archive.
CSRC = Path("src/baton/engine/kernels/csrc")

setup(
    ext_modules=[
        Extension(
            "baton.engine.kernels._cpu",
            sources=[str(CSRC / "cpu_module.c")],
            depends=sorted(str(path) for path in CSRC.glob("*")),
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno"],
            optional=True,
        )
    ]
)
