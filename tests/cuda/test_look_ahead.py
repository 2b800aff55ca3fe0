"""Decode steps on a device that are queued before the tokens of the step before are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.benchmarks import device_idle
from baton.engine.kernels.cuda import sampling
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.device import CaptureFailed
from baton.engine.kernels.cuda.row_plan import GraphPlan
from baton.engine.llm import LLMEngine
from baton.engine.pipeline import device_steps
from baton.engine.pipeline.decode_graph import DecodeGraph
from baton.engine.pipeline.device_rows import DeviceRows
from baton.engine.pipeline.device_steps import DeviceSteps
from baton.engine.scheduling.events import Failed
from baton.engine.scheduling.scheduler import SchedulerConfig
from baton.proto.contexts.text import TextContext
from baton.proto.errors import BatonError, InputError
from baton.proto.sampling import SamplingParams

from .host_device import HostDevice, HostGraph
from .small_model import SHAPE, load

END = 2
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=9, ignore_eos=True)


@pytest.fixture(autouse=True, scope="module")
def few_rows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_steps, "BUCKETS", (1, 2, 4, 8))
        yield


class Every:
    """A grammar: the token at place n is n plus ``shift`` modulo three.

    ``length``: tokens after which only the model's end may follow; ``fails``: tokens after which no
    mask can be made.
    """

    def __init__(self, shift: int = 0, length: int = 99, fails: int = 99) -> None:
        self.consumed, self.shift = 0, shift
        self.length, self.fails = length, fails

    def consume_token(self, token: int) -> bool:
        fits = bool(self._following()[token])
        self.consumed += fits
        return fits

    def allowed(self) -> np.ndarray:
        if self.consumed == self.fails:
            raise InputError("no token can follow")
        return self._following()

    def _following(self) -> np.ndarray:
        ids = np.arange(SHAPE.vocab)
        if self.consumed >= self.length:
            return ids == END
        return (ids % 3 == (self.consumed + self.shift) % 3) & (ids != END)


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


@pytest.mark.parametrize("constrained", [False, True])
def test_a_step_in_flight_keeps_its_blocks(
    folder: Path, host_device: HostDevice, constrained: bool
) -> None:
    engine = LLMEngine(load(folder, CudaBackend(host_device.late(5))))
    assert run_with_aborts(engine, constrained=constrained) >= 2


def test_blocks_that_are_freed_too_early_are_noticed(
    folder: Path, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLMEngine(load(folder, CudaBackend(host_device)))
    monkeypatch.setattr(engine.scheduler, "_is_out", lambda _sequence: False)
    with pytest.raises(AssertionError, match="a block of a running step is free"):
        run_with_aborts(engine)


def started(
    engine: LLMEngine, work: list[tuple[list[int], SamplingParams]], *, constrained: bool
) -> tuple[list[TextContext], list[bytes]]:
    """Contexts and keys of requests that wait; with ``constrained`` two of three have a grammar."""
    contexts = [engine._context(prompt, params) for prompt, params in work]
    for n, context in enumerate(contexts):
        if constrained and n % 3:
            context.set_matcher(Every(n))
    return contexts, [engine.add(context) for context in contexts]


def run_with_aborts(engine: LLMEngine, *, constrained: bool = False) -> int:
    """Abort every second request while two steps are out, or let it stop; the others are exact.

    Returns how many surplus rows ran.
    """
    work = mixed(6)
    alone = LLMEngine(engine.runner, look_ahead=False)
    waiting, _ = started(alone, work, constrained=constrained)
    while alone.has_work:
        alone.step()
    expected = [context.tokens.generated.tolist() for context in waiting]
    contexts, keys = started(engine, work, constrained=constrained)
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


@pytest.mark.parametrize(("blocks", "constrained"), [(8, False), (9, False), (8, True)])
def test_requests_that_are_preempted_give_the_same_tokens(
    folder: Path, host_device: HostDevice, blocks: int, constrained: bool
) -> None:
    """No block is left for the next token of some step that would be queued ahead."""
    work = [(prompt, replace(params, max_new_tokens=14)) for prompt, params in mixed(4)]
    outcomes = []
    for look_ahead in (False, True):
        runner = load(folder, CudaBackend(host_device), num_blocks=blocks)
        engine = LLMEngine(runner, SchedulerConfig(growth=0), look_ahead=look_ahead)
        contexts, _ = started(engine, work, constrained=constrained)
        while engine.has_work:
            engine.step()
        outcomes.append([context.tokens.generated.tolist() for context in contexts])
        assert engine.scheduler.load().preemptions > 0
        assert bool(steps_of(engine).fed) == look_ahead
        assert engine.cache.pool.used == 0
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("constrained", [False, True])
def test_a_step_that_fails_takes_the_queued_one_with_it(
    folder: Path, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch, constrained: bool
) -> None:
    """Each request fails once, no block is lost, and later requests are served."""
    work = mixed(3)
    expected, _ = answers(folder, host_device, work, look_ahead=False)
    engine = LLMEngine(load(folder, CudaBackend(host_device.late(6))))
    _, keys = started(engine, work, constrained=constrained)
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
            DeviceSteps,
            "_queue",
            lambda self, chunks, _, **rest: queue(self, chunks, 0, **rest),
        )
        device = host_device.late(1)
    try:
        found, _ = answers(folder, device, work)
    except BatonError:  # errors of the sampler that were not written yet
        assert bug == "same turn"
    else:
        assert found != expected


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalized": {"repetition_penalty": 1.6, "frequency_penalty": 0.7, "presence_penalty": 0.2},
    "reported": {},
    "constrained": {},
    "by the host": {"logit_bias": {3: 4.0}},
}


def run_kinds(
    folder: Path, device: Any, kinds: list[str], *, look_ahead: bool
) -> tuple[list[Any], DeviceSteps]:
    """Tokens and log-probabilities of one request of each kind, of different lengths."""
    engine = LLMEngine(load(folder, CudaBackend(device)), look_ahead=look_ahead)
    contexts = []
    for n, kind in enumerate(kinds):
        prompt = np.random.default_rng(n).integers(0, SHAPE.vocab, 4 + 3 * n).tolist()
        params = replace(DRAWN, seed=n, max_new_tokens=5 + 2 * (n % 3), **KINDS[kind])
        context = engine._context(prompt, params)
        if kind == "reported":
            context.log_probabilities = 3
        if kind == "constrained":
            context.set_matcher(Every(n))
        contexts.append(context)
        engine.add(context)
    while engine.has_work:
        events = engine.step()
        assert not [event for event in events if isinstance(event, Failed)], events
    assert engine.cache.pool.used == 0
    found = [
        (c.tokens.generated.tolist(), [str(v) for v in c._log_probabilities_data.values()])
        for c in contexts
    ]
    return found, steps_of(engine)


@pytest.mark.parametrize(
    ("kinds", "replays", "fed"),
    [
        (["plain", "penalized", "reported", "penalized"], 5, 4),
        (["constrained", "plain", "penalized", "constrained", "reported"], 5, 4),
        (["penalized", "by the host", "plain"], 1, 1),
    ],
    ids=["penalties", "grammar", "host"],
)
def test_rows_of_all_kinds_share_captured_steps(
    folder: Path,
    host_device: HostDevice,
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[str],
    replays: int,
    fed: int,
) -> None:
    """Penalties, log-probabilities and grammars; sampling by the host launches single kernels."""
    ahead, steps = run_kinds(folder, host_device.late(3), kinds, look_ahead=True)
    waiting, _ = run_kinds(folder, host_device, kinds, look_ahead=False)
    assert ahead == waiting
    assert steps.replays >= replays
    assert steps.fed >= fed
    monkeypatch.setattr(device_steps, "BUCKETS", ())
    single, without = run_kinds(folder, host_device, kinds, look_ahead=False)
    assert without.replays == 0
    assert [tokens for tokens, _ in single] == [tokens for tokens, _ in ahead]
    for n, (kind, (tokens, logprobs)) in enumerate(zip(kinds, ahead, strict=True)):
        assert bool(logprobs) == (kind == "reported")
        places = [(n + place) % 3 for place in range(len(tokens))]
        assert kind != "constrained" or [token % 3 for token in tokens] == places


@pytest.mark.parametrize("bug", ["not recorded", "recorded twice", "stale mask"])
def test_planted_bugs_of_histories_and_masks_are_noticed(
    folder: Path, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    kinds = ["constrained"] if bug == "stale mask" else ["penalized", "penalized", "penalized"]
    expected, _ = run_kinds(folder, host_device, kinds, look_ahead=False)
    sample = sampling.sample

    def wrong(*arguments: Any, record: bool = False, **named: Any) -> None:
        sample(*arguments, record=record and bug != "not recorded", **named)
        if bug == "recorded twice" and record:
            sample(*arguments, record=True, **named)

    monkeypatch.setattr(sampling, "sample", wrong)
    if bug == "stale mask":
        words = sampling.mask_words(np.arange(SHAPE.vocab) % 3 == 1)
        monkeypatch.setattr(sampling, "mask_words", lambda *_: words)
        with pytest.raises(AssertionError, match="Failed"):
            run_kinds(folder, host_device, kinds, look_ahead=True)
        return
    found, _ = run_kinds(folder, host_device, kinds, look_ahead=True)
    assert found != expected


def run_grammars(
    folder: Path, device: Any, *, look_ahead: bool = True
) -> tuple[list[tuple[list[int], str]], DeviceSteps]:
    """Tokens of eight requests and how they ended: grammars that go on, end, fail; and none."""
    engine = LLMEngine(load(folder, CudaBackend(device)), look_ahead=look_ahead)
    matchers = [
        Every(0), None, Every(1, length=4), Every(2), Every(1, fails=5), None, Every(2, length=6),
        Every(0, fails=7),
    ]  # fmt: skip
    contexts = []
    for n, matcher in enumerate(matchers):
        params = replace(DRAWN, seed=n, max_new_tokens=8 + n % 3, ignore_eos=matcher is None)
        context = engine._context([5 + n, 6, 7], params)
        if matcher is not None:
            context.set_matcher(matcher)
        contexts.append(context)
    keys = [engine.add(context) for context in contexts]
    ends = dict.fromkeys(keys, "")
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Failed):
                ends[event.request] = event.code
    assert engine.cache.pool.used == 0
    return [
        (context.tokens.generated.tolist(), ends[key] or context.status.value)
        for context, key in zip(contexts, keys, strict=True)
    ], steps_of(engine)


@pytest.fixture(scope="module")
def expected(folder: Path, host_device: HostDevice) -> list[tuple[list[int], str]]:
    """What requests with grammars get from steps that wait."""
    outcomes, waiting = run_grammars(folder, host_device, look_ahead=False)
    assert waiting.fed == 0
    return outcomes


@pytest.mark.parametrize("seed", [None, 1, 2, 3, 4])
def test_masks_are_those_of_steps_that_wait(
    folder: Path,
    host_device: HostDevice,
    expected: list[tuple[list[int], str]],
    seed: int | None,
) -> None:
    """A request whose grammar ends or fails has a surplus row; the forward pass never waits."""
    found, ahead = run_grammars(folder, host_device if seed is None else host_device.late(seed))
    assert found == expected
    assert ahead.fed >= 8
    ends = [end for _, end in found]
    assert ends.count("input") == 2 and ends.count("end_of_sequence") == 2
    assert [len(tokens) for tokens, _ in found] == [8, 9, 5, 8, 5, 10, 7, 7]


@pytest.mark.parametrize("refused", [{0}, {1}, {0, 1}])
def test_parts_that_cannot_be_captured_are_launched_kernel_by_kernel(
    folder: Path,
    host_device: HostDevice,
    expected: list[tuple[list[int], str]],
    monkeypatch: pytest.MonkeyPatch,
    refused: set[int],
) -> None:
    """The forward pass, the sampling, or both; the step counts all the same."""
    captures: list[int] = []
    capture = HostDevice.capture

    def refusing(device: HostDevice, work: Callable[[], None]) -> HostGraph:
        captures.append(len(captures))
        if captures[-1] in refused:
            work()
            raise CaptureFailed("not supported")
        return capture(device, work)

    monkeypatch.setattr(HostDevice, "capture", refusing)
    found, _ = run_grammars(folder, host_device.late(2))
    assert found == expected


def test_a_step_that_fails_while_it_is_captured_leaves_no_logits(
    folder: Path, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next capture of this shape samples its own logits, which are in other memory by then."""
    engine = LLMEngine(load(folder, CudaBackend(host_device.late(3))))
    capture, captures = HostDevice.capture, [0]

    def out_of_memory(device: HostDevice, work: Callable[[], None]) -> HostGraph:
        graph = capture(device, work)
        captures[0] += 1
        if captures[0] == 1:
            raise MemoryError("the graph cannot be made")
        return graph

    monkeypatch.setattr(HostDevice, "capture", out_of_memory)

    def run(count: int, *, constrained: bool) -> list[list[int]]:
        contexts = [engine._context([5 + n, 6, 7], replace(DRAWN, seed=n)) for n in range(count)]
        for n, context in enumerate(contexts):
            if constrained:
                context.set_matcher(Every(n))
            engine.add(context)
        while engine.has_work:
            engine.step()
        return [context.tokens.generated.tolist() for context in contexts]

    failed = run(2, constrained=True)
    assert max(map(len, failed)) < DRAWN.max_new_tokens
    run(8, constrained=False)  # the logits get larger memory
    found = run(2, constrained=True)
    engine = LLMEngine(load(folder, CudaBackend(host_device)), look_ahead=False)
    assert found == run(2, constrained=True)


