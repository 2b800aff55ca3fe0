"""Encoded images that later requests with the same image use again."""

from __future__ import annotations

from collections import OrderedDict

from .vision_tower import Encoded

FEATURE_BYTES = 256 << 20
"""Default limit of the features in memory."""


class FeatureCache:
    """Features of images by key and grid, the least recently used dropped first.

    ``limit``: bytes; a larger image is not kept, and images of the running step do not count.
    Counts ``hits`` and ``misses``.
    """

    def __init__(self, limit: int = FEATURE_BYTES) -> None:
        self.limit = limit
        self.nbytes = self.hits = self.misses = 0
        self._entries: OrderedDict[tuple[bytes, tuple[int, int]], Encoded] = OrderedDict()

    def get(self, key: bytes, grid: tuple[int, int]) -> Encoded | None:
        """Return the features of an image, or None."""
        features = self._entries.get((key, grid))
        if features is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end((key, grid))
        return features

    def put(self, key: bytes, grid: tuple[int, int], features: Encoded) -> None:
        """Keep the features of an image, within the limit."""
        if features.nbytes > self.limit or (key, grid) in self._entries:
            return
        self._entries[key, grid] = features
        self.nbytes += features.nbytes
        while self.nbytes > self.limit:
            self.nbytes -= self._entries.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Drop all features."""
        self._entries.clear()
        self.nbytes = 0
