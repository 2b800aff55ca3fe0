"""Whole batches of contexts through ``next_token``, as the pipeline page describes it."""

from pathlib import Path

import numpy as np
import pytest

from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.pipeline import (
    KVCacheMixin,
    ModelOutputs,
    PipelineModel,
    TextGenerationPipeline,
    token_steps,
)
from baton.engine.pipeline.model import lay_out, lay_out_next
from baton.engine.scheduling.plan import Chunk, SampleSpec
from baton.proto.contexts.images import ImageMetadata
from baton.proto.contexts.outputs import TextGenerationOutput
from baton.proto.contexts.status import GenerationStatus
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.contexts.vision import TextAndVisionContext
from baton.proto.errors import CapacityError, InputError
from baton.proto.sampling import SamplingParams

DATA = Path(__file__).resolve().parents[2] / "data" / "checkpoints"
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def load(name="llama", num_blocks=64, block_size=8, backend="numpy"):
    return load_runner(
        RunnerConfig(
            model=str(DATA / name), backend=backend, num_blocks=num_blocks, block_size=block_size
        )
    )


def context(tokens, limit=None, params=GREEDY, **more):
    tokens = np.asarray(tokens, np.int64)
    limit = len(tokens) + limit if limit else 2000
    return TextContext(max_length=limit, tokens=TokenBuffer(tokens), sampling_params=params, **more)


def batch_of(*contexts):
    return {c.request_id: c for c in contexts}


@pytest.fixture(scope="module")
def reference():
    with np.load(DATA / "llama" / "reference.npz") as file:
        return dict(file)


