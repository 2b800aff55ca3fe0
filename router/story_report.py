"""Stories as plain JSON values, for ``baton trace``, the dashboard and the request log.

All times are seconds after the request's arrival at this router, by this router's clock. The times
of a prefill worker are placed between the Assign and the handoff's report: both messages are
assumed to take equally long. Those of a decode worker end with the terminal's arrival.
"""

from __future__ import annotations

from functools import lru_cache
from math import floor

from baton.extend.points import Ended
from baton.proto.wire.messages import WorkerTimes

from .records import NEVER, Chosen, Preference
from .stories import Story, StoryAttempt, StoryHandoff

Record = dict[str, object]
CLIENT_PREFIX = b"client-"


def story_record(story: Story, policy: str, now: float) -> Record:
    """Return a story as JSON values; ``policy``: name of the router's policy."""
    last = story.attempts[-1] if story.attempts else None
    queued, ttft, itl = story.latencies()
    return {
        "request_id": story.request_id,
        "request": story.key.hex(),
        "client": _client(story.identity),
        "gateway": story.gateway,
        "traceparent": story.traceparent,
        "state": story.state,
        "task": story.task,
        "resumed": story.resumed,
        "finish_reason": story.status,
        "code": story.code,
        "message": story.message or (last.cause if last is not None else ""),
        "age_s": _rounded(now - story.began),
        "seconds": _rounded(story.ended - story.began),
        "queue_s": _rounded(queued),
        "ttft_s": _rounded(ttft),
        "itl_s": _rounded(itl),
        "slo_ttft_s": story.slo_ttft or None,
        "slo_itl_s": story.slo_itl or None,
        "first_token_s": _after(story, story.first_token),
        "last_token_s": _after(story, story.last_token),
        "prompt_tokens": story.prompt_tokens,
        "cached_tokens": story.cached_tokens,
        "new_tokens": story.new_tokens,
        "attempts": [
            _attempt(story, attempt, policy)
            for attempt in story.attempts
            if attempt.prefill or attempt.decode
        ],
    }


class RequestLine(Ended, frozen=True, omit_defaults=True, gc=False):
    """The fields of a request's log line; unknown fields are left out."""

    request: str = ""
    client: str = ""
    gateway: str = ""
    message: str = ""


def request_line(story: Story) -> RequestLine:
    """Return a request's log line; it has neither prompt nor tokens."""
    attempts = story.attempts
    placed = 0
    for one in attempts:  # a comprehension is a call
        if one.prefill or one.decode:
            placed += 1
    prefill = decode = transport = cause = way = ""
    if attempts:
        last = attempts[-1]
        prefill, cause = last.prefill, last.cause
        if last.report is not None:
            transport = last.report.transport
        way = _way_taken(last, decoded=story.decoded)
        if way != "prefill":
            decode = last.decode
    queued, ttft, itl = story.latencies()
    # As _rounded, whose calls would take a fifth of this function.
    return RequestLine(  # by position, since Python puts so many names into a dict
        story.request_id, story.state, way, story.status, story.code,
        story.prompt_tokens, story.cached_tokens, story.new_tokens,
        floor((story.ended - story.began) * 1e6 + 0.5) / 1e6,
        None if queued is None else floor(queued * 1e6 + 0.5) / 1e6,
        None if ttft is None else floor(ttft * 1e6 + 0.5) / 1e6,
        None if itl is None else floor(itl * 1e6 + 0.5) / 1e6,
        story.slo_ttft or None, story.slo_itl or None,
        prefill, decode, transport, placed,
        story.key.hex(), _client(story.identity), story.gateway, story.message or cause,
    )  # fmt: skip


def _way_taken(last: StoryAttempt, *, decoded: bool) -> str:
    """Return ``local``, ``handed_over`` or ``prefill``; empty: none, or another router chose it."""
    if not last.prefill:
        return "local" if last.decode and last.route is not None else ""
    return "handed_over" if last.report is not None or decoded else "prefill"


def assign_delay(attempt: StoryAttempt, times: WorkerTimes | None, ended: float) -> float:
    """Return the estimated seconds from the Assign's sending to its arrival.

    ``ended``: when the worker's last message about the attempt arrived.
    """
    if times is None or times.ended is None or attempt.assigned_at == NEVER:
        return 0.0
    return max(0.0, ended - attempt.assigned_at - times.ended) / 2