@pytest.mark.parametrize(
    "bug", ["of the step before", "sampled before", "other row", "not waited for"]
)
def test_planted_bugs_of_masks_are_noticed(
    folder: Path,
    host_device: HostDevice,
    expected: list[tuple[list[int], str]],
    monkeypatch: pytest.MonkeyPatch,
    bug: str,
) -> None:
    queue, write_masks, sample = DeviceSteps._queue, DeviceRows.write_masks, DecodeGraph.sample
    late: list[DeviceRows] = []

    def hasty(steps: DeviceSteps, *arguments: Any, applied: Any, **rest: Any) -> Any:
        step = queue(steps, *arguments, applied=None, **rest)
        if applied is not None:
            applied()
        return step

    def put_off(rows: DeviceRows) -> dict[bytes, BatonError]:
        late.append(rows)
        return {}

    def too_early(graph: DecodeGraph) -> bool:
        replayed = sample(graph)
        write_masks(late.pop())
        return replayed

    def shuffled(rows: DeviceRows) -> dict[bytes, BatonError]:
        masked = rows._masked
        others = [*masked[1:], *masked[:1]]
        rows._masked = [(row, *other[1:]) for (row, *_), other in zip(masked, others, strict=True)]
        return write_masks(rows)

    if bug == "of the step before":
        monkeypatch.setattr(DeviceSteps, "_queue", hasty)
    elif bug == "sampled before":
        monkeypatch.setattr(DeviceRows, "write_masks", put_off)
        monkeypatch.setattr(DecodeGraph, "sample", too_early)
    elif bug == "other row":
        monkeypatch.setattr(DeviceRows, "write_masks", shuffled)
    else:
        monkeypatch.setattr(HostDevice, "wait_for", lambda *_: None)
    # Whether a late mask is missed depends on the order of the streams, which the seed draws.
    found = (run_grammars(folder, host_device.late(seed))[0] for seed in range(1, 9))
    assert any(answers != expected for answers in found)


