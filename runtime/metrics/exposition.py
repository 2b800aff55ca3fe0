"""The text that Prometheus reads, made from families by prometheus-client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .families import Family, Row

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(families: Iterable[Family]) -> bytes:
    """Return the families in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return map(_metric, self._families)

    def describe(self) -> Iterator[Metric]:
        """Describe nothing: the registry must not ask for the families when it is made."""
        return iter(())


def _metric(family: Family) -> Metric:
    if family.kind == "histogram":
        shown = HistogramMetricFamily(family.name, family.text, labels=family.labels)
        for row in family.rows:
            shown.add_metric(row.labels, _buckets(family, row), row.value)
        return shown
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    plain = kind(family.name, family.text, labels=family.labels)
    for row in family.rows:
        plain.add_metric(row.labels, row.value)
    return plain


def _buckets(family: Family, row: Row) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound."""
    bounds = [*map(floatToGoString, family.bounds), "+Inf"]
    return list(zip(bounds, accumulate(row.counts), strict=True))
