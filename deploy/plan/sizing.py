"""What a model needs on this machine, and what it should reach: parameters, memory, speed.

:func:`measure` runs the model's own products on random weights for about a second, because the
read bandwidth alone is reached only by a kernel that waits for nothing else. The rest is
arithmetic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from baton.engine.kernels.backend import Backend, QuantizedWeights, Weights
from baton.engine.kernels.load import load_backend
from baton.engine.kernels.quantized import KINDS
from baton.engine.loading.checkpoint import Checkpoint
from baton.engine.loading.kv_types import AUTO, kv_type_of
from baton.engine.loading.safetensors import TensorEntry, is_narrow
from baton.runtime.process.cores import plural
from baton.runtime.process.memory import size_text

from .memory import model_memory, process_bytes

ROWS = (1, 8, 512)
"""Rows of the measured products: one stream, eight streams, a chunk of a prompt."""
PROMPT, ANSWER = 512, 128
"""Tokens of the request for which the pools are sized."""
_SAMPLE_BYTES = 96 << 20
"""Most weights that are measured: no cache holds them."""
_SLOW_BYTES = 8 << 20
"""Weights for the NumPy kernels, which take seconds for more."""
_COLUMNS = 2048
_PRODUCTS_SHARE = 0.78
"""Share of a step's time that products take; attention, norms and sampling take the rest. Fitted to
Qwen2.5-1.5B and Gemma 3 270M at contexts of 128 to 512 tokens."""
_LEAST_SHARE = 0.02
"""A type with less of the weights is measured with the others."""
_MOST_S = 0.15


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Measured on this machine: ``read`` bytes per second with ``threads``, tokens per second."""

    threads: int
    read: float
    stream: float
    eight_streams: float
    prompt: float


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """Needs of a model and its pools, in bytes. ``tokens``: KV tokens of each worker that fit."""

    parameters: int
    file_bytes: int
    weights_bytes: int
    kv_type: str
    kv_token_bytes: int
    workers: int
    private_bytes: int
    shared_bytes: int
    shares: bool
    kv_bytes: int
    tokens: int
    speed: Speed | None = None


def sizing(
    checkpoint: Checkpoint,
    workers: int,
    kv_bytes: int,
    *,
    shares: bool,
    speed: Speed | None,
    kv_type: str = AUTO,
) -> Sizing:
    """Return the needs of a text model.

    ``kv_bytes``: of the KV memory of each worker. ``kv_type``: of the keys and values there.
    """
    needs = model_memory(checkpoint, 1, kv_type)
    weights, token = needs.weights, needs.context
    own = process_bytes(checkpoint.config.vocab_size) + kv_bytes
    return Sizing(
        parameters=checkpoint.tensors.elements,
        file_bytes=checkpoint.tensors.nbytes,
        weights_bytes=weights,
        kv_type=kv_type_of(checkpoint, kv_type),
        kv_token_bytes=token,
        workers=workers,
        private_bytes=workers * (weights + own),
        shared_bytes=weights + workers * own,
        shares=shares,
        kv_bytes=kv_bytes,
        tokens=kv_bytes // token,
        speed=speed,
    )


def lines(found: Sizing) -> Iterator[tuple[str, str]]:
    """Yield the subject and the text of each line for a terminal."""
    size = (
        f"{found.parameters:,} parameters, {size_text(found.file_bytes)} in the file, "
        f"{size_text(found.weights_bytes)} in memory, {size_text(found.kv_token_bytes)} of KV "
        f"memory per token ({found.kv_type})"
    )
    yield "size", size
    memory = (
        f"{found.workers} {plural(found.workers, 'worker')}: "
        f"{size_text(found.shared_bytes)} with one copy of the weights, "
        f"{size_text(found.private_bytes)} with private ones "
        f"({'shared' if found.shares else 'private'} here); "
        f"KV memory for {found.tokens} tokens in each"
    )
    yield "memory", memory
    if (speed := found.speed) is not None:
        text = (
            f"about {speed.stream:.1f} tokens/s for one stream, {speed.eight_streams:.1f} for "
            f"eight, {speed.prompt:.0f} of a prompt, per worker with {speed.threads} "
            f"{plural(speed.threads, 'thread')} (measured: {speed.read / 1e9:.1f} GB/s read)"
        )
        yield "speed", text


def suggestion(speed: Speed, cores: int, *, fits: int) -> str:
    """Return options for this machine, and why. ``fits``: workers that its memory holds."""
    if cores < 2 or fits < 2:
        limit = "one core" if cores < 2 else "memory for one worker"
        return f"--mode colocated --workers 1 --threads {cores}: {limit}"
    prompt, answer = PROMPT / speed.prompt, ANSWER / speed.eight_streams
    prefill = min(cores - 1, max(1, round(cores * prompt / (prompt + answer))))
    decode = cores - prefill
    return (
        f"--prefill 1 --decode 1 --prefill-threads {prefill} --decode-threads {decode}: "
        f"a prompt of {PROMPT} tokens takes {1e3 * prompt:.0f} ms of a worker, an answer of "
        f"{ANSWER} tokens in a batch of eight {1e3 * answer:.0f} ms"
    )


