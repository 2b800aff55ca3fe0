"""A metric: requests that kept the limits of TTFT and ITL, by decode worker.

baton serve --metrics-port 9464 --metric slo_metric:SloMetric
curl -s http://127.0.0.1:9464/metrics | grep kept_limits
"""

from collections import Counter

from baton.extend import Ended, Family, counter

TTFT_S, ITL_S = 1.0, 0.1


class SloMetric:
    """Counts finished requests."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, ...]] = Counter()

    def ended(self, request: Ended) -> None:
        """Count a request that ended with a result."""
        if request.outcome != "finished" or request.ttft_s is None:
            return
        kept = request.ttft_s <= TTFT_S and (request.itl_s or 0.0) <= ITL_S
        self._requests[request.decode, "yes" if kept else "no"] += 1

    def families(self) -> list[Family]:
        """Return the metric for a scrape."""
        text = f"Requests by whether TTFT <= {TTFT_S:g} s and ITL <= {ITL_S:g} s."
        values = {labels: float(count) for labels, count in self._requests.items()}
        return [counter("kept_limits_requests_total", text, values, ("decode", "kept"))]
