"""Labels of workers, such as their rack, which a policy of the user's own may read.

The text is ``rack=r1,zone=a``.
"""

from __future__ import annotations

import os

from baton.proto.errors import ConfigError
from baton.proto.limits import MAX_LABELS

MAX_LABEL_CHARS = 256
VARIABLE = "BATON_LABELS"
"""The labels of all workers of a host whose settings give none."""


def parse_labels(text: str) -> dict[str, str]:
    """Return the labels by name. Raises ConfigError."""
    labels: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, mark, value = (piece.strip() for piece in part.partition("="))
        if not (name and mark and value) or max(len(name), len(value)) > MAX_LABEL_CHARS:
            raise ConfigError(f"labels has {part[:40]!r}, not of the form rack=r1")
        labels[name] = value
    if len(labels) > MAX_LABELS:
        raise ConfigError(f"labels has {len(labels)} names, limit {MAX_LABELS}")
    return labels


def worker_labels(text: str) -> dict[str, str]:
    """Return a worker's labels: of its settings, else of this host. Raises ConfigError."""
    own = "" if ":" in (host := os.environ.get(VARIABLE, "")) else host
    return parse_labels(text or own)
