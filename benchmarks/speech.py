"""Decoding of audio beside the snac package and real time, on one core.

A random SNAC codec of the size of the 24 kHz model (19.8M parameters). A chunk is decoded from its
own frames and their context, as a decode worker does. The package decodes the frames of the chunk
alone, so its column does less work. CPU seconds, best of several rounds taken in turn.

Then a cluster of one prefill and one decode worker streams speech of a small random Llama with this
codec: time to the first samples, audio per second, and the gaps of a text beside it.

``python -m baton.benchmarks.speech [--peer-python PATH]``; PATH has torch and snac.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from baton.client import AsyncClient
from baton.client.speech import I16
from baton.deploy.config import demo_model_folder
from baton.engine.audio.snac import DILATIONS, TAPS, Rows, SnacDecoder
from baton.engine.audio.snac_weights import SnacConfig
from baton.engine.kernels.load import load_backend
from baton.proto.sampling import SamplingParams
from baton.runtime.process.os_settings import limit_blas_threads

from .checkpoints import Shape, write_checkpoint
from .scratch import scratch_folder
from .served import Served

CONFIG: dict[str, object] = {
    "sampling_rate": 24000,
    "encoder_dim": 48,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 1024,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": 4096,
    "codebook_dim": 8,
    "vq_strides": [4, 2, 1],
    "noise": False,
    "depthwise": True,
}
CHUNKS = (1, 2, 4, 8, 16)
ROUNDS = 7
FIRST_TOKEN = 1000
SPEAKER = Shape("speaker", FIRST_TOKEN + 7 * 4096, 128, 384, 4, 4, 2)
TOKENS = 700
"""Per stream: 100 frames, 8.5 s."""
STREAMS = (1, 2, 4)
CLUSTER_ROUNDS = 5


def tensors(config: SnacConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the decoder, with folded weights."""
    wide, channels = config.latent_width, config.decoder_dim
    shapes: dict[str, tuple[int, ...]] = {}

    def add(module: str, *shape: int, bias: int = 0) -> None:
        shapes[f"{module}.weight"] = shape
        shapes[f"{module}.bias"] = (bias or shape[0],)

    for index in range(len(config.vq_strides)):
        base = f"quantizer.quantizers.{index}"
        shapes[f"{base}.codebook.weight"] = (config.codebook_size, config.codebook_dim)
        add(f"{base}.out_proj", wide, config.codebook_dim, 1)
    add("decoder.model.0", wide, 1, TAPS)
    add("decoder.model.1", channels, wide, 1)
    for index, rate in enumerate(config.decoder_rates):
        base, out = f"decoder.model.{index + 2}.block", channels // 2
        shapes[f"{base}.0.alpha"] = (1, channels, 1)
        add(f"{base}.1", channels, out, 2 * rate, bias=out)
        for unit in range(len(DILATIONS)):
            inner = f"{base}.{unit + 2}.block"
            shapes[f"{inner}.0.alpha"] = shapes[f"{inner}.2.alpha"] = (1, out, 1)
            add(f"{inner}.1", out, 1, TAPS)
            add(f"{inner}.3", out, out, 1)
        channels = out
    last = len(config.decoder_rates) + 2
    shapes[f"decoder.model.{last}.alpha"] = (1, channels, 1)
    add(f"decoder.model.{last + 1}", 1, channels, TAPS)
    return shapes


def write_codec(folder: Path, config: dict[str, object], seed: int = 0) -> Path:
    """Write a codec with random weights."""
    import msgspec

    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    parts: list[bytes] = []
    at = 0
    for name, shape in tensors(msgspec.convert(config, SnacConfig)).items():
        scale = 1.0 if name.endswith("alpha") else float(np.prod(shape[1:])) ** -0.5
        values = np.abs(rng.standard_normal(shape, np.float32)) + np.float32(0.5)
        if not name.endswith("alpha"):
            values = rng.standard_normal(shape, np.float32) * np.float32(scale)
        parts.append(values.tobytes())
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(parts)
    return folder


def chunk_seconds(decoder: SnacDecoder, frames: int) -> float:
    """CPU seconds to decode a chunk with context on both sides."""
    config, reach = decoder.config, decoder.context_frames
    rng = np.random.default_rng(frames)
    entries = [
        rng.integers(0, config.codebook_size, (frames + 2 * reach) * count).astype(np.int32)
        for count in config.frame_entries
    ]
    wanted = Rows(reach * config.frame_samples, (reach + frames) * config.frame_samples)
    began = time.process_time()
    decoder.decode(entries, wanted)
    return time.process_time() - began


