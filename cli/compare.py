"""``baton bench --compare``: the same requests to clusters of different modes, in turns.

One cluster runs at a time. Every round starts each configuration afresh, in another order, and has
its own tokens, so that no prompt is cached from the round before.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import uvloop

from baton.client import AsyncClient
from baton.client.environment import KEYS_VARIABLE, find_cluster
from baton.deploy.config import ServeSettings
from baton.deploy.plan.hub import with_local_model
from baton.deploy.plan.plan import decode_budget, decode_step, first_token_limit, runner_of
from baton.deploy.plan.prepare import check_start
from baton.deploy.report import DEAD, ClusterReport
from baton.deploy.roles import DECODE, PREFILL
from baton.engine.loading.runner_config import RunnerConfig
from baton.forecast.beside import Latencies, forecast, lines
from baton.forecast.calibration import Adapted, Calibration
from baton.forecast.cluster import Setup, Slo
from baton.forecast.learn import calibrated
from baton.forecast.observe import calibrate
from baton.loadgen.comparison import Counters, Run, difference, rows, table
from baton.loadgen.modes import ADAPTIVE, Configuration, warnings
from baton.loadgen.picture import tails
from baton.loadgen.plan import Job, Shape, random_jobs
from baton.loadgen.run import NativeTarget, Runner
from baton.loadgen.statistics import OK, Summary, summarize, warning
from baton.offline.cluster import OwnCluster
from baton.proto.errors import BatonError, ConfigError, RequestFailed
from baton.proto.layout import ModelCard
from baton.runtime.process.cores import usable_cores

from .bench_load import (
    ROUNDS,
    loads_of,
    lost,
    options_of,
    planned,
    sent,
    unit_of,
    warmup_of,
    workload,
    write,
)
from .cluster import parsed
from .parser import warn
from .settings import GROUPS, resolve

START_S = 600.0
"""Seconds for a cluster to become ready; loading a large model takes minutes."""
SAMPLE_S = 0.5
"""Seconds between two looks at the used KV memory."""
_GROUPS = ("model", "KV memory", "routing and batching")
_KEPT = {
    *("model", "threads", "prefill_threads", "decode_threads", "handoff", "worker_timeout"),
    *(field for group in _GROUPS for field in GROUPS[group]),
} - {"enforce_disaggregation"}
"""Settings that started clusters take from the file and the environment."""


def compare(arguments: argparse.Namespace) -> int:
    """Run all rounds, then print the table and write the files, also after Ctrl-C or an error.

    Raises RequestFailed if the tokens of two configurations differ, or no request ended well.
    """
    check(arguments)
    comparison = Comparison(arguments)
    for sentence in warnings(arguments.compare, usable_cores().count):
        warn(sentence)
    ended: BatonError | KeyboardInterrupt | None = None
    try:
        for _ in comparison.runs_in_turns():
            pass
    except (BatonError, KeyboardInterrupt) as problem:
        ended = problem
    if arguments.forecast and ended is None:
        comparison.predict()
    if comparison.runs:
        comparison.show()
    if ended is not None:
        raise ended
    different = difference(comparison.runs)
    if different:
        raise RequestFailed(different)
    if not any(record.outcome == OK for run in comparison.runs for record in run.records):
        raise RequestFailed("no request ended well")
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that a comparison cannot have.

    All configurations must do equal work, which two runs can be compared by.
    """
    wrong = {
        "--stop-at-eos": arguments.stop_at_eos,
        "--temperature": arguments.temperature,
        "--cancel-share": arguments.cancel_share,
        "--texts": arguments.texts != 1,
        "--model": arguments.model,
        "--api-key": arguments.api_key,
        "--endpoint": arguments.endpoint != "completions",
        "--duration without --rates or --trace": arguments.duration
        and not (arguments.rates or arguments.trace),
    }
    given = [name for name, value in wrong.items() if value]
    if given:
        raise ConfigError(f"--compare cannot be combined with {given[0]}")
    if len(loads_of(arguments)) > 1:
        raise ConfigError("--compare takes one load; call it once for each")
    if arguments.forecast and not (arguments.rates or arguments.trace):
        raise ConfigError("--forecast needs --rates or --trace: a closed loop has no arrival times")
    if arguments.forecast and all(one.address for one in arguments.compare):
        raise ConfigError(
            "--forecast needs a configuration to start; running ones are not modelled"
        )
    if all(one.address for one in arguments.compare) and arguments.address:
        raise ConfigError(f"no cluster would start with the model {arguments.address}")


