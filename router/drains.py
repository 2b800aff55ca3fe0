"""The rule that the last ready worker of a role is drained only by force."""

from __future__ import annotations


def last_worker(name: str, role: str) -> str:
    """Return the error message for operators: the worker is the last of its role."""
    return (
        f"{role} must keep at least 1 ready worker, and {name} is the last: add another "
        f"(baton scale {role}=2), or drain it anyway (--force)"
    )
