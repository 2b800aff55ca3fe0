"""The devices that the kernels run on: always the CPU, and a GPU where CuPy finds one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from baton.benchmarks.checkpoints import write_checkpoint
from baton.engine.kernels.cuda.cupy_device import CupyDevice
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.gpus import cuda_is_available

from .host.builder import prune, sanitizer, why_not
from .host_device import VARIANT, HostDevice
from .small_model import SHAPE

Array = npt.NDArray[np.generic]
Run = Callable[[], Sequence[Array]]
ROOT = Path(__file__).parents[2]
SANITIZED_TEST = "test_marked_tests_pass_under_sanitizers"
ORDERS = 8 if VARIANT == "plain" else 1
ONLY = os.environ.get("BATON_CUDA_DEVICES", "")
"""One of "host" and "cuda": only tests that take a device, and only that one."""


@pytest.fixture(scope="session")
def build_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where built sources are kept from one run to the next."""
    cache = getattr(pytestconfig, "cache", None)  # absent under -p no:cacheprovider
    folder: Path = cache.mkdir("baton-cuda") if cache else tmp_path_factory.mktemp("baton-cuda")
    prune(folder)
    return folder


def environment() -> dict[str, str]:
    """Of a process whose kernels are built by the sanitizers."""
    return os.environ | {
        "LD_PRELOAD": str(sanitizer()),
        "ASAN_OPTIONS": "detect_leaks=0",
        "BATON_CUDA_HOST_VARIANT": "sanitized",
    }


def start_sanitized_run() -> subprocess.Popen[str]:
    """Start the tests marked `sanitized` in another process."""
    selection = ("-m", "sanitized", "tests/cuda")
    command = [sys.executable, "-m", "pytest", "-q", "--capture=sys", *selection]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def sanitized_run(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str] | None]:
    """The tests marked `sanitized`, running beside the others, if this run asks for them.

    Workers of pytest-xdist fill the processors already: there the test starts it that wants it.
    """
    asked = any(item.name == SANITIZED_TEST for item in request.session.items)
    is_worker = hasattr(request.config, "workerinput")
    if VARIANT != "plain" or not asked or is_worker or sanitizer() is None:
        yield None
        return
    with start_sanitized_run() as run:
        yield run
        run.kill()


@pytest.fixture(scope="session")
def host_device(build_cache: Path) -> HostDevice:
    """The kernels on the CPU."""
    if reason := why_not():
        pytest.skip(reason)
    return HostDevice(build_cache)


@pytest.fixture(scope="session")
def cuda_device() -> CupyDevice:
    """The kernels on the GPU."""
    return CupyDevice()


def devices() -> list[str]:
    """Names of the devices that tests run on."""
    return [ONLY] if ONLY else ["host", *(["cuda"] if cuda_is_available() else [])]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests without a device where one is asked for."""
    if not ONLY:
        return
    kept = [item for item in items if "device" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture(scope="session", params=devices())
def device(request: pytest.FixtureRequest) -> Device:
    """Every device of this machine."""
    found: Device = request.getfixturevalue(f"{request.param}_device")
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small model, :data:`SHAPE`."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), SHAPE, "BF16")


@contextmanager
def in_order(device: Device, seed: int, watching_races: bool = False) -> Iterator[None]:
    """Launches on the CPU in the order of a seed; a GPU has another order each time."""
    with ExitStack() as stack:
        if isinstance(device, HostDevice):
            stack.enter_context(device.order(seed))
            if watching_races:
                stack.enter_context(device.watching_races())
        yield


@pytest.fixture
def schedules(device: Device) -> Callable[[Run], list[Array]]:
    """`schedules(run)`: the outputs of ``run()``, equal in every bit under all orders.

    ``run`` makes its outputs anew (``device.empty`` is poisoned), launches, and returns them
    downloaded. The last time races in shared memory are watched for.
    """

    def check(run: Run) -> list[Array]:
        first: list[Array] | None = None
        for seed in range(ORDERS + 2):
            with in_order(device, seed, watching_races=seed > ORDERS):
                outputs = list(run())
            if first is None:
                first = outputs
            for i, (expected, got) in enumerate(zip(first, outputs, strict=True)):
                assert expected.dtype == got.dtype
                assert expected.tobytes() == got.tobytes(), f"output {i} differs in order {seed}"
        assert first is not None
        return first

    return check


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random data each time; the seed is printed when a test fails."""
    seed = int(os.environ.get("BATON_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"BATON_TEST_SEED={seed}")
    return np.random.default_rng(seed)