class Peer:
    """The snac package in another process."""

    def __init__(self, python: str, folder: Path) -> None:
        script = Path(__file__).with_name("speech_peer.py")
        command = [python, "-W", "ignore", str(script), str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.parameters = int(self._line())

    def seconds(self, frames: int) -> float:
        """CPU seconds to decode frames without context."""
        if self._process.stdin is None:
            raise RuntimeError("the peer has no input")
        self._process.stdin.write(f"{frames}\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def _line(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"the peer ended with code {self._process.wait()}")
        return line


def measure(decoders: dict[str, SnacDecoder], peer: Peer | None) -> None:
    """Print one row per chunk size."""
    config = next(iter(decoders.values())).config
    names = [*decoders, *(["snac"] if peer else [])]
    print(f"{'frames':>8}{'audio ms':>10}" + "".join(f"{name + ' ms':>14}" for name in names))
    for frames in CHUNKS:
        best = dict.fromkeys(names, float("inf"))
        for _ in range(ROUNDS):
            for name, decoder in decoders.items():
                best[name] = min(best[name], chunk_seconds(decoder, frames))
            if peer:
                best["snac"] = min(best["snac"], peer.seconds(frames))
        audio = frames * config.frame_samples / config.sampling_rate
        row = "".join(f"{best[name] * 1e3:>14.1f}" for name in names)
        line = f"{frames:>8}{audio * 1e3:>10.1f}{row}   real time x {audio / best[names[0]]:.1f}"
        print(line + (f", snac / ours {best['snac'] / best[names[0]]:.2f}" if peer else ""))


def write_speaker(folder: Path) -> Path:
    """Write a random speech model with a codec of real size."""
    write_checkpoint(folder, SPEAKER, "F32")
    shutil.copy(demo_model_folder() / "tokenizer.json", folder)
    write_codec(folder / "snac", CONFIG)
    (folder / "speech.json").write_text(json.dumps({"first_token": FIRST_TOKEN}))
    return folder


async def _stream(chunks: AsyncIterator[I16]) -> tuple[float, float, int]:
    """Return the seconds until the first and the last chunk, and the number of samples."""
    began = time.perf_counter()
    first, count = 0.0, 0
    async for chunk in chunks:
        first = first or time.perf_counter() - began
        count += len(chunk)
    return first, time.perf_counter() - began, count


async def _text_gaps(client: AsyncClient, tokens: int) -> list[float]:
    """Return the seconds between the outputs of a text."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, temperature=0)
    times = [time.perf_counter() async for _ in client.generate([5, 6, 7], params)]
    gaps: list[float] = np.diff(times).tolist()
    return gaps


async def _round(client: AsyncClient, streams: int, seed: int) -> tuple[list[float], float, float]:
    """Return times to first samples, seconds of audio per second, and p99 of a text's gaps."""

    def params(index: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, seed=100 * seed + index)

    began = time.perf_counter()
    gaps = asyncio.create_task(_text_gaps(client, TOKENS))
    done = await asyncio.gather(
        *(_stream(client.speak(f"Number {n}.", params(n))) for n in range(streams))
    )
    seconds = max((last for _, last, _ in done), default=time.perf_counter() - began)
    audio = sum(count for *_, count in done) / 24000
    return [first for first, *_ in done], audio / seconds, float(np.quantile(await gaps, 0.99))


def measure_cluster(folder: Path, scratch: Path) -> None:
    """Print one row per number of streams at once."""

    async def body(address: str) -> None:
        async with AsyncClient(address) as client:
            await _round(client, 1, 99)
            print(" streams  first ms  worst ms  audio s/s  text p99 ms")
            for streams in (0, *STREAMS):
                rounds = [await _round(client, streams, at) for at in range(CLUSTER_ROUNDS)]
                firsts = [first for found, *_ in rounds for first in found] or [float("nan")]
                speed = float(np.median([speed for _, speed, _ in rounds]))
                p99 = float(np.median([gap for *_, gap in rounds]))
                print(
                    f"{streams:>8}{np.median(firsts) * 1e3:>10.0f}{max(firsts) * 1e3:>10.0f}"
                    f"{speed:>11.1f}{p99 * 1e3:>13.1f}"
                )

    with Served(scratch, folder) as served:
        asyncio.run(body(served.address))


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", help="a Python with torch and snac")
    options = parser.parse_args()
    limit_blas_threads()
    with scratch_folder() as scratch:
        folder = write_codec(scratch / "snac", CONFIG)
        decoders = {name: SnacDecoder(folder, load_backend(name)) for name in ("auto", "numpy")}
        peer = Peer(options.peer_python, folder) if options.peer_python else None
        try:
            measure(decoders, peer)
        finally:
            if peer:
                peer.close()
        measure_cluster(write_speaker(scratch / "speaker"), scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
