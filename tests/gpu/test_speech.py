"""Clusters with CUDA workers, executed on the CPU, speak: model and codec on one emulated GPU."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from baton.benchmarks.scratch import scratch_folder
from baton.benchmarks.served import Served
from baton.client import AsyncClient
from baton.client.speech import samples_of
from baton.engine.audio.chunks import AudioDecoder, load_audio
from baton.engine.audio.pcm import pcm16
from baton.engine.kernels.audio import AudioBackend
from baton.engine.kernels.cuda.audio import CudaAudio
from baton.engine.kernels.cuda.device import Device
from baton.proto.contexts.speech import TTSContext
from baton.proto.sampling import SamplingParams

from ..cuda.host_device import HostDevice
from ..processes import wait_until
from .speaker import FIRST, make_speaker

I16 = npt.NDArray[np.int16]
Spoken = tuple[list[int], I16]
PROMPTS = [list(range(FIRST, FIRST + 30)), [3, 9, 4, 200], [7] * 17]
NEW = 7 * 18


def context(index: int) -> TTSContext:
    """A request of fixed length and drawn tokens."""
    params = SamplingParams(temperature=0.7, seed=index, max_new_tokens=NEW, ignore_eos=True)
    return TTSContext(
        max_length=1024,
        tokens=np.array(PROMPTS[index]),
        sampling_params=params,
        ignore_eos=True,
        streaming=True,
    )


def spoken(address: str, strike: Callable[[int], object] = lambda samples: None) -> list[Spoken]:
    """Tokens and samples of all prompts at once; ``strike`` gets the number of samples so far."""
    count = 0

    async def one(client: AsyncClient, index: int) -> Spoken:
        nonlocal count
        tokens: list[int] = []
        chunks: list[I16] = []
        async for output in client.generate(context(index)):
            tokens += output.tokens
            if output.media:
                chunks.append(samples_of(output.media))
                count += len(chunks[-1])
                strike(count)
        return tokens, np.concatenate(chunks)

    async def all_of_them() -> list[Spoken]:
        async with AsyncClient(address, connect_timeout=20.0) as client:
            return list(await asyncio.gather(*(one(client, i) for i in range(len(PROMPTS)))))

    return asyncio.run(all_of_them())


def samples_here(audio: AudioDecoder, tokens: list[int]) -> I16:
    """What the codec makes of tokens in this process."""
    stream = audio.stream()
    chunks = [*stream.feed(tokens), *stream.finish()]
    return np.frombuffer(pcm16(np.concatenate(chunks)), np.int16)


def assert_exact(found: list[Spoken], folder: Path, kernels: AudioBackend) -> None:
    """Every bit of the samples is that of the tokens, whoever decoded which chunk.

    The tokens themselves may differ from run to run, as of texts: a GPU's products depend on the
    number of rows, and a step has the requests that happen to be there.
    """
    ours, on_cpu = load_audio(folder, kernels)[1], load_audio(folder)[1]
    for tokens, samples in found:
        assert len(tokens) == NEW
        assert np.array_equal(samples, samples_here(ours, tokens))
        assert np.abs(samples.astype(int) - samples_here(on_cpu, tokens)).max() <= 1
        assert samples.std() > 100


def pids(served: Served) -> dict[str, int]:
    """Of the workers that are ready."""
    workers = served.client.status()["workers"]
    return {worker["id"]: worker["pid"] for worker in workers if worker["state"] == "ready"}


def wait_replaced(served: Served, before: dict[str, int]) -> None:
    def replaced() -> bool:
        now = pids(served)
        return len(now) == len(before) and now != before

    wait_until(replaced, 60.0)


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_cluster_speaks(
    tmp_path: Path, with_cupy: dict[str, str], monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    """Also on a machine's GPU."""
    for name, value in with_cupy.items():
        monkeypatch.setenv(name, value)
    folder = make_speaker(tmp_path / "speaker")
    flags = ("--device=cuda", "--kv-blocks=96")
    # Paths of sockets are too long below tmp_path.
    with scratch_folder() as place, Served(place, folder, flags=flags) as served:
        assert_exact(spoken(served.address), folder, CudaAudio(device))


@pytest.fixture
def served(
    tmp_path: Path, with_cupy: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    for name, value in with_cupy.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BATON_FAKE_GPU_FAILS", f"snake:{tmp_path / 'fail'}")
    folder = make_speaker(tmp_path / "speaker")
    flags = ("--device=cuda", "--kv-blocks=96", "--worker-timeout=1")
    # Paths of sockets are too long below tmp_path.
    with scratch_folder() as place, Served(place, folder, decode=2, flags=flags) as served:
        yield served


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_deaths_change_no_sample(served: Served, tmp_path: Path, host_device: HostDevice) -> None:
    """A decode worker is killed while it speaks; then the GPU fails below another one's codec."""
    assert served.client.describe().card.numerics.endswith("/BF16/audio1-f32")
    folder, kernels = tmp_path / "speaker", CudaAudio(host_device)
    before, killed = pids(served), []

    def kill(samples: int) -> None:
        if samples > 1000 and not killed:
            killed.append(before["decode-0"])
            os.kill(before["decode-0"], signal.SIGKILL)

    assert_exact(spoken(served.address, kill), folder, kernels)
    assert killed
    wait_replaced(served, before)
    before, order = pids(served), tmp_path / "fail"
    order.touch()
    assert_exact(spoken(served.address), folder, kernels)
    wait_replaced(served, before)
    assert "device lost: CUDARuntimeError: cudaErrorIllegalAddress" in served.log.read_text()
    counts = served.client.status()["router"]["requests"]
    assert counts["replayed"] + counts["moved"] >= 2
