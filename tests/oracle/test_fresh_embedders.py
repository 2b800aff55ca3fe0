"""Fresh random embedding checkpoints written by transformers, computed by both."""

import numpy as np
import pytest

from baton.engine.kernels.load import load_backend
from baton.engine.loading.loader import load_embedder
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.ids import RequestID

from .makers import load_maker

pytestmark = pytest.mark.oracle
pytest.importorskip("torch", reason="torch is not installed; run make test-oracle")
pytest.importorskip("transformers", reason="transformers is not installed; run make test-oracle")


maker = load_maker("make_embedders")
SEED = int(np.random.SeedSequence().entropy % (1 << 31))


def backends():
    try:
        load_backend("cpu")
    except Exception:
        return ["numpy"]
    return ["numpy", "cpu"]


def embed(folder, texts, **settings):
    pipeline = load_embedder(RunnerConfig(model=str(folder), **settings)).pipeline
    batch = {
        RequestID(str(i)): TextContext(max_length=4096, tokens=TokenBuffer(text.astype(np.int64)))
        for i, text in enumerate(texts)
    }
    return np.stack([out.embeddings for out in pipeline.encode(batch).values()])


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize(
    ("make", "architecture", "changes"),
    [
        (maker.make_bert, "", {}),
        (maker.make_bert, "", {"hidden_size": 72, "num_attention_heads": 6, "type_vocab_size": 1}),
        (maker.make_qwen3, "Qwen3ForCausalLM", {}),
        (maker.make_qwen3, "Qwen3ForCausalLM", {"num_key_value_heads": 4, "head_dim": 8}),
    ],
)
def test_vectors_equal_transformers(
    tmp_path, make, architecture, changes, pooling, normalize, backend
):
    model = make(SEED, **changes)
    maker.save(model, tmp_path, pooling, normalize=normalize, architecture=architecture)
    texts = maker.texts_of(SEED, model.config.vocab_size)
    expected = maker.vectors_of(model, texts, pooling, normalize=normalize)
    found = embed(tmp_path, texts, backend=backend, block_size=8)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5, err_msg=f"seed {SEED}")
