"""Extension points: what a module of your own may implement, and what it is given.

docs/extend.md describes each point. A class needs the methods of its protocol and no base class.
Stable: facts get further fields, but none is renamed or removed.
"""

from baton.runtime.metrics.families import Family, Histogram, counter, gauge, histogram

from .points import (
    Decider,
    Ended,
    Metric,
    ModelFamily,
    Order,
    Placing,
    Policy,
    Prompt,
    Transport,
    Ways,
    WorkerFacts,
)
from .resolve import (
    DECIDER,
    FAMILY,
    METRIC,
    ORDER,
    POLICY,
    TRANSPORT,
    ExtensionError,
    Point,
    is_extension,
    resolve,
)

__all__ = [
    "DECIDER",
    "FAMILY",
    "METRIC",
    "ORDER",
    "POLICY",
    "TRANSPORT",
    "Decider",
    "Ended",
    "ExtensionError",
    "Family",
    "Histogram",
    "Metric",
    "ModelFamily",
    "Order",
    "Placing",
    "Point",
    "Policy",
    "Prompt",
    "Transport",
    "Ways",
    "WorkerFacts",
    "counter",
    "gauge",
    "histogram",
    "is_extension",
    "resolve",
]
