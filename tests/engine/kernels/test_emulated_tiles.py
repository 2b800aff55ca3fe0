"""The kernels for AMX on any processor with AVX512-BF16: tile instructions are computed.

The tests of the kernels run in a process whose extension is built with ``emulated/instructions.h``.
Bits that a processor with AMX recorded (``test_numerics.py``) prove the computed products of
bfloat16, integers those of bytes.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from .conftest import ISAS
from .emulated.build import build, build_probe, installed, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
ROOT = Path(__file__).parents[3]
KINDS = ("halves", "signed", "unsigned")


@pytest.fixture(scope="module")
def library(pytestconfig, tmp_path_factory) -> Path:
    """The extension with emulated tiles, kept from one run to the next."""
    cache = getattr(pytestconfig, "cache", None)  # absent under -p no:cacheprovider
    return build(cache.mkdir("baton-amx") if cache else tmp_path_factory.mktemp("baton-amx"))


@pytest.fixture(scope="module")
def probe(tmp_path_factory) -> Path:
    return build_probe(tmp_path_factory.mktemp("probe"), emulated=True)


def emulated(library: Path) -> dict[str, str]:
    """The environment of a process that has these tests' modules, also under PYTHONSAFEPATH."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"BATON_EMULATED_TILES": str(library), "PYTHONPATH": os.pathsep.join(paths)}
    return os.environ | more


def run_tests(library: Path, *arguments: str) -> str:
    """Run tests with the emulated kernels; return the last line of the report."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider",
         "-p", "tests.engine.kernels.emulated.plugin", *arguments],
        cwd=ROOT, env=emulated(library),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    return run.stdout.rstrip().rpartition("\n")[2]


def test_the_tests_of_the_kernels_pass(library):
    """All tests with kernels for AMX, none skipped but one of products of another order."""
    last = run_tests(library, "-k", "amx and not emulated", "tests/engine/kernels")
    passed = re.match(r"(\d+) passed(?:, (\d+) skipped)?", last)
    assert passed, last
    assert int(passed[1]) > 800
    assert int(passed[2] or 0) <= 1, last


@pytest.mark.long
def test_the_tests_of_models_pass(library):
    files = ("test_models", "test_gguf_models", "test_gguf_products", "test_gemma", "test_fp8")
    run_tests(library, *(f"tests/engine/{name}.py" for name in files))


COUNT = """
import ctypes, sys
import tests.engine.kernels.emulated.plugin
import numpy as np
from baton.engine.kernels.load import load_backend
from baton.engine.kernels.quantized import KINDS
from tests.engine.kernels.quantized_cases import random_weights

counts = (ctypes.c_uint64 * 3).in_dll(ctypes.CDLL(sys.argv[1]), "emulated_products")
kernels = load_backend("cpu", isa="amx")
for kind in KINDS:
    packed = kernels.pack_linear([random_weights(np.random.default_rng(1), kind, 33, 512)])
    for rows in (16, 17):
        before = list(counts)
        kernels.linear(np.ones((rows, 512), np.float32), packed, np.empty((rows, 33), np.float32))
        print(kind, rows, *(now - then for now, then in zip(counts, before)))
