"""Builds the C kernels. Without a compiler it warns, and the slow NumPy kernels serve instead."""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("engine/kernels/csrc")

# The kernels use the stable ABI alone, so one file serves Python 3.11 and newer. A Python without
# the global lock has no stable ABI.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

NOT_BUILT = """
baton: WARNING: the C kernels were not built, because they could not be compiled (see below).
baton: The slow NumPy kernels will be used, and answers take up to 4 times as long.
baton: Install a C compiler (such as gcc) and Python's headers, then install Baton again.
"""


class BuildKernels(build_ext):
    """Builds the optional kernels, and explains the effect of a failure."""

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except Exception:
            sys.stderr.write(NOT_BUILT)
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)  # of other sources
            raise  # setuptools goes on without an optional extension
        built = Path(self.get_ext_fullpath(ext.name))
        for other in built.parent.glob("_cpu.*.so"):  # Python would prefer one of an older build
            if other.name != built.name:
                other.unlink()


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "baton.engine.kernels._cpu",
            sources=sorted(str(path) for path in CSRC.glob("*.c")),
            depends=sorted(str(path) for path in CSRC.glob("*.h")),
            # Rounding is part of the contract: no contraction but the FMAs written out.
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
            py_limited_api=STABLE,
            extra_compile_args=[
                "-O3",
                "-std=gnu11",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
