"""Text with images against transformers' results: features, logits, tokens, prefix cache."""

from dataclasses import replace

import numpy as np
import pytest

from baton.engine.llm import LLMEngine
from baton.engine.models.contexts import read_context
from baton.engine.models.feature_cache import FeatureCache
from baton.engine.pipeline.model import lay_out
from baton.engine.scheduling.admission import _victim
from baton.engine.scheduling.plan import Sampled, StepPlan, StepResult
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.engine.scheduling.sequence import Sequence
from baton.proto.contexts.rope_positions import merged_grids, rope_delta, rope_positions
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.vision import context_rope_delta
from baton.proto.errors import InputError
from baton.proto.ids import RequestID
from baton.proto.wire.context_maps import request_map

from .vision_cases import GREEDY, cases, load, prompt_logits, whole_chunk

MODELS = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(params=["numpy", "cpu"])
def backend(request):
    if request.param == "cpu":
        pytest.importorskip("baton.engine.kernels._cpu", reason="the C kernels are not built")
    return request.param


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


def finish(engine: LLMEngine, contexts: list) -> list[list[int]]:
    for context in contexts:
        engine.add(context)
    while engine.has_work:
        engine.step()
    return [c.tokens.all[c.prompt_length :].tolist() for c in contexts]


def test_features_equal_those_of_transformers(name, backend):
    tower = load(name, backend).pipeline.model._tower
    for case in cases(name):
        images = [(p, tuple(g[1:].tolist())) for p, g in zip(case.pixels, case.grids, strict=True)]
        found = tower.encode(images)
        for mine, theirs, deep in zip(found, case.features, case.deep, strict=True):
            np.testing.assert_allclose(mine.features, theirs, atol=1e-4)
            assert len(mine.deep) == len(deep)
            for one, other in zip(mine.deep, deep, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-4)


def test_logits_of_all_rows_equal_those_of_transformers(name, backend):
    runner = load(name, backend)
    for case in cases(name):
        np.testing.assert_allclose(prompt_logits(runner, case), case.logits, atol=1e-4)


def test_rope_positions_equal_those_of_transformers(name):
    for case in cases(name):
        merged = merged_grids(case.spans, case.grids)
        n = len(case.prompt)
        assert rope_delta(case.spans, merged) == case.delta
        for start in range(n):
            found = rope_positions(case.spans, merged, start, n)
            np.testing.assert_array_equal(found, case.positions[:, start:])
        after = rope_positions(case.spans, merged, n, n + 3)
        np.testing.assert_array_equal(after, np.tile(np.arange(n, n + 3) + case.delta, (3, 1)))


@pytest.mark.parametrize("budget", [0, 7, 16, 33])
def test_tokens_in_batches_and_chunks_equal_those_of_transformers(name, backend, budget):
    engine = LLMEngine(load(name, backend), SchedulerConfig(max_batch=3, token_budget=budget))
    known = cases(name)
    text = TextContext(
        max_length=40, tokens=np.arange(4, 30, dtype=np.int64), sampling_params=GREEDY
    )
    found = finish(engine, [text, *(case.context() for case in known)])
    assert found[1:] == [case.greedy for case in known]
    assert len(found[0]) == 40 - 26


def test_no_chunk_ends_inside_an_image(name):
    runner = load(name)
    for budget in (1, 3, 9, 14):
        engine = LLMEngine(runner, SchedulerConfig(token_budget=budget))
        for case in cases(name):
            ends = []
            engine.add(case.context(new=1))
            execute = runner.pipeline.execute
            while (plan := engine.scheduler.plan(0.0)) is not None:
                ends += [chunk.start + len(chunk.tokens) for chunk in plan.chunks]
                engine.scheduler.apply(execute(plan), 0.0)
            assert len(ends) > 1
            assert not [e for e in ends for a, b in case.spans if a < e < b]


def test_alone_and_in_a_batch_the_logits_have_the_same_bits(name):
    pytest.importorskip("baton.engine.kernels._cpu", reason="the C kernels are not built")
    runner = load(name)
    model, known = runner.pipeline.model, cases(name)
    images = [
        (p, tuple(g[1:].tolist()))
        for case in known
        for p, g in zip(case.pixels, case.grids, strict=True)
    ]
    together = model._tower.encode(images)
    for image, among in zip(images, together, strict=True):
        alone = model._tower.encode([image])[0]
        np.testing.assert_array_equal(alone.features, among.features)
        np.testing.assert_array_equal(np.array(alone.deep), np.array(among.deep))


