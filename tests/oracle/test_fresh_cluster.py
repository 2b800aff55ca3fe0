"""Fresh random checkpoints written by transformers, served by a whole cluster."""

import random

import numpy as np
import pytest

from ..cluster.conftest import cluster, start_cluster  # noqa: F401 -- fixtures
from ..cluster.driver import Job, all_handoffs, ask_all, greedy
from ..cluster.reference import Case
from .makers import load_maker

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(300)]
pytest.importorskip("torch", reason="torch is not installed; run make test-oracle")
pytest.importorskip("transformers", reason="transformers is not installed; run make test-oracle")


maker = load_maker("make_checkpoints")
SEED = int(np.random.SeedSequence().entropy % (1 << 31))
NEW_TOKENS = 64
TOP = 20
TOLERANCE = 1e-4
NEAR_TIE_SHARE = 0.005


def prompts(rng: np.random.Generator) -> list[np.ndarray]:
    """Sixteen of 1 to 1500 tokens; most of them branch off another one somewhere."""
    trunk = rng.integers(4, 256, 1500).astype(np.int32)
    lengths = [1, 2, 8, 16, 17, 64, 65, 129, 500, 1500]
    made = [trunk[:length] for length in lengths]
    for shared in (7, 16, 64, 100, 512, 1000):
        branch = rng.integers(4, 256, int(rng.integers(1, 400))).astype(np.int32)
        made.append(np.concatenate([trunk[:shared], branch]))
    return made


def logprobs_of(model, case: Case) -> np.ndarray:
    """Log-softmax ``[n, vocab]`` the reference draws each token of the answer from."""
    tokens = np.array(case.prompt + case.greedy[:-1], np.int32)
    rows = maker.logits_of(model, tokens)[len(case.prompt) - 1 :].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("name", maker.MODELS)
def test_tokens_and_log_probs_equal_transformers(tmp_path, cluster, name):  # noqa: F811
    rng = np.random.default_rng(SEED)
    pick = random.Random(f"{name}{SEED}").choice
    settings = {
        "block_size": pick((8, 16, 64)),
        "max_num_batched_tokens": pick((16, 64, 0)),
        "transport": pick(("ipc", "tcp")),
    }
    print(f"seed {SEED}, {settings}")
    family, overrides = maker.MODELS[name]
    model = maker.make_model(family, overrides, SEED)
    model.save_pretrained(tmp_path)
    cases = []
    for prompt in prompts(rng):
        tokens, margins = maker.greedy_of(model, prompt, NEW_TOKENS)
        cases.append(Case(prompt.tolist(), tokens.tolist(), margins.tolist()))
    jobs = [Job(c.prompt, greedy(NEW_TOKENS), {"log_probabilities": TOP}) for c in cases]
    running = cluster(model=tmp_path, prefill=1, decode=2, **settings)
    with running.client() as client:
        answers = ask_all(client, jobs * 2)
        handoffs = all_handoffs(client, len(answers))
    assert sum(h["cached_tokens"] for h in handoffs) > 0
    ties = 0
    for case, answer in zip(cases * 2, answers, strict=True):
        ties += case.near_tie(answer.tokens)
        check_log_probs(case, answer, logprobs_of(model, case))
    print(f"{name}: {ties} near-ties in {len(answers)} requests")
    assert ties <= max(1, NEAR_TIE_SHARE * len(answers))


def check_log_probs(case: Case, answer, wanted: np.ndarray) -> None:
    """Up to where a near-tie sends the two different ways."""
    same = case.differs_at(answer.tokens)
    for row, token, (chosen, top) in zip(
        wanted[:same], answer.tokens[:same], answer.logprobs[:same], strict=True
    ):
        assert abs(chosen - row[token]) < TOLERANCE
        assert len(top) == TOP
        assert max(abs(value - row[one]) for one, value in top.items()) < TOLERANCE
