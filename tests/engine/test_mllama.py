"""Images in cross-attention against transformers' results: features, logits, tokens, prefixes."""

from dataclasses import replace

import numpy as np
import pytest

from baton.engine.llm import LLMEngine
from baton.engine.models.contexts import read_context
from baton.engine.models.cross_decoder import CrossDecoder
from baton.engine.scheduling.plan import Sampled, StepPlan, StepResult
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.engine.scheduling.sequence import Sequence
from baton.proto.contexts.tiled_images import aspect_ratios, ratio_args
from baton.proto.errors import InputError
from baton.proto.hashing import cache_salt
from baton.proto.ids import RequestID
from baton.proto.sampling import SamplingParams
from baton.proto.wire.context_maps import request_map

from ..suite.short import some_long
from .mllama_cases import IMAGE, TILES, cases, load, prompt_logits, whole_chunk

ROW = 36
"""Positions of an image: 34 in blocks of 4."""


@pytest.fixture(params=["numpy", "cpu"])
def backend(request):
    if request.param == "cpu":
        pytest.importorskip("baton.engine.kernels._cpu", reason="the C kernels are not built")
    return request.param


def finish(engine: LLMEngine, contexts: list) -> list[list[int]]:
    for context in contexts:
        engine.add(context)
    while engine.has_work:
        engine.step()
    return [c.tokens.all[c.prompt_length :].tolist() for c in contexts]


def with_images():
    return [case for case in cases() if case.pixels]


def test_features_equal_those_of_transformers(backend):
    tower = load(backend).pipeline.model._tower
    for case in with_images():
        for pixels, ratio, expected in zip(case.pixels, case.ids, case.features, strict=True):
            found = tower.encode(pixels, aspect_ratios(TILES)[ratio - 1])
            np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("block_size", some_long(16, 1, 4))
