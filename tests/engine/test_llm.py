"""The engine alone, from token ids to token ids: exact, and independent of other requests.

Prompts, greedy tokens and decision margins of the committed checkpoints come from
transformers. The determinism cases compare logits bit by bit; they need the compiled
kernels, since a matrix product of OpenBLAS depends on the number of its rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import Runner, load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.pipeline import steps
from baton.engine.scheduling.scheduler import SchedulerConfig
from baton.proto.contexts.text import TextContext
from baton.proto.errors import CapacityError, InternalError
from baton.proto.sampling import SamplingParams

DATA = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
BLOCK = 8
GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
NEAR_TIE = 1e-4
TEMPERATURE = 8.0  # at a lower temperature, the random checkpoints repeat one token


def load(model: str = "llama", backend: str = "numpy", num_blocks: int = 256) -> Runner:
    path = str(DATA / model)
    return load_runner(
        RunnerConfig(model=path, backend=backend, num_blocks=num_blocks, block_size=BLOCK)
    )


def sampled(seed: int, count: int = 24) -> SamplingParams:
    return SamplingParams(
        temperature=TEMPERATURE, top_p=0.9, seed=seed, max_new_tokens=count, ignore_eos=True
    )


def prompt(length: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(4, 256, length).tolist()
    return tokens


# ------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize("settings", [{}, {"token_budget": 16, "max_batch": 3, "growth": 0}])
@pytest.mark.parametrize("model", ["llama", "mistral", "qwen3"])
def test_greedy_tokens_equal_transformers(model: str, settings: dict[str, int]) -> None:
    with np.load(DATA / model / "reference.npz") as data:
        which = range(7)
        prompts = [data[f"prompt_{i}"].tolist() for i in which]
        expected = [data[f"greedy_{i}"][:24].tolist() for i in which]
        margins = [data[f"margins_{i}"][:24] for i in which]
    engine = LLMEngine(load(model), SchedulerConfig(**settings))
    contexts = engine.generate(prompts, GREEDY)
    for context, tokens, margin in zip(contexts, expected, margins, strict=True):
        sure = next((i for i, m in enumerate(margin) if m < NEAR_TIE), len(margin))
        assert context.tokens.generated[:sure].tolist() == tokens[:sure]
        assert len(context.tokens.generated) == 24
        assert context.status == "maximum_length"
    engine.scheduler.check_integrity()
    assert engine.cache.pool.used == 0


def test_end_token_and_stop_token_end_a_request() -> None:
    engine = LLMEngine(load())
    free = engine.generate([prompt(9, 1)], GREEDY)[0].tokens.generated.tolist()
    stop = SamplingParams(temperature=0, max_new_tokens=24, stop_token_ids=[free[5]])
    stopped = engine.generate([prompt(9, 1)], stop)[0]
    assert stopped.tokens.generated.tolist() == free[: free.index(free[5]) + 1]
    assert stopped.status == "end_of_sequence"


def test_unset_parameters_are_the_models(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DATA / "llama", folder)
    (folder / "generation_config.json").write_text('{"do_sample": false, "max_new_tokens": 5}')
    engine = LLMEngine(load(str(folder)))
    context = engine.generate([prompt(9, 1)], SamplingParams(ignore_eos=True))[0]
    greedy = LLMEngine(load()).generate([prompt(9, 1)], GREEDY)[0]
    assert context.tokens.generated.tolist() == greedy.tokens.generated[:5].tolist()
    assert context.status == "maximum_length"


def test_failures_are_typed_and_hurt_nobody_else() -> None:
    engine = LLMEngine(load(num_blocks=4))
    good = TextContext(max_length=64, tokens=prompt(5, 2), sampling_params=GREEDY)
    engine.add(good)
    with pytest.raises(CapacityError, match="more KV blocks"):
        engine.generate([prompt(40, 3)], GREEDY)
    with pytest.raises(InternalError, match="token ids outside"):
        engine.generate([[300, 4]], GREEDY)
    assert good.is_done and len(good.tokens.generated) == 24
    engine.scheduler.check_integrity()


# ------------------------------------------------------------------------------ determinism


class Recorder:
    """Records the bits of every row of logits from which a token is sampled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[bytes, int], bytes] = {}
        original = steps.sample_rows

        def record(logits, chunks, failed):
            for row, chunk in zip(logits, chunks, strict=True):
                self.rows[chunk.request, chunk.sample.position] = row.tobytes()
            return original(logits, chunks, failed)

        monkeypatch.setattr(steps, "sample_rows", record)


