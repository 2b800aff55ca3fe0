"""What calibration requests show of a running cluster, and the service model that fits them. Pure.

Steps of an engine alone have the right proportions, but a worker's take longer: between them it
sends tokens, and client, router and other workers use the same cores and memory. So the parts of
:class:`.service.ServiceModel` are measured alone and scaled by what a small cluster shows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import msgspec

from baton.loadgen.statistics import Record

from .fit import least_squares
from .service import ServiceModel, least
from .spread import Spread, Spreads, deviation, multiples, seconds

Key = TypeVar("Key")
_PROMPT = ("prefill_s", "chunk_s", "prefill_token_s", "prefill_pair_s")
_STREAM = ("decode_s", "decode_sequence_s", "decode_token_s", "hidden_s")


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that did not wait: the seconds to its first token at the client.

    ``others``: share of this time in which the other worker of the host computed.
    """

    tokens: int
    seconds: float
    others: float = 0.0


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds between tokens of ``rows`` streams with ``context`` tokens altogether."""

    rows: int
    context: float
    gaps: Sequence[float]
    others: float = 0.0

    @property
    def seconds(self) -> float:
        """The mean."""
        return statistics.mean(self.gaps)


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds by which the first gap of a stream is longer than its others."""

    tokens: int
    seconds: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What the calibration requests of one or more clusters took."""

    prompts: Sequence[Prompt]
    streams: Sequence[Stream]
    handoffs: Sequence[Handoff]

    def __add__(self, other: Calibration) -> Calibration:
        return Calibration(
            prompts=[*self.prompts, *other.prompts],
            streams=[*self.streams, *other.streams],
            handoffs=[*self.handoffs, *other.handoffs],
        )


NOTHING = Calibration(prompts=[], streams=[], handoffs=[])


class Adapted(msgspec.Struct, frozen=True, kw_only=True):
    """A service model, and how it differs from that of the engine alone.

    ``prefill``, ``decode``: how many times as long steps with and without prompts take. ``error``:
    the mean relative error of what the model says of the calibration requests.
    """

    service: ServiceModel
    prefill: float
    decode: float
    error: float

    def lines(self) -> list[str]:
        """Return the learned numbers as text."""
        one = self.service
        beside = f"{1 + one.prefill_beside:.2f} x and {1 + one.decode_beside:.2f} x"
        way, handoff = f"{1e3 * one.hop_s:.1f} ms", f"{1e3 * one.handoff_s:.1f} ms"
        steps = f"prompts take {self.prefill:.2f} x and tokens {self.decode:.2f} x"
        found = one.spreads
        tails = [
            max(part, default=1) for part in (found.prefill, found.decode, found.decode_beside)
        ]
        return [
            f"calibrated in a running cluster: {steps} the time of the engine alone;",
            f"beside a busy worker {beside} that; {way} to a worker and back; {handoff} a handoff;",
            "the slowest of 100 prompts takes {:.2f} x the mean; of 100 tokens {:.2f} x, and "
            "beside a busy worker {:.2f} x".format(*tails),
        ]


def adapted(alone: ServiceModel, seen: Calibration, cores: int, chunk: int = 0) -> Adapted:
    """Return the model of a cluster from that of its engine alone.

    ``cores``: workers of the host that can compute at once; 0: each has its own host.
    ``chunk``: prompt tokens of a step of the calibrated prefill worker (0: the whole prompt). Times
    of equal requests are averaged first: a stall is a part of what a cluster takes. Raises
    ValueError without prompts and streams alone.
    """
    prompts = _means((p.tokens, p.seconds) for p in seen.prompts if not p.others)
    expected = [(1.0, alone.prefill(tokens, 0, chunk)) for tokens in prompts]
    streams = [one for one in seen.streams if not one.others]
    if not prompts or not streams:
        raise ValueError("a calibration needs prompts and streams that were alone")
    hop, prefill = least_squares(expected, list(prompts.values()))
    if not prefill or len(prompts) == 1:  # the times do not grow, so they cannot be divided
        hop, (prefill,) = 0.0, least_squares([(work,) for _, work in expected], [*prompts.values()])
    decode = math.fsum(one.seconds for one in streams)
    decode /= math.fsum(alone.step(one.rows, one.context) for one in streams)
    service = replace(_scaled(alone, prefill, decode), hop_s=hop, cores=cores)
    token_s = service.kv_token_bytes / service.handoff_rate
    handoffs = [one.seconds - one.tokens * token_s for one in seen.handoffs]
    service = replace(
        service,
        handoff_s=max(0.0, statistics.mean(handoffs)) if handoffs else 0.0,
        prefill_beside=_beside(
            [(p.seconds - hop, service.prefill(p.tokens, 0, chunk), p.others) for p in seen.prompts]
        ),
        decode_beside=_beside(
            [(s.seconds, service.step(s.rows, s.context), s.others) for s in seen.streams]
        ),
    )
    error = _error(service, seen, chunk)
    service = replace(service, spreads=_spreads(service, seen, chunk))
    return Adapted(service=service, prefill=prefill, decode=decode, error=error)


def alone_seen(record: Record) -> Calibration:
    """Return what a request shows that had the cluster for itself."""
    ttft, pause = record.ttft, gaps([record])
    if ttft is None or not pause:
        return NOTHING
    first = record.stamps[1][0] - record.stamps[0][0]
    return Calibration(
        prompts=[Prompt(tokens=record.prompt_tokens, seconds=ttft)],
        streams=[Stream(rows=1, context=_context([record]), gaps=pause)],
        handoffs=[Handoff(tokens=record.prompt_tokens, seconds=first - statistics.mean(pause))],
    )


def together_seen(records: Sequence[Record]) -> Calibration:
    """Return what streams show that one worker had at once."""
    pause = gaps(records)
    if not pause:
        return NOTHING
    stream = Stream(rows=len(records), context=_context(records), gaps=pause)
    return Calibration(prompts=[], streams=[stream], handoffs=[])


def beside_seen(stream: Record, prompts: Sequence[Record]) -> Calibration:
    """Return what a stream and prompts of one token show that two workers computed at once."""
    if len(stream.stamps) < 2:
        return NOTHING
    since, until = stream.stamps[0][0], stream.stamps[-1][0]
    inside = [one for one in prompts if one.sent >= since and one.ended <= until]
    busy = [one for one in inside if one.ttft is not None]
    if not busy:
        return NOTHING
    since, until = busy[0].sent, busy[-1].ended
    pause = gaps([stream], since, until)
    share = math.fsum(one.ttft or 0.0 for one in busy) / (until - since)
    found = [Prompt(tokens=one.prompt_tokens, seconds=one.ttft or 0.0, others=1.0) for one in busy]
    streams = []
    if pause:
        context = _context([stream])
        streams = [Stream(rows=1, context=context, gaps=pause, others=min(1.0, share))]
    return Calibration(prompts=found, streams=streams, handoffs=[])


def gaps(
    records: Sequence[Record], since: float = -math.inf, until: float = math.inf
) -> list[float]:
    """Return the seconds between tokens while all of the streams run; empty for too few.

    The first token of each is left out, because its gap has the handoff. Tokens of one message are
    0 apart.
    """
    if any(len(one.stamps) < 3 for one in records):
        return []
    since = max(since, *(one.stamps[1][0] for one in records))
    until = min(until, *(one.stamps[-1][0] for one in records))
    found: list[float] = []
    for one in records:
        inside = [stamp for stamp in one.stamps if since <= stamp[0] <= until]
        for (before, _), (at, count) in pairwise(inside):
            found += [at - before, *[0.0] * (count - 1)]
    return found


def _context(records: Iterable[Record]) -> float:
    """Return the tokens that the steps of streams attend to, in the mean."""
    return math.fsum(one.prompt_tokens + one.tokens / 2 for one in records)


def _scaled(alone: ServiceModel, prefill: float, decode: float) -> ServiceModel:
    factors = {
        **dict.fromkeys(_PROMPT, prefill),
        **dict.fromkeys(_STREAM, decode),
    }
    parts = {name: max(least(name), by * getattr(alone, name)) for name, by in factors.items()}
    return replace(alone, **parts)


def _means(found: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """Return the mean of the values of each key."""
    by: dict[Key, list[float]] = {}
    for key, value in found:
        by.setdefault(key, []).append(value)
    return {key: statistics.mean(values) for key, values in by.items()}


def _beside(found: Iterable[tuple[float, float, float]]) -> float:
    """Return the part by which another worker prolongs steps.

    ``found``: seconds, those without the other worker, and the share in which it computed.
    """
    beside = [one for one in found if one[2]]
    longer = math.fsum(seconds - alone for seconds, alone, _ in beside)
    return (
        max(0.0, longer / math.fsum(alone * share for _, alone, share in beside)) if beside else 0.0
    )


def _spreads(service: ServiceModel, seen: Calibration, chunk: int) -> Spreads:
    """Return how the calibration requests differ from the model.

    The shortest prompts show the spread of the way to a worker and back, the longest ones that of
    the steps, less that of the way. The gap with a handoff has a step as well.
    """
    lengths = [p.tokens for p in seen.prompts]
    short, long = min(lengths), max(lengths)

    def work(prompt: Prompt) -> float:
        beside = 1 + service.prefill_beside * prompt.others
        return beside * service.prefill(prompt.tokens, 0, chunk)

    ways = [p.seconds - work(p) for p in seen.prompts if p.tokens == short and not p.others]
    hop = seconds(ways) if service.hop_s else ()

    def prompts(beside: bool) -> Spread:
        chosen = [p for p in seen.prompts if p.tokens == long and bool(p.others) == beside]
        found = [max(0.0, p.seconds - service.hop_s) / work(p) for p in chosen]
        wide = deviation(multiples(found)) * statistics.mean(map(work, chosen)) if chosen else 0.0
        return multiples(found, min(1.0, deviation(hop) / wide)) if wide else ()

    def streams(beside: bool) -> Spread:
        return multiples(
            gap / service.step(s.rows, s.context) / (1 + service.decode_beside * s.others)
            for s in seen.streams
            if bool(s.others) == beside
            for gap in s.gaps
        )

    decode = streams(beside=False)
    token_s = service.kv_token_bytes / service.handoff_rate
    moved = [one.seconds - one.tokens * token_s for one in seen.handoffs]
    wide = deviation(seconds(moved))
    step = deviation(decode) * service.step(1, 0.0)
    return Spreads(
        hop_s=hop,
        handoff_s=seconds(moved, min(1.0, step / wide)) if wide else (),
        prefill=prompts(beside=False),
        decode=decode,
        prefill_beside=prompts(beside=True),
        decode_beside=streams(beside=True),
    )


def _error(service: ServiceModel, seen: Calibration, chunk: int) -> float:
    """Return the mean relative error of the model for each kind of calibration request."""
    multiples = []
    for prompt in seen.prompts:
        work = service.prefill(prompt.tokens, 0, chunk) * (
            1 + service.prefill_beside * prompt.others
        )
        kind = "prompt", prompt.tokens, prompt.others > 0
        multiples.append((kind, prompt.seconds / (service.hop_s + work)))
    for stream in seen.streams:
        step = service.step(stream.rows, stream.context)
        step *= 1 + service.decode_beside * stream.others
        multiples.append((("stream", stream.rows, stream.others > 0), stream.seconds / step))
    return statistics.mean(abs(one - 1) for one in _means(multiples).values())
