"""Problems of a serving cluster: members that are down, slow to answer or without a host.

Pure: turns the controller's members into sentences for operators. A cluster with any problem
listed here keeps serving and is *degraded*.
"""

from __future__ import annotations

from ..roles import GATEWAY, POOLS, ROUTER
from .members import Member, Stage
from .pools import Pools

OK, DEGRADED = "ok", "degraded"
SILENT_S = 5.0
"""Seconds without a router's answer to the controller before the router is listed."""


def problems(pools: Pools, now: float) -> list[str]:
    """Return one sentence for each member that should serve and does not."""
    found = [text for member in pools.members if (text := _problem(member, now))]
    for role in (*POOLS, GATEWAY):
        missing = pools.target(role) - len(pools.members.active(role))
        wait = pools.held(role, now)
        if missing > 0 and wait > 0:
            found.append(f"{role}: {missing} lost, replacement starts in {wait:.1f} s")
    return found


def _problem(member: Member, now: float) -> str:
    if not member.active:
        return ""
    if member.turning and not member.cause:
        return ""
    if member.cause and member.restart_at:
        wait = max(0.0, member.restart_at - now)
        return f"{member.name} is down: {member.cause}; restart {member.ends} in {wait:.1f} s"
    if member.cause:
        return f"{member.name} is restarting: its last process ended ({member.cause})"
    if member.waits_for:
        return f"{member.name} waits for a host: {member.waits_for}"
    if member.stage is Stage.STARTING and member.was_ready:
        return f"{member.name} not found yet" if member.unseen else f"{member.name} is restarting"
    silent = now - member.heard_at
    if member.role == ROUTER and member.stage is Stage.READY and silent >= SILENT_S:
        return f"{member.name} has not answered the controller for {silent:.0f} s"
    return ""