class Bench:
    """One model; runs requests and returns the tokens and logits of each."""

    def __init__(self, model: str, recorder: Recorder) -> None:
        self.model = model
        self.recorder = recorder
        self.engine: LLMEngine | None = None

    def run(
        self,
        requests: list[tuple[list[int], SamplingParams]],
        *,
        num_blocks: int = 256,
        engine: LLMEngine | None = None,
        **settings: int,
    ) -> list[tuple[list[int], list[bytes]]]:
        if engine is None:
            runner = load(self.model, "cpu", num_blocks)
            runner.pool.fill(
                np.nan
            )  # so that reading memory before writing to it changes the result
            engine = LLMEngine(runner, SchedulerConfig(**settings))
        self.engine = engine
        self.recorder.rows.clear()
        contexts, keys = [], []
        for tokens, params in requests:
            context = TextContext(
                max_length=512, tokens=tokens, sampling_params=params, ignore_eos=True
            )
            contexts.append(context)
            keys.append(engine.add(context))
        while engine.has_work:
            engine.step()
            engine.scheduler.check_integrity()
        return [self._outcome(key, c) for key, c in zip(keys, contexts, strict=True)]

    def _outcome(self, key: bytes, context: TextContext) -> tuple[list[int], list[bytes]]:
        positions = range(context.prompt_length, len(context.tokens))
        logits = [self.recorder.rows[key, position] for position in positions]
        return context.tokens.generated.tolist(), logits


@pytest.fixture(params=["llama", "mistral", "qwen3"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    pytest.importorskip("baton.engine.kernels._cpu", reason="the C kernels are not built")
    return Bench(request.param, Recorder(monkeypatch))


SUBJECT = (prompt(61, 7), sampled(11))
OTHERS = [(prompt(3 + 5 * n, 20 + n), sampled(n, 6 + 2 * n)) for n in range(16)]


def test_same_bits_among_others_as_alone(bench: Bench) -> None:
    (alone,) = bench.run([SUBJECT])
    assert len(set(alone[0])) > 5
    among = bench.run([*OTHERS[:8], SUBJECT, *OTHERS[8:]])
    assert among[8] == alone


@pytest.mark.parametrize("budget", [1, 16, 61, 64])
def test_same_bits_for_every_chunk_size(bench: Bench, budget: int) -> None:
    (whole,) = bench.run([SUBJECT])
    chunked = bench.run([SUBJECT, *OTHERS[:3]], token_budget=budget)
    assert chunked[0] == whole


def test_same_bits_after_a_prefix_hit(bench: Bench) -> None:
    (cold,) = bench.run([SUBJECT])
    engine = bench.engine
    assert engine is not None
    hits = engine.scheduler.load().prefix_hit_tokens
    warm = bench.run([OTHERS[4], SUBJECT], engine=engine)
    assert engine.scheduler.load().prefix_hit_tokens - hits >= 56
    assert warm[1] == cold


def test_same_bits_after_preemption(bench: Bench) -> None:
    requests = [(prompt(20 + n, 40 + n), sampled(n)) for n in range(4)]
    calm = bench.run(requests)
    tight = bench.run(requests, num_blocks=14, growth=0, token_budget=16)
    assert bench.engine is not None
    assert bench.engine.scheduler.load().preemptions > 0
    assert tight == calm
