"""What both sides of the measured handoff agree on: shape of blocks, sockets, keeping time."""

from __future__ import annotations

import time

import zmq

from ...proto.layout import KVLayout

# The 125M-parameter Llama of docs/benchmarks.md.
LAYOUT = KVLayout(num_layers=12, num_kv_heads=4, head_dim=64, block_size=16)
IDLE_S = 0.002
"""Seconds that both sides sleep before a measurement, as while a prompt is computed."""
Socket = zmq.Socket[bytes]
SOCKETS = ("control", "data", "raw")
"""Envelopes and KV frames of the handoff; the raw transfer, and what steers the receiver."""
Stamp = tuple[str, float]
"""The last finished step and its time (``perf_counter``, the same clock in all processes)."""


class Stamps:
    """What one side has done, and when."""

    def __init__(self) -> None:
        self.taken: list[Stamp] = []

    def __call__(self, done: str) -> None:
        """It is done."""
        self.taken.append((done, time.perf_counter()))
