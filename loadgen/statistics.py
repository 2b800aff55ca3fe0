"""Latencies of a run from the times of its tokens, as tables. Pure.

Definitions, which docs/benchmarks.md publishes: TTFT is from a request's arrival to its first
streamed token; the arrival is the scheduled time in an open loop, and the time of sending in a
closed one. The first gap is from the first to the second token. ITL has every gap between two
tokens of all requests. TPOT is (end to end - TTFT) / (tokens - 1) of one request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

OK, CANCELLED, REFUSED, FAILED = "ok", "cancelled", "refused", "failed"
OUTCOMES = (OK, CANCELLED, REFUSED, FAILED)
LEVELS = (50.0, 90.0, 95.0, 99.0)
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_ROWS = (
    ("TTFT", "ttft"),
    ("first gap", "first_gap"),
    ("ITL", "itl"),
    ("TPOT", "tpot"),
    ("end to end", "end_to_end"),
)
_EMBED_ROWS = (("latency", "end_to_end"),)
SHARES = (0.9, 0.99)
LATE_S = 0.01
"""A generator that sends later than this at p99 measures itself."""


@dataclass(slots=True)
class Record:
    """One request of a run; times in seconds of one clock.

    ``arrived``: when it should be sent. ``sent``: when it was. ``stamps``: arrival of each message
    with tokens, and their number. ``tokens``: of the answer, as the server counts them. ``texts``:
    of a request for embeddings, which has one stamp without tokens; 0: it generates. ``answer``:
    the token ids, if the target keeps them. ``prefill``, ``decode``: ids of the workers, if known.
    """

    arrived: float
    sent: float = 0.0
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    texts: int = 0
    stamps: list[tuple[float, int]] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    prefill: str = ""
    decode: str = ""
    outcome: str = FAILED
    error: str = ""

    def stamp(self, now: float, tokens: int) -> None:
        """Note the arrival of tokens."""
        self.stamps.append((now, tokens))
        self.tokens += tokens

    @property
    def ttft(self) -> float | None:
        """Seconds from the arrival to the first token."""
        return self.stamps[0][0] - self.arrived if self.stamps else None

    @property
    def end_to_end(self) -> float | None:
        """Seconds from the arrival to the last token."""
        return self.stamps[-1][0] - self.arrived if self.stamps else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for one token."""
        if self.tokens < 2 or len(self.stamps) < 2:
            return None
        return (self.stamps[-1][0] - self.stamps[0][0]) / (self.tokens - 1)

    def gaps(self) -> list[float]:
        """Seconds before each token after the first; tokens of one message are 0 apart."""
        found: list[float] = []
        before: float | None = None
        for at, tokens in self.stamps:
            found += [] if before is None else [at - before]
            found += [0.0] * (tokens - 1)
            before = at
        return found

    def meets(self, slo_ttft: float, slo_itl: float) -> bool:
        """Whether the whole answer came with TTFT and TPOT within these limits."""
        first, per_token = self.ttft, self.tpot
        if self.outcome != OK or first is None or first > slo_ttft:
            return False
        return per_token is None or per_token <= slo_itl


