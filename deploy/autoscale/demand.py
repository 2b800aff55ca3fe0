"""The number of workers of each pool that the load of the last minutes needed. Pure.

**Prefill.** The arrivals of each second are recorded, and the speed of a worker is measured. From
both, the queue of N workers is simulated for every N. The result is the smallest N with which the
required share of requests would have met the TTFT target. The simulation is valid for bursts and
for steady load, and needs no rule of thumb about utilisation.

Tokens of images cost more than other tokens, because a worker encodes the images first. Workers
report the seconds for that, so the cost of these tokens is measured by itself, and a change of the
mix of prompts counts at once.

**Pictures.** Prefill workers encode the prompts of pictures. Their work is the tokens that the
last text encoder reads, with those of a negative prompt. The first of two encoders reads others,
which are no measure of it.

Decode workers compute the steps of pictures. The decode pool of a picture model is sized like the
prefill pool, by rows of steps instead of tokens: the work of a picture is the rows of a step times
the number of steps. KV blocks do not show this work, because they hold the prompt alone. A picture
may take the time of its steps and the TTFT target.

**Decode.** Two limits bound a decode worker's capacity: its KV blocks, and the target inter-token
latency (ITL), which a step must not exceed. A line fitted to measurements gives the step time for
a number of blocks. With fewer workers, steps take longer, so requests run longer and hold more
blocks. The calculation includes this feedback. Otherwise a fully loaded pool would seem able to
shrink.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from baton.worker.start_order import LATE_TURN

from .metrics import LONGEST_STEP_S, RouterSample, WorkerSample
from .settings import ScaleSettings

Values = npt.NDArray[np.float64]
LONGEST_GAP_S = 10
"""After a longer gap between observations, the history restarts: the gap cannot be filled."""
MOST_TOKENS = 10**8
"""Maximum plausible tokens between two observations."""
MOST_ROWS = 10**12
"""Maximum plausible rows of steps between two observations."""


# --------------------------------------------------------------------------- measurements over time


class History:
    """Rows of ``width`` numbers, one row per second, at most ``seconds`` rows."""

    def __init__(self, width: int, seconds: float) -> None:
        self._values = np.zeros((width, math.ceil(seconds)))
        self._known = 0
        self._at: float | None = None

    def __len__(self) -> int:
        """Number of recorded seconds."""
        return self._known

    def add(self, row: tuple[float, ...], now: float, *, amounts: bool) -> None:
        """Add a row for the time since the last call, which must be a second or more.

        ``amounts``: the values are amounts, spread evenly over that time; else current states.
        """
        seconds = 0 if self._at is None else int(now - self._at)
        if self._at is None or seconds > LONGEST_GAP_S:
            self._at, self._known = now, 0
            return
        if not seconds:
            raise ValueError("a row of less than a second")
        self._at += seconds
        size = self._values.shape[1]
        seconds = min(seconds, size)
        self._values[:, :-seconds] = self._values[:, seconds:]
        value = np.array(row, np.float64) / (seconds if amounts else 1)
        self._values[:, -seconds:] = value[:, None]
        self._known = min(size, self._known + seconds)

    def due(self, now: float) -> bool:
        """Whether a second has passed, so that :meth:`add` accepts a row."""
        return self._at is None or now - self._at >= 1

    def columns(self) -> Values:
        """Return a view, float64 ``[width, seconds]``, the latest second last."""
        return self._values[:, self._values.shape[1] - self._known :]


def growth(values: Values, ahead_s: float, most: float = 1.3) -> float:
    """Expected growth of ``values`` (one per second) over their latest mean, from 1 to ``most``.

    The second half must rise as well as the whole, because a single past step is not a trend.
    """
    half = values[len(values) // 2 :]
    return min(most, _trend(values, ahead_s), _trend(half, ahead_s))


def _trend(values: Values, ahead_s: float) -> float:
    """Extrapolate a straight line through the means of ten seconds each.

    The slope is reduced by twice its standard error, because bursts make the slope uncertain.
    """
    whole = len(values) // 10
    if whole < 6:
        return 1.0
    means = values[-10 * whole :].reshape(whole, 10).mean(axis=1)
    x = 10.0 * (np.arange(whole) - (whole - 1) / 2)
    spread = float(x @ x)
    slope = float(x @ means) / spread
    rest = means - means.mean() - slope * x
    error = math.sqrt(float(rest @ rest) / (whole - 2) / spread)
    recent = float(means[-6:].mean())
    sure = slope - 2 * error
    if sure <= 0 or recent <= 0:
        return 1.0
    return 1 + sure * (ahead_s + 30) / recent


def headroom(values: Values, share: float = 0.3, most: float = 1.5) -> float:
    """Factor by which the next burst may exceed past bursts, from 1 to ``most``.

    ``values``: one per second. A steady load reaches its peak within minutes, but the window
    contains only a few bursts of a bursty load. So the factor grows with the variation between
    minutes.
    """
    whole = len(values) // 60
    if whole < 3:
        return 1.0
    means = values[-60 * whole :].reshape(whole, 60).mean(axis=1)
    mean = float(means.mean())
    return min(most, 1 + share * float(means.std()) / mean) if mean > 0 else 1.0


def fewest(enough: Callable[[int], bool], most: int) -> int:
    """The smallest number of workers, from 1, that is enough; ``most`` if no smaller number is."""
    return 1 + bisect_left(range(1, most), x=True, key=enough)


class Deltas:
    """Growth of each counter since its last observation.

    The growth of a new counter is zero, because its value may be old. A counter that fell belongs
    to a restarted process and is treated as new.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, ...]] = {}

    def of(self, owner: Hashable, *counters: float) -> tuple[float, ...]:
        """Return the growth of ``owner``'s counters, or zeros if any counter fell."""
        last = self._last.get(owner)
        self._last[owner] = counters
        if last is None or any(b < a for a, b in zip(last, counters, strict=True)):
            return (0.0,) * len(counters)
        return tuple(b - a for a, b in zip(last, counters, strict=True))

    def keep(self, owners: set[Hashable]) -> None:
        """Drop the counters of all other owners."""
        self._last = {owner: seen for owner, seen in self._last.items() if owner in owners}


