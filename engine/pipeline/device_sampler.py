"""Samples tokens on the GPU, where the logits are, for rows of any request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.errors import BatonError, InputError, InternalError
from baton.proto.limits import MAX_LOG_PROBABILITIES

from ..kernels.cuda import sampling
from ..kernels.cuda.device import Device, DeviceArray
from ..sampling.sampler import sample
from ..scheduling.plan import Chunk, Sampled, SampleSpec
from .steps import describe

_WHY = {
    sampling.NO_TOKEN_LEFT: "no token is left to draw, or a logit is not a number",
    sampling.NOT_FINITE: "the model produced non-finite logits",
    sampling.BAD_ROW: "the history holds ids outside the vocabulary",
}


@dataclass(slots=True)
class SampleRows:
    """Sampling parameters of a batch's rows, on the host; and the rows only the host can sample."""

    rows: npt.NDArray[np.void]
    masks: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    seen: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    counts: list[npt.NDArray[np.int32]] = field(default_factory=list)
    on_host: list[int] = field(default_factory=list)
    reported: bool = False


class DeviceSampler:
    """Samples a token per row of logits on ``device``; see :mod:`..kernels.cuda.sampling`.

    The host samples rows with logits processors, which are Python code, and rows beyond the
    kernels' limits.
    """

    def __init__(self, device: Device, vocab: int) -> None:
        self._device = device
        self._vocab = vocab
        self._capacity = 0
        self._space: sampling.Workspace | None = None

    def rows_of(self, chunks: Sequence[Chunk], failed: dict[bytes, BatonError]) -> SampleRows:
        """Collect the chunks' sampling parameters; invalid requests go to ``failed``."""
        asked = SampleRows(np.zeros(len(chunks), sampling.ROW))
        for at, chunk in enumerate(chunks):
            if chunk.sample is None:
                raise InternalError("a chunk that samples no token has no row")
            try:
                self._ask(asked, at, chunk.sample)
            except InputError as error:  # an error of the request's grammar
                failed[chunk.request] = error
            except Exception as error:  # one request's bad parameters fail this request only
                failed[chunk.request] = InternalError(f"sampling: {describe(error)}")
        return asked

    def draw(
        self,
        logits: DeviceArray,
        chunks: Sequence[Chunk],
        asked: SampleRows,
        failed: dict[bytes, BatonError],
    ) -> list[Sampled]:
        """Sample a token per row that has not failed; rows that fail now go to ``failed``."""
        count, device = len(chunks), self._device
        tokens, errors = device.empty((count,), np.int32), device.empty((count,), np.int32)
        report = _new_report(device, count) if asked.reported else None
        sampling.sample(
            device,
            logits,
            device.upload(asked.rows.view(np.uint8).reshape(count, sampling.ROW.itemsize)),
            self.workspace(count),
            tokens,
            errors,
            self._restrictions(asked),
            report,
            filters=sampling.filtered(asked.rows, self._vocab),
        )
        found = [device.download(array) for array in (tokens, errors)]
        listed = None
        if report is not None:
            listed = [device.download(a) for a in (report.token, report.ids, report.values)]
        sampled = collect(chunks, found[0], found[1], listed, set(asked.on_host), failed)
        return sampled + self._draw_on_host(logits, chunks, asked.on_host, failed)

    def workspace(self, rows: int) -> sampling.Workspace:
        """Return a workspace for up to ``rows`` rows; every use of it is over when the next begins.

        All work is on one stream.
        """
        if self._space is None or rows > self._capacity:
            self._capacity = 1 << max(0, rows - 1).bit_length()
            self._space = sampling.workspace(self._device, self._capacity, self._vocab)
        return self._space

    def _ask(self, asked: SampleRows, at: int, spec: SampleSpec) -> None:
        """Fill in row ``at``; a row that only the host can sample stays greedy on the device."""
        mask = history = -1
        words = None if spec.mask is None else sampling.mask_words(spec.mask.allowed(), spec.banned)
        if words is not None:
            mask = len(asked.masks)
        if spec.params.needs_penalties:
            history = len(asked.seen)
        try:
            sampling.fill_row(asked.rows, at, spec, mask, history)
        except ValueError:
            asked.on_host.append(at)
            return
        if words is not None:
            asked.masks.append(words)
        if history >= 0:
            seen, counts = sampling.history_arrays(spec.history, spec.prompt_length, self._vocab)
            asked.seen.append(seen)
            asked.counts.append(counts)
        asked.reported |= bool(spec.logprobs)

    def _restrictions(self, asked: SampleRows) -> sampling.Restrictions:
        upload = self._device.upload
        return sampling.Restrictions(
            upload(np.stack(asked.masks)) if asked.masks else None,
            upload(np.stack(asked.seen)) if asked.seen else None,
            upload(np.stack(asked.counts)) if asked.counts else None,
        )

    def _draw_on_host(
        self,
        logits: DeviceArray,
        chunks: Sequence[Chunk],
        rows: Sequence[int],
        failed: dict[bytes, BatonError],
    ) -> list[Sampled]:
        sampled = []
        for at in rows:
            chunk = chunks[at]
            if chunk.sample is None or chunk.request in failed:
                continue
            view: Any = logits
            row = self._device.download(view[at])[: self._vocab]
            try:
                if not np.isfinite(row.sum()):
                    raise InternalError(_WHY[sampling.NOT_FINITE])
                token, logprobs = sample(row, chunk.sample)
            except BatonError as error:
                failed[chunk.request] = error
            except Exception as error:  # a processor is the caller's code
                failed[chunk.request] = InternalError(f"sampling: {describe(error)}")
            else:
                sampled.append(Sampled(chunk.request, token, logprobs))
        return sampled