class Comparison:
    """The runs so far. Raises ConfigError or CheckpointError for settings, model or machine."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._limits = arguments.slo_ttft, arguments.slo_itl
        self._load = loads_of(arguments)[0]
        self._settings: list[dict[str, Any]] = [
            {} if one.address else self._settings_of(one) for one in arguments.compare
        ]
        started = next((one for one in self._settings if one), None)
        if started is not None:
            check_start(msgspec.convert(started, ServeSettings))
        self._card: ModelCard | None = None
        self._jobs: tuple[int, list[Job]] = 0, []
        self.runs: list[Run] = []
        self._forecasts: dict[str, Latencies] = {}
        self._seen: dict[RunnerConfig, Calibration] = {}
        self._learned: dict[RunnerConfig, Adapted] = {}

    def _settings_of(self, configuration: Configuration) -> dict[str, Any]:
        """Return the checked settings to start a configuration with."""
        given: dict[str, Any] = {**configuration.settings(), "model": self._arguments.address}
        for name, value in zip(("slo_ttft", "slo_itl"), self._limits, strict=True):
            given |= {name: value} if math.isfinite(value) else {}
        settings = resolve(given, os.environ, self._arguments.config)
        settings = with_local_model(settings, _note)
        kept = _KEPT | given.keys()
        return {
            name: value for name, value in msgspec.to_builtins(settings).items() if name in kept
        }

    @property
    def _rounds(self) -> int:
        return self._arguments.rounds or ROUNDS

    def runs_in_turns(self) -> Iterator[Run]:
        """Measure each configuration once in every round."""
        own = list(zip(self._arguments.compare, self._settings, strict=True))
        for number in range(1, self._rounds + 1):
            first = (number - 1) % len(own)
            for configuration, settings in own[first:] + own[:first]:
                self._calibrate(settings)
                run = self._measured(configuration, settings, number)
                self.runs.append(run)
                _note(self._line(run))
                yield run
        for settings in {_runner(one): one for one in self._settings if one}.values():
            self._calibrate(settings)

    def _calibrate(self, settings: dict[str, Any]) -> None:
        """Measure a small cluster between the runs, which may be slower at another time."""
        if not self._arguments.forecast or not settings:
            return
        runner = _runner(settings)
        try:
            found = calibrate(settings, runner)
        except BatonError as problem:
            warn(f"no calibration: {problem}")
            return
        self._seen[runner] = self._seen[runner] + found if runner in self._seen else found

    def _measured(self, configuration: Configuration, settings: dict[str, Any], number: int) -> Run:
        load = os.getloadavg()[0]
        try:
            if configuration.address:
                run = uvloop.run(self._run(configuration, configuration.address, number))
            else:
                cluster = OwnCluster(settings, log=None, timeout=START_S)
                try:
                    run = uvloop.run(self._run(configuration, cluster.address, number))
                finally:
                    cluster.close()
        except BatonError as problem:
            raise type(problem)(f"{configuration.name}: {problem}") from problem
        counters = msgspec.structs.replace(run.counters, machine_load=round(load, 2))
        return replace(run, counters=counters)

    async def _run(self, configuration: Configuration, address: str, number: int) -> Run:
        own = "" if not configuration.address else os.environ.get(KEYS_VARIABLE, "")
        addresses, keys = find_cluster(address, self._arguments.keys or own or None)
        client = AsyncClient(addresses, keys=keys)
        target = NativeTarget(client, ignore_eos=True, temperature=0.0, keeps_answers=True)
        try:
            model = await client.model()
            model.check_text()
            self._check_card(model.card)
            runner = Runner(target, limit=self._arguments.limit)
            await self._warm_up(runner, model.card, configuration.workers)
            jobs = self._jobs_of(model.card, number)
            before = parsed(await client.status())
            async with _sampled(client) as used:
                records = await sent(self._arguments, runner, jobs, self._load)
            if runner.is_lost:
                _note(self._line(Run(configuration.name, number, records, Counters())))
                raise lost(self._arguments, jobs, records)
            after = parsed(await client.status())
        finally:
            await target.close()
        return Run(configuration.name, number, records, _counted(before, after, used, model.card))

    def _check_card(self, card: ModelCard) -> None:
        """Raise ConfigError if this cluster serves another model than the first one."""
        if card.task != "generate":
            raise ConfigError("--compare needs a model that generates text")
        if self._card is None:
            self._card = card
        found = self._card.mismatch(card)
        if found is not None and not found[0].startswith("layout."):
            raise ConfigError(
                f"{found[0]} is {found[2]}, and {found[1]} of the first configuration"
            )

    def _shape(self, card: ModelCard) -> Shape:
        return Shape(
            self._arguments.input, self._arguments.output, vocabulary=card.vocab_size,
            longest=card.max_length,
        )  # fmt: skip

    async def _warm_up(self, runner: Runner, card: ModelCard, workers: int) -> None:
        count = warmup_of(self._arguments, workers)
        jobs = random_jobs(self._shape(card), [None] * count, self._arguments.seed + 1)
        for record in await runner.closed_loop(jobs, max(1, workers)):
            if record.outcome != OK:
                raise RequestFailed(f"the first request failed: {record.error}")

    def _jobs_of(self, card: ModelCard, number: int) -> list[Job]:
        """Return the jobs of a round, the same objects for every configuration."""
        if self._jobs[0] != number:
            found = planned(
                self._arguments, self._shape(card), self._load, self._arguments.seed, number
            )
            self._jobs = number, list(found)
        return self._jobs[1]

    # ------------------------------------------------------------- results

    def _summary(self, run: Run) -> Summary:
        return summarize(run.records, self._load, *self._limits)

    def _line(self, run: Run) -> str:
        summary = self._summary(run)
        values = (summary.ttft.p50, summary.itl.p50, summary.itl.p99)
        first, middle, last = ("-" if one is None else f"{1000 * one:.1f} ms" for one in values)
        text = (
            f"round {run.round}, {run.name}: {summary.outcomes[OK]} of {summary.requests} ok, "
            f"TTFT p50 {first}, ITL p50 {middle}, p99 {last}"
        )
        late = warning(summary)
        return f"{text}; {late}" if late else text

    def _title(self) -> str:
        name = "" if self._card is None else self._card.name
        load = f"{unit_of(self._arguments)} {self._load:g}"
        return f"{name}: {workload(self._arguments, embeds=False)}, {load}"

    def show(self) -> None:
        """Print the table, the agreement of the tokens and the machine's load; write the files."""
        arguments, runs = self._arguments, self.runs
        wanted = self._rounds * len(arguments.compare)
        print(self._title() + (f"; {len(runs)} of {wanted} runs" if len(runs) < wanted else ""))
        print("\n".join(table(runs, *self._limits)))
        if self._forecasts:
            learned = list(self._learned.values())
            print("\n".join(lines(self._beside(), max(one.error for one in learned))))
            print("\n".join(dict.fromkeys(line for one in learned for line in one.lines())))
        different = difference(runs)
        count = sum(len(run.records) for run in runs)
        print(
            f"tokens: {different or f'all {count} answers equal those of the other configurations'}"
        )
        loads = [run.counters.machine_load for run in runs]
        print(
            f"machine: {usable_cores().count} processors, load average {min(loads):.1f} to "
            f"{max(loads):.1f} before the runs"
        )
        if arguments.json:
            write(arguments.json, self.report(equal_tokens=not different))
        if arguments.plot:
            write(arguments.plot, self._picture().encode())

    def predict(self) -> None:
        """Simulate the started clusters with the times of the calibration and of measured steps.

        A model that cannot be measured leaves the results without it.
        """
        card = self._card
        if card is None:
            return
        jobs = self._jobs_of(card, 1)  # those of later rounds have other tokens only
        try:
            for one, given in zip(self._arguments.compare, self._settings, strict=True):
                if one.address or (runner := _runner(given)) not in self._seen:
                    continue
                settings = msgspec.convert(given, ServeSettings)
                limits = settings.step_time, settings.max_num_batched_tokens
                if runner not in self._learned:
                    _note("measuring the steps of the model")
                    self._learned[runner] = calibrated(runner, self._seen[runner], *limits)
                pools = {PREFILL: one.prefill, DECODE: one.decode}
                service = self._learned[runner].service
                setup = replace(_setup(settings), chunk=service.chunk(*limits))
                self._forecasts[one.name] = forecast(jobs, service, pools, setup)
        except BatonError as problem:
            warn(f"no forecast: {problem}")

    def _beside(self) -> dict[str, tuple[Latencies, Latencies]]:
        """Return each forecast with the measured latencies of all rounds."""
        found = {}
        for name, predicted in self._forecasts.items():
            records = [one for run in self.runs if run.name == name for one in run.records]
            measured = summarize(records, self._load, *self._limits)
            real = Latencies(ttft=measured.ttft, itl=measured.itl, tpot=measured.tpot)
            found[name] = predicted, real
        return found

    def report(self, *, equal_tokens: bool) -> bytes:
        """Return the JSON file: options, a summary per run, a row per request; in seconds."""
        runs = [
            {"configuration": run.name, "round": run.round, "summary": self._summary(run),
             "counters": run.counters}
            for run in self.runs
        ]  # fmt: skip
        content = {
            "title": self._title(),
            "unit": unit_of(self._arguments),
            "processors": usable_cores().count,
            "options": options_of(self._arguments),
            "settings": dict(
                zip((one.name for one in self._arguments.compare), self._settings, strict=True)
            ),
            "equal_tokens": equal_tokens,
            "forecast": self._forecast_report() if self._forecasts else None,
            "runs": runs,
            "rows": [row for run in self.runs for row in rows(run)],
        }
        return msgspec.json.encode(content) + b"\n"

    def _forecast_report(self) -> dict[str, Any]:
        return {
            "learned": list(self._learned.values()),
            "calibrations": list(self._seen.values()),
            "configurations": self._forecasts,
        }

    def _picture(self) -> str:
        values: dict[str, tuple[list[float], list[float]]] = {}
        for run in self.runs:
            first, gaps = values.setdefault(run.name, ([], []))
            for record in run.records:
                if record.outcome == OK:
                    first += [] if record.ttft is None else [record.ttft]
                    gaps += record.gaps()
        return tails(values, *self._limits, title=self._title())