class Rate:
    """Amount per second of work. Old work fades with later work, not with time.

    So the rate is still valid after an idle night.
    """

    def __init__(self, half_life_s: float, least_s: float) -> None:
        self._half_life = half_life_s
        self._least = least_s
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Record ``seconds`` of work with the result ``amount``."""
        fade = math.exp2(-seconds / self._half_life)
        self._amount = self._amount * fade + amount
        self._seconds = self._seconds * fade + seconds

    @property
    def value(self) -> float | None:
        """The rate, or None before enough work was recorded."""
        if self._seconds < self._least or self._amount <= 0:
            return None
        return self._amount / self._seconds


# --------------------------------------------------------------------------- prefill


class QueueDemand:
    """History of arrivals, the speed of a worker, and the number of workers for both.

    ``late_last``: work that would be late anyway is computed last; else work waits in the order of
    arrival.
    """

    late_last = True

    def __init__(self, settings: ScaleSettings) -> None:
        self._settings = settings
        self._history = History(3, settings.window)  # tokens or rows, tokens of images, requests
        self._deltas = Deltas()
        self._rate = Rate(half_life_s=120.0, least_s=1.0)
        self._encoding = Rate(half_life_s=120.0, least_s=1.0)
        self._arrived = self._images = self._requests = 0.0  # since the last row
        self._waiting = self._images_waiting = 0.0

    def see(
        self, routers: Sequence[RouterSample], workers: Sequence[WorkerSample], now: float
    ) -> None:
        """Record one observation. All samples are usable."""
        for router in routers:
            owner = (router.name, router.life)
            (requests,) = self._deltas.of((owner, "requests"), router.submitted)
            (arrived,) = self._deltas.of((owner, "work"), self._received(router))
            if arrived <= self._most:
                self._requests += requests
                self._arrived += arrived
            (images,) = self._deltas.of((owner, "images"), router.image_tokens)
            if images <= self._most:
                self._images += images
        for worker in workers:
            owner = (worker.name, worker.incarnation)
            *done, seconds, encoding, images = self._deltas.of(
                owner,
                *self._computed(worker),
                worker.compute_seconds,
                worker.encode_seconds,
                worker.image_tokens,
            )
            if 0 < seconds <= LONGEST_STEP_S and max(sum(done), images) <= self._most:
                encoding = min(encoding, seconds)
                self._rate.add(sum(done), seconds - encoding)
                self._encoding.add(images, encoding)
        self._waiting = self._left(routers, workers)
        self._images_waiting = sum(router.queued_image_tokens for router in routers)
        if self._history.due(now):
            row = self._arrived, self._images, self._requests
            self._history.add(row, now, amounts=True)
            self._arrived = self._images = self._requests = 0.0

    def _seconds(self, amount: Values, images: Values) -> Values:
        """Seconds of a worker for tokens or rows, and for encoding the tokens of images.

        The rate of the former is known.
        """
        rate, encoding = self._rate.value, self._encoding.value
        return amount / (rate or math.inf) + (images / encoding if encoding else 0.0)

    def _work(self) -> tuple[Values, Values]:
        """Seconds of work that arrived in each second of the window, and the requests."""
        amount, images, requests = self._history.columns()
        return self._seconds(amount, images), requests

    def _queue(self) -> float:
        """Seconds of one worker for all waiting work."""
        waiting, images = np.array([[self._waiting], [self._images_waiting]])
        return float(self._seconds(waiting, images)[0])

    def needed(
        self, margin: float, ahead_s: float, most: int, *, spare: bool = False
    ) -> int | None:
        """Fewest workers that use at most ``margin`` of the limit; None without enough data.

        ``ahead_s``: extrapolate growth by this many seconds. ``spare``: add headroom for bursts.
        """
        if self._rate.value is None or not len(self._history):
            return None
        work, requests = self._work()
        if not requests.sum():
            return 1
        more = growth(work, ahead_s) if ahead_s else 1.0
        more *= headroom(work) if spare else 1.0
        work = work * more
        own = np.divide(work / more, requests, out=np.zeros_like(work), where=requests > 0)
        slack = self._slack(own, margin)

        def enough(workers: int) -> bool:
            share = share_in_time(work, requests, slack, workers, late_last=self.late_last)
            return share >= self._settings.keep

        return fewest(enough, most)

    def lasting(self, workers: int, cold_s: float) -> bool:
        """Whether more than ``workers`` would help although they need ``cold_s`` to start.

        More workers help if more work arrives than ``workers`` can do, or if first tokens have
        been late for longer than ``cold_s``. A shorter burst ends before new workers are ready.
        Such a burst only prevents the pool from shrinking.
        """
        if self._rate.value is None:
            return False
        work, requests = self._work()
        recent = work[-max(1, round(cold_s)) :]
        if recent.sum() > workers * max(len(recent), cold_s):
            return True
        own = np.divide(work, requests, out=np.zeros_like(work), where=requests > 0)
        slack = self._slack(own, 1.0)
        possible = (requests > 0) & (slack >= 0)
        shares = in_time(work, slack, workers, late_last=self.late_last)
        missed = shares < self._settings.keep
        late = np.flatnonzero(possible & missed)
        return bool(len(late)) and late[-1] - late[0] >= cold_s

    def behind(self, target: int, cold_s: float, most: int, *, coming: bool) -> int:
        """Fewest workers that keep the queue within the limit; 0 if ``target`` is enough.

        The history of arrivals shows a lack of workers only after requests are late, which is one
        cold start too late. So the present queue is extrapolated with the mean load, until a new
        worker would be ready and for half the window after that. ``coming``: workers are already
        starting, so requests that wait for them do not order more.
        """
        if self._rate.value is None:
            return 0
        load = mean_load(self._work()[0])
        limit = self.limit(self._settings.up_margin)
        queue = min(self._queue(), limit * target)  # requests beyond this are late anyway
        surplus = load - target
        horizon = cold_s + self._settings.window / 2
        if surplus <= 0 or queue + surplus * horizon <= limit * target:
            return 0
        wanted = math.ceil(load)
        if not coming:  # enough to finish the queue of that time within the limit
            late = math.ceil((queue + surplus * cold_s) / limit)
            wanted = max(wanted, min(late, 2 * wanted))
        return min(wanted, most)

    def wait(self, workers: int) -> float:
        """Seconds for ``workers`` to compute all waiting work; 0 while the rate is unknown."""
        return self._queue() / workers if workers and self._rate.value is not None else 0.0

    def limit(self, margin: float = 1.0) -> float:
        """Longest acceptable result of :meth:`wait`, in seconds."""
        return self._settings.slo_ttft * margin

    def _slack(self, own: Values, margin: float) -> Values:
        """Seconds for which work may wait. ``own``: seconds of computing one request."""
        return self._settings.slo_ttft * margin - own

    _most = MOST_TOKENS

    def _received(self, router: RouterSample) -> int:
        raise NotImplementedError

    def _computed(self, worker: WorkerSample) -> tuple[int, ...]:
        raise NotImplementedError

    def _left(self, routers: Sequence[RouterSample], workers: Sequence[WorkerSample]) -> int:
        raise NotImplementedError


class PrefillDemand(QueueDemand):
    """Prompts: their work is their tokens."""

    def _received(self, router: RouterSample) -> int:
        # If a request ends without a first token, the sum falls. Deltas counts that as zero.
        return router.started_tokens + router.queued_tokens

    def _computed(self, worker: WorkerSample) -> tuple[int, ...]:
        return worker.prompt_tokens, worker.cached_tokens

    def _left(self, routers: Sequence[RouterSample], workers: Sequence[WorkerSample]) -> int:
        return sum(worker.tokens_waiting for worker in workers)


class EncoderDemand(QueueDemand):
    """Prompts of pictures: their work is the tokens that the last text encoder reads."""

    def _received(self, router: RouterSample) -> int:
        return router.encoder_tokens

    def _computed(self, worker: WorkerSample) -> tuple[int, ...]:
        return (worker.encoder_tokens,)

    def _left(self, routers: Sequence[RouterSample], workers: Sequence[WorkerSample]) -> int:
        return sum(router.queued_encoder_tokens for router in routers)


class PictureDemand(QueueDemand):
    """Pictures: their work is the rows of a step, times the steps.

    A picture may take as long as its own steps and the TTFT target together. So a large picture
    alone is never late, and two of them on one worker are.
    """

    late_last = False
    _most = MOST_ROWS

    def limit(self, margin: float = 1.0) -> float:
        """Longest acceptable result of :meth:`wait`, in seconds."""
        work, requests = (float(values.sum()) for values in self._work())
        return super().limit(margin) + (work / requests if requests else 0.0)

    def _slack(self, own: Values, margin: float) -> Values:
        return self._settings.slo_ttft * margin + own

    def _received(self, router: RouterSample) -> int:
        return router.picture_rows

    def _computed(self, worker: WorkerSample) -> tuple[int, ...]:
        return (worker.step_rows,)

    def _left(self, routers: Sequence[RouterSample], workers: Sequence[WorkerSample]) -> int:
        return sum(router.queued_rows for router in routers)


def share_in_time(
    work: Values, requests: Values, slack: Values, workers: int, *, late_last: bool
) -> float:
    """Share of ``requests`` that ``workers`` begin within ``slack`` seconds.

    Requests without slack are ignored: more workers cannot help them.
    """
    possible = np.where(slack >= 0, requests, 0.0)
    if not possible.sum():
        return 1.0
    shares = in_time(work, slack, workers, late_last=late_last)
    return float(possible @ shares / possible.sum())


def mean_load(work: Values) -> float:
    """Mean work per second, or 0 with less than thirty seconds of data."""
    return float(work.mean()) if len(work) >= 30 else 0.0


def in_time(work: Values, slack: Values, workers: int, *, late_last: bool) -> Values:
    """For the arrivals of each second, the share that waits at most ``slack`` seconds.

    ``work``: arrived work in worker-seconds. With ``late_last`` the simulated queue has the order
    of :mod:`baton.worker.start_order`: late prompts start after prompts that can still be in
    time, except for one part of the time in LATE_TURN.
    """
    shares = np.ones(len(work))
    backlog = late = 0.0
    for second, (came, spare) in enumerate(zip(work.tolist(), slack.tolist(), strict=True)):
        power = workers * (1 - 1 / LATE_TURN) if late else float(workers)
        before = backlog + came
        over = min(came, max(0.0, before - power - workers * max(0.0, spare)))
        if late_last:
            backlog = max(0.0, before - over - power)
            late = max(0.0, late + over - (workers - (before - over - backlog)))
        else:
            backlog = max(0.0, before - power)
        if over:
            shares[second] = 1 - over / came
    return shares


# --------------------------------------------------------------------------- decode


class StepFit:
    """Fit step seconds as ``base + slope * blocks``, by least squares with fading old samples."""

    def __init__(self, half_life: float = 2000.0) -> None:
        self._keep = math.exp2(-1 / half_life)
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, blocks: float, seconds: float) -> None:
        """Add one worker's step: KV blocks in use, and its duration in seconds."""
        keep = self._keep
        self._n = self._n * keep + 1
        self._x = self._x * keep + blocks
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + blocks * blocks
        self._xy = self._xy * keep + blocks * seconds

    @property
    def line(self) -> tuple[float, float] | None:
        """``(base, slope)``, neither negative; None before ten samples."""
        if self._n < 10:
            return None
        x, y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - x * x
        slope = (self._xy / self._n - x * y) / spread if spread > 1e-3 * x * x else 0.0
        slope = min(max(0.0, slope), y / x if x > 0 else 0.0)
        return y - slope * x, slope


