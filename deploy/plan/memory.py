"""The default sizes of a worker's KV memory, and of its memory for pictures.

:func:`free_memory` reads the free memory of this machine and its control groups. :func:`kv_share`
and :func:`picture_share` are pure and divide the free memory among the workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from baton.engine.loading.checkpoint import Checkpoint, load_checkpoint
from baton.engine.loading.embedding_config import DRAW
from baton.engine.loading.loader import folder_task
from baton.engine.pictures.folder import open_folder
from baton.engine.pictures.loading import (
    DRAWING_PARTS,
    longest_row,
    parts_bytes,
    state_layout,
)
from baton.engine.pictures.memory import USUAL_PIXELS, picture_bytes

from ..controller.backend import DECODE

_FAIR, _MOST = 0.5, 0.8
"""Share of the free memory for all processes: normally, and if needed for one whole context."""
USUAL_PROMPT_TOKENS = 512
"""Tokens of a picture's prompt for the last text encoder."""
_BATCHES = 2
"""Contexts of maximum length per running request: its own, and one in the prefix cache."""
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


def folder_memory(folder: str, max_length: int, block_size: int) -> ModelMemory:
    """Return the memory of the model in a folder.

    The context of a picture model is the state of a picture with a negative prompt, of the usual
    number of tokens. Raises CheckpointError for the folder's files.
    """
    if folder_task(folder) != DRAW:
        return model_memory(load_checkpoint(folder), max_length)
    pictures = open_folder(folder)
    layout = state_layout(pictures, block_size)
    row = max_length or longest_row(block_size, USUAL_PROMPT_TOKENS)
    return ModelMemory(
        weights=parts_bytes(pictures, pictures.family.encoder_parts),
        context=layout.token_bytes * row,
        drawing=parts_bytes(pictures, DRAWING_PARTS),
        picture=picture_bytes(pictures, USUAL_PIXELS),
    )


def model_memory(checkpoint: Checkpoint, max_length: int) -> ModelMemory:
    """Bytes of a worker's packed weights, and of the float32 KV of a context of maximum length."""
    config = checkpoint.config
    length = max_length or config.rope.default_length()
    token = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim
    return ModelMemory(weights=checkpoint.tensors.loaded_bytes, context=length * token)


def kv_share(free: int, workers: int, batch: int, model: ModelMemory) -> int:
    """Bytes of KV memory for each of ``workers``, each with max batch size ``batch``.

    An equal part of half the free memory, but at least one context of maximum length if that fits,
    and at most the memory that a full batch can use.
    """
    weights = max(model.weights, model.drawing)
    fair, most = (int(free * part) // workers - weights for part in (_FAIR, _MOST))
    useful = _BATCHES * batch * model.context
    return max(LEAST_BYTES, min(useful, max(fair, min(model.context, most))))


def picture_share(free: int, used: int, decode: int, model: ModelMemory) -> int:
    """Bytes for the arrays of a picture in each of ``decode`` workers of a picture model.

    ``used``: bytes that all workers need besides. At least enough for a picture of a usual size.
    """
    return max(model.picture, (int(free * _MOST) - used) // decode)


PROCESS_BYTES = 64 << 20
"""Memory of a worker besides weights and KV blocks."""


def total_memory(root: Path = Path("/")) -> int | None:
    """Return the memory limit in bytes of this machine and its control groups; None if unknown."""
    machine = _field(root / "proc/meminfo", "MemTotal:")
    if machine is None:
        return None
    groups = root / "sys/fs/cgroup"
    limits = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        mount = groups / "memory" if controllers else groups
        if not controllers or "memory" in controllers.split(","):
            group = mount / path.strip("/")
            limits += [_text(folder / name).strip() for folder in (group, *group.parents)]
    return min([machine << 10, *(int(limit) for limit in limits if limit.isdigit())])


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that new processes can use without swapping; None if unknown.

    The minimum over the machine's available memory and the free memory of each control group
    (version 1 or 2) of this process. Caches count as free.
    """
    machine = _field(root / "proc/meminfo", "MemAvailable:")
    if machine is None:
        return None
    return max(0, min([machine << 10, *_group_rooms(root)]))


def _group_rooms(root: Path) -> Iterator[int]:
    groups = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            yield from _rooms(groups, path, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _rooms(groups / "memory", path, *names)


def _rooms(mount: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[int]:
    """Yield the free bytes of a group and its parents. A container sees only the mount point."""
    group = mount / path.strip("/")
    for folder in (group, *group.parents):
        most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
        if most.isdigit() and used.isdigit():
            reclaimable = _field(folder / "memory.stat", cache) or 0
            yield int(most) - int(used) + reclaimable
        if folder == mount:
            return


def _field(path: Path, name: str) -> int | None:
    """Return the number after a name in a file with one name and number per line."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
