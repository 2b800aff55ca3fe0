"""How files of tests are dealt to the workers of pytest-xdist.

A file is never divided, since its tests may share a cluster. Files whose tests start clusters come
first, and every second worker takes files from the end: as long as there are others, two clusters
do not compete for the same processors, and the last files, small ones, level the workers out.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

RANKS = {"tests/cluster": 0, "tests/cuda": 2}
"""Processes that wait for each other on one side, kernels that compute on the other."""
OTHERS = 1


def rank(test: str) -> int:
    """Where the file of a test (a pytest node id) belongs: 0 in front, 2 at the end."""
    return RANKS.get("/".join(test.split("/")[:2]), OTHERS)


class FromBothEnds(LoadFileScheduling):
    """Deals whole files, from both ends of their list in turn by worker."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        number = int(node.gateway.id.removeprefix("gw"))
        if number % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def in_ranks(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The same tests by rank, otherwise in their order."""
    return sorted(items, key=lambda item: rank(item.nodeid))