class DecodeDemand:
    """History of blocks in use and step times, and the number of workers for them."""

    def __init__(self, settings: ScaleSettings) -> None:
        self._settings = settings
        self._history = History(3, settings.window)  # blocks, requests, step seconds
        self._fit = StepFit()
        self._capacity = 0.0
        self.step_s = 0.0
        """Step seconds of the slowest worker in the last observation."""

    def see(self, workers: Sequence[WorkerSample], now: float) -> None:
        """Record one observation. All samples are usable."""
        self.step_s = 0.0
        total = 0.0
        for worker in workers:
            if worker.running and worker.step_s:
                self._fit.add(worker.kv_used, worker.step_s)
                self.step_s = max(self.step_s, worker.step_s)
            total += worker.kv_used
        self._capacity = min((worker.kv_total for worker in workers), default=0)
        running = sum(worker.running for worker in workers)
        waiting = sum(worker.waiting for worker in workers)
        if running:
            total *= (running + waiting) / running  # waiting requests hold no blocks yet
        if self._history.due(now):
            self._history.add((total, running + waiting, self.step_s), now, amounts=False)

    def needed(
        self, margin: float, ahead_s: float, most: int, *, spare: bool = False
    ) -> int | None:
        """Fewest workers that use at most ``margin`` of the limits; None without enough data.

        ``ahead_s``: extrapolate growth by this many seconds. ``spare``: add headroom for bursts.
        """
        line = self._fit.line
        if not len(self._history) or not self._capacity:
            return None
        blocks, requests, steps = self._history.columns()
        if not requests.sum():
            return 1
        if line is None:
            return None
        more = growth(blocks, ahead_s) if ahead_s else 1.0
        more *= headroom(blocks) if spare else 1.0
        held = blocks * more

        def enough(workers: int) -> bool:
            share = self._share(held, requests, steps, workers, margin, line)
            return share >= self._settings.keep

        return fewest(enough, most)

    def can_keep(self, margin: float = 1.0) -> bool:
        """Whether an empty step meets the ITL target. If not, only KV blocks limit the load."""
        line = self._fit.line
        return line is not None and line[0] < self._settings.slo_itl * margin

    def _share(
        self,
        blocks: Values,
        requests: Values,
        steps: Values,
        workers: int,
        margin: float,
        line: tuple[float, float],
    ) -> float:
        """Share of requests that ``workers`` could have served within both limits."""
        base, slope = line
        room = self._capacity * self._settings.kv_share * margin / self._settings.up_margin
        step = np.where(steps > 0, steps, base)
        per_step = blocks / (workers * np.maximum(step, 1e-9))
        stays = 1 - per_step * slope
        held = np.where(stays > 0, per_step * base / np.where(stays > 0, stays, 1.0), np.inf)
        held = np.maximum(held, 0.0)
        fits = held <= room
        if self.can_keep(margin):
            fits &= base + slope * held <= self._settings.slo_itl * margin
        return float(requests[fits].sum() / requests.sum())