def answers_of_a_growing_batch(folder: Path, device: HostDevice) -> list[list[int]]:
    """A penalized request alone, with three others, and alone again: replays of several graphs."""
    engine = LLMEngine(load(folder, CudaBackend(device)))
    contexts = []
    for n, count in enumerate((16, 4, 4, 4)):
        params = replace(DRAWN, seed=n, max_new_tokens=count, **KINDS["penalized"])
        contexts.append(engine._context([5 + n, 6, 7], params))
    engine.add(contexts[0])
    for _ in range(6):
        engine.step()
    for context in contexts[1:]:
        engine.add(context)
    while engine.has_work:
        engine.step()
    assert steps_of(engine).replays > 8
    return [context.tokens.generated.tolist() for context in contexts]


@pytest.mark.parametrize("bug", ["plan", "histories"])
def test_replays_that_read_memory_of_before_a_move_change_tokens(
    folder: Path, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    """A graph keeps the addresses it was captured with."""
    expected = answers_of_a_growing_batch(folder, host_device)
    if bug == "plan":
        write = GraphPlan.write

        def moving(plan: GraphPlan, lengths: Any, turn: int = 0) -> None:
            for work in plan._decode.values():
                work.plan = host_device.upload(host_device.download(work.plan))
            write(plan, lengths, turn)

        monkeypatch.setattr(GraphPlan, "write", moving)
    else:
        reserve = DeviceRows._reserve

        def uncounted(rows: DeviceRows) -> None:
            reserve(rows)
            rows.moves = 0

        monkeypatch.setattr(DeviceRows, "_reserve", uncounted)
    assert answers_of_a_growing_batch(folder, host_device) != expected


@pytest.mark.parametrize("kind", device_idle.KINDS)
def test_a_modelled_device_idles_only_if_the_host_waits(tmp_path: Path, kind: str) -> None:
    model = device_idle.write_model(tmp_path / "model")
    idle, host, _ = device_idle.measure(model, 3, 1000.0, 5, kind, ahead=False)
    assert 0 < idle < 2 * host
    idle, _, calls = device_idle.measure(model, 3, 1000.0, 5, kind, ahead=True)
    assert idle == 0
    assert calls < 12
