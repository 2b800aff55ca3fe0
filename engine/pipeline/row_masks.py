"""The masks of captured steps: which tokens the grammar of each row allows next.

Invariant: the masks of a step are written when the steps before are over, because only then do the
grammars know their tokens. So nothing reads the masks that are overwritten. They are copied on a
separate stream, while the forward pass of their step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.proto.errors import BatonError, InputError, InternalError

from ..grammar.constraint import GrammarMatcher, write_words
from ..kernels.cuda import sampling
from ..kernels.cuda.device import Device
from ..scheduling.plan import SampleSpec
from .steps import describe

Masked = tuple[int, bytes, SampleSpec]
"""A row with a mask, its request and how it is sampled."""


class RowMasks:
    """Masks of the first rows of a device, for :class:`.device_rows.DeviceRows`.

    ``words``: uint32 ``[R, ceil(vocab / 32)]`` on the device, None before :meth:`reserve`.
    """

    def __init__(self, device: Device, vocab: int) -> None:
        self._device, self._vocab = device, vocab
        self._copies: Device | None = None  # the stream that copies masks
        self._pinned: Any = None
        self.words: Any = None

    def reserve(self, rows: int) -> bool:
        """Allocate memory for ``rows`` masks; True if they have other memory than before."""
        if self.words is not None and len(self.words) >= rows:
            return False
        device, shape = self._device, (rows, -(-self._vocab // 32))
        self.words = device.zeros(shape, np.uint32)
        self._pinned = device.host_buffer(shape, np.uint32)
        self._copies = self._copies or device.another_stream()
        self._copies.wait_for(device.record())  # the memory is not cleared yet
        return True

    def write(self, masked: Sequence[Masked]) -> dict[bytes, BatonError]:
        """Queue the masks of a step and return the requests whose masks failed.

        Later work on the device's stream waits for the masks.
        """
        failed: dict[bytes, BatonError] = {}
        if self._copies is None or not masked:
            raise InternalError("no row has a mask")
        for row, request, spec in self._unwritten(masked):
            try:
                if spec.mask is None:
                    raise InternalError("a row has lost its mask")
                self._pinned[row] = sampling.mask_words(spec.mask.allowed(), spec.banned)
            except InputError as error:  # an error of the request's grammar
                failed[request] = error
            except Exception as error:  # one request's grammar fails this request only
                failed[request] = InternalError(f"sampling: {describe(error)}")
        rows = [row for row, _, _ in masked]
        span = slice(min(rows), max(rows) + 1)
        self._copies.write(self.words[span], self._pinned[span])
        self._device.wait_for(self._copies.record())
        return failed

    def _unwritten(self, masked: Sequence[Masked]) -> list[Masked]:
        """Write the masks that need no single look, all at once, and return the others."""
        matchers, fast, slow = [], [], []
        for each in masked:
            spec = each[2]
            if type(spec.mask) is GrammarMatcher and not spec.banned:
                matchers.append(spec.mask)
                fast.append(each)
            else:
                slow.append(each)
        left = write_words(matchers, [row for row, _, _ in fast], self._pinned)
        return [*slow, *(fast[index] for index in left)]
