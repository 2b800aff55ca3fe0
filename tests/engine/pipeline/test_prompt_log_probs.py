"""Log-probabilities of prompt tokens: against transformers' logits, in chunks, after cache hits."""

from pathlib import Path

import numpy as np
import pytest

from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.models import decoder
from baton.engine.scheduling.events import Failed, TokenEvent
from baton.engine.scheduling.scheduler import SchedulerConfig
from baton.engine.scheduling.step_loop import StepLoop
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.prompt_log_probs import record_type
from baton.proto.sampling import SamplingParams

DATA = Path(__file__).resolve().parents[2] / "data" / "checkpoints"
MODELS = ("llama", "llama_plain", "mistral", "qwen2", "qwen3")
TOP = 5


def load(model, backend="cpu", blocks=256):
    return load_runner(
        RunnerConfig(model=str(DATA / model), backend=backend, num_blocks=blocks, block_size=16)
    )


def context_of(tokens, new=1, *, echo=True):
    return TextContext(
        max_length=len(tokens) + new,
        tokens=TokenBuffer(np.array(tokens, np.int64)),
        log_probabilities=TOP,
        log_probabilities_echo=echo,
        ignore_eos=True,
        sampling_params=SamplingParams(temperature=0, max_new_tokens=new),
    )


def run(loop, *contexts):
    """Run the contexts together; return the prompt's records of each."""
    names = [loop.add(context) for context in contexts]
    found = {}
    while loop.has_work:
        for event in loop.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, TokenEvent) and event.prompt_log_probs is not None:
                assert event.request not in found, "records travel with the first token alone"
                found[event.request] = np.frombuffer(event.prompt_log_probs, record_type(TOP))
    return [found.get(name) for name in names]


def loop_of(runner, budget=0, **more):
    return StepLoop(runner.pipeline, SchedulerConfig(token_budget=budget, **more))


def log_softmax(rows):
    rows = rows.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", [0, 37])
def test_records_equal_the_log_softmax_of_transformers(name, budget):
    loop = loop_of(load(name), budget)
    checked = 0
    with np.load(DATA / name / "reference.npz") as reference:
        prompts = [reference[f"prompt_{i}"].tolist() for i in range(7)]
        all_records = run(loop, *map(context_of, prompts))
        for i, (prompt, records) in enumerate(zip(prompts, all_records, strict=True)):
            assert len(records) == len(prompt) - 1
            rows, wanted = reference[f"rows_{i}"], log_softmax(reference[f"logits_{i}"])
            for row, values in zip(rows, wanted, strict=True):
                if row >= len(prompt) - 1:
                    continue  # it predicts the first new token
                record, target = records[row], prompt[row + 1]
                best = np.argsort(-values, kind="stable")[:TOP]
                assert abs(record["logprob"] - values[target]) < 1e-4
                assert record["rank"] == 1 + (values > values[target]).sum()
                assert record["ids"].tolist() == best.tolist()
                np.testing.assert_allclose(record["logprobs"], values[best], atol=1e-4)
                checked += 1
    assert checked > 10


def test_records_are_the_same_bits_in_chunks_together_and_after_cache_hits():
    runner = load("qwen3")
    tokens = np.random.default_rng(7).integers(0, 256, 150).tolist()
    (alone,) = run(loop_of(runner), context_of(tokens))
    for budget in (1, 16, 33):
        (chunked,) = run(loop_of(runner, budget), context_of(tokens))
        assert chunked.tobytes() == alone.tobytes()
    loop = loop_of(runner, 48)
    run(loop, context_of(tokens, echo=False))  # fills the cache
    hits = loop.scheduler.load().prefix_hit_tokens
    again = run(loop, context_of(tokens), context_of(tokens[:90]), context_of(tokens, echo=False))
    assert again[0].tobytes() == alone.tobytes()
    assert again[1].tobytes() == alone[:89].tobytes()
    assert again[2] is None
    assert loop.scheduler.load().prefix_hit_tokens - hits == 144  # only the request without echo
    loop.scheduler.check_integrity()


def test_records_equal_what_drawing_the_same_tokens_reports():
    loop = loop_of(load("llama"))
    drawn = context_of([5, 9, 200], 40)
    run(loop, drawn)
    entries = drawn.to_generation_output().log_probabilities
    prompt = drawn.tokens.all.tolist()
    (records,) = run(loop, context_of(prompt))
    for record, entry in zip(records[2:], entries, strict=True):
        (logprob,), (top,) = entry.token_log_probabilities, entry.top_log_probabilities
        assert record["logprob"] == np.float32(logprob)
        assert record["ids"].tolist() == list(top)
        assert record["rank"] == 1


def test_a_preempted_prompt_starts_its_records_again():
    # Two prompts whose growth needs more blocks than there are.
    runner = load("llama_plain", blocks=12)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, 80).tolist() for _ in range(2)]
    wanted = [run(loop_of(runner), context_of(prompt))[0] for prompt in prompts]
    loop = loop_of(runner, 16, growth=0)
    found = run(loop, *(context_of(prompt, 40) for prompt in prompts))
    assert loop.scheduler.load().preemptions > 0
    assert [one.tobytes() for one in found] == [one.tobytes() for one in wanted]


def test_a_prompt_of_one_token_has_no_records():
    (records,) = run(loop_of(load("llama")), context_of([7], 3))
    assert len(records) == 0


def test_the_logits_of_a_prompt_are_never_in_memory_at_once():
    runner = load("llama")
    tokens = np.random.default_rng(5).integers(0, 256, 1000).tolist()
    run(loop_of(runner), context_of(tokens))
    held = runner.pipeline.model._space._arrays["scored_logits"]
    assert len(held) == decoder.SCORED_ROWS


def test_logits_that_are_no_numbers_fail_the_request():
    runner = load("llama")
    runner.pipeline.model._final_norm[:] = np.nan
    loop = loop_of(runner)
    loop.add(context_of([1, 2, 3]))
    (event,) = [event for event in loop.step() if isinstance(event, Failed)]
    assert "non-finite" in event.message
