"""The rows of captured decode steps: which request has which row, and which data the device has.

Invariant: a request keeps its row from step to step. The token that a step draws is then in place
as the input of the next step, which can be queued before the host has read that token. Rows of no
request have no keys and write none, and their tokens are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from baton.proto.errors import BatonError
from baton.proto.limits import MAX_LOG_PROBABILITIES as MAX_LOGPROBS

from ..kernels.cuda import sampling
from ..kernels.cuda.device import Device
from ..scheduling.plan import Chunk, SampleSpec
from .row_masks import RowMasks

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

TURNS = 2
"""Steps that may be queued at once; each uses separate pinned memory."""

NOWHERE = -1
"""Cache slot of a row that writes no keys."""

_NOTHING = np.zeros((), sampling.ROW)
_NOTHING["mask"] = _NOTHING["history"] = -1


@dataclass(slots=True, frozen=True)
class GraphSizes:
    """Limits of captured steps.

    ``table_width``: blocks of the longest context. ``max_length``: tokens of the longest context.
    ``blocks`` of ``block_size`` tokens are in the KV pool.
    """

    table_width: int
    max_length: int
    blocks: int
    block_size: int

    @property
    def pool_tokens(self) -> int:
        """Tokens of the KV pool; they limit the attention work of a step."""
        return self.blocks * self.block_size


class Needs(NamedTuple):
    """What a step's sampling needs: masks, histories, log-probabilities, more passes for filters.

    See :func:`~baton.engine.kernels.cuda.sampling.filtered`.
    """

    masks: bool = False
    histories: bool = False
    report: bool = False
    filters: bool = False


def report_parts(memory: Any, rows: int) -> tuple[Any, Any, Any]:
    """Split int32 memory: log-prob float32 ``[R]``, ids ``[R, 20]``, log-probs float32 ``[R, 20]``.

    For the memory on the device and its copy on the host.
    """
    ids = rows * (1 + MAX_LOGPROBS)
    shape = (rows, MAX_LOGPROBS)
    token, values = memory[:rows].view(np.float32), memory[ids:].view(np.float32)
    return token, memory[rows:ids].reshape(shape), values.reshape(shape)


class DeviceRows:
    """Up to ``buckets[-1]`` rows; a step computes the first rows, as many as a bucket has.

    ``drawn``: int32 ``[2, R]`` on the device, the newest token of each row, which is the input of
    its next step, and the sampler's error. ``tables``: int32 ``[R, W]`` there, block tables.
    On the host, of the step placed last: ``lengths`` int32 ``[R]``, positions that each row sees, 0
    without a request; ``positions`` int32, ``deltas`` int32, rope position minus position,
    ``slots`` int64, ``sampling`` of :data:`.sampling.ROW`.

    The device also keeps the histories of rows with penalties, to which the sampler adds each token
    it draws, and the masks of rows with a grammar, written for each step by :meth:`write_masks`.
    Their memory is allocated when a row needs it.
    """

    def __init__(
        self, device: Device, sizes: GraphSizes, vocab: int, buckets: Sequence[int]
    ) -> None:
        rows, width = max(buckets, default=0), sizes.table_width
        self._device, self._sizes, self._vocab = device, sizes, vocab
        self._buckets = tuple(buckets)
        self.drawn = cast("Any", device.zeros((2, rows), np.int32))
        self.tables = cast("Any", device.zeros((rows, width), np.int32))
        self.lengths = np.zeros(rows, np.int32)
        self.positions = np.zeros(rows, np.int32)
        self.deltas = np.zeros(rows, np.int32)
        self.slots = np.full(rows, NOWHERE, np.int64)
        self.sampling = np.full(rows, _NOTHING, sampling.ROW)
        self._blocks: I32 = np.zeros((rows, width), np.int32)  # the tables, on the host
        self._room = np.zeros(rows, np.int32)  # tokens that fit into each row's blocks
        self._staged = [device.host_buffer((rows, width), np.int32) for _ in range(TURNS)]
        self._given = [device.host_buffer((rows,), np.int32) for _ in range(TURNS)]
        self._row_of: dict[bytes, int] = {}
        self._free = list(range(rows))
        self._requests: list[bytes] = []  # of the last step, in its order
        self._table_of: list[I32 | None] = [None] * rows
        self._spec_of: list[SampleSpec | None] = [None] * rows
        self.rows: list[int] = []
        """Row of each chunk of the last step."""
        self._at: I64 = np.empty(0, np.int64)  # the same
        self.bucket = 0
        """Number of rows that the last step computes."""
        self.needs = Needs()
        """What the sampling of the last step needs beside parameters."""
        self._masked: list[tuple[int, bytes, SampleSpec]] = []  # rows of the last step with a mask
        self._masks = RowMasks(device, vocab)
        self._seen: Any = None  # on the device, as the next ones
        self._counts: Any = None
        self._history_end = np.zeros(rows, np.int64)  # tokens in the history of each row; 0: none
        self.moves = 0
        """How often masks or histories got other memory, which captured steps do not know."""
        self.reported = cast("Any", device.zeros((rows * (1 + 2 * MAX_LOGPROBS),), np.int32))
        """Memory of :meth:`report` on the device; see :func:`report_parts`."""

    def forget(self) -> None:
        """Give all rows back, because what the device has of them is not known."""
        self._clear(list(self._row_of.values()))
        self._row_of.clear()
        self._free = list(range(len(self.lengths)))
        self._requests, self.rows = [], []

    def place(self, chunks: Sequence[Chunk], turn: int, *, fed: bool) -> bool:
        """Give each chunk its row and queue what the device lacks of it.

        ``fed``: the chunks' tokens are those that the last placed step draws. ``turn``: the pinned
        memory to use, below :data:`TURNS`. Returns False if no captured step computes these chunks:
        too many, more than a token each, a row of an image, arguments out of range, or sampling by
        the host.
        """
        known = [chunk.sample for chunk in chunks if chunk.sample is not None]
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        if len(known) < len(chunks) or not len(chunks) or int(starts.min()) < 0:
            return False
        tokens = None if fed else self._tokens(chunks)
        if not fed and tokens is None:
            return False
        if not self._seat([chunk.request for chunk in chunks], fed=fed):
            return False
        return self._fill(chunks, known, starts, tokens, turn)

    def _tokens(self, chunks: Sequence[Chunk]) -> I32 | None:
        """Return the chunks' tokens if each has one, inside the vocabulary."""
        tokens = np.concatenate([chunk.tokens for chunk in chunks])
        if len(tokens) != len(chunks) or not all(len(chunk.tokens) == 1 for chunk in chunks):
            return None
        return tokens if tokens.min() >= 0 and tokens.max() < self._vocab else None

    def _seat(self, requests: list[bytes], *, fed: bool) -> bool:
        """Give rows to the requests and take them from all others; False if there are too few."""
        if requests == self._requests:
            return True
        bucket = next((b for b in self._buckets if b >= len(requests)), None)
        row_of = self._row_of
        new = [request for request in requests if request not in row_of]
        if bucket is None or (fed and new) or len(set(requests)) < len(requests):
            return False
        gone = row_of.keys() - requests
        if not fed:
            # A token in flight is in its row. Without one, a request may move to a lower row.
            high = [request for request, row in row_of.items() if row >= bucket]
            new += [request for request in high if request not in gone]
            gone |= set(high)
        rows = [row_of.pop(request) for request in gone]
        self._clear(rows)
        for row in rows:
            heappush(self._free, row)
        for request in new:
            row_of[request] = heappop(self._free)
        self._requests = requests
        self.rows = [row_of[request] for request in requests]
        self._at = np.array(self.rows, np.int64)
        needed = max(self.rows) + 1
        self.bucket = next(b for b in self._buckets if b >= needed)
        return True

    def _clear(self, rows: Sequence[int]) -> None:
        at = np.array(rows, np.int64)
        self.lengths[at] = self.positions[at] = self.deltas[at] = 0
        self.slots[at] = NOWHERE
        self.sampling[at] = _NOTHING
        self._history_end[at] = 0
        for row in rows:
            self._table_of[row] = self._spec_of[row] = None

    def _fill(
        self,
        chunks: Sequence[Chunk],
        specs: Sequence[SampleSpec],
        starts: I32,
        tokens: I32 | None,
        turn: int,
    ) -> bool:
        rows, at, size = self.rows, self._at, self._sizes.block_size
        tables = [chunk.block_table for chunk in chunks]
        # Block tables and parameters are never modified: the same object has the same values.
        known = self._table_of
        changed = [i for i, row in enumerate(rows) if known[row] is not tables[i]]
        if not all(self._take_table(rows[i], tables[i]) for i in changed):
            self.forget()
            return False
        for i in changed:
            # Only the first sampled row of a request, whose table is new here, can be an image's.
            if chunks[i].images or chunks[i].rope_positions is not None:
                self.forget()
                return False
            self.deltas[rows[i]] = chunks[i].rope_delta
        try:
            self._pack(specs)
        except Exception:  # only the host can sample a row
            self.forget()
            return False
        if (starts >= self._room[at]).any() or int(starts.max()) >= self._sizes.max_length:
            self.forget()
            return False
        self.positions[at] = starts
        self.lengths[at] = starts + np.int32(1)
        self.sampling["position"][at] = ends = starts + np.int32(1)
        self.slots[at] = self._blocks[at, starts // size] * np.int64(size) + starts % size
        for i in changed:
            self._send_table(rows[i], len(tables[i]), turn)
        if not self._restrict(chunks, specs, ends, fed=tokens is None):
            self.forget()
            return False
        if tokens is not None:
            given, count = self._given[turn], self.bucket
            given[at] = tokens
            self._device.write(self.drawn[0, :count], given[:count])
        return True

    def _pack(self, specs: Sequence[SampleSpec]) -> None:
        """Write the sampling rows that differ from the last step's in more than the position.

        Raises ValueError for sampling that the kernels lack.
        """
        last = self._spec_of
        for i, row in enumerate(self.rows):
            spec, before = specs[i], last[row]
            if (
                before is None
                or spec.params is not before.params
                or spec.banned != before.banned
                or spec.logprobs != before.logprobs
                or (spec.mask is None) != (before.mask is None)
            ):
                mask = -1 if spec.mask is None else row
                sampling.fill_row(self.sampling, row, spec, mask, row)
                last[row] = spec
                self._history_end[row] = 0

    def _restrict(
        self, chunks: Sequence[Chunk], specs: Sequence[SampleSpec], ends: I32, *, fed: bool
    ) -> bool:
        """Queue the histories that the device lacks; False if they are not known."""
        packed, at, rows, device = self.sampling, self._at, self.rows, self._device
        masked = np.flatnonzero(packed["mask"][at] >= 0).tolist()
        self._masked = [(rows[i], chunks[i].request, specs[i]) for i in masked]
        penalized = np.flatnonzero(packed["history"][at] >= 0).tolist()
        self.needs = Needs(
            bool(masked),
            bool(penalized),
            bool(packed["logprobs"][at].any()),
            sampling.filtered(packed[at], self._vocab),
        )
        if not masked and not penalized:
            return True
        self._reserve()
        for i in penalized:
            row, spec, end = rows[i], specs[i], int(ends[i])
            if self._history_end[row] != end:
                if fed or len(spec.history) != end:
                    return False
                try:
                    found = sampling.history_arrays(spec.history, spec.prompt_length, self._vocab)
                except ValueError:
                    return False
                device.write(self._seen[row], found[0])
                device.write(self._counts[row], found[1])
            self._history_end[row] = end + 1  # the sampler adds the token that it draws
        return True

    def write_masks(self) -> dict[bytes, BatonError]:
        """Queue the masks of the last step; see :meth:`.row_masks.RowMasks.write`."""
        return self._masks.write(self._masked)

    def _reserve(self) -> None:
        """Allocate memory for the masks and histories of a step's rows; more drops the old ones."""
        words = -(-self._vocab // 32)
        zeros = self._device.zeros
        if self.needs.masks:
            self.moves += self._masks.reserve(self.bucket)
        if self.needs.histories and (self._seen is None or len(self._seen) < self.bucket):
            self._seen = zeros((self.bucket, words), np.uint32)
            self._counts = zeros((self.bucket, self._vocab), np.int32)
            self._history_end[:] = 0
            self.moves += 1

    def restrictions(self) -> sampling.Restrictions:
        """Return the masks and histories on the device, as far as the last step needs them."""
        histories = self.needs.histories
        return sampling.Restrictions(
            self._masks.words if self.needs.masks else None,
            self._seen if histories else None,
            self._counts if histories else None,
        )

    def report(self, count: int) -> sampling.Report | None:
        """Return the first rows of the memory for log-probabilities, if the last step needs it."""
        if not self.needs.report:
            return None
        token, ids, values = report_parts(self.reported, len(self.lengths))
        return sampling.Report(token[:count], ids[:count], values[:count])

    def _take_table(self, row: int, table: I32) -> bool:
        """Keep a block table; False if it is too long or has ids outside the pool."""
        count = len(table)
        if not 0 < count <= self._sizes.table_width:
            return False
        if int(table.min()) < 0 or int(table.max()) >= self._sizes.blocks:
            return False
        self._blocks[row, :count] = table
        self._room[row] = count * self._sizes.block_size
        self._table_of[row] = table
        return True

    def _send_table(self, row: int, count: int, turn: int) -> None:
        staged = self._staged[turn][row, :count]
        staged[...] = self._blocks[row, :count]
        self._device.write(self.tables[row, :count], staged)
