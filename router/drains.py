"""When a worker may not be drained: the last one that serves a role, unless that is forced."""

from __future__ import annotations


def last_worker(name: str, role: str) -> str:
    """Why the last ready worker of a role is not drained, in one sentence for operators."""
    return (
        f"{role} must keep at least 1 ready worker, and {name} is the last: add another "
        f"(baton scale {role}=2), or drain it all the same (--force)"
    )
