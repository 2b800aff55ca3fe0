"""Classifier-free guidance: two noises become one, in the forms of the pipelines of diffusers."""

from __future__ import annotations

import math

import numpy as np

from baton.proto.contexts.pixels import PixelContext
from baton.proto.picture_requests import cfg_normalization, cfg_truncation, uses_negative

from ..kernels.backend import F32
from ..kernels.host_backend import PictureBackend

_TRAIN_STEPS = np.float32(1000)
BOTH, ALONE = ("", "negative_"), ("",)


class TrueCfg:
    """Flux: ``negative + true_cfg_scale * (noise - negative)``."""

    def prefixes(self, request: PixelContext, level: float) -> tuple[str, ...]:
        """Return both prompts if true CFG is on, at all levels."""
        return BOTH if uses_negative(request) else ALONE

    def combine(
        self, request: PixelContext, noise: F32, negative: F32, backend: PictureBackend
    ) -> F32:
        """Return the noise away from that of the negative prompt."""
        return backend.mix(noise, negative, negative, request.true_cfg_scale)


class ClassicCfg:
    """Z-Image: ``noise + guidance_scale * (noise - negative)``, perhaps limited in norm.

    ``cfg_truncation``: after this share of the time from 0 (noise) to 1 the prompt acts alone.
    ``cfg_normalization``: the norm of the result is at most so many norms of the prompt's noise.
    """

    def prefixes(self, request: PixelContext, level: float) -> tuple[str, ...]:
        """Return both prompts until the truncation."""
        # As diffusers rounds it: a step at the very truncation has still both prompts.
        done = (_TRAIN_STEPS - np.float32(level) * _TRAIN_STEPS) / _TRAIN_STEPS
        late = float(done) > cfg_truncation(request)
        return BOTH if uses_negative(request) and not late else ALONE

    def combine(
        self, request: PixelContext, noise: F32, negative: F32, backend: PictureBackend
    ) -> F32:
        """Return the noise away from that of the negative prompt."""
        most = cfg_normalization(request)
        limit = most * _norm(noise, backend) if most else math.inf  # before mix writes to it
        mixed = backend.mix(noise, negative, noise, request.guidance_scale)
        if not most:
            return mixed
        norm = _norm(mixed, backend)
        return backend.mix(mixed, None, mixed, limit / norm - 1) if norm > limit else mixed


def _norm(x: F32, backend: PictureBackend) -> float:
    """Return the Euclidean norm of all numbers, summed in float64."""
    return math.sqrt(np.square(backend.download(x), dtype=np.float64).sum())