def test_the_same_image_hits_the_prefix_cache_and_another_misses(name):
    engine = LLMEngine(load(name))
    case = cases(name)[1]

    def run(context) -> tuple[int, list[int]]:
        before = engine.scheduler.load().prefix_hit_tokens
        tokens = finish(engine, [context])[0]
        return engine.scheduler.load().prefix_hit_tokens - before, tokens

    first, second = (start for start, _ in case.spans)
    assert run(case.context()) == (0, case.greedy)
    assert run(case.context()) == ((len(case.prompt) - 1) // 4 * 4, case.greedy)
    hit, tokens = run(case.context(pixels=[case.pixels[0], 255 - case.pixels[1]]))
    assert hit == second // 4 * 4
    assert tokens != case.greedy
    hit, tokens = run(case.context(pixels=[255 - case.pixels[0], case.pixels[1]]))
    assert hit == first // 4 * 4
    assert run(case.context(salt="another tenant")) == (0, case.greedy)


def test_a_chunk_starts_inside_an_image_after_a_hit(name):
    """The block with the image's last tokens also has text, which differs."""
    case = cases(name)[0]
    start, end = case.spans[0]
    other = replace(case, prompt=case.prompt.copy())
    other.prompt[end + 1] += 1
    size = 5
    assert start < end // size * size < end
    expected = finish(LLMEngine(load(name, block_size=size)), [other.context()])
    engine = LLMEngine(load(name, block_size=size))
    assert finish(engine, [case.context()]) == [case.greedy]
    before = engine.scheduler.load().prefix_hit_tokens
    assert finish(engine, [other.context()]) == expected
    assert engine.scheduler.load().prefix_hit_tokens - before == end // size * size


def test_the_delta_in_the_context_is_used(name):
    case = cases(name)[2]
    sent = case.context(rope_delta=np.array([case.delta], np.int32))
    assert context_rope_delta(sent) == context_rope_delta(case.context()) == case.delta < 0
    wrong = case.context(rope_delta=np.array([0], np.int32))
    assert Sequence(b"r", wrong, block_size=4).images.delta == 0


def test_contradictions_are_refused(name):
    engine = LLMEngine(load(name))
    case = cases(name)[1]
    swapped = case.grids[:, [0, 2, 1]]
    bad = (
        case.context(image_grid_thw=case.grids[:1]),
        case.context(image_grid_thw=case.grids.astype(np.float32)),
        case.context(image_grid_thw=case.grids * 2),
        case.context(image_grid_thw=case.grids * np.array([2, 1, 1], np.int32)),
        case.context(image_grid_thw=swapped),
        case.context(pixels=[p.astype(np.float32) for p in case.pixels]),
        case.context(pixels=[p[:-1] for p in case.pixels]),
        case.context(aspect_ratio_ids=np.ones((1, 2), np.int32)),
    )
    for context in bad:
        with pytest.raises(InputError):
            engine.add(context)
    assert not engine.has_work
    assert finish(engine, [case.context()]) == [case.greedy]


def test_a_decode_worker_loads_no_tower_and_refuses_images(name):
    whole, part = load(name), load(name, vision=False)
    assert part.card.mismatch(whole.card) is None
    assert part.pipeline.model.weights_bytes < whole.pipeline.model.weights_bytes
    case = cases(name)[0]
    chunk = whole_chunk(case, case.context())
    failed = part.pipeline.execute(StepPlan(0, (chunk,))).failed
    assert [error.code for error in failed.values()] == ["handoff_failed"]


def test_two_engines_share_a_prompt_and_the_second_has_no_pixels(name):
    """The first engine computes the prompt; blocks and context move; the second goes on."""
    whole, part = load(name), load(name, vision=False)
    for case in cases(name):
        first = case.context()
        before = Sequence(b"r", first, block_size=4)
        before.allocation = whole.pipeline.kv.new_cache().reserve([], len(case.prompt))
        sampled = whole.pipeline.execute(StepPlan(0, (before.chunk(len(case.prompt)),))).sampled
        second = case.context(
            pixels=[p[:0] for p in case.pixels],
            rope_delta=np.array([before.images.delta], np.int32),
        )
        second.update(sampled[0].token)
        after = Sequence(b"r", second, block_size=4)
        scheduler = Scheduler(SchedulerConfig(), part.pipeline.kv.new_cache())
        after.allocation = scheduler.cache.reserve([], len(case.prompt) + 1)
        moved = after.allocation.block_table[: len(before.allocation.block_table)]
        part.pool[:, moved] = whole.pool[:, before.allocation.block_table]
        after.num_computed_tokens = len(case.prompt)
        scheduler.adopt(after)
        while (plan := scheduler.plan(0.0)) is not None:
            scheduler.apply(part.pipeline.execute(plan), 0.0)
        assert second.tokens.all[len(case.prompt) :].tolist() == case.greedy


def test_a_worker_reads_requests_for_text_and_with_images(name):
    card = load(name).card
    assert card.kinds == ["TextContext", "TextAndVisionContext"]
    case = cases(name)[0]
    read = read_context(card.architecture, request_map(case.context()), RequestID("r"))
    assert read.images == case.context().images
    text = TextContext(max_length=9, tokens=np.array([5, 6]))
    assert type(read_context(card.architecture, request_map(text), RequestID("r"))) is TextContext
    without = case.context()
    without.extra_model_args = {}
    with pytest.raises(InputError, match="image_grid_thw"):
        read_context(card.architecture, request_map(without), RequestID("r"))


def test_encoding_does_not_count_as_the_cost_of_tokens(name):
    case = cases(name)[0]
    budgets = []
    for encoding in (0.0, 9.0):
        scheduler = LLMEngine(load(name), SchedulerConfig(step_seconds=0.5)).scheduler
        scheduler.add(Sequence(b"r", case.context(), block_size=4), 0.0)
        plan = scheduler.plan(0.0)
        token = Sampled(b"r", case.greedy[0])
        seconds = 1.0 + encoding
        result = StepResult(0, (token,), seconds, plan.num_tokens, encode_seconds=encoding)
        scheduler.apply(result, 0.0)
        budgets.append(scheduler._budget.tokens)
        found = scheduler.load()
        assert (found.compute_seconds, found.encode_seconds) == (seconds, encoding)
        spans = [(image.start_idx, image.end_idx) for image in case.context().images]
        assert found.image_tokens == sum(end - start for start, end in spans)
    assert budgets[0] == budgets[1]


def test_a_step_reports_the_seconds_of_encoding_only_on_a_miss(name):
    runner, case = load(name), cases(name)[0]
    chunk = whole_chunk(case, case.context())
    first = runner.pipeline.execute(StepPlan(0, (chunk,)))
    second = runner.pipeline.execute(StepPlan(1, (chunk,)))
    assert 0 < first.encode_seconds < first.seconds
    assert second.encode_seconds == 0


def test_sequences_with_images_are_preempted_last(name):
    def ranked(context, rank: int) -> Sequence:
        sequence = Sequence(bytes([rank]), context, block_size=4)
        sequence.rank = (0, 0.0, rank)
        return sequence

    text = TextContext(max_length=9, tokens=np.array([5, 6]))
    first, second = ranked(text, 1), ranked(text, 2)
    image = ranked(cases(name)[0].context(), 3)
    assert _victim([first, second, image], first) is second
    assert _victim([first, image], first) is image
    assert _victim([first, second, image], image) is image


def test_the_cache_of_encoded_images_keeps_its_limit(name):
    case = cases(name)[3]
    model = load(name).pipeline.model
    chunk = whole_chunk(case, case.context())
    sizes = [
        found.nbytes for found in model._tower.encode([(i.pixels, i.grid) for i in chunk.images])
    ]
    model.encoded = FeatureCache(sum(sizes[1:]))
    inputs = lay_out([chunk], np.zeros((1, 99, 2, 1, 4, 1), np.float32))
    model._features(inputs)
    assert model.encoded.nbytes == sum(sizes[1:])
    assert [model.encoded.get(i.key, i.grid) is not None for i in chunk.images] == [
        False,
        *[True] * (len(sizes) - 1),
    ]
    huge = FeatureCache(1)
    huge.put(b"k", (2, 2), model._tower.encode([(case.pixels[0], (2, 8))])[0])
    assert huge.nbytes == 0
