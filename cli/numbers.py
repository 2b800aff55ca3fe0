"""Numbers on the command line. A wrong number is a usage error and never reaches a cluster."""

from __future__ import annotations

import argparse
import math
import re

from baton.deploy.config import ANY_HTTP_PORT

_LIMIT = re.compile(r"(ttft|itl)=(\d+(?:\.\d+)?)(ms|s)?")
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


def limits(text: str) -> tuple[float, float]:
    """Parse ``ttft=1s,itl=50ms`` to both limits in seconds; ``inf`` for one that is left out."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = _LIMIT.fullmatch(part.strip())
        value = float(match[2]) * (0.001 if match[3] == "ms" else 1.0) if match else 0.0
        if match is None or match[1] in found or not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"'{text}' is not limits such as ttft=1s,itl=50ms")
        found[match[1]] = value
    return found.get("ttft", math.inf), found.get("itl", math.inf)


def count(text: str) -> int:
    """Parse a whole number, 0 or more."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, 0 or more")
    return whole(text)


def http_port(text: str) -> int:
    """Parse a port of gateways, or -1 for the default port if it is free."""
    return ANY_HTTP_PORT if text.strip() == str(ANY_HTTP_PORT) else count(text)


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
