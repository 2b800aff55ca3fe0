"""Builds the optional C kernels; without a compiler the NumPy reference serves instead."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "baton.engine.kernels._cpu",
            sources=["engine/kernels/csrc/cpu_module.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno"],
            optional=True,
        )
    ]
)
