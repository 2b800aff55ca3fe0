"""How much memory a worker's KV blocks get when the operator does not say.

:func:`free_memory` reads what this machine and its control groups leave; :func:`kv_share` is
pure and divides it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..engine.checkpoint import Checkpoint

_FAIR, _MOST = 0.5, 0.8
"""Shares of the free memory all processes take together: usually, and for one whole context."""
_BATCHES = 2
"""Whole contexts kept for each request that runs: its own, and one in the prefix cache."""
LEAST_BYTES = 16 << 20
"""Less is not worth starting with; memory is touched only as it fills."""


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the model itself takes, in bytes: ``weights`` of every worker, ``context`` of KV."""

    weights: int
    context: int


def model_memory(checkpoint: Checkpoint, max_length: int) -> ModelMemory:
    """Bytes of a worker's packed weights, and of the float32 KV of one whole context."""
    config = checkpoint.config
    length = max_length or config.rope.default_length()
    token = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim
    return ModelMemory(weights=checkpoint.tensors.nbytes, context=length * token)


def kv_share(free: int, workers: int, batch: int, model: ModelMemory) -> int:
    """Bytes of KV memory for each of ``workers`` that run ``batch`` requests together.

    At least one whole context as far as there is room, at most what the batch can use, and
    otherwise an equal part of half the free memory.
    """
    fair, most = (int(free * part) // workers - model.weights for part in (_FAIR, _MOST))
    useful = _BATCHES * batch * model.context
    return max(LEAST_BYTES, min(useful, max(fair, min(model.context, most))))


PROCESS_BYTES = 64 << 20
"""What a worker takes besides weights and KV blocks."""


def total_memory(root: Path = Path("/")) -> int | None:
    """Bytes this machine and the control groups around this process allow; None if unknown."""
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
    """Bytes new processes may take without swapping; None where that cannot be read.

    The least of what the machine has available and what each control group around this
    process still allows, version 1 or 2; caches count as free.
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
    """Room in a group and all above it; a container sees only the mount, its own group."""
    group = mount / path.strip("/")
    for folder in (group, *group.parents):
        most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
        if most.isdigit() and used.isdigit():
            reclaimable = _field(folder / "memory.stat", cache) or 0
            yield int(most) - int(used) + reclaimable
        if folder == mount:
            return


def _field(path: Path, name: str) -> int | None:
    """Number behind a name in a file of such lines."""
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
