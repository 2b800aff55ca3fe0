"""Decode steps on a device that are queued before the tokens of the step before are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.llm import LLMEngine
from baton.engine.pipeline import device_steps
from baton.engine.pipeline.device_rows import DeviceRows
from baton.engine.pipeline.device_steps import DeviceSteps
from baton.engine.scheduling.events import Failed
from baton.engine.scheduling.scheduler import SchedulerConfig
from baton.proto.errors import BatonError
from baton.proto.sampling import SamplingParams

from .conftest import SHAPE
from .host_device import HostDevice, HostGraph
from .test_model import load

DRAWN = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=9, ignore_eos=True)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_steps, "BUCKETS", (1, 2, 4, 8))


def steps_of(engine: LLMEngine) -> DeviceSteps:
    steps = engine.runner.pipeline._computer
    assert isinstance(steps, DeviceSteps)
    return steps


def answers(
    folder: Path, device: Any, work: list[tuple[list[int], SamplingParams]], **settings: Any
) -> tuple[list[list[int]], DeviceSteps]:
    """Generated tokens of each prompt; afterwards no block is held."""
    look_ahead = settings.pop("look_ahead", True)
    engine = LLMEngine(
        load(folder, CudaBackend(device)), SchedulerConfig(**settings), look_ahead=look_ahead
    )
    prompts, params = [prompt for prompt, _ in work], [each for _, each in work]
    contexts = engine.generate(prompts, params)
    engine.scheduler.check_integrity()
    assert engine.cache.pool.used == 0
    return [context.tokens.generated.tolist() for context in contexts], steps_of(engine)


def mixed(count: int, **fields: Any) -> list[tuple[list[int], SamplingParams]]:
    rng = np.random.default_rng(5)
    return [
        (
            rng.integers(0, SHAPE.vocab, 3 + 4 * n).tolist(),
            replace(DRAWN, seed=n, max_new_tokens=4 + 3 * (n % 3), **fields),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_tokens_are_those_of_steps_that_wait(
    folder: Path, host_device: HostDevice, seed: int | None
) -> None:
    """Also on a device that carries its queue out late, in any order that its events allow."""
    work = mixed(5)
    expected, waiting = answers(folder, host_device, work, look_ahead=False)
    assert waiting.fed == 0
    device = host_device if seed is None else host_device.late(seed)
    found, ahead = answers(folder, device, work)
    assert found == expected
    assert ahead.fed > 6


def test_an_answer_may_stop_at_each_position(folder: Path, host_device: HostDevice) -> None:
    """The next step has a surplus row then, and the other rows go on."""
    (prompt, params), *_ = mixed(1)
    params = replace(params, max_new_tokens=7)
    (whole,), _ = answers(folder, host_device, [(prompt, params)], look_ahead=False)
    stops = [(prompt, replace(params, stop_token_ids=[token])) for token in whole]
    found, steps = answers(folder, host_device.late(4), stops)
    assert found == [whole[: whole.index(token) + 1] for token in whole]
    assert steps.fed > 3


def test_a_step_in_flight_keeps_its_blocks(folder: Path, host_device: HostDevice) -> None:
    engine = LLMEngine(load(folder, CudaBackend(host_device.late(5))))
    assert run_with_aborts(engine) >= 2


def test_blocks_that_are_freed_too_early_are_noticed(
    folder: Path, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLMEngine(load(folder, CudaBackend(host_device)))
    monkeypatch.setattr(engine.scheduler, "_is_out", lambda _sequence: False)
    with pytest.raises(AssertionError, match="a block of a running step is free"):
        run_with_aborts(engine)


def run_with_aborts(engine: LLMEngine) -> int:
    """Abort every second request while two steps are out, or let it stop; the others are exact.

    Returns how many surplus rows ran.
    """
    work = mixed(6)
    alone = LLMEngine(engine.runner, look_ahead=False)
    expected = [context.tokens.generated.tolist() for context in alone.generate(*zipped(work))]
    contexts = [engine._context(prompt, params) for prompt, params in work]
    keys = [engine.add(context) for context in contexts]
    surplus = steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        begun = engine._begun
        if begun is not None:
            if steps in (2, 4, 5):
                engine.abort(keys[2 * (steps // 2)])
            known = engine.scheduler.requests
            surplus += sum(chunk.request not in known for chunk in begun.plan.chunks)
            blocks = {int(b) for chunk in begun.plan.chunks for b in chunk.block_table}
            free = set(engine.cache.pool._free)
            assert not blocks & free, "a block of a running step is free"
        engine.scheduler.check_integrity()
    assert engine.cache.pool.used == 0
    for index in (0, 1, 3, 5):
        assert contexts[index].tokens.generated.tolist() == expected[index]
    return surplus


def zipped(work: list[tuple[list[int], SamplingParams]]) -> tuple[list[Any], list[Any]]:
    return [prompt for prompt, _ in work], [params for _, params in work]


@pytest.mark.parametrize("blocks", [8, 9])
def test_requests_that_are_preempted_give_the_same_tokens(
    folder: Path, host_device: HostDevice, blocks: int
) -> None:
    """No block is left for the next token of some step that would be queued ahead."""
    work = [(prompt, replace(params, max_new_tokens=14)) for prompt, params in mixed(4)]
    outcomes = []
    for look_ahead in (False, True):
        runner = load(folder, CudaBackend(host_device), blocks)
        engine = LLMEngine(runner, SchedulerConfig(growth=0), look_ahead=look_ahead)
        contexts = engine.generate(*zipped(work))
        outcomes.append([context.tokens.generated.tolist() for context in contexts])
        assert engine.scheduler.load().preemptions > 0
        assert bool(steps_of(engine).fed) == look_ahead
        assert engine.cache.pool.used == 0
    assert outcomes[0] == outcomes[1]


def test_a_step_that_fails_takes_the_queued_one_with_it(
    folder: Path, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request fails once, no block is lost, and later requests are served."""
    work = mixed(3)
    expected, _ = answers(folder, host_device, work, look_ahead=False)
    engine = LLMEngine(load(folder, CudaBackend(host_device.late(6))))
    keys = {engine.add(engine._context(prompt, params)) for prompt, params in work}
    replay, broken = HostGraph.replay, [True]

    def failing(graph: HostGraph) -> None:
        def fail() -> None:
            if broken:
                raise RuntimeError("the step failed on the device")

        graph._stream.add(fail)
        replay(graph)

    while steps_of(engine).fed < 1:
        engine.step()
    monkeypatch.setattr(HostGraph, "replay", failing)
    events = []
    while engine.has_work:
        events += engine.step()
    failed = [event.request for event in events if isinstance(event, Failed)]
    assert sorted(failed) == sorted(keys)
    assert engine.cache.pool.used == 0
    broken.clear()
    contexts = engine.generate(*zipped(work))
    assert [context.tokens.generated.tolist() for context in contexts] == expected


