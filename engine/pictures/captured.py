"""Calls of a picture model's transformer on a GPU, captured as graphs.

A graph is captured per shape: latent rows and columns, samples, and text rows. The first call of a
shape runs kernel by kernel and allocates the transformer's arrays. The second one is captured,
later ones are replays. Latents, prompts, and the sinusoids of noise level and guidance are copied
into fixed memory before each replay, and the noise out of it, so that callers own their arrays.

Memory: graphs of smaller shapes share the arrays of the largest one. A larger shape drops all of
them first, and so does :meth:`CapturedSteps.release`, after which the VAE may use the memory.
What a graph has besides is small against the two bytes per float by which bfloat16 stays below
:func:`.memory.row_bytes`.

Layers are reported after the replay is queued. So an exception of ``after_layer`` ends the call,
but its kernels still run to the end of the step, in the graph's memory alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton.runtime.process.log import get_logger

from ..kernels.backend import F32
from ..kernels.cuda.device import CaptureFailed
from ..kernels.cuda.kept import CapturedWork
from ..kernels.cuda.pictures import CudaPictures
from ..kernels.host_backend import PictureBackend
from .configs import no_watch
from .family import StepInputs, Transformer

MAX_KEPT = 4
"""Graphs that are kept at a time."""

_log = get_logger()
_Key = tuple[object, ...]


def captured(model: Transformer, backend: PictureBackend) -> Transformer | CapturedSteps:
    """Return what runs the transformer: itself on the CPU, else its captured calls."""
    return CapturedSteps(model, backend) if isinstance(backend, CudaPictures) else model


class CapturedSteps:
    """The captured calls of one transformer; used as the transformer itself. Not thread-safe."""

    def __init__(self, model: Transformer, backend: CudaPictures) -> None:
        self._model, self._backend = model, backend
        self._calls: dict[_Key, _Call | None] = {}  # the newest last; None: called once
        self._after_layer: Callable[[], None] = no_watch
        self._rows = 0  # of the largest shape since the last release
        self._refused = False
        self.replays = 0

    @property
    def nbytes(self) -> int:
        """Bytes that graphs have besides the transformer's own arrays."""
        return sum(call.nbytes for call in self._calls.values() if call is not None)

    def watch(self, after_layer: Callable[[], None]) -> None:
        """Call ``after_layer`` for every layer; its exceptions end a call."""
        self._after_layer = after_layer
        self._model.watch(after_layer)

    def execute(self, inputs: StepInputs) -> list[F32]:
        """Return the noise float32 ``[rows * columns, token_width]`` that each sample contains."""
        if self._refused:
            return self._model.execute(inputs)
        rows = sum(len(array) for array in (*inputs.latents, *inputs.prompts))
        if rows > self._rows:
            self.release()
            self._rows = rows
        key = _key(inputs)
        seen, call = key in self._calls, self._calls.pop(key, None)
        if call is not None:
            self._calls[key] = call
            self.replays += 1
            return call.run(inputs, self._after_layer)
        while len(self._calls) >= MAX_KEPT:
            del self._calls[next(iter(self._calls))]
        if not seen:
            noise = self._model.execute(inputs)
            self._calls[key] = None
            return noise
        call = _Call(self._model, self._backend, inputs)
        try:
            call.capture(self._after_layer)
        except CaptureFailed as error:
            self._refused = True
            self._calls.clear()
            _log.warning("graph.not_captured", rows=rows, error=str(error))
        else:
            self._calls[key] = call
        return call.noise()

    def release(self) -> None:
        """Free the graphs and the transformer's arrays."""
        self._calls.clear()
        self._rows = 0
        self._model.release()


class _Call:
    """A call of one shape. ``inputs`` are the first ones, with which it is captured."""

    def __init__(self, model: Transformer, backend: CudaPictures, inputs: StepInputs) -> None:
        self._model, self._backend = model, backend
        self._fixed = replace(
            inputs,
            latents=[backend.empty(*x.shape) for x in inputs.latents],
            prompts=[backend.empty(*x.shape) for x in inputs.prompts],
            pooled=[backend.empty(*x.shape) for x in inputs.pooled],
        )
        self._work = CapturedWork(backend.device)
        self._found: list[F32] = []
        self._layers = 0
        self._copy_in(inputs)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that belong to this call alone."""
        return self._work.nbytes + sum(int(array.nbytes) for array in _arrays(self._fixed))

    def capture(self, after_layer: Callable[[], None]) -> None:
        """Compute the call and capture it. If CaptureFailed is raised, it is computed as well.

        ``after_layer``: what watches the model.
        """
        model, runs = self._model, 0

        def work() -> None:
            nonlocal runs
            runs += 1
            if runs == 1:
                self._found = model.execute(self._fixed)
                return
            model.watch(self._count_layer)
            try:
                model.execute(self._fixed)  # into the same arrays
            finally:
                model.watch(after_layer)

        self._backend.capture(work, self._work)

    def run(self, inputs: StepInputs, after_layer: Callable[[], None]) -> list[F32]:
        """Replay the call with other inputs, report its layers and return the noise."""
        self._copy_in(inputs)
        self._backend.replay(self._work, self._model.conditions(inputs))
        for _ in range(self._layers):
            after_layer()
        return self.noise()

    def noise(self) -> list[F32]:
        """Return copies of the noise, because the next replay writes other noise there."""
        backend = self._backend
        return [
            backend.mix(found, None, backend.device.zeros(found.shape, found.dtype), 1.0)
            for found in self._found
        ]

    def _copy_in(self, inputs: StepInputs) -> None:
        for source, place in zip(_arrays(inputs), _arrays(self._fixed), strict=True):
            self._backend.put_columns(source, 0, place)

    def _count_layer(self) -> None:
        self._layers += 1


def _arrays(inputs: StepInputs) -> list[Any]:
    """Return the inputs that are on the device."""
    return [*inputs.latents, *inputs.prompts, *inputs.pooled]


def _key(inputs: StepInputs) -> _Key:
    return (inputs.rows, inputs.columns, *(array.shape for array in _arrays(inputs)))
