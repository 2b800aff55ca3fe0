"""A SNAC codec: a decoder from codebook entries to samples, and an encoder back.

Invariant: a sample depends on the entries of its frame and of ``context_frames`` frames on each
side. With compiled kernels its bits are the same in every window that has these frames.

The codec was trained with random noise inside its decoder; here this noise is zero. The decoder
runs on the kernels of any device, the encoder in NumPy. Rows are instants and columns channels, so
every dense convolution is one product of overlapping rows with a packed matrix. Rows that the
wanted samples do not need are left out block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.proto.errors import CheckpointError, ConfigError, InputError

from ..kernels.audio import AudioBackend
from ..kernels.backend import PackedLinear
from ..models.workspace import Workspace
from .snac_weights import SnacConfig, SnacWeights, load_snac_config

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

DILATIONS = (1, 3, 9)
TAPS = 7


LONGEST_EXAMPLE_S = 20
"""Maximum seconds to encode; the largest states then have a few hundred MiB."""


class Rows(NamedTuple):
    """A range of rows, or of samples: from ``first`` to before ``end``."""

    first: int
    end: int

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.end - self.first

    def wider(self, margin: int, rows: int) -> Rows:
        """Return the range with a margin on both sides, cut to ``0..rows``."""
        return Rows(max(0, self.first - margin), min(rows, self.end + margin))

    def within(self, other: Rows) -> slice:
        """Return the indices of this range in an array that holds ``other``."""
        return slice(self.first - other.first, self.end - other.first)


class Span(NamedTuple):
    """The rows of its input that a block takes, and the rows of its output that it makes."""

    taken: Rows
    made: Rows


def _cut(rate: int) -> int:
    """Rows that a transposed convolution drops at the start of its output."""
    return (rate + 1) // 2


@dataclass(slots=True, frozen=True)
class Unit:
    """A residual unit: snake, depthwise convolution, snake, dense convolution of one tap."""

    before: F32
    weight: F32
    bias: F32
    dilation: int
    between: F32
    dense: PackedLinear


@dataclass(slots=True, frozen=True)
class Block:
    """A decoder block: snake, transposed convolution with ``rate``, residual units."""

    before: F32
    rate: int
    raised: PackedLinear
    units: tuple[Unit, ...]


class SnacDecoder:
    """A loaded decoder. Not thread-safe: the workspace is shared by all calls.

    ``context_frames``: frames on each side of a frame that may change its samples.
    """

    def __init__(self, folder: Path, backend: AudioBackend) -> None:
        self.config = config = load_snac_config(folder)
        self.backend = backend
        _check_widths(folder, config, backend)
        # On a GPU a worker allocates once, for its longest window.
        self._space = Workspace(backend, exact=not backend.on_host)
        weights = SnacWeights(folder)
        self._codebooks = [
            _codebook(weights, backend, config, index) for index in range(len(config.vq_strides))
        ]
        wide, channels = config.latent_width, config.decoder_dim
        base = "decoder.model"
        self._first = _mixing(weights, backend, f"{base}.0", wide)
        self._widened = _dense(weights, backend, f"{base}.1", channels, wide, 1)
        self._blocks = []
        for index, rate in enumerate(config.decoder_rates):
            half = config.decoder_dim >> (index + 1)
            module = f"{base}.{index + 2}.block"
            self._blocks.append(
                _block(weights, backend, module, (channels, half, rate), noise=config.noise)
            )
            channels = half
        last = len(config.decoder_rates) + 2
        self._last_snake = backend.upload(_scales(weights, f"{base}.{last}", channels))
        self._last = _dense(weights, backend, f"{base}.{last + 1}", 1, channels, TAPS)
        weights.finish()
        self.context_frames = self._reach()

    def _reach(self) -> int:
        """Return the number of frames on each side of a frame that may change its samples."""
        config = self.config
        frames = 1
        while True:
            steps = (2 * frames + 1) * config.frame_latents
            wanted = Rows(frames * config.frame_samples, (frames + 1) * config.frame_samples)
            first, end = self._spans(steps, wanted)[0].taken
            if first >= TAPS // 2 and end <= steps - TAPS // 2:
                return frames
            frames += 1

    def decode(self, entries: Sequence[I32], wanted: Rows | None = None) -> F32:
        """Return samples, float32 in -1..1.

        ``entries``: one array per codebook, coarsest first, ``[frames * frame_entries]``.
        ``wanted``: range of the samples to return; None: all. Raises ValueError for arrays that do
        not fit, entries outside the codebook and a range outside the samples.
        """
        *_, samples = self.stages(entries, wanted)
        return samples

    def stages(self, entries: Sequence[I32], wanted: Rows | None = None) -> Iterator[F32]:
        """Decode in stages of similar cost; the last item is what :meth:`decode` returns.

        A caller may do other work between the stages, but may not start another decoding.
        """
        states = self._latents(entries)
        total = len(states) * self.config.samples_per_latent
        wanted = Rows(0, total) if wanted is None else wanted
        if not 0 <= wanted.first <= wanted.end <= total:
            raise ValueError(f"samples {wanted.first}..{wanted.end} are outside 0..{total}")
        if wanted.first == wanted.end:
            yield np.zeros(0, np.float32)
            return
        spans = self._spans(len(states), wanted)
        states, held = self._head(states), Rows(0, len(states))
        delta: F32 | None = None
        for index, (block, span) in enumerate(zip(self._blocks, spans, strict=True)):
            kept = span.taken.within(held)
            states = self._raise(
                index, block, span, states[kept], delta if delta is None else delta[kept]
            )
            held, delta = span.made, None
            yield states
            for unit in block.units:
                delta = self._unit(index, unit, states, delta)
                yield states
        yield self._tail(states, delta, held, wanted)

    def _spans(self, steps: int, wanted: Rows) -> list[Span]:
        """Return the rows that each block takes and makes, so that the samples are right.

        Rows outside have no influence on the samples, or do not exist.
        """
        rows = steps * self.config.samples_per_latent
        needed = wanted.wider(TAPS // 2, rows)
        spans: list[Span] = []
        for rate in reversed(self.config.decoder_rates):
            made = needed.wider(sum(DILATIONS) * (TAPS // 2), rows)
            rows //= rate
            first, last = made.first + _cut(rate), made.end - 1 + _cut(rate)
            needed = Rows(max(0, first // rate - 1), min(rows, last // rate + 1))
            spans.append(Span(needed, made))
        return spans[::-1]

    def _latents(self, entries: Sequence[I32]) -> F32:
        """Return the sum of the codebooks' vectors ``[steps, latent width]``."""
        config = self.config
        if len(entries) != len(config.vq_strides):
            raise ValueError(f"{len(entries)} arrays of entries, not {len(config.vq_strides)}")
        steps = len(entries[-1])
        if any(len(e) * s != steps for e, s in zip(entries, config.vq_strides, strict=True)):
            raise ValueError(f"the codebooks' entries do not cover {steps} steps each")
        total = self._space.rows("latents", steps, config.latent_width)
        for index, (ids, stride, (table, out)) in enumerate(
            zip(entries, config.vq_strides, self._codebooks, strict=True)
        ):
            ids = np.ascontiguousarray(ids, np.int32)
            self.backend.look_up(ids, table, out, stride, total, add=index > 0)
        return total

    def _head(self, latents: F32) -> F32:
        steps, wide = latents.shape
        mixed = self._space.rows("mixed", steps, wide)
        self.backend.depthwise(latents, *self._first, 1, None, mixed)
        states = self._space.rows("head", steps, self.config.decoder_dim)
        self.backend.linear(mixed, self._widened, states)
        return states

    def _raise(self, index: int, block: Block, span: Span, states: F32, delta: F32 | None) -> F32:
        """Apply snake and the transposed convolution: ``rate`` rows for one.

        Its kernel is twice as long as the rate, so ``rate`` rows of output depend on two
        adjacent rows of input and follow from one product.
        """
        rows, channels = states.shape
        padded = self._space.rows(f"padded {index}", rows + 2, channels)
        self._activate(states, delta, block.before, padded, 1)
        raised = self._space.rows(f"raised {index}", rows + 1, block.rate * (channels // 2))
        self.backend.convolve(padded, block.raised, raised)
        start = span.made.first - span.taken.first * block.rate + _cut(block.rate)
        return raised.reshape(-1, channels // 2)[start : start + span.made.size]

    def _unit(self, index: int, unit: Unit, states: F32, delta: F32 | None) -> F32:
        """Add ``delta`` to ``states`` and return the next delta."""
        rows, channels = states.shape
        active = self._space.rows(f"active {index}", rows, channels)
        mixed = self._space.rows(f"mixed {index}", rows, channels)
        self._activate(states, delta, unit.before, active, 0)
        self.backend.depthwise(active, unit.weight, unit.bias, unit.dilation, unit.between, mixed)
        self.backend.linear(mixed, unit.dense, active)
        return active

    def _tail(self, states: F32, delta: F32 | None, held: Rows, wanted: Rows) -> F32:
        count, channels = wanted.size, states.shape[1]
        margin = TAPS // 2
        kept = Rows(max(held.first, wanted.first - margin), min(held.end, wanted.end + margin))
        inside = kept.within(Rows(wanted.first - margin, wanted.end + margin))
        padded = self._space.rows("padded tail", count + 2 * margin, channels)
        rows = kept.within(held)
        self._activate(
            states[rows],
            delta if delta is None else delta[rows],
            self._last_snake,
            padded,
            inside.start,
        )
        sums = self._space.rows("sums", count, 1)
        samples = self._space.rows("samples", count, 1).reshape(-1)
        self.backend.convolve(padded, self._last, sums)
        self.backend.soft_clip(sums.reshape(-1), samples)
        found = self.backend.download(samples)
        return found.copy() if self.backend.on_host else found

    def _activate(self, states: F32, delta: F32 | None, scales: F32, out: F32, first: int) -> None:
        """Apply snake into the rows of ``out`` from ``first`` on, with zeros around them."""
        if delta is None:
            self.backend.snake(states, scales, out, first)
        else:
            self.backend.add_snake(delta, states, scales, out, first)


class SnacEncoder:
    """A loaded encoder, in NumPy: an example is encoded once, so compiled kernels save little."""

    def __init__(self, folder: Path) -> None:
        self.config = config = load_snac_config(folder)
        weights = SnacWeights(folder)
        base, channels = "encoder.block", config.encoder_dim
        if np.prod(config.encoder_rates) != config.samples_per_latent:
            raise CheckpointError(f"{folder}: encoder_rates and decoder_rates differ in length")
        self._first = _matrix(weights, f"{base}.0", channels, 1, TAPS)
        self._blocks = []
        for index, rate in enumerate(config.encoder_rates):
            block = f"{base}.{index + 1}.block"
            units = [
                (
                    _scales(weights, f"{block}.{unit}.block.0", channels),
                    (*_depthwise(weights, f"{block}.{unit}.block.1", channels), dilation),
                    _scales(weights, f"{block}.{unit}.block.2", channels),
                    _matrix(weights, f"{block}.{unit}.block.3", channels, channels, 1),
                )
                for unit, dilation in enumerate(DILATIONS)
            ]
            before = _scales(weights, f"{block}.3", channels)
            lowered = _matrix(weights, f"{block}.4", 2 * channels, channels, 2 * rate)
            self._blocks.append((units, before, rate, lowered))
            channels *= 2
        self._last = _depthwise(weights, f"{base}.{len(config.encoder_rates) + 1}", channels)
        self._quantizers = []
        for index in range(len(config.vq_strides)):
            name, dim = f"quantizer.quantizers.{index}", config.codebook_dim
            table = weights.take(f"{name}.codebook.weight", (config.codebook_size, dim))
            inward = _matrix(weights, f"{name}.in_proj", dim, channels, 1)
            self._quantizers.append(
                (inward, table, _matrix(weights, f"{name}.out_proj", channels, dim, 1))
            )

    def encode(self, samples: F32) -> list[I32]:
        """Return the entries of each codebook, coarsest first, of float32 samples in -1..1.

        Zeros fill the last frame. Raises InputError for too many samples.
        """
        config = self.config
        if len(samples) > LONGEST_EXAMPLE_S * config.sampling_rate:
            seconds = len(samples) / config.sampling_rate
            raise InputError(f"the audio has {seconds:.1f} s, limit {LONGEST_EXAMPLE_S} s")
        padded = np.zeros(-(-len(samples) // config.frame_samples) * config.frame_samples, "f4")
        padded[: len(samples)] = samples
        states = _convolve(padded[:, None], self._first, 1, TAPS // 2)
        for units, before, rate, lowered in self._blocks:
            for first, depthwise, second, dense in units:
                mixed = _mix(_snake(states, first), *depthwise)
                states = states + _convolve(_snake(mixed, second), dense, 1, 0)
            states = _convolve(_snake(states, before), lowered, rate, (rate + 1) // 2)
        return self._quantize(_mix(states, *self._last, 1))

    def _quantize(self, rest: F32) -> list[I32]:
        """Return the entries whose directions are nearest to what the coarser books left over."""
        found = []
        for (inward, table, outward), stride in zip(
            self._quantizers, self.config.vq_strides, strict=True
        ):
            means = rest.reshape(-1, stride, rest.shape[1]).mean(axis=1)
            vectors = _convolve(means, inward, 1, 0)
            lengths = np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
            entries = np.argmax(vectors @ (table / lengths).T, axis=1).astype(np.int32)
            rest = rest - np.repeat(_convolve(table[entries], outward, 1, 0), stride, axis=0)
            found.append(entries)
        return found


def _convolve(states: F32, weights: tuple[F32, F32], stride: int, margin: int) -> F32:
    """Return a convolution of all channels, ``[rows / stride, out]``."""
    matrix, bias = weights
    taps = matrix.shape[1] // states.shape[1]
    padded = np.pad(states, ((margin, margin), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps, axis=0)[::stride]
    return np.asarray(windows.reshape(len(windows), -1) @ matrix.T + bias, np.float32)


def _mix(states: F32, weight: F32, bias: F32, dilation: int) -> F32:
    """Return a convolution of single channels."""
    margin = dilation * (TAPS // 2)
    padded = np.pad(states, ((margin, margin), (0, 0)))
    total = np.broadcast_to(bias, states.shape).copy()
    for tap in range(TAPS):
        total += padded[tap * dilation : tap * dilation + len(states)] * weight[tap]
    return total


def _snake(states: F32, scales: F32) -> F32:
    return np.asarray(states + scales[1] * np.sin(scales[0] * states) ** 2, np.float32)


def _matrix(
    weights: SnacWeights, module: str, out: int, channels: int, taps: int
) -> tuple[F32, F32]:
    """Return a convolution of all channels as a matrix ``[out, channels * taps]``, and its bias."""
    matrix = weights.folded(module, (out, channels, taps)).reshape(out, -1)
    return matrix, weights.take(f"{module}.bias", (out,))


def _codebook(
    weights: SnacWeights, backend: AudioBackend, config: SnacConfig, index: int
) -> tuple[F32, PackedLinear]:
    """Return a codebook's table and the projection of its vectors."""
    base, dim, wide = f"quantizer.quantizers.{index}", config.codebook_dim, config.latent_width
    weights.leave(f"{base}.in_proj.")  # of the encoder
    table = weights.take(f"{base}.codebook.weight", (config.codebook_size, dim))
    out = _dense(weights, backend, f"{base}.out_proj", wide, dim, 1)
    return backend.upload(table), out


def _check_widths(folder: Path, config: SnacConfig, backend: AudioBackend) -> None:
    """Raise ConfigError for a codec whose channels the kernels cannot address."""
    blocks = [config.decoder_dim >> index for index in range(len(config.decoder_rates) + 1)]
    for width in (config.latent_width, config.codebook_dim, *blocks):
        if width % backend.column_multiple:
            raise ConfigError(
                f"{folder}: on {backend.name} the codec's channels must be multiples of "
                f"{backend.column_multiple}, not {width}"
            )


def _dense(
    weights: SnacWeights, backend: AudioBackend, module: str, out: int, channels: int, taps: int
) -> PackedLinear:
    """Pack a convolution of all channels, ``[out, channels, taps]``."""
    matrix = weights.folded(module, (out, channels, taps)).transpose(0, 2, 1)
    bias = weights.take(f"{module}.bias", (out,))
    return backend.pack_linear([np.ascontiguousarray(matrix.reshape(out, -1))], bias)


def _depthwise(weights: SnacWeights, module: str, channels: int) -> tuple[F32, F32]:
    """Return weights ``[taps, channels]`` and bias of a convolution of single channels."""
    matrix = weights.folded(module, (channels, 1, TAPS))[:, 0].T
    return np.ascontiguousarray(matrix), weights.take(f"{module}.bias", (channels,))


def _mixing(
    weights: SnacWeights, backend: AudioBackend, module: str, channels: int
) -> tuple[F32, F32]:
    """Upload the weights and the bias of a convolution of single channels."""
    weight, bias = _depthwise(weights, module, channels)
    return backend.upload(weight), backend.upload(bias)


def _scales(weights: SnacWeights, module: str, channels: int) -> F32:
    """Return the two factors of a snake activation, ``[2, channels]``."""
    alpha = weights.take(f"{module}.alpha", (1, channels, 1))[0, :, 0]
    return np.stack([alpha, np.float32(1) / (alpha + np.float32(1e-9))])


def _block(
    weights: SnacWeights,
    backend: AudioBackend,
    module: str,
    sizes: tuple[int, int, int],
    *,
    noise: bool,
) -> Block:
    channels, out, rate = sizes
    before = backend.upload(_scales(weights, f"{module}.0", channels))
    kernel = weights.folded(f"{module}.1", (channels, out, 2 * rate))
    # Output row r of a group sees the row before through tap r + rate, its own through tap r.
    pair = np.concatenate([kernel[:, :, rate:], kernel[:, :, :rate]])
    matrix = pair.transpose(2, 1, 0).reshape(rate * out, 2 * channels)
    bias = np.tile(weights.take(f"{module}.1.bias", (out,)), rate)
    raised = backend.pack_linear([np.ascontiguousarray(matrix)], bias)
    if noise:
        weights.leave(f"{module}.2.")
    first = 3 if noise else 2
    units = tuple(
        _unit(weights, backend, f"{module}.{first + index}.block", out, dilation)
        for index, dilation in enumerate(DILATIONS)
    )
    return Block(before, rate, raised, units)


def _unit(
    weights: SnacWeights, backend: AudioBackend, module: str, channels: int, dilation: int
) -> Unit:
    weight, bias = _mixing(weights, backend, f"{module}.1", channels)
    return Unit(
        before=backend.upload(_scales(weights, f"{module}.0", channels)),
        weight=weight,
        bias=bias,
        dilation=dilation,
        between=backend.upload(_scales(weights, f"{module}.2", channels)),
        dense=_dense(weights, backend, f"{module}.3", channels, channels, 1),
    )
