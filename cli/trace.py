"""``baton trace``: what happened to one request, or a list of the last requests.

The routers keep the stories of their last requests (``baton serve --trace-requests``).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

from baton.client import Client
from baton.deploy.messages import counted
from baton.proto.errors import BatonError, ConfigError, ConnectionLost, InputError, VersionMismatch
from baton.router.story_slices import slices_of
from baton.runtime.process.log import printable
from baton.runtime.process.memory import size_text

from .cluster import add_address, addresses_of, keys_of
from .numbers import at_least_one
from .output import say

LISTED = 20
MATCHES = 10
"""Most requests that are listed for a name that several have."""
_BESIDE = "transfer"
"""A transfer runs beside the computation of later layers, so it gets a thread in trace files."""
_HTTP_ID = re.compile(r"([^-]+-(.+)-[0-9a-f]{24})(-\d+)?")
"""Ids that a gateway makes: kind, X-Request-Id, its own characters, number of the choice."""
Story = dict[str, Any]
"""A record of a router (``router/story_report.py``), with the router's name as ``router``."""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser(
        "trace",
        help="show what happened to a request: route, waits, handoff, replays",
        description="Show what happened to a request: why its workers were chosen, its waits, its "
        "handoff and its replays. Without a request, list the last requests.",
    )
    parser.add_argument(
        "request",
        metavar="REQUEST_ID",
        nargs="?",
        default="",
        help="request id, X-Request-Id of an HTTP request, or at least 8 characters of either "
        "that no other request has",
    )
    add_address(parser)
    parser.add_argument(
        "--last",
        type=at_least_one,
        metavar="N",
        help=f"list the last N requests [{LISTED}]",
    )
    parser.add_argument("--json", action="store_true", help="print the stories as JSON")
    parser.add_argument(
        "--perfetto",
        metavar="FILE",
        help="write the stories as a trace for ui.perfetto.dev or chrome://tracing",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the stories.

    Raises BatonError if no router answers, no story has this name, or those of several requests.
    """
    if arguments.request and arguments.last is not None:
        raise ConfigError("give either a request id or --last")
    asked = time.time()
    stories = _ask_all(arguments)
    if arguments.request:
        stories = _of_one_request(arguments.request, stories)
    if arguments.perfetto:
        content = json.dumps(trace_file(stories, asked))
        Path(arguments.perfetto).write_text(content, "utf-8")
        what = counted(len(stories), "request")
        print(f"wrote {what} to {arguments.perfetto}; open it in ui.perfetto.dev")
    elif arguments.json:
        print(json.dumps(stories, indent=2))
    elif arguments.request:
        print("\n\n".join("\n".join(map(printable, describe(story))) for story in stories))
    elif stories:
        print("\n".join(map(printable, listed(stories))))
    else:
        print("no requests")
    return 0


def _ask_all(arguments: argparse.Namespace) -> list[Story]:
    """Return the stories of all routers that answer, oldest request first.

    A list has the last requests of all routers together. Each router is asked for as many, and adds
    its unfinished requests.
    """
    found: list[Story] = []
    problems: list[BatonError] = []
    addresses = addresses_of(arguments)
    last = 0 if arguments.request else arguments.last or LISTED
    for address in addresses:
        try:
            with Client(
                address, keys=keys_of(arguments), connect_timeout=arguments.timeout
            ) as client:
                report = client.status(handoffs=0, requests=last, request=arguments.request)
        except (ConnectionLost, VersionMismatch) as problem:
            problems.append(problem)
            continue
        name = report["router"]["name"]
        found += [{"router": name, **story} for story in report.get("requests", ())]
    if len(problems) == len(addresses):
        raise problems[0]
    found.sort(key=lambda story: -float(story["age_s"]))
    return found[-last:] if last else found


def _of_one_request(name: str, stories: list[Story]) -> list[Story]:
    """Return the stories whose whole id is the name, else those of the one request it matches."""
    if not stories:
        raise InputError(
            f"no router has a story of request {name!r}: the id is unknown, a gateway refused the "
            "request (such as 400 or 404), or the story was dropped "
            "(--trace-requests is the number of stories that a router keeps)"
        )
    complete = [story for story in stories if name in _whole_ids(story)]
    if complete:
        return complete
    requests = len({_whole_ids(story)[0] for story in stories})
    if requests > 1:
        for line in listed(stories[: -MATCHES - 1 : -1]):
            say(line, error=True)
        most = f"; these are the last {MATCHES}" if len(stories) > MATCHES else ""
        raise InputError(f"{name!r} matches {requests} requests{most}: give more of the id")
    return stories


def _whole_ids(story: Story) -> tuple[str, ...]:
    """Return the ids that name the request; the first is the same for all its choices."""
    own, key = story["request_id"], story["request"]
    made = _HTTP_ID.fullmatch(own) if story["gateway"] else None
    return (own, key) if made is None else (made[1], made[2], own, key)


# --------------------------------------------------------------------------- lists


def listed(stories: list[Story]) -> list[str]:
    """Lines of a table with one request per line."""
    head = (
        f"{'age':>8} {'state':<10} {'prompt':>7} {'cached':>7} {'new':>6} {'TTFT':>9} {'ITL':>9} "
        f"{'total':>9}  {'workers':<22} request"
    )
    return [head, *(_line(story) for story in stories)]


def _line(story: Story) -> str:
    last = story["attempts"][-1] if story["attempts"] else {"prefill": "", "decode": ""}
    names = [last[role] for role in ("prefill", "decode") if last[role]]
    workers = " > ".join(names[: 1 if _without_decode(story) else 2]) or "-"
    return (
        f"{story['age_s']:>7.1f}s {story['state']:<10} {story['prompt_tokens']:>7} "
        f"{story['cached_tokens']:>7} {story['new_tokens']:>6} {_ms(story['ttft_s']):>9} "
        f"{_ms(story['itl_s']):>9} {_ms(story['seconds']):>9}  {workers:<22} {story['request_id']}"
    )


def _without_decode(story: Story) -> bool:
    """Return True if the request ended at its prefill worker: it needed no handoff."""
    last = story["attempts"][-1] if story["attempts"] else {}
    ended = story["state"] in ("finished", "failed", "cancelled")
    return ended and not (last.get("handoff") or last.get("decode_times"))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


# --------------------------------------------------------------------------- one story


def describe(story: Story) -> list[str]:
    """Return the lines of one request's story."""
    through = f" through {story['gateway']}" if story["gateway"] else ""
    resumed = ", resumed here" if story["resumed"] else ""
    age, cached = f"{story['age_s']:.1f} s ago", story["cached_tokens"]
    prompt, new = (counted(story[f"{what}_tokens"], f"{what} token") for what in ("prompt", "new"))
    numbers = [("TTFT", "ttft_s"), ("mean ITL", "itl_s"), ("queue", "queue_s"), ("all", "seconds")]
    times = [f"{name} {_ms(story[key])}" for name, key in numbers if story[key] is not None]
    lines = [
        f"request {story['request_id']} (key {story['request']})",
        f"  {story['state']}{_why(story)}",
        f"  client {story['client']}{through} at {story['router']}, {age}{resumed}",
        f"  {prompt} ({cached} cached), {new}",
        f"  {', '.join(times)}",
        *_own_limits(story),
    ]
    for attempt in story["attempts"]:
        lines += ["", *_attempt(attempt)]
    if _without_decode(story) and lines[-1].startswith("  decode"):
        lines.append("  handoff  none: the request ended at its prefill worker")
    return [*lines, "", *_timeline(story)]


def _own_limits(story: Story) -> list[str]:
    """Return the line of the request's own limits, and what they allowed."""
    limits = [("TTFT", "slo_ttft_s", "ttft_s"), ("mean ITL", "slo_itl_s", "itl_s")]
    shown = []
    for name, limit, seconds in limits:
        if story[limit] is not None:
            late = story[seconds] is not None and story[seconds] > story[limit]
            shown.append(f"{name} {_ms(story[limit])}{' (missed)' if late else ''}")
    return [f"  own limits: {', '.join(shown)}"] if shown else []


def _why(story: Story) -> str:
    parts = [story["finish_reason"], story["code"], story["message"]]
    shown = ": ".join(dict.fromkeys(part for part in parts if part))
    return f": {shown}" if shown and shown != story["state"] else ""


def _attempt(attempt: dict[str, Any]) -> list[str]:
    lines = [f"attempt {attempt['number']}" + (f": {attempt['cause']}" * bool(attempt["cause"]))]
    route = attempt["route"]
    if route is not None and route["why"]:
        lines.append(f"  way      {route['way']}: {route['why']}")
    lines += [
        f"  {role:<8} {attempt[role]}{_reason(role, route)}"
        for role in ("prefill", "decode")
        if attempt[role]
    ]
    handoff = attempt["handoff"]
    if handoff is not None:
        again = f", {handoff['resent_frames']} sent again" if handoff["resent_frames"] else ""
        blocks, frames = counted(handoff["blocks"], "block"), counted(handoff["frames"], "frame")
        cached = counted(handoff["cached_tokens"], "token")
        lines.append(
            f"  handoff  {size_text(handoff['bytes_sent'])} in {blocks} and {frames} over "
            f"{handoff['transport']}{again}, {cached} already there, "
            f"{_ms(handoff['seconds'])} from Reserve to Committed"
        )
    return lines


def _reason(role: str, route: dict[str, Any] | None) -> str:
    """Why a worker was chosen."""
    if route is None:
        return ": it had the request already"
    side = route[role]
    if side is None:
        return ""
    cached, load = (counted(side[f"{what}_tokens"], "token") for what in ("cached", "load"))
    facts = f"about {cached} cached, load {load}"
    if route["pinned"] == role:
        return f": target_endpoint of the request ({facts})"
    if "candidates" not in side:
        only = "in turn" if route["policy"] == "round_robin" else "the only candidate"
        return f": {only} ({facts})"
    by, candidates = side.get("chosen_by", route["policy"]), f"{side['candidates']} candidates"
    if "cost" not in side:
        return f": chosen by {by}, {candidates} ({facts})"
    missed = f", because {side['instead_of']} {side['because']}" if "instead_of" in side else ""
    return (
        f": {by} cost {side['cost']:g}, next best {side['next_best']} "
        f"{side['next_cost']:g}, {candidates}{missed} ({facts})"
    )


def _timeline(story: Story) -> list[str]:
    """Lines with the slices of the request, indented by depth."""
    slices = slices_of(story, story["router"])
    depths: list[int] = []
    for part in slices:
        depths.append(0 if part.parent < 0 else depths[part.parent] + 1)
    lines = [f"{'start':>11} {'duration':>11}  {'process':<12} step"]
    for part, depth in zip(slices, depths, strict=True):
        took = _ms(part.end - part.start)
        indent = "  " * depth
        lines.append(f"{_ms(part.start):>11} {took:>11}  {part.process:<12} {indent}{part.name}")
    return lines


# --------------------------------------------------------------------------- trace file


def trace_file(stories: list[Story], now: float) -> dict[str, Any]:
    """Return stories as a file that ui.perfetto.dev and chrome://tracing open.

    The format is Chrome's Trace Event Format: complete events (``ph`` X) with microseconds, and
    metadata events (``ph`` M) with names. A process of the cluster is a process of the trace, and
    a request is a thread in each, so that slices of one thread nest. ``now``: Unix time in seconds
    of the stories' ``age_s``.
    """
    events: list[dict[str, Any]] = []
    pids: dict[str, int] = {}
    for number, story in enumerate(stories):
        arrived = (now - float(story["age_s"])) * 1e6
        threads: dict[tuple[int, int], str] = {}
        for part in slices_of(story, story["router"]):
            pid = pids.setdefault(part.process, len(pids) + 1)
            beside = part.name == _BESIDE
            tid = 2 * number + 1 + beside
            threads[pid, tid] = story["request_id"] + (" transfer" if beside else "")
            name = f"request {story['request_id']}" if part.parent < 0 else part.name
            details: dict[str, Any] = dict(part.details)
            if part.parent < 0:
                details |= _request_facts(story)
            if part.error:
                details["error"] = part.error
            events.append(
                {
                    "name": name,
                    "cat": "request",
                    "ph": "X",
                    "ts": round(arrived + part.start * 1e6, 3),
                    "dur": round((part.end - part.start) * 1e6, 3),
                    "pid": pid,
                    "tid": tid,
                    "args": details,
                }
            )
        for (pid, tid), shown in threads.items():
            events.append(_name_event("thread_name", shown, pid, tid))
    events += [_name_event("process_name", name, pid, 0) for name, pid in pids.items()]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name_event(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _request_facts(story: Story) -> dict[str, Any]:
    names = (
        "request", "client", "gateway", "state", "finish_reason", "code", "message",
        "prompt_tokens", "cached_tokens", "new_tokens", "queue_s", "ttft_s", "itl_s",
    )  # fmt: skip
    return {name: story[name] for name in names if story[name] not in (None, "")}
