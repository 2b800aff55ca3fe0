"""A broken invariant of a simulated run."""

from __future__ import annotations


class Violation(Exception):
    """An invariant does not hold."""
