"""Latencies as pictures in SVG: over the load, or by percentile. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from .statistics import Summary, percentile

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 720, 220, 70, 130, 40, 50
_COLORS = ("#3b7dd8", "#d8663b", "#3a9a5b", "#a05cc9", "#c9a227", "#2aa5a5", "#c94f7c", "#7f7f7f")
_MARKS = (0.0, 50.0, 90.0, 95.0, 99.0, 99.9, 99.99)
"""Percentiles that are named below a picture of tails."""
_LEAST_MS = 0.01
_STYLE = """
svg { background: #fff; color: #222; font: 13px system-ui, sans-serif }
@media (prefers-color-scheme: dark) { svg { background: #16181c; color: #ddd } }
text { fill: currentColor } .grid { stroke: currentColor; opacity: .18 }
.limit { stroke: currentColor; stroke-dasharray: 5 4; opacity: .7 }
polyline { fill: none; stroke-width: 2 }
""".strip()
Line = tuple[str, list[tuple[float, float]]]


def picture(
    summaries: Sequence[Summary],
    unit: str,
    slo_ttft: float = math.inf,
    slo_itl: float = math.inf,
    title: str = "",
) -> str:
    """Return the SVG of p50 and p99 over the load: of TTFT and ITL, or of embeddings' latency."""
    runs = sorted(summaries, key=lambda one: one.load)
    shown = [("TTFT", "ttft", slo_ttft), ("ITL", "itl", slo_itl)]
    if any(one.texts is not None for one in runs):
        shown = [("latency", "end_to_end", slo_ttft)]
    panels = [
        _panel(f"{name} in ms", _lines(runs, field), limit * 1000, TOP + at * (PANEL + GAP))
        for at, (name, field, limit) in enumerate(shown)
    ]
    height = TOP + len(shown) * (PANEL + GAP)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
            f"<style>{_STYLE}</style>",
            f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>',
            *panels,
            _label((LEFT + WIDTH - RIGHT) / 2, height - 8, unit, "middle"),
            "</svg>",
            "",
        ]
    )


def _lines(runs: Sequence[Summary], field: str) -> list[Line]:
    lines = []
    for level in ("p50", "p99"):
        values = [(one.load, getattr(getattr(one, field), level)) for one in runs]
        lines.append((level, [(load, 1000 * value) for load, value in values if value is not None]))
    return lines


def _panel(title: str, lines: Sequence[Line], limit: float, top: int) -> str:
    points = [point for _, found in lines for point in found]
    loads = ticks(0.0, max((x for x, _ in points), default=1.0))
    shown = [y for _, y in points] + ([limit] if math.isfinite(limit) else [])
    values = ticks(0.0, max(shown, default=1.0))

    def x(load: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * load / loads[-1]

    def y(value: float) -> float:
        return top + PANEL - (PANEL - 24) * value / values[-1]

    parts = [f'<text x="{LEFT}" y="{top + 12}">{escape(title)}</text>']
    for value in values:
        parts.append(_rule(LEFT, y(value), WIDTH - RIGHT, y(value), "grid"))
        parts.append(_label(LEFT - 8, y(value) + 4, f"{value:g}", "end"))
    for load in loads:
        parts.append(_rule(x(load), y(0), x(load), y(values[-1]), "grid"))
        parts.append(_label(x(load), top + PANEL + 18, f"{load:g}", "middle"))
    if math.isfinite(limit):
        parts.append(_rule(LEFT, y(limit), WIDTH - RIGHT, y(limit), "limit"))
        parts.append(_label(WIDTH - RIGHT + 8, y(limit) + 4, "limit", "start"))
    for (name, found), color in zip(lines, _COLORS, strict=False):
        path = " ".join(f"{x(load):.1f},{y(value):.1f}" for load, value in found)
        parts.append(f'<polyline points="{path}" stroke="{color}"/>')
        parts += [
            f'<circle cx="{x(load):.1f}" cy="{y(value):.1f}" r="3" fill="{color}"/>'
            for load, value in found
        ]
        if found:
            load, value = found[-1]
            parts.append(_label(x(load) + 8, y(value) - 6, name, "start"))
    return "\n".join(parts)


def ticks(least: float, most: float, about: int = 5) -> list[float]:
    """Return round values from ``least`` to the first round value at or above ``most``."""
    span = max(most - least, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(power * one for one in (1, 2, 5, 10) if span / (power * one) <= about)
    count = math.ceil(round(span / step, 9))
    return [round(least + step * number, 12) for number in range(count + 1)]


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


# --------------------------------------------------------------------------- by percentile


def tails(
    values: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    slo_ttft: float = math.inf,
    slo_itl: float = math.inf,
    title: str = "",
) -> str:
    """Return the SVG of TTFT and ITL by percentile, a curve per name.

    ``values``: all TTFT and all ITL in seconds. The percentiles are stretched towards 100, and the
    latencies are logarithmic, because the curves of interest part in the tail.
    """
    panels = []
    for at, (name, limit) in enumerate((("TTFT", slo_ttft), ("ITL", slo_itl))):
        curves = [(key, sorted(found[at])) for key, found in values.items()]
        panels.append(_tail_panel(f"{name} in ms", curves, limit, TOP + at * (PANEL + GAP)))
    height = TOP + 2 * (PANEL + GAP)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
            f"<style>{_STYLE}</style>",
            f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>',
            *panels,
            _label((LEFT + WIDTH - RIGHT) / 2, height - 8, "percentile", "middle"),
            "</svg>",
            "",
        ]
    )


def _tail_panel(
    title: str, curves: Sequence[tuple[str, list[float]]], limit: float, top: int
) -> str:
    levels = _levels(max((len(found) for _, found in curves), default=0))
    lines = [
        (name, [(level, max(_LEAST_MS, 1000 * percentile(found, level))) for level in levels])
        for name, found in curves
        if found
    ]
    shown = [y for _, points in lines for _, y in points]
    shown += [limit * 1000] if math.isfinite(limit) else []
    rules = _decades(min(shown, default=1.0), max(shown, default=1.0))

    def x(level: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * _stretched(level) / _stretched(levels[-1])

    def y(value: float) -> float:
        low, high = math.log(rules[0]), math.log(rules[-1])
        return top + PANEL - (PANEL - 24) * (math.log(value) - low) / (high - low)

    parts = [f'<text x="{LEFT}" y="{top + 12}">{escape(title)}</text>']
    for value in rules:
        parts.append(_rule(LEFT, y(value), WIDTH - RIGHT, y(value), "grid"))
        parts.append(_label(LEFT - 8, y(value) + 4, f"{value:g}", "end"))
    for level in (one for one in _MARKS if one <= levels[-1]):
        parts.append(_rule(x(level), y(rules[0]), x(level), y(rules[-1]), "grid"))
        parts.append(_label(x(level), top + PANEL + 18, f"{level:g}", "middle"))
    if math.isfinite(limit):
        at = y(limit * 1000)
        parts.append(_rule(LEFT, at, WIDTH - RIGHT, at, "limit"))
    for at, (name, points) in enumerate(lines):
        color = _COLORS[at % len(_COLORS)]
        path = " ".join(f"{x(level):.1f},{y(value):.1f}" for level, value in points)
        parts.append(f'<polyline points="{path}" stroke="{color}"/>')
        place = top + 30 + 16 * at
        parts.append(
            f'<rect x="{WIDTH - RIGHT + 8}" y="{place - 9}" width="10" height="10" fill="{color}"/>'
        )
        parts.append(_label(WIDTH - RIGHT + 22, place, name, "start"))
    return "\n".join(parts)


def _levels(count: int) -> list[float]:
    """Return percentiles to draw, up to the highest that ``count`` values can show."""
    highest = 100 * (1 - 1 / max(count, 2))
    steps = 120
    last = _stretched(highest)
    return [100 * (1 - 10 ** (-last * step / steps)) for step in range(steps + 1)]


def _stretched(level: float) -> float:
    """Return the place of a percentile: 90, 99 and 99.9 are equally far apart."""
    return -math.log10(max(1e-9, 1 - level / 100))


def _decades(least: float, most: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten, from at most ``least`` to at least ``most``."""
    least, most = max(least, _LEAST_MS), max(most, _LEAST_MS)
    power = math.floor(math.log10(least))
    found = [factor * 10.0**one for one in range(power, power + 12) for factor in (1, 2, 5)]
    low = max(at for at, value in enumerate(found) if value <= least * 1.000001)
    high = next((at for at, value in enumerate(found) if value >= most), len(found) - 1)
    return found[low : max(high, low + 1) + 1]