# ------------------------------------------------------------------ measurement


def measure(checkpoint: Checkpoint, threads: int, sample_bytes: int = _SAMPLE_BYTES) -> Speed:
    """Return the speed of the CPU's kernels on weights of the model's types and bytes."""
    backend = load_backend("auto", threads=threads)
    if backend.name != "cpu":
        sample_bytes = min(sample_bytes, _SLOW_BYTES)
    body, head = bytes_read(checkpoint, backend)
    total = sum(body.values()) + sum(head.values())
    seconds = dict.fromkeys(ROWS, 0.0)
    for kind in {*body, *head}:
        found = body.get(kind, 0) + head.get(kind, 0)
        if found < _LEAST_SHARE * total:
            continue
        per_byte = _seconds_per_byte(backend, kind, min(found, sample_bytes))
        for rows in ROWS:
            # A chunk of a prompt has no logits but the last ones.
            read = body.get(kind, 0) + (head.get(kind, 0) if rows < max(ROWS) else 0)
            seconds[rows] += read * per_byte[rows]
    one, eight, prompt = (_PRODUCTS_SHARE * rows / seconds[rows] for rows in ROWS)
    return Speed(
        threads=backend.threads,
        read=1 / _seconds_per_byte(backend, "F32", sample_bytes, ROWS[:1])[1],
        stream=one,
        eight_streams=eight,
        prompt=prompt,
    )


def bytes_read(checkpoint: Checkpoint, backend: Backend) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of matrices that a token reads by type: of the layers, and of the head."""
    tensors = checkpoint.tensors
    body, head = dict[str, int](), dict[str, int]()
    table = [name for name in tensors if name.endswith("embed_tokens.weight")]
    heads = [name for name in tensors if name.endswith("lm_head.weight")] or table
    for name in tensors:
        entry = tensors.entry(name)
        if len(entry.shape) != 2 or (name in table and name not in heads):
            continue
        place, (kind, nbytes) = head if name in heads else body, _computed(entry, backend)
        place[kind] = place.get(kind, 0) + nbytes
    return body, head


def _computed(entry: TensorEntry, backend: Backend) -> tuple[str, int]:
    """Return the type in which a matrix is computed, and its bytes in this type."""
    if entry.dtype in backend.quantized_kinds:
        return entry.dtype, entry.end - entry.begin
    narrow = is_narrow(entry.dtype) and not backend.wide_weights
    return ("BF16", 2 * math.prod(entry.shape)) if narrow else ("F32", 4 * math.prod(entry.shape))


def _seconds_per_byte(
    backend: Backend, kind: str, sample_bytes: int, numbers: Sequence[int] = ROWS
) -> dict[int, float]:
    """Measure products of random weights for each number of rows."""
    rng = np.random.default_rng(0)
    weights, nbytes = _sample(rng, kind, sample_bytes)
    packed = backend.pack_linear([weights])
    found = {}
    for rows in numbers:
        if rows == max(ROWS):  # many rows are bound by computation, whatever the caches hold
            weights, nbytes = _sample(rng, kind, sample_bytes // 8)
            packed = backend.pack_linear([weights])
        x = rng.standard_normal((rows, _COLUMNS), dtype=np.float32)
        out = np.empty((rows, packed.out_features), np.float32)
        seconds = _least_seconds(partial(backend.linear, x, packed, out))
        found[rows] = seconds / backend.threads / nbytes
    return found


def _sample(
    rng: np.random.Generator, kind: str, nbytes: int
) -> tuple[Weights | QuantizedWeights, int]:
    """Return weights of a type, and their bytes. The speed does not depend on the values."""
    if kind in KINDS:
        row = _COLUMNS // KINDS[kind].items * KINDS[kind].nbytes
        blocks = rng.integers(0, 256, (max(16, nbytes // row), row), dtype=np.uint8)
        return QuantizedWeights(kind, blocks, _COLUMNS), blocks.nbytes
    dtype = np.uint16 if kind == "BF16" else np.float32
    rows = max(16, nbytes // (_COLUMNS * np.dtype(dtype).itemsize))
    ones: Weights = np.full((rows, _COLUMNS), 0x3F80 if kind == "BF16" else 1, dtype)
    return ones, ones.nbytes


def _least_seconds(action: Callable[[], object]) -> float:
    """Return the least processor time of a few calls, which other programs hardly change.

    On an idle machine all threads compute or spin for the whole call.
    """
    least, spent = math.inf, 0.0
    while spent < _MOST_S or least == math.inf:
        began = time.process_time()
        action()
        seconds = time.process_time() - began
        least, spent = min(least, seconds), spent + seconds
    return least