def percentile(ordered: Sequence[float], level: float) -> float:
    """Return a percentile of sorted values, interpolated between neighbours; ``level`` 0 to 100."""
    place = (len(ordered) - 1) * level / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. Without a value, all but ``count`` is None."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution:
        """Return the distribution of the values that are not None."""
        ordered = sorted(value for value in values if value is not None)
        if not ordered:
            return cls()
        p50, p90, p95, p99 = (percentile(ordered, level) for level in LEVELS)
        mean = math.fsum(ordered) / len(ordered)
        return cls(
            count=len(ordered), mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=ordered[-1]
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    ``load``: requests per second of an open loop, or requests at a time of a closed one.
    ``seconds``: from the first arrival to the last end. ``attained``: share of all requests that
    meet both limits; cancelled, refused and failed requests do not. ``goodput``: those per second.
    ``lag``: seconds by which the generator itself sent late. ``texts``: embedded by requests that
    ended well; None: the requests generate. TTFT of a request for embeddings is its whole latency.
    """

    load: float
    seconds: float
    requests: int
    outcomes: dict[str, int]
    request_rate: float
    texts: int | None
    text_rate: float
    prompt_tokens: int
    prompt_rate: float
    cached_tokens: int
    output_tokens: int
    output_rate: float
    attained: float
    goodput: float
    ttft: Distribution
    first_gap: Distribution
    itl: Distribution
    tpot: Distribution
    end_to_end: Distribution
    lag: Distribution
    errors: dict[str, int]


def summarize(
    records: Sequence[Record],
    load: float,
    slo_ttft: float = math.inf,
    slo_itl: float = math.inf,
) -> Summary:
    """Return the summary of a run. Latencies count requests that ended well, or were cancelled.

    Tokens that a cancelled request got before its end were streamed to a user like others.
    """
    seen = [one for one in records if one.outcome in (OK, CANCELLED)]
    ok = [one for one in records if one.outcome == OK]
    start = min((one.arrived for one in records), default=0.0)
    seconds = max((one.ended for one in records), default=0.0) - start
    good = sum(one.meets(slo_ttft, slo_itl) for one in records)
    gaps = [one.gaps() for one in seen]
    tokens = sum(one.tokens for one in records)
    prompts = sum(one.prompt_tokens for one in seen if one.stamps or not one.texts)
    texts = sum(one.texts for one in ok)
    errors: dict[str, int] = {}
    for one in records:
        if one.error:
            errors[one.error] = errors.get(one.error, 0) + 1
    return Summary(
        load=load,
        seconds=seconds,
        requests=len(records),
        outcomes={name: sum(one.outcome == name for one in records) for name in OUTCOMES},
        request_rate=_rate(len(ok), seconds),
        texts=texts if any(one.texts for one in records) else None,
        text_rate=_rate(texts, seconds),
        prompt_tokens=prompts,
        prompt_rate=_rate(prompts, seconds),
        cached_tokens=sum(one.cached_tokens for one in seen),
        output_tokens=tokens,
        output_rate=_rate(tokens, seconds),
        attained=good / len(records) if records else 0.0,
        goodput=_rate(good, seconds),
        ttft=Distribution.of(one.ttft for one in seen),
        first_gap=Distribution.of(found[0] for found in gaps if found),
        itl=Distribution.of(gap for found in gaps for gap in found),
        tpot=Distribution.of(one.tpot for one in ok),
        end_to_end=Distribution.of(one.end_to_end for one in ok),
        lag=Distribution.of(one.sent - one.arrived for one in records),
        errors=errors,
    )


def _rate(number: int, seconds: float) -> float:
    return number / seconds if seconds > 0 else 0.0


def highest(summaries: Iterable[Summary], share: float) -> float | None:
    """Return the highest load at which this share of the requests met both limits, or None."""
    return max((one.load for one in summaries if one.attained >= share), default=None)


# --------------------------------------------------------------------------- tables


def table(summary: Summary, slo_ttft: float, slo_itl: float) -> list[str]:
    """Return the lines for one run."""
    lines = [f"{'ms':12}" + "".join(f"{name:>10}" for name in _COLUMNS)]
    shown = _ROWS if summary.texts is None else _EMBED_ROWS
    lines += [f"{title:12}{_values(getattr(summary, name))}" for title, name in shown]
    counts = ", ".join(
        f"{number} {name}" for name, number in summary.outcomes.items() if number or name == OK
    )
    lines.append(f"{'requests':12}{summary.requests} in {summary.seconds:.1f} s: {counts}")
    rates = f"{'rates':12}{summary.request_rate:.2f} requests/s, "
    if summary.texts is None:
        rates += f"{summary.output_rate:.1f} output tokens/s; prompts: {summary.prompt_tokens} "
        rates += f"tokens, {summary.cached_tokens} of them cached"
    else:
        rates += f"{summary.text_rate:.2f} texts/s, {summary.prompt_rate:.1f} tokens/s; "
        rates += f"{summary.texts} texts with {summary.prompt_tokens} tokens"
    lines.append(rates)
    if has_limits(slo_ttft, slo_itl):
        lines.append(f"{'goodput':12}{summary.goodput:.2f} requests/s; {_share(summary)}")
    lines += [f"{FAILED:12}{number} x {text}" for text, number in summary.errors.items()]
    return lines


def sweep(summaries: Sequence[Summary], unit: str, slo_ttft: float, slo_itl: float) -> list[str]:
    """Return the lines for runs at several loads."""
    embeds = any(one.texts is not None for one in summaries)
    names = ("p50", "p99", "texts/s") if embeds else ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")
    names = ("done/s", *names, "tokens/s", "ok")
    lines = [f"{unit:>12}" + "".join(f"{name:>10}" for name in names)]
    limited = has_limits(slo_ttft, slo_itl)
    if limited:
        lines[0] += f"{'in limits':>11}"
    for one in summaries:
        shown = (one.end_to_end,) if embeds else (one.ttft, one.itl)
        cells = [f"{one.load:12g}{one.request_rate:10.2f}"]
        cells += [f"{_ms(value):>10}" for found in shown for value in (found.p50, found.p99)]
        cells += [f"{one.text_rate:10.2f}", f"{one.prompt_rate:10.1f}"] if embeds else []
        cells += [] if embeds else [f"{one.output_rate:10.1f}"]
        cells.append(f"{one.outcomes[OK] / max(1, one.requests):10.1%}")
        lines.append("".join(cells) + (f"{one.attained:11.1%}" if limited else ""))
    lines[0] += "   (latencies in ms)"
    if limited:
        lines += [_highest(summaries, unit, share) for share in SHARES]
    return lines


def _highest(summaries: Sequence[Summary], unit: str, share: float) -> str:
    found = highest(summaries, share)
    text = "none of these" if found is None else f"{found:g}"
    return f"highest {unit} with {share:.0%} of the requests in the limits: {text}"


def warning(summary: Summary) -> str:
    """Return a sentence if the generator was too slow for its own schedule, else an empty text."""
    late = summary.lag.p99 or 0.0
    if late <= LATE_S:
        return ""
    return (
        f"requests were sent up to {late * 1000:.0f} ms late (p99): this machine is too busy to "
        "generate the load, and the latencies contain that"
    )


def has_limits(slo_ttft: float, slo_itl: float) -> bool:
    """Whether any latency limit is set."""
    return not (math.isinf(slo_ttft) and math.isinf(slo_itl))


def _share(summary: Summary) -> str:
    return f"{summary.attained:.1%} of all requests are in the limits"


def _values(found: Distribution) -> str:
    return "".join(f"{_ms(getattr(found, name)):>10}" for name in _COLUMNS)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
