"""Numbers on the command line. A wrong number is a usage error and never reaches a cluster."""

from __future__ import annotations

import argparse

_MOST = 2**63 - 1  # the largest integer that every message can carry


def seconds(text: str) -> float:
    """Parse a duration, 0 or more. ``inf``: no limit."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds, 0 or more")
    return value


def number(text: str) -> float:
    """Parse any number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


def positive(text: str) -> float:
    """Parse a finite number greater than 0."""
    value = number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number greater than 0")
    return value


def count(text: str) -> int:
    """Parse a whole number, 0 or more."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, 0 or more")
    return whole(text)


def at_least_one(text: str) -> int:
    """Parse a whole number, 1 or more."""
    if not text.strip().isdecimal() or not (value := whole(text)):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, 1 or more")
    return value


def whole(text: str) -> int:
    """Parse a whole number of at most 64 bits."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if abs(value) > _MOST:
        raise argparse.ArgumentTypeError(f"'{text}' is too large")
    return value