def test_logits_of_all_rows_equal_those_of_transformers(backend, block_size):
    runner = load(backend, block_size=block_size, num_blocks=1024 // block_size)
    for case in cases():
        np.testing.assert_allclose(prompt_logits(runner, case), case.logits, atol=1e-4)


@pytest.mark.parametrize("budget", some_long(3, 0, 16, 50))
def test_tokens_in_batches_and_chunks_equal_those_of_transformers(backend, budget):
    """Among them are a prompt without images, and images without text between them."""
    engine = LLMEngine(load(backend), SchedulerConfig(max_batch=4, token_budget=budget))
    known = cases()
    assert finish(engine, [case.context() for case in known]) == [case.greedy for case in known]


def test_alone_and_in_a_batch_the_bits_are_the_same():
    """Also beside prompts without images, and when chunks begin elsewhere."""
    pytest.importorskip("baton.engine.kernels._cpu", reason="the C kernels are not built")
    runner = load(num_blocks=1024)

    def run(contexts: list, **limits) -> list:
        for context in contexts:
            context.log_probabilities = 5
        finish(LLMEngine(runner, SchedulerConfig(**limits)), contexts)
        return [context.to_generation_output().log_probabilities for context in contexts]

    known = cases()
    alone = [run([case.context(salt="a")])[0] for case in known]
    assert run([case.context(salt="b") for case in known]) == alone
    assert run([case.context(salt="c") for case in known], token_budget=5) == alone


def test_the_same_image_hits_the_prefix_cache_and_another_misses():
    engine = LLMEngine(load())
    case = cases()[1]

    def run(context) -> tuple[int, list[int]]:
        before = engine.scheduler.load().prefix_hit_tokens
        tokens = finish(engine, [context])[0]
        return engine.scheduler.load().prefix_hit_tokens - before, tokens

    length = 2 * ROW + len(case.prompt)
    assert run(case.context()) == (0, case.greedy)
    assert run(case.context()) == ((length - 1) // 4 * 4, case.greedy)
    hit, tokens = run(case.context(pixels=[case.pixels[0], 255 - case.pixels[1]]))
    assert hit == ROW
    assert tokens != case.greedy
    hit, tokens = run(case.context(pixels=[255 - case.pixels[0], case.pixels[1]]))
    assert hit == 0
    assert tokens != case.greedy
    assert run(case.context(salt="another tenant")) == (0, case.greedy)


def test_the_same_pixels_with_another_aspect_ratio_are_another_image():
    """Their keys and values differ, because tiles and their positions do."""
    case = cases()[0]
    wide = replace(case, ids=[2])  # one row of two tiles
    expected = finish(LLMEngine(load()), [wide.context()])
    engine = LLMEngine(load())
    assert finish(engine, [case.context()]) == [case.greedy]
    assert finish(engine, [wide.context()]) == expected
    assert engine.scheduler.load().prefix_hit_tokens == 0


def test_a_chunk_starts_inside_an_image_after_a_hit():
    """Only some of an image's blocks are left in the cache."""
    case = cases()[1]
    for kept in (4, 20, ROW, 52):
        runner = load(num_blocks=64)
        engine = LLMEngine(runner)
        assert finish(engine, [case.context()]) == [case.greedy]
        pool = engine.scheduler.cache.pool
        held = [pool._index[one] for one in _hashes(runner, case)[: kept // 4]]
        for block in held:
            pool.pin(block)
        others = pool.allocate(pool.available)
        runner.pool[:, others] = np.nan
        for block in (*others, *held):
            pool.unpin(block)
        before = engine.scheduler.load().prefix_hit_tokens
        assert finish(engine, [case.context()]) == [case.greedy]
        assert engine.scheduler.load().prefix_hit_tokens - before == kept


def _hashes(runner, case) -> list[bytes]:
    salt = cache_salt(runner.card.fingerprint, "")
    return Sequence(b"r", case.context(), block_size=4, salt=salt).extend_hashes()


def test_a_preempted_request_is_computed_again():
    engine = LLMEngine(load(num_blocks=26), SchedulerConfig(growth=0))
    known = [case for case in cases() if len(case.pixels) == 1]
    assert finish(engine, [case.context() for case in known]) == [case.greedy for case in known]
    assert engine.scheduler.load().preemptions > 0


def test_a_decode_worker_loads_no_tower_and_refuses_images():
    whole, part = load(), load(vision=False)
    assert isinstance(part.pipeline.model, CrossDecoder)
    assert part.card.mismatch(whole.card) is None
    assert part.pipeline.model.weights_bytes < whole.pipeline.model.weights_bytes
    chunk = whole_chunk(cases()[0].context())
    failed = part.pipeline.execute(StepPlan(0, (chunk,))).failed
    assert [error.code for error in failed.values()] == ["handoff_failed"]


def test_two_engines_share_a_prompt_and_the_second_has_no_pixels():
    """The first engine computes the prompt; blocks and context move; the second goes on."""
    whole, part = load(), load(vision=False)
    for case in with_images():
        first = case.context()
        length = len(first.tokens)
        before = Sequence(b"r", first, block_size=4)
        before.allocation = whole.pipeline.kv.new_cache().reserve([], length)
        sampled = whole.pipeline.execute(StepPlan(0, (before.chunk(length),))).sampled
        second = case.context(
            pixels=[p[:0] for p in case.pixels],
            rope_delta=np.array([before.images.delta], np.int32),
        )
        second.update(sampled[0].token)
        after = Sequence(b"r", second, block_size=4)
        scheduler = Scheduler(SchedulerConfig(), part.pipeline.kv.new_cache())
        after.allocation = scheduler.cache.reserve([], length + 1)
        moved = after.allocation.block_table[: len(before.allocation.block_table)]
        part.pool[:] = np.nan
        part.pool[:, moved] = whole.pool[:, before.allocation.block_table]
        after.num_computed_tokens = length
        scheduler.adopt(after)
        part.pool[:, after.allocation.block_table[len(moved) :]] = 0
        while (plan := scheduler.plan(0.0)) is not None:
            scheduler.apply(part.pipeline.execute(plan), 0.0)
        assert second.tokens.all[length:].tolist() == case.greedy


def test_contradictions_are_refused():
    engine = LLMEngine(load())
    case = cases()[1]
    good = ratio_args(case.ids, TILES)
    ids, mask = good["aspect_ratio_ids"], good["aspect_ratio_mask"]
    bad = (
        case.context(aspect_ratio_ids=ids + 1),
        case.context(aspect_ratio_ids=ids * 0),
        case.context(aspect_ratio_ids=ids[:, :1]),
        case.context(aspect_ratio_ids=ids.astype(np.float32)),
        case.context(aspect_ratio_mask=1 - mask),
        case.context(aspect_ratio_mask=mask[..., :2]),
        case.context(pixels=[p.astype(np.float32) for p in case.pixels]),
        case.context(pixels=[np.zeros((40, 8, 3), np.uint8)] * 2),
        case.context(block_size=8),
        replace(case, prompt=np.append(case.prompt, IMAGE)).context(),
        replace(case, prompt=case.prompt[1:]).context(),
        replace(case, image=5).context(),
    )
    for context in bad:
        with pytest.raises(InputError):
            engine.add(context)
    assert not engine.has_work
    assert finish(engine, [case.context()]) == [case.greedy]


def test_a_worker_reads_requests_for_text_and_with_images():
    card = load().card
    assert card.kinds == ["TextContext", "TextAndVisionContext"]
    assert (card.vocab_size, card.image_positions, card.image_tiles) == (264, 34, 4)
    case = cases()[0]
    read = read_context(card.architecture, request_map(case.context()), RequestID("r"))
    assert read.images == case.context().images
    without = case.context()
    without.extra_model_args = {}
    with pytest.raises(InputError, match="aspect_ratio_ids"):
        read_context(card.architecture, request_map(without), RequestID("r"))


def test_tokens_after_the_vocabulary_are_never_sampled():
    """Also at a high temperature: the image token has an embedding, but no logit."""
    params = SamplingParams(temperature=100.0, max_new_tokens=200, seed=3, ignore_eos=True)
    case = cases()[0]
    context = case.context(new=200)
    context.sampling_params, context.ignore_eos = params, True
    found = finish(LLMEngine(load()), [context])[0]
    assert len(found) == 200
    assert len(set(found)) > 80
    assert max(found) < 256


def test_penalties_are_for_tokens_of_the_text():
    """As in transformers: the aspect ratio ids before the text are ids of other tokens there."""
    case = next(one for one in with_images() if np.setdiff1d(one.ids, one.prompt).size)
    ratio = int(np.setdiff1d(case.ids, case.prompt)[0])
    context = case.context(new=2)
    # The biased token wins by 1 if nothing but the tokens of the text is penalized.
    bias = {ratio: 1 + float(case.logits[-1].max() - case.logits[-1][ratio])}
    context.sampling_params = SamplingParams(
        temperature=0, repetition_penalty=10.0, logit_bias=bias, max_new_tokens=2
    )
    assert finish(LLMEngine(load()), [context])[0][0] == ratio
    spec = Sequence(b"r", context, block_size=4)._sample_spec(len(context.tokens))
    assert spec.history[: spec.prompt_length].tolist() == case.prompt.tolist()
    assert spec.history[spec.prompt_length :].tolist() == context.tokens.all[-2:].tolist()
    assert spec.position == len(context.tokens)


def test_positions_of_images_do_not_count_as_the_cost_of_tokens():
    """Only the text is computed by the decoder's layers."""
    case = cases()[0]
    scheduler = LLMEngine(load(), SchedulerConfig(step_seconds=1.0)).scheduler
    scheduler.add(Sequence(b"r", case.context(), block_size=4), 0.0)
    plan = scheduler.plan(0.0)
    assert plan.num_tokens == ROW + len(case.prompt)
    drawn = (Sampled(b"r", case.greedy[0]),)
    scheduler.apply(StepResult(0, drawn, 10.0, plan.num_tokens), 0.0)
    assert scheduler._budget._per_token == 10.0 / len(case.prompt)
