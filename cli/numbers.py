"""Numbers on the command line: a wrong one is bad usage and never reaches a cluster."""

from __future__ import annotations

import argparse

_MOST = 2**63 - 1  # what every message can carry


def seconds(text: str) -> float:
    """A duration, 0 or more; ``inf`` is without end."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds, 0 or more")
    return value


def number(text: str) -> float:
    """Any number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


def count(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, 0 or more")
    return whole(text)


def whole(text: str) -> int:
    """A whole number of 64 bits."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if abs(value) > _MOST:
        raise argparse.ArgumentTypeError(f"'{text}' is too large")
    return value