def prompts(reference, which=(1, 2, 4)):
    return [(reference[f"prompt_{i}"], reference[f"greedy_{i}"].tolist()) for i in which]


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_tokens_equal_transformers_in_steps_of_any_number(reference, steps):
    pipeline = load().pipeline
    cases = prompts(reference)
    batch = batch_of(*(context(prompt) for prompt, _ in cases))
    got = {request_id: [] for request_id in batch}
    for _ in range(24 // steps):
        outputs = pipeline.next_token(batch, num_steps=steps)
        assert list(outputs) == list(batch)
        for request_id, output in outputs.items():
            assert len(output.tokens) == steps
            assert output.final_status is GenerationStatus.ACTIVE
            got[request_id] += output.tokens
    assert list(got.values()) == [greedy[:24] for _, greedy in cases]


def test_one_that_ends_early_gets_no_more_tokens_and_its_status(reference):
    pipeline = load().pipeline
    (one, greedy), (two, _), _ = prompts(reference)
    short, long = context(one, limit=3), context(two)
    outputs = pipeline.next_token(batch_of(short, long), num_steps=5)
    assert outputs[short.request_id].tokens == greedy[:3]
    assert outputs[short.request_id].final_status is GenerationStatus.MAXIMUM_LENGTH
    assert outputs[short.request_id].is_done
    assert len(outputs[long.request_id].tokens) == 5
    again = pipeline.next_token(batch_of(short, long))
    assert again[short.request_id].tokens == []
    assert again[short.request_id].is_done


def test_a_context_outside_the_batch_rests_and_goes_on_as_if_nothing_was(reference):
    pipeline = load().pipeline
    (one, greedy_one), (two, greedy_two), _ = prompts(reference)
    first, second = context(one), context(two)
    pipeline.next_token(batch_of(first, second), num_steps=4)
    pipeline.next_token(batch_of(second), num_steps=6)
    assert first.tokens.generated.tolist() == greedy_one[:4]
    pipeline.next_token(batch_of(first), num_steps=8)
    assert first.tokens.generated.tolist() == greedy_one[:12]
    assert second.tokens.generated.tolist() == greedy_two[:10]


def test_released_blocks_are_free(reference):
    pipeline = load().pipeline
    contexts = [context(prompt) for prompt, _ in prompts(reference)]
    pipeline.next_token(batch_of(*contexts))
    pool = pipeline._loop.cache.pool
    assert pool.used > 0
    for one in contexts:
        pipeline.release(one)
        pipeline.release(one)
    assert pool.used == 0
    pipeline.release(context([1, 2, 3]))


def test_one_that_never_fits_is_an_error_and_the_others_keep_their_tokens(reference):
    pipeline = load(num_blocks=8).pipeline
    (prompt, greedy), *_ = prompts(reference)
    good, huge = context(prompt), context([5] * 100)
    with pytest.raises(CapacityError, match="KV blocks"):
        pipeline.next_token(batch_of(huge, good), num_steps=2)
    outputs = pipeline.next_token(batch_of(good))
    assert outputs[good.request_id].tokens == greedy[: len(outputs[good.request_id].tokens)]
    assert good.tokens.generated.tolist() == greedy[: len(good.tokens.generated)]


def test_log_probabilities_come_with_their_tokens(reference):
    pipeline = load().pipeline
    (prompt, greedy), *_ = prompts(reference)
    one = context(prompt, log_probabilities=2)
    output = pipeline.next_token(batch_of(one), num_steps=3)[one.request_id]
    assert output.tokens == greedy[:3]
    assert len(output.log_probabilities) == 3
    for token, entry in zip(output.tokens, output.log_probabilities, strict=True):
        assert token in entry.top_log_probabilities[0]


def test_the_older_form_is_one_dict_per_step(reference):
    pipeline = load().pipeline
    (one, greedy), (two, other), _ = prompts(reference)
    short, long = context(one, limit=2), context(two)
    steps = token_steps(pipeline.next_token(batch_of(short, long), num_steps=4))
    assert len(steps) == 4
    assert [list(step) for step in steps] == [
        [short.request_id, long.request_id],
        [short.request_id, long.request_id],
        [long.request_id],
        [long.request_id],
    ]
    assert [step[long.request_id].tokens for step in steps] == [[t] for t in other[:4]]
    assert steps[0][short.request_id].final_status is GenerationStatus.ACTIVE
    assert steps[1][short.request_id].is_done
    merged = TextGenerationOutput.merge([s[short.request_id] for s in steps[:2]])
    assert merged.tokens == greedy[:2]


def test_the_engine_alone_and_the_workers_run_the_same_pipeline(reference, monkeypatch):
    runner = load()
    ran = []
    begin = TextGenerationPipeline.begin
    monkeypatch.setattr(
        TextGenerationPipeline, "begin", lambda self, *a: ran.append(self) or begin(self, *a)
    )
    LLMEngine(runner).generate([[1, 2, 3]], SamplingParams(temperature=0, max_new_tokens=2))
    assert set(map(id, ran)) == {id(runner.pipeline)}


# ------------------------------------------------------------------------------ the model


def chunk(tokens, start, table):
    count = start + len(tokens)
    spec = SampleSpec(GREEDY, count, np.empty(0, np.int32), count)
    return Chunk(b"x", start, np.array(tokens, np.int32), np.array(table, np.int32), spec)


def test_the_next_inputs_are_those_laid_out_anew():
    pool = np.zeros((1, 16, 2, 1, 4, 2), np.float32)
    before = lay_out([chunk([1, 2, 3], 4, [7, 3]), chunk([9], 0, [2]), chunk([5], 6, [1, 8])], pool)
    found = lay_out_next(np.array([11, 12, 13], np.int32), before)
    anew = lay_out([chunk([11], 7, [7, 3]), chunk([12], 1, [2]), chunk([13], 7, [1, 8])], pool)
    for name in ("tokens", "positions", "slots", "block_tables", "row_offsets", "logit_rows"):
        mine, other = getattr(found, name), getattr(anew, name)
        np.testing.assert_array_equal(mine, other)
        assert mine.dtype == other.dtype
    assert found.pool is pool


def test_a_model_runs_through_its_own_inputs(reference):
    """prepare, execute, prepare the next, execute: the loop of the page, without a pipeline."""
    runner = load()
    model = runner.pipeline.model
    assert isinstance(model, PipelineModel)
    assert isinstance(model, KVCacheMixin)
    (prompt, greedy), *_ = prompts(reference)
    inputs = model.prepare_initial_token_inputs([chunk(prompt, 0, [5, 2, 9, 1])])
    drawn = []
    for _ in range(8):
        outputs = model.execute(inputs)
        assert isinstance(outputs, ModelOutputs)
        drawn.append(int(outputs.next_token_logits[0].argmax()))
        logprobs = model.compute_log_probabilities(inputs, outputs, drawn[-1:], [1], [False])
        assert list(logprobs[0].top) == drawn[-1:]
        none = model.compute_log_probabilities(inputs, outputs, drawn[-1:], [0], [False])
        assert none == [None]
        inputs = model.prepare_next_token_inputs(np.array(drawn[-1:], np.int32), inputs)
    assert drawn == greedy[:8]


def test_kv_memory_is_whole_blocks():
    model = load().pipeline.model
    block = model.kv_layout.block_bytes * model.kv_layout.num_layers
    assert model.estimate_kv_cache_size(5 * block + block - 1) == 5 * block
    assert model.estimate_kv_cache_size(-1) == 0
    manager = model.load_kv_manager(model.backend, 3 * block + 1)
    assert manager.num_blocks == 3
    assert manager.new_cache().num_blocks == 3
    with pytest.raises(ValueError, match="one KV block"):
        model.load_kv_manager(model.backend, block - 1)
    assert model.estimate_memory_footprint() > 0


IMAGE = np.zeros((3, 2, 2), np.float32)
IMAGES = [
    {"images": [ImageMetadata(start_idx=1, end_idx=3, pixel_values=IMAGE)]},
    {"pixel_values": (IMAGE,)},
]


@pytest.mark.parametrize("images", IMAGES)
def test_a_text_model_refuses_images_before_anything_is_generated(images):
    pipeline = load().pipeline
    text = context([5, 6, 7], 3)
    seen = TextAndVisionContext(
        max_length=9, tokens=[5, 9, 9, 6], vision_token_ids=[9], sampling_params=GREEDY, **images
    )
    with pytest.raises(InputError, match="takes no images"):
        pipeline.next_token(batch_of(text, seen))
    assert [len(c.tokens) for c in (text, seen)] == [3, 4]
    assert not text.tokens.processed_length
    again = context([5, 6, 7], 3)
    outputs = pipeline.next_token(batch_of(text), 3) | load().pipeline.next_token(
        batch_of(again), 3
    )
    assert outputs[text.request_id].tokens == outputs[again.request_id].tokens
    engine = LLMEngine(load())
    with pytest.raises(InputError, match="takes no images"):
        engine.add(seen)


def test_a_vision_context_without_images_is_a_text(reference):
    (prompt, greedy), *_ = prompts(reference)
    seen = TextAndVisionContext(
        max_length=len(prompt) + 2, tokens=prompt, vision_token_ids=[9], sampling_params=GREEDY
    )
    assert load().pipeline.next_token(batch_of(seen), 2)[seen.request_id].tokens == greedy[:2]
