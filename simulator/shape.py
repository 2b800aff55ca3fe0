"""The processes of a simulated cluster: how many of each kind, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Sizes:
    """Sizes of a worker; few blocks and small windows provoke waiting and preemption.

    ``window`` and ``budget``: bytes of credit. ``device``: use fences.
    ``move_s``: maximum seconds to pack or write a frame asynchronously, as on
    a GPU's transfer stream (0: synchronous). ``in_place``: decode workers read
    blocks in the prefill workers' pools, as over CUDA IPC.
    """

    block_size: int = 4
    prefill_blocks: int = 96
    decode_blocks: int = 64
    token_budget: int = 16
    growth: int = 8
    slo_ttft: float = 0.0
    frame_bytes: int = 256
    window: int = 512
    budget: int = 2048
    stream_tokens: int = 24
    device: bool = False
    move_s: float = 0.0
    in_place: bool = False


@dataclass(slots=True, frozen=True)
class Shape:
    """Number of processes of each kind and their sizes; either text or embedding workers.

    ``draws``: the prefill and decode workers serve a picture model. ``rogues``: all connections
    have keys, and a rogue of each role has one too (:mod:`.rogues`). ``greedy``: rogues also
    register as workers, take requests and compute them falsely. ``mode``: of the routers.
    ``local``: decode workers compute prompts, if a router asks for it. ``policy``, ``decider`` and
    ``order`` may be a user's own class, from the folder ``extensions``. The workers are in two
    racks by turns (label ``rack``).
    """

    prefill: int = 2
    decode: int = 2
    embed: int = 0
    clients: int = 2
    routers: int = 1
    restart_s: float = 0.3
    sizes: Sizes = field(default_factory=Sizes)
    policy: str = "least_loaded"
    decider: str = ""
    order: str = ""
    extensions: str = ""
    draws: bool = False
    rogues: bool = False
    greedy: bool = False
    mode: str = "disaggregated"
    local: bool = False
