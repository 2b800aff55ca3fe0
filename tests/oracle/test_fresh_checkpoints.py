"""Fresh random checkpoints written by transformers, computed by both."""

import numpy as np
import pytest

from baton.engine.kernels.load import load_backend
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.models.rope import cos_sin_table, parse_rope
from baton.engine.scheduling.plan import Chunk, SampleSpec, StepPlan
from baton.proto.sampling import SamplingParams

from .makers import load_maker

pytestmark = pytest.mark.oracle
pytest.importorskip("torch", reason="torch is not installed; run make test-oracle")
pytest.importorskip("transformers", reason="transformers is not installed; run make test-oracle")


maker = load_maker("make_checkpoints")
SEED = int(np.random.SeedSequence().entropy % (1 << 31))
EMPTY = np.empty(0, np.int32)


def backends():
    names = ["numpy"]
    try:
        load_backend("cpu")
    except Exception:
        return names
    return [*names, "cpu"]


def save(tmp_path, family, overrides, seed, sharded=False):
    model = maker.make_model(family, overrides, seed)
    model.save_pretrained(tmp_path, **({"max_shard_size": "60KB"} if sharded else {}))
    return model


def open_runner(folder, backend, **settings):
    return load_runner(RunnerConfig(model=str(folder), backend=backend, num_blocks=256, **settings))


def run(runner, tokens, start=0, sample=True):
    """Feed ``tokens`` of one request; returns its logits after the last."""
    end = start + len(tokens)
    table = np.arange(-(-end // runner.card.layout.block_size), dtype=np.int32)
    spec = SampleSpec(SamplingParams(temperature=0), end, EMPTY, end) if sample else None
    kept = []
    execute = runner.pipeline.model.execute

    def keep(inputs):
        outputs = execute(inputs)
        kept.append(outputs.next_token_logits.copy())
        return outputs

    runner.pipeline.model.execute = keep
    chunk = Chunk(b"x", start, np.asarray(tokens, np.int32), table, spec)
    result = runner.pipeline.execute(StepPlan(0, (chunk,)))
    runner.pipeline.model.execute = execute
    assert not result.failed
    return result.sampled[0].token if sample else None, kept[0]


CASES = {
    **maker.MODELS,
    "llama_biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_window": (
        "Qwen3",
        {
            "head_dim": 24,
            "use_sliding_window": True,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    **{
        f"llama_{name}": ("Llama", {"head_dim": maker.ROPE_HEAD_DIM, "rope_parameters": dict(rope)})
        for name, rope in maker.ROPES.items()
    },
}


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(tmp_path, case, backend):
    """Chunked prompt, then greedy decoding; near-ties are followed by teacher forcing."""
    family, overrides = CASES[case]
    print(f"seed {SEED}")
    model = save(tmp_path, family, overrides, SEED)
    runner = open_runner(tmp_path, backend)
    rng = np.random.default_rng(SEED)
    prompt = rng.integers(4, 256, 150).astype(np.int32)
    greedy, margins = maker.greedy_of(model, prompt, 32)
    everything = np.concatenate([prompt, greedy[:-1]])
    expected = maker.logits_of(model, everything)
    at = 0
    for size in (1, 60, 89):
        _, logits = run(runner, prompt[at : at + size], at)
        at += size
        np.testing.assert_allclose(logits[0], expected[at - 1], atol=1e-4, rtol=0)
    token = int(logits[0].argmax())
    for step, wanted in enumerate(greedy):
        assert token == wanted or margins[step] < 2e-4, f"step {step}"
        if step + 1 < len(greedy):
            token, logits = run(runner, [wanted], len(prompt) + step)
            np.testing.assert_allclose(logits[0], expected[len(prompt) + step], atol=1e-4, rtol=0)


def test_sharded_checkpoint(tmp_path):
    model = save(tmp_path, "Qwen2", {}, SEED, sharded=True)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    tokens = np.arange(4, 30, dtype=np.int32)
    _, logits = run(open_runner(tmp_path, "numpy"), tokens)
    np.testing.assert_allclose(logits[0], maker.logits_of(model, tokens)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", backends())
def test_bf16_checkpoint(tmp_path, backend):
    """Weights rounded to bfloat16. Keys and values are rounded too, by default, and matrix tiles
    round what they multiply; either stays nearer to transformers in float32 than transformers
    itself does in bfloat16.
    """
    print(f"seed {SEED}")
    maker.make_model("Llama", {}, SEED).bfloat16().save_pretrained(tmp_path)
    # Read anew, as the conversion rounds the rope frequencies as well.
    exact, rounded = (
        maker.transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    )
    tokens = np.random.default_rng(SEED).integers(4, 256, 120).astype(np.int32)
    expected, theirs = (maker.logits_of(model, tokens) for model in (exact, rounded))
    rows = [29, *range(30, 120)]
    for kv_type in ("auto", "float32"):
        runner, starts = open_runner(tmp_path, backend, kv_type=kv_type), [0, *rows[1:]]
        ours = [run(runner, tokens[s : r + 1], s)[1][0] for s, r in zip(starts, rows, strict=True)]
        distance = np.asarray(ours) - expected[rows]
        if kv_type == "auto" or runner.backend.numerics.endswith(("amx", "bf16")):
            assert np.abs(distance).max() > 1e-4, "nothing is rounded"
            assert rms(distance) <= rms(theirs[rows] - expected[rows])
        else:
            assert np.abs(distance).max() <= 1e-4


def rms(x):
    """Root of the mean square."""
    return float(np.sqrt(np.square(x, dtype=np.float64).mean()))


@pytest.mark.parametrize("name", maker.ROPES)
@pytest.mark.parametrize("theta", [1000.0, 10000.0, 500000.0, 1234567.0])
def test_rope_tables(name, theta):
    parameters = {**maker.ROPES[name], "rope_theta": theta}
    if "factor" in parameters:
        parameters["factor"] = round(float(np.random.default_rng(SEED).uniform(1.1, 16)), 3)
    config = parse_rope({"max_position_embeddings": 2048, "rope_parameters": parameters})
    positions = np.arange(2048)
    table = cos_sin_table(config, maker.ROPE_HEAD_DIM, len(positions))
    np.testing.assert_allclose(
        table, maker.rope_table(parameters, positions), atol=2e-6, rtol=0, err_msg=str(parameters)
    )


def test_dynamic_rope_beyond_the_trained_length(tmp_path):
    """A prompt as long as the served length: the case both define alike."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    overrides = {"max_position_embeddings": 64, "rope_parameters": rope}
    model = save(tmp_path, "Llama", overrides, SEED)
    tokens = np.random.default_rng(SEED).integers(4, 256, 100).astype(np.int32)
    _, logits = run(open_runner(tmp_path, "numpy", max_length=100), tokens)
    np.testing.assert_allclose(logits[0], maker.logits_of(model, tokens)[-1], atol=1e-4, rtol=0)


def test_longrope_beyond_the_original_length(tmp_path):
    overrides = {
        "head_dim": maker.ROPE_HEAD_DIM,
        "rope_parameters": {**maker.ROPES["longrope"], "original_max_position_embeddings": 64},
    }
    model = save(tmp_path, "Llama", overrides, SEED)
    tokens = np.random.default_rng(SEED).integers(4, 256, 100).astype(np.int32)
    assert open_runner(tmp_path, "numpy").card.max_length == 64
    _, logits = run(open_runner(tmp_path, "numpy", max_length=2048), tokens)
    np.testing.assert_allclose(logits[0], maker.logits_of(model, tokens)[-1], atol=1e-4, rtol=0)