def _attempt(story: Story, attempt: StoryAttempt, policy: str) -> Record:
    is_last = attempt is story.attempts[-1]
    times, report = story.prefill_times(attempt), attempt.report
    ended = story.ended if is_last else attempt.ended_at
    heard = attempt.reported_at if report is not None else ended
    record: Record = {
        "number": attempt.number,
        "prefill": attempt.prefill,
        "decode": attempt.decode,
        "assigned_s": _after(story, attempt.assigned_at),
        "ended_s": _after(story, ended),
        "cause": attempt.cause,
        "route": _route(attempt, policy),
        "prefill_times": None,
        "decode_times": None,
        "handoff": None,
    }
    if times is not None and attempt.assigned_at != NEVER:
        start = attempt.assigned_at + assign_delay(attempt, times, heard) - story.began
        record["prefill_times"] = _prefill(times, start)
    there = story.decode_times if is_last else None
    if there is not None and there.ended is not None:
        record["decode_times"] = _decode(there, ended - there.ended - story.began)
    if report is not None:
        record["handoff"] = _handoff(report, attempt.reported_at - story.began)
    return record


def _prefill(times: WorkerTimes, start: float) -> Record:
    steps = {
        "started_s": times.started,
        "granted_s": times.granted,
        "computing_s": times.computing,
        "sending_s": times.sending,
        "computed_s": times.computed,
        "ended_s": times.ended,
    }
    shown = {name: _rounded(None if at is None else start + at) for name, at in steps.items()}
    return {"received_s": _rounded(start), **shown, "refusals": times.refusals}


def _decode(times: WorkerTimes, start: float) -> Record:
    steps = {
        "computing_s": times.computing,
        "computed_s": times.computed,
        "ended_s": times.ended,
    }
    shown = {name: _rounded(None if at is None else start + at) for name, at in steps.items()}
    return {"taken_over_s": _rounded(start), **shown, "preemptions": times.preemptions}


def _handoff(report: StoryHandoff, reported: float) -> Record:
    return {
        "transport": report.transport,
        "bytes_sent": report.bytes_sent,
        "bytes_received": report.bytes_received,
        "blocks": report.blocks,
        "cached_tokens": report.cached_tokens,
        "frames": report.frames,
        "resent_frames": report.resent_frames,
        "seconds": _rounded(report.seconds),
        "reported_s": _rounded(reported),
    }


def _route(attempt: StoryAttempt, policy: str) -> Record | None:
    if attempt.route is None:
        return None
    pinned, load, cached, margin, decode_load, decode_cached, decode_margin, why = attempt.route
    return {
        "policy": policy,
        "way": _way(attempt),
        "why": why,
        "pinned": pinned,
        "prefill": _side(load, cached, margin) if attempt.prefill else None,
        "decode": _side(decode_load, decode_cached, decode_margin) if attempt.decode else None,
    }


def _way(attempt: StoryAttempt) -> str:
    if not attempt.prefill:
        return "local"
    return "handoff" if attempt.decode else "prefill"  # alone, for embeddings


def _side(load: int, cached: int, why: Preference) -> Record:
    """Load and probably cached tokens of a chosen worker, and why it was chosen, if known."""
    found: Record = {"load_tokens": load, "cached_tokens": cached}
    margin = why.margin if isinstance(why, Chosen) else why
    if isinstance(why, Chosen):
        found |= {"chosen_by": why.by, "candidates": why.candidates}
        if why.instead_of:
            found |= {"instead_of": why.instead_of, "because": why.because}
    if margin is not None:
        cost, rival, rival_cost, candidates = margin
        found |= {
            "cost": round(float(cost), 3),
            "next_best": rival,
            "next_cost": round(float(rival_cost), 3),
            "candidates": candidates,
        }
    return found


@lru_cache(maxsize=1024)
def _client(identity: bytes) -> str:
    """Return a connection's routing id in hexadecimal, without the prefix of native clients."""
    return identity.removeprefix(CLIENT_PREFIX).hex()


def _after(story: Story, when: float) -> float | None:
    return None if when == NEVER else _rounded(when - story.began)


def _rounded(seconds: float | None) -> float | None:
    """Round to microseconds, in a quarter of the time of ``round(seconds, 6)``."""
    return None if seconds is None else floor(seconds * 1e6 + 0.5) / 1e6
