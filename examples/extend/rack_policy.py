"""A policy that keeps a request in one rack, and prefers the router's own rack.

    RACK=a baton serve --decode 2 --prefill 2 --policy rack_policy:RackPolicy \
        --labels prefill-0:rack=a,decode-0:rack=a,prefill-1:rack=b,decode-1:rack=b
    python -m baton.simulator --policy rack_policy:RackPolicy

The router chooses the decode worker first, by load, and then a prefill worker of the same rack.
The variable RACK is the router's own rack: its decode workers are preferred, if it is set.
"""

import os

from baton.extend import Placing, WorkerFacts

SPARE_TOKENS = 4096
"""A worker of the rack may have this much more work than the least loaded one."""


class RackPolicy:
    """Prefers workers of one rack while they are not much busier than the others."""

    def __init__(self) -> None:
        self._rack = os.environ.get("RACK", "")

    def choose(self, request: Placing, workers: tuple[WorkerFacts, ...]) -> WorkerFacts:
        """Return the least loaded worker of the rack, or of all if the rack is busy."""
        rack = self._rack if request.decode is None else request.decode.labels.get("rack")
        near = [worker for worker in workers if worker.labels.get("rack") == rack]
        best = min(workers, key=_work)
        if not near:
            return best
        nearest = min(near, key=_work)
        return nearest if _work(nearest) <= _work(best) + SPARE_TOKENS else best


def _work(worker: WorkerFacts) -> int:
    """Tokens before this request, less those that need no work because they are cached."""
    return worker.outstanding_tokens - worker.cached_tokens
