"""The default sizes of a worker's KV memory, and of its memory for pictures.

:func:`kv_share` and :func:`picture_share` are pure and divide the free memory among the workers.
"""

from __future__ import annotations

import msgspec

from baton.engine.loading.checkpoint import Checkpoint
from baton.engine.loading.kv_types import AUTO, kv_type_of
from baton.proto.layout import KVLayout

from ..roles import DECODE

_FAIR, _MOST = 0.5, 0.8
"""Share of the free memory for all processes: normally, and if needed for one whole context."""
_BATCHES = 2
"""Contexts of maximum length per running request: its own, and one in the prefix cache."""
PROCESS_BYTES = 64 << 20
"""Memory of a worker besides weights and KV blocks."""
OTHER_BYTES = 40 << 20
"""Memory of a router or a gateway (measured)."""
LEAST_BYTES = 16 << 20
"""Minimum KV memory per worker. Unused memory is not allocated by the kernel."""


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the model in bytes. ``weights``: of a prefill worker, or of the larger worker.

    ``context``: KV of one context. ``drawing``: weights of a decode worker of a picture model,
    which has other parts of the model; 0 for other models. ``picture``: arrays of a picture of a
    usual size, 0 for other models.
    """

    weights: int
    context: int
    drawing: int = 0
    picture: int = 0

    def worker(self, role: str) -> int:
        """Return the bytes of the weights of a worker."""
        return self.drawing if self.drawing and role == DECODE else self.weights


def model_memory(checkpoint: Checkpoint, max_length: int, kv_type: str = AUTO) -> ModelMemory:
    """Bytes of a worker's packed weights, and of the KV of a context of maximum length."""
    config = checkpoint.config
    layout = KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=1,
        dtype=kv_type_of(checkpoint, kv_type),
    )
    length = max_length or config.rope.default_length()
    context = length * layout.token_bytes
    return ModelMemory(weights=checkpoint.tensors.loaded_bytes, context=context)


def kv_share(
    free: int, workers: int, batch: int, model: ModelMemory, *, copies: int = 0, others: int = 0
) -> int:
    """Bytes of KV memory for each of ``workers``, each with max batch size ``batch``.

    ``copies``: copies of the weights that the workers have together; 0: one each. ``others``:
    routers and gateways that start too.

    An equal part of half the free memory, but at least one context of maximum length if that fits,
    and at most the memory that a full batch can use, or that the processes leave.
    """
    weights = max(model.weights, model.drawing)
    taken = (copies or workers) * weights
    fair, most = ((int(free * part) - taken) // workers for part in (_FAIR, _MOST))
    rest = (free - taken - workers * PROCESS_BYTES - others * OTHER_BYTES) // workers
    useful = _BATCHES * batch * model.context
    return max(LEAST_BYTES, min(useful, rest, max(fair, min(model.context, most))))


def picture_share(free: int, used: int, decode: int, model: ModelMemory) -> int:
    """Bytes for the arrays of a picture in each of ``decode`` workers of a picture model.

    ``used``: bytes that all workers need besides. At least enough for a picture of a usual size.
    """
    return max(model.picture, (int(free * _MOST) - used) // decode)


_ENTRY_BYTES = 1 << 10
"""Memory for an entry of the vocabulary: grammars hold all texts and merges (measured)."""


def process_bytes(vocab_size: int) -> int:
    """Return the memory of a worker of a text model besides weights and KV blocks."""
    return PROCESS_BYTES + _ENTRY_BYTES * vocab_size