def _runner(settings: dict[str, Any]) -> RunnerConfig:
    """Return the engine that the steps of a configuration are measured with."""
    runner = runner_of(msgspec.convert(settings, ServeSettings), DECODE)
    return msgspec.structs.replace(runner, vision=False)


def _setup(settings: ServeSettings) -> Setup:
    """Return how the simulator serves with these settings."""
    slo = Slo(settings.slo_ttft, settings.slo_itl)
    return Setup(
        mode=settings.mode,
        slo=slo if settings.mode == ADAPTIVE else Slo(math.inf, math.inf),
        slo_ttft=first_token_limit(settings),
        step_s=decode_step(settings),
        token_budget=decode_budget(settings),
    )


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@asynccontextmanager
async def _sampled(client: AsyncClient) -> AsyncIterator[list[int]]:
    """Collect the KV blocks that requests use, every :data:`SAMPLE_S` seconds."""
    used: list[int] = []

    async def sample() -> None:
        while True:
            report = parsed(await client.status())
            used.append(sum(worker.kv_blocks_used for worker in report.workers))
            await asyncio.sleep(SAMPLE_S)

    task = asyncio.ensure_future(sample())
    try:
        yield used
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _counted(
    before: ClusterReport, after: ClusterReport, used: Sequence[int], card: ModelCard
) -> Counters:
    block = card.layout.token_bytes * card.layout.block_size
    alive = [worker for worker in after.workers if worker.state != DEAD]

    def handed(report: ClusterReport) -> tuple[int, float]:
        receivers = report.of_role("decode")
        seconds = math.fsum(worker.handoff_seconds for worker in receivers)
        return sum(worker.handoff_bytes for worker in receivers), seconds

    (old_bytes, old_seconds), (new_bytes, new_seconds) = handed(before), handed(after)
    return Counters(
        handoffs=after.handoffs.count - before.handoffs.count,
        handoff_bytes=new_bytes - old_bytes,
        handoff_seconds=new_seconds - old_seconds,
        local=after.router.requests.local - before.router.requests.local,
        kv_bytes=block * sum(worker.kv_blocks_total for worker in alive),
        kv_used=block * max(used, default=0),
    )