"""


def test_quantized_products_of_many_rows_use_tiles(library):
    """Of 3 panels, 2 tiles of rows and 512 columns: 8 tiles of 64 columns, or 16 blocks of 32."""
    run = subprocess.run(
        [sys.executable, "-c", COUNT, str(library)], cwd=ROOT, capture_output=True, text=True,
        check=True, env=emulated(library),
    )  # fmt: skip
    found = {tuple(line.split()[:2]): line.split()[2:] for line in run.stdout.splitlines()}
    for kind in ("Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q8_0", "Q5_0", "Q4_0", "IQ4_NL", "Q4_1", "Q5_1"):
        assert found[kind, "16"] == ["0", "0", "0"]
        assert found[kind, "17"] == (["0", "48", "48"] if kind[-1] == "K" else ["0", "96", "0"])


def test_the_installed_kernels_have_the_instructions():
    """The real build; the compiler of this machine may be too old for them."""
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump")
    extension = installed()
    assert extension is not None
    run = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", extension],
        capture_output=True,
        text=True,
        check=True,
    )
    found = set(re.findall(r"\t(tdp\w+|tile\w+|ldtilecfg)", run.stdout))
    wanted = {"ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tileloaddt1", "tilestored"}
    assert found == wanted | {"tdpbf16ps", "tdpbssd", "tdpbsud"}


# ------------------------------------------------------------------ the instructions


def multiply(probe: Path, kind: str, a: np.ndarray, b: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """``sums + a[tall, bytes] @ b[bytes / 4, 64]`` by one instruction."""
    sums = sums.copy()
    arrays = (array.ctypes.data_as(ctypes.c_void_p) for array in (a, b, sums))
    sizes = (ctypes.c_int64(n) for n in (KINDS.index(kind), *a.shape))
    ctypes.CDLL(str(probe)).multiply(*sizes, *arrays)
    return sums


def factors(rng, tall: int, terms: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random bytes, among them the largest and smallest."""
    a, b = (rng.integers(0, 256, shape, np.uint8) for shape in ((tall, terms), (terms // 4, 64)))
    for bytes_ in (a, b):
        bytes_[rng.random(bytes_.shape) < 0.3] = 0x80
        bytes_[rng.random(bytes_.shape) < 0.2] = 0xFF
    return a, b, rng.integers(-(2**31), 2**31, (tall, 16)).astype(np.int32)


@pytest.mark.parametrize(("tall", "terms"), [(16, 64), (16, 32), (1, 64), (7, 4)])
@pytest.mark.parametrize("kind", ["signed", "unsigned"])
def test_sums_of_bytes_are_those_of_integers(probe, rng, kind, tall, terms):
    a, b, sums = factors(rng, tall, terms)
    columns = b.reshape(-1, 16, 4).transpose(0, 2, 1).reshape(terms, 16)
    wide = columns.view(np.int8 if kind == "signed" else np.uint8).astype(np.int64)
    exact = sums + a.view(np.int8).astype(np.int64) @ wide
    assert np.array_equal(multiply(probe, kind, a, b, sums), exact.astype(np.int32))


def config(changes: Sequence[tuple[int, int]] = ()) -> bytes:
    """Eight whole tiles of palette 1, but for ``changes``: offsets and values of bytes."""
    made = bytearray(64)
    made[0], made[16:32:2], made[48:56] = 1, bytes([64]) * 8, bytes([16]) * 8
    for at, value in changes:
        made[at] = value
    return bytes(made)


FAULTS = {
    "no tiles are configured": (None, 0, 1, 2),
    "the palette is not 1": (config([(0, 2)]), 0, 1, 2),
    "a reserved byte is not zero": (config([(56, 16)]), 0, 1, 2),
    "more than 16 rows": (config([(49, 17)]), 0, 1, 2),
    "more than 64 bytes in a row": (config([(18, 68)]), 0, 1, 2),
    "rows without bytes": (config([(18, 0)]), 0, 1, 2),
    "a tile without rows": (config([(18, 0), (49, 0)]), 0, 1, 2),
    "no such tile": (config(), 0, 1, 8),
    "one tile is used twice": (config(), 0, 1, 1),
    "rows of broken words": (config([(16, 62)]), 0, 1, 2),
    "sums and rows differ in rows": (config([(48, 15)]), 0, 1, 2),
    "sums and columns differ in columns": (config([(16, 32)]), 0, 1, 2),
    "rows and columns differ in terms": (config([(18, 32)]), 0, 1, 2),
}
ATTEMPT = """
import ctypes, sys
attempt = ctypes.CDLL(sys.argv[1]).attempt
config, *tiles = sys.argv[2:]
attempt(bytes.fromhex(config) or None, *map(int, tiles))
"""


def attempt(probe: Path, memory: bytes | None, *tiles: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ATTEMPT, probe, (memory or b"").hex(), *map(str, tiles)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("what", FAULTS)
def test_faults_end_the_process(probe, what):
    run = attempt(probe, *FAULTS[what])
    assert run.returncode == -signal.SIGABRT
    assert what in run.stderr


def test_shapes_that_fit_are_no_fault(probe):
    assert attempt(probe, config(), 0, 1, 2).returncode == 0


@pytest.mark.skipif("amx" not in ISAS, reason="this processor has no AMX")
@pytest.mark.parametrize("kind", KINDS)
def test_instructions_of_the_processor_compute_the_same(probe, rng, tmp_path, kind):
    """Finite numbers of all sizes, subnormal ones too."""
    own = build_probe(tmp_path, emulated=False)
    assert ctypes.CDLL(str(own)).permitted()
    for _ in range(200):
        a, b, sums = factors(rng, 16, 64)
        if kind == "halves":
            for array in (a, b):
                halves = array.view(np.uint16)
                halves &= 0xBFFF  # at most 2
            sums.view(np.uint32)[:] &= 0xBFFFFFFF
        expected = multiply(probe, kind, a, b, sums)
        assert np.array_equal(multiply(own, kind, a, b, sums), expected)
