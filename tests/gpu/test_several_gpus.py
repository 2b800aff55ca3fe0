"""Machines with two GPUs: one device per worker, and blocks that pass from GPU to GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.benchmarks.checkpoints import write_checkpoint
from baton.benchmarks.scratch import scratch_folder
from baton.benchmarks.served import Served
from baton.client import Client

from ..cuda.small_model import SHAPE
from ..processes import wait_until
from .failing_cluster import generated
from .test_lost_gpu import PROMPTS, pids

UUIDS = ["GPU-" + "-".join(digits * n for n in (4, 2, 2, 2, 6)) for digits in ("01", "02")]

SENDER = """
import msgspec, numpy as np, sys
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.cupy_device import CupyDevice
backend = CudaBackend(CupyDevice(int(sys.argv[1])))
pool = backend.kv_pool((2, 6, 2, 1, 8, 64), None)
values = np.random.default_rng(3).integers(0, 1 << 16, pool.shape, np.uint16)
backend.device.write(pool, values)
backend.synchronize()
print(msgspec.json.encode(backend.pool_ticket(pool)).decode(), flush=True)
sys.stdin.read()
"""

RECEIVER = """
import msgspec, numpy as np, sys, threading
import cupy
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.cupy_device import CupyDevice
from baton.proto.layout import KVLayout
from baton.proto.wire.messages import DeviceTicket
ticket = msgspec.json.decode(sys.stdin.readline(), type=DeviceTicket)
backend = CudaBackend(CupyDevice(int(sys.argv[1])))
pool = backend.kv_pool((2, 9, 2, 1, 8, 64), None)
layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64, block_size=8, dtype="bfloat16")
expected = np.random.default_rng(3).integers(0, 1 << 16, (2, 6, 2, 1, 8, 64), np.uint16)
theirs, mine = np.array([5, 0, 3], np.int32), np.array([1, 8, 2], np.int32)

def fetch():  # a new thread begins with device 0
    try:
        mapping, source = backend.open_pool(ticket, layout)
    except OSError as error:
        return print(error)
    backend.copy_blocks(source, pool, 0, 2, theirs, mine)
    assert (backend.device.download(pool)[:, mine] == expected[:, theirs]).all()
    mapping.close()
    stream = backend.block_stream(pool, 4096)
    move = stream.sum(0, 2, mine)
    move.wait()
    assert backend.memory_bytes() == 1 << 30
    assert not any(backend.device.local_bytes().values())
    backend.device.compile("elementwise.cu")
    backend.synchronize()
    print("copied", *cupy.cuda.touched)