@pytest.mark.parametrize("bug", ["stale token", "position", "other row", "same turn"])
def test_planted_bugs_change_tokens(
    folder: Path, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    work = mixed(3)
    expected, _ = answers(folder, host_device, work, look_ahead=False)
    place = DeviceRows.place

    def wrong(rows: DeviceRows, chunks: Any, turn: int, *, fed: bool) -> bool:
        if bug == "stale token" and fed:
            host_device.write(rows.drawn[0], np.zeros(rows.drawn.shape[1], np.int32))
        placed = place(rows, chunks, turn, fed=fed)
        if bug == "position" and fed:
            rows.sampling["position"] += 1
        if bug == "other row" and fed:
            rows.rows = rows.rows[::-1]
        return placed

    monkeypatch.setattr(DeviceRows, "place", wrong)
    device = host_device
    if bug == "same turn":  # two queued steps share pinned memory
        queue = DeviceSteps._queue
        monkeypatch.setattr(
            DeviceSteps, "_queue", lambda self, chunks, _, *, fed: queue(self, chunks, 0, fed=fed)
        )
        device = host_device.late(1)
    try:
        found, _ = answers(folder, device, work)
    except BatonError:  # errors of the sampler that were not written yet
        assert bug == "same turn"
    else:
        assert found != expected
