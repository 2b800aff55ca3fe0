"""Logits and greedy tokens of the committed checkpoints against transformers' results."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from baton.engine.loading.loader import Runner, load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.loading.safetensors import TensorStore
from baton.engine.scheduling.plan import Chunk, SampleSpec, StepPlan
from baton.proto.sampling import SamplingParams

from . import folder_mutations

DATA = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
MODELS = ("llama", "llama_plain", "mistral", "qwen2", "qwen3", "gemma3", "phi3")
UNBOUNDED = 1 << 20
GREEDY = SamplingParams(temperature=0)
EMPTY = np.empty(0, np.int32)


class Sequences:
    """Requests with scattered blocks in a pool of NaN, computed in plans of any shape."""

    def __init__(self, runner: Runner, prompts: list[np.ndarray], room: int) -> None:
        self.runner = runner
        runner.pool.fill(np.nan)
        self.tokens = [list(map(int, p)) for p in prompts]
        self.done = [0] * len(prompts)
        self.prompts = [len(p) for p in prompts]
        size = runner.card.layout.block_size
        free = np.random.default_rng(5).permutation(runner.num_blocks).astype(np.int32)
        ends = np.cumsum([0, *(-(-(len(p) + room) // size) for p in prompts)])
        assert ends[-1] <= len(free)
        self.tables = [free[a:b] for a, b in pairwise(ends)]

    def chunk(self, i: int, budget: int) -> Chunk:
        start = self.done[i]
        tokens = np.array(self.tokens[i][start : start + budget], np.int32)
        last = start + len(tokens) == len(self.tokens[i])
        sample = SampleSpec(GREEDY, len(self.tokens[i]), EMPTY, self.prompts[i]) if last else None
        return Chunk(bytes([i]), start, tokens, self.tables[i], sample)

    def step(self, which: list[int], budget: int) -> None:
        chunks = [self.chunk(i, budget) for i in which]
        result = self.runner.pipeline.execute(StepPlan(0, tuple(chunks)))
        assert not result.failed
        for i, chunk in zip(which, chunks, strict=True):
            self.done[i] += len(chunk.tokens)
        for drawn in result.sampled:
            self.tokens[drawn.request[0]].append(drawn.token)

    def generate(self, count: int, budget: int) -> list[list[int]]:
        """Run all requests together until each has ``count`` new tokens."""
        while pending := [i for i, t in enumerate(self.tokens) if len(t) < self.prompts[i] + count]:
            self.step(pending, budget)
        return [t[p:] for t, p in zip(self.tokens, self.prompts, strict=True)]


@pytest.fixture(params=["numpy", "cpu"])
def backend(request):
    if request.param == "cpu":
        pytest.importorskip("baton.engine.kernels._cpu", reason="the C kernels are not built")
    return request.param


def load(name: str, block_size: int = 16, blocks: int = 512, backend="numpy", **more) -> Runner:
    return load_runner(
        RunnerConfig(
            model=str(DATA / name),
            backend=backend,
            block_size=block_size,
            num_blocks=blocks * 16 // block_size,
            **more,
        )
    )


@pytest.fixture(scope="module")
def references():
    data = {}
    for name in MODELS:
        with np.load(DATA / name / "reference.npz") as file:
            data[name] = dict(file)
    return data


def logits_of(runner: Runner, tokens: np.ndarray, rows: np.ndarray, budget: int) -> np.ndarray:
    """Logits after each of ``rows``, computed in chunks of ``budget`` tokens."""
    size = runner.card.layout.block_size
    table = np.random.default_rng(3).permutation(runner.num_blocks).astype(np.int32)
    table = table[: -(-len(tokens) // size)]
    captured, original = [], runner.pipeline.model.execute

    def execute(inputs):
        outputs = original(inputs)
        captured.append(outputs.next_token_logits.copy())
        return outputs

    runner.pipeline.model.execute = execute
    runner.pool.view(np.uint8).fill(0xFF)  # NaN in every type
    cuts = sorted({*range(0, len(tokens), budget), *(int(r) + 1 for r in rows), len(tokens)})
    for start, end in pairwise(cuts):
        sample = SampleSpec(GREEDY, end, EMPTY, end) if end - 1 in rows else None
        chunk = Chunk(b"x", start, tokens[start:end], table, sample)
        assert not runner.pipeline.execute(StepPlan(0, (chunk,))).failed
    runner.pipeline.model.execute = original
    return np.concatenate([c for c in captured if len(c)])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("budget", "block_size"), [(16, 8), (64, 64), (UNBOUNDED, 16)])
def test_logits_equal_transformers(references, backend, name, budget, block_size):
    runner, reference = load(name, block_size, backend=backend), references[name]
    for i in range(8):
        prompt, rows = reference[f"prompt_{i}"], reference[f"rows_{i}"]
        logits = logits_of(runner, prompt, rows, budget)
        np.testing.assert_allclose(logits, reference[f"logits_{i}"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("budget", "block_size"), [(16, 16), (64, 8), (UNBOUNDED, 64)])
def test_greedy_tokens_in_one_batch(references, backend, name, budget, block_size):
    """Prompts of 1 to 1500 tokens together, chunks and decode rows mixed."""
    runner, reference = load(name, block_size, backend=backend), references[name]
    prompts = [reference[f"prompt_{i}"] for i in range(8)]
    count = 24
    generated = Sequences(runner, prompts, count).generate(count, budget)
    for i, tokens in enumerate(generated):
        assert tokens == reference[f"greedy_{i}"][:count].tolist(), f"prompt {i}"


def test_reference_paths_have_no_near_ties(references):
    """Otherwise greedy tokens need not be equal."""
    margins = np.concatenate([r[f"margins_{i}"] for r in references.values() for i in range(8)])
    assert margins.min() > 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_bits_do_not_depend_on_chunks_blocks_or_neighbours(references, name):
    """With the C kernels, logits have the same bits alone and whole, and chunked among others."""
    pytest.importorskip("baton.engine.kernels._cpu", reason="the C kernels are not built")
    prompt = references[name]["prompt_6"]
    rows = np.array([len(prompt) - 1])
    alone = logits_of(load(name, 16, backend="cpu"), prompt, rows, UNBOUNDED)
    for budget, block_size in ((1, 8), (7, 64), (64, 16)):
        chunked = logits_of(load(name, block_size, backend="cpu"), prompt, rows, budget)
        np.testing.assert_array_equal(alone, chunked)
    runner = load(name, 16, backend="cpu")
    everyone = Sequences(runner, [references[name][f"prompt_{i}"] for i in (2, 6, 4)], 0)
    outputs = []
    execute = runner.pipeline.model.execute
    runner.pipeline.model.execute = lambda *args: outputs.append(execute(*args)) or outputs[-1]
    everyone.step([0, 1, 2], UNBOUNDED)
    np.testing.assert_array_equal(alone[0], outputs[0].next_token_logits[1])


def test_rows_do_not_see_later_tokens_or_other_sequences(references):
    runner, reference = load("qwen3"), references["qwen3"]
    prompt = reference["prompt_4"]
    alone = Sequences(runner, [prompt], 8).generate(8, UNBOUNDED)[0]
    others = [reference[f"prompt_{i}"] for i in (0, 3, 5)]
    among = Sequences(runner, [*others, prompt], 8).generate(8, 16)[-1]
    assert alone == among


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_weights(tmp_path, dtype, references):
    """Rounded weights give nearly the F32 logits, and exactly those of the weights in F32 again."""
    half = rewrite(DATA / "llama_plain", tmp_path / "half", dtype)
    widened = rewrite(half, tmp_path / "wide", "F32")
    prompt, rows = references["llama_plain"]["prompt_4"], np.array([5, 32])
    expected = references["llama_plain"]["logits_4"][[-1]]
    config = RunnerConfig(model=str(half), backend="numpy", num_blocks=64, kv_type="float32")
    logits = logits_of(load_runner(config), prompt, rows, UNBOUNDED)
    wide = logits_of(
        load_runner(RunnerConfig(model=str(widened), backend="numpy", num_blocks=64)),
        prompt,
        rows,
        UNBOUNDED,
    )
    np.testing.assert_array_equal(logits, wide)
    assert np.abs(logits[-1] - expected[0]).max() < 0.2


def rewrite(source: Path, target: Path, dtype: str) -> Path:
    """Copy a checkpoint with all tensors as ``dtype``."""
    target.mkdir()
    store, header, parts, at = TensorStore.open(source), {}, [], 0
    for name in store:
        tensor = store.tensor(name)
        if tensor.dtype == np.uint16:
            tensor = (tensor.astype(np.uint32) << 16).view(np.float32)
        tensor = tensor.astype(np.float16 if dtype == "F16" else np.float32)
        if dtype == "BF16":
            tensor = (tensor.view(np.uint32) >> 16).astype(np.uint16)
        data = tensor.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    (target / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(parts)
    )
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


TIED = [("config.json", ["tie_word_embeddings"], True)]
APART = [("config.json", ["tie_word_embeddings"], False)]
HEAD = ("lm_head.weight", "random 256x32")
EQUAL = ("lm_head.weight", "copy model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("stated", "meant"),
    [
        ({"set": TIED, "tensor": [HEAD]}, {"set": APART, "tensor": [HEAD]}),
        ({"set": TIED, "tensor": [EQUAL]}, {"set": TIED}),
        ({"set": TIED, "tensor": [("model.embed_tokens.weight", "rename lm_head.weight")]}, {}),
    ],
)
def test_a_head_beside_tied_embeddings_counts(stated, meant, tmp_path):
    """As in transformers: a different head is used, an equal one is not, either may be left out."""
    logits = []
    for name, mutation in (("stated", stated), ("meant", meant)):
        folder = folder_mutations.copy_of("llama", tmp_path / name)
        folder_mutations.mutate(folder, mutation)
        logits.append(folder_mutations.answer_of(folder, "llama"))
    np.testing.assert_array_equal(*logits)