thread = threading.Thread(target=fetch)
thread.start()
thread.join()
"""


def passed(environment: dict[str, str], to: int = 1, **variables: str) -> str:
    """Copy blocks from GPU 0 to GPU ``to`` of another process; return what that one prints."""
    run = [sys.executable, "-P", "-c"]
    plain: dict[str, Any] = {"stdin": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [*run, SENDER, "0"], env=environment, stdout=subprocess.PIPE, **plain
    ) as sender:
        assert sender.stdin is not None
        assert sender.stdout is not None
        ticket = sender.stdout.readline()
        receiver = subprocess.run(
            [*run, RECEIVER, str(to)],
            input=ticket,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        sender.stdin.close()
    assert not receiver.returncode, receiver.stderr
    assert not receiver.stderr
    return receiver.stdout.strip()


@pytest.fixture
def two_gpus(with_cupy: dict[str, str]) -> dict[str, str]:
    return {**with_cupy, "BATON_FAKE_GPUS": "2"}


def test_blocks_pass_between_gpus_bit_for_bit(two_gpus: dict[str, str]) -> None:
    assert passed(two_gpus) == "copied 1"
    # The same GPU by another ordinal, because the first one is hidden.
    assert passed(two_gpus, to=0, CUDA_VISIBLE_DEVICES="1") == "copied 1"


def test_gpus_that_are_no_peers_do_not_map_memory(two_gpus: dict[str, str]) -> None:
    apart = {**two_gpus, "BATON_FAKE_NO_PEERS": "1"}
    assert passed(apart) == f"{UUIDS[1]} cannot read the memory of {UUIDS[0]}"
    assert "PeerAccessUnsupported" in passed(apart, to=0, CUDA_VISIBLE_DEVICES="1")


def ordinals(plan: bytes) -> dict[str, int]:
    """The GPU of each worker in the output of ``--dry-run``."""
    return {
        process["name"]: process["config"]["runner"]["ordinal"]
        for process in json.loads(plan)["processes"]
        if "runner" in process["config"]
    }


def given(plan: bytes) -> dict[str, str]:
    """The CUDA_VISIBLE_DEVICES of each worker of a split GPU in the output of ``--dry-run``."""
    return {
        process["name"]: process["config"]["runner"]["instance"]
        for process in json.loads(plan)["processes"]
        if "runner" in process["config"]
    }


INSTANCES = [f"MIG-{uuid.removeprefix('GPU-')}" for uuid in UUIDS]


def test_instances_of_a_split_gpu_do_not_map_memory(with_cupy: dict[str, str]) -> None:
    """CUDA IPC does not reach another instance; the blocks of the same one are mapped."""
    split = {**with_cupy, "BATON_FAKE_MIG": "2", "CUDA_VISIBLE_DEVICES": INSTANCES[0]}
    assert passed(split, to=0) == "copied 0"
    refused = passed(split, to=0, CUDA_VISIBLE_DEVICES=INSTANCES[1])
    assert refused.startswith("cannot map another process's GPU memory: cudaErrorMapBuffer")


SEES = """
from baton.engine.loading.loader import _load_backend
from baton.engine.loading.runner_config import RunnerConfig
print(_load_backend(RunnerConfig(model="", backend="cuda", instance="%s")).gpu.device)
"""


def test_a_worker_sees_the_instance_of_its_settings_alone(with_cupy: dict[str, str]) -> None:
    split = {**with_cupy, "BATON_FAKE_MIG": "2", "CUDA_VISIBLE_DEVICES": ",".join(INSTANCES)}
    command = [sys.executable, "-P", "-c", SEES % INSTANCES[1]]
    run = subprocess.run(command, env=split, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"cuda:0 {INSTANCES[1]}"


def test_workers_of_a_split_gpu(with_cupy: dict[str, str]) -> None:
    command = [sys.executable, "-P", "-m", "baton.cli"]
    split = {**with_cupy, "BATON_FAKE_MIG": "3", "CUDA_VISIBLE_DEVICES": INSTANCES[1]}
    serve = [*command, "serve", "--device=cuda", "--dry-run"]
    run = subprocess.run(serve, env=split, capture_output=True, check=True)
    assert ordinals(run.stdout) == {"prefill-0": 0, "decode-0": 0}
    doctor = subprocess.run(
        [*command, "doctor"], env=split, capture_output=True, text=True, check=False
    )
    assert f"cuda:0 {INSTANCES[1]}, Host memory MIG 1g.10gb" in doctor.stdout
    both = {**split, "CUDA_VISIBLE_DEVICES": ",".join(INSTANCES)}
    run = subprocess.run(serve, env=both, capture_output=True, check=True)
    assert ordinals(run.stdout) == {"prefill-0": 0, "decode-0": 0}
    assert given(run.stdout) == {"prefill-0": INSTANCES[0], "decode-0": INSTANCES[1]}
    for shown, sentence in (
        (f"0,{INSTANCES[0]}", "CUDA_VISIBLE_DEVICES has 2 entries, 1 of them MIG instances, but"),
        ("MIG-none", "CuPy finds no CUDA device: no GPU, or its driver is missing or old, or "),
    ):
        refused = subprocess.run(
            serve, env={**split, "CUDA_VISIBLE_DEVICES": shown}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert refused.returncode
        assert refused.stderr.splitlines()[-1].startswith(f"baton: {sentence}")


WITHOUT_PEER = """
import numpy as np
from baton.engine.kernels.cuda import elementwise
from baton.engine.kernels.cuda.cupy_device import CupyDevice
one, other = CupyDevice(0), CupyDevice(1)
values = one.upload(np.ones((1, 64), np.uint16))
weights = other.upload(np.ones(64, np.uint16))
elementwise.rms_norm(other, values, weights, 1e-6, other.empty((1, 64), np.uint16))
"""


def test_the_emulation_catches_memory_of_another_gpu(two_gpus: dict[str, str]) -> None:
    command = [sys.executable, "-P", "-c", WITHOUT_PEER]
    run = subprocess.run(command, env=two_gpus, capture_output=True, text=True, check=False)
    assert "IllegalAddress" in run.stderr


FORGETFUL = '''
"""Plants one bug after the other: a method of the device no longer sets the current device."""
import cupy, inspect, json, numpy as np, re, textwrap, threading
from baton.engine.kernels.cuda import cupy_device, elementwise
from baton.engine.kernels.cuda.cupy_device import CupyDevice

def use():
    """Call every method on GPU 1, in a thread that begins with device 0."""
    cupy.cuda.touched.clear()
    device = CupyDevice(1)
    ones = device.upload(np.ones((2, 64), np.uint16))
    weights, out = device.upload(np.ones(64, np.uint16)), device.empty((2, 64), np.uint16)
    square = device.zeros((64, 64), np.uint16)
    work = lambda: elementwise.rms_norm(device, ones, weights, 1e-6, out)
    work()
    device.local_bytes()
    device.memory_bytes()
    device.free_bytes()
    device.matmul(ones, square, out)
    device.capture(work).replay()
    device.capture(lambda: device.matmul(ones, square, out)).replay()
    device.compile("elementwise.cu")
    device.export(device.shareable((4,), np.uint16))
    device.host_buffer((4,), np.uint16)
    device.trim_host()
    other = device.another_stream()
    other.wait_for(device.record())
    buffer = np.zeros((2, 64), np.uint16)
    device.write(out, buffer)
    device.read(out, buffer)
    device.download(out)
    device.synchronize()
    if cupy.cuda.touched != {1}:
        raise RuntimeError(f"contexts on {cupy.cuda.touched}")

def outcome():
    problems = []
    def run():
        try:
            use()
        except Exception as problem:
            problems.append(str(problem))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return problems[0] if problems else ""

def forgetful(method):
    """The method without self._device in its with statements, or None if it has none."""
    text = textwrap.dedent(inspect.getsource(method))
    planted = re.sub(r"with self\\._device:", "if True:", text)
    planted = planted.replace(", self._device", "")
    if planted == text:
        return None
    scope = {}
    exec(planted, vars(cupy_device), scope)
    return scope[method.__name__]

results = {"": outcome()}
for name, method in list(vars(CupyDevice).items()):
    planted = forgetful(method) if inspect.isfunction(method) else None
    if planted is not None:
        setattr(CupyDevice, name, planted)
        results[name] = outcome()
        setattr(CupyDevice, name, method)
print(json.dumps(results))
'''
UNSEEN = {"open", "unmap", "tensor_map"}
"""Methods for the memory of another process, which the tests of blocks call; and one whose driver's
call is made without a device here."""


def test_a_planted_lack_of_the_current_device_is_caught_in_each_method(
    two_gpus: dict[str, str],
) -> None:
    """CUDA's current device is a setting of the thread, at first device 0."""
    command = [sys.executable, "-P", "-c", FORGETFUL]
    environment = {**two_gpus, "BATON_FAKE_ONE_GPU": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    caught = json.loads(run.stdout)
    assert not caught.pop(""), "without a planted bug"
    assert {"__init__", "_proven", "export", "capture", "matmul", "local_bytes"} < caught.keys()
    assert {name for name, problem in caught.items() if not problem} == UNSEEN


def test_a_device_that_does_not_exist_is_one_sentence(
    two_gpus: dict[str, str], tmp_path: Path
) -> None:
    config = {
        "worker_id": "decode-0", "endpoint": f"ipc://{tmp_path}/d", "routers": {},
        "runner": {
            "model": str(write_checkpoint(tmp_path / "model", SHAPE, "BF16")),
            "backend": "cuda", "ordinal": 3,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-P", "-m", "baton.decode_worker"]
    command += ["--config", str(tmp_path / "config.json")]
    run = subprocess.run(command, env=two_gpus, capture_output=True, text=True, check=False)
    assert "device 3 does not exist, this machine has 2" in run.stderr
    assert "Traceback" not in run.stderr


def test_serve_starts_a_worker_per_gpu(two_gpus: dict[str, str]) -> None:
    command = [sys.executable, "-P", "-m", "baton.cli"]
    four = {**two_gpus, "BATON_FAKE_GPUS": "5", "CUDA_VISIBLE_DEVICES": "4,0,1,3"}
    serve = [*command, "serve", "--device=cuda", "--dry-run"]
    run = subprocess.run(serve, env=four, capture_output=True, check=True)
    assert ordinals(run.stdout) == {"prefill-0": 0, "decode-0": 1, "decode-1": 2, "decode-2": 3}
    wrong = [*serve, "--device-ids=0,3"]
    refused = subprocess.run(wrong, env=two_gpus, capture_output=True, text=True, check=False)
    said = refused.stderr.splitlines()
    assert said[-1] == "baton: device 3 does not exist, this machine has 2"
    assert all("has no effect" in line for line in said[:-1])  # of the emulation's variables
    doctor = subprocess.run(
        [*command, "doctor"], env=two_gpus, capture_output=True, text=True, check=False
    )
    assert f"cuda:1 {UUIDS[1]}, Host memory" in doctor.stdout


def devices(client: Client) -> dict[str, str]:
    """Of the workers that are ready."""
    workers = client.status()["workers"]
    return {one["id"]: one["device"] for one in workers if one["state"] == "ready"}


@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.parametrize("peers", [True, False], ids=["peers", "no peers"])
def test_a_cluster_uses_both_gpus(
    tmp_path: Path, two_gpus: dict[str, str], monkeypatch: pytest.MonkeyPatch, peers: bool
) -> None:
    for name, value in {**two_gpus, "BATON_FAKE_ONE_GPU": "1"}.items():
        monkeypatch.setenv(name, value)
    if not peers:
        monkeypatch.setenv("BATON_FAKE_NO_PEERS", "1")
    folder = write_checkpoint(tmp_path / "model", SHAPE, "BF16")
    flags = ("--device=cuda", "--kv-blocks=64", "--log-level=info")
    own = {"prefill-0": f"cuda:0 {UUIDS[0]}", "decode-0": f"cuda:1 {UUIDS[1]}"}
    # Paths of sockets are too long below tmp_path.
    with scratch_folder() as place, Served(place, folder, flags=flags) as served:
        assert devices(served.client) == own
        first = generated(served.client, PROMPTS)
        before = pids(served.client)
        os.kill(before["decode-0"], signal.SIGKILL)
        wait_until(lambda: pids(served.client) != before and len(devices(served.client)) == 2)
        assert devices(served.client) == own
        assert generated(served.client, PROMPTS) == first
        handoffs = served.client.status(handoffs=16)["handoffs"]["last"]
        log = served.log.read_text()
    assert {one["transport"] for one in handoffs} == {"cuda_ipc" if peers else "zmq"}
    assert (f"{UUIDS[1]} cannot read the memory of {UUIDS[0]}" in log) is not peers
    monkeypatch.setenv("BATON_FAKE_GPUS", "1")
    with scratch_folder() as place, Served(place, folder, flags=flags) as served:
        assert generated(served.client, PROMPTS) == first