def collect(
    chunks: Sequence[Chunk],
    tokens: npt.NDArray[np.int32],
    errors: npt.NDArray[np.int32],
    report: Sequence[npt.NDArray[Any]] | None,
    skipped: set[int],
    failed: dict[bytes, BatonError],
) -> list[Sampled]:
    """Return the tokens of the rows that have one, with log-probs where requested.

    ``report``: log-prob of the token ``[B]``, ids and log-probs of the most likely ``[B, 20]``.
    """
    listed = [None] * len(chunks) if report is None else _pack(chunks, report)
    if not (skipped or failed or errors.any()):
        return [
            Sampled(chunk.request, token, logprobs)
            for chunk, token, logprobs in zip(chunks, tokens.tolist(), listed, strict=True)
        ]
    sampled = []
    for at, (chunk, token, error) in enumerate(
        zip(chunks, tokens.tolist(), errors.tolist(), strict=True)
    ):
        if at in skipped or chunk.request in failed or chunk.sample is None:
            continue
        if error:
            failed[chunk.request] = InternalError(_WHY.get(error, f"sampling: error {error}"))
            continue
        sampled.append(Sampled(chunk.request, token, listed[at]))
    return sampled


def _pack(
    chunks: Sequence[Chunk], report: Sequence[npt.NDArray[Any]]
) -> list[TokenLogProbs | None]:
    """Return the log-probs of each row that requests them, with the bytes of TokenLogProbs.of().

    Rows with the same number of entries are packed at once: a map and a pack per row took half of
    the time in which a step's tokens were read.
    """
    own, ids, values = report
    wanted = np.array([0 if c.sample is None else c.sample.logprobs for c in chunks], np.int64)
    # A small vocabulary fills fewer places than were requested.
    counts = np.minimum(wanted, (ids >= 0).sum(axis=1))
    packed: list[TokenLogProbs | None] = [None] * len(chunks)
    for count in np.unique(counts[wanted > 0]).tolist():
        rows = np.flatnonzero((wanted > 0) & (counts == count))
        parts = (ids[rows, :count].astype("<i4"), values[rows, :count].astype("<f8"))
        raw = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)
        data, size = raw.tobytes(), raw.shape[1]
        for i, (row, logprob) in enumerate(zip(rows.tolist(), own[rows].tolist(), strict=True)):
            packed[row] = TokenLogProbs(logprob, data[i * size : (i + 1) * size])
    return packed


def _new_report(device: Device, rows: int) -> sampling.Report:
    listed = (rows, MAX_LOG_PROBABILITIES)
    return sampling.Report(
        device.empty((rows,), np.float32),
        device.empty(listed, np.int32),
        device.empty(listed, np.float32),
    )
