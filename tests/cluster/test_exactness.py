"""Through a whole cluster come the tokens and log-probabilities that transformers computes."""

import itertools

import numpy as np
import pytest

from ..processes import wait_until
from ..suite.short import in_short
from .driver import IN_FLIGHT, Job, all_handoffs, ask_all, greedy, worker_figures
from .reference import DATA, MODELS, cases_of, last_logprobs

pytestmark = pytest.mark.cluster

BLOCK_SIZES = (8, 16, 64)
CHUNK_BUDGETS = (16, 64, 0)
BACKENDS = ("auto", "numpy")
TOP = 20
TOLERANCE = 1e-4

Setting = tuple[str, int, int, str]


def pairwise() -> list[Setting]:
    """Every pair of model, block size and chunk budget once, most on the best backend."""
    rows = []
    for m, model in enumerate(MODELS):
        for b, block_size in enumerate(BLOCK_SIZES):
            budget = CHUNK_BUDGETS[(m + b) % len(CHUNK_BUDGETS)]
            backend = "numpy" if (m + 2 * b) % len(MODELS) == 0 else "auto"
            rows.append((model, block_size, budget, backend))
    return rows


def product() -> list[Setting]:
    """All the others."""
    every = itertools.product(MODELS, BLOCK_SIZES, CHUNK_BUDGETS, BACKENDS)
    return [setting for setting in every if setting not in pairwise()]


def test_the_subset_has_every_pair():
    rows = pairwise()
    for one, other in itertools.combinations((MODELS, BLOCK_SIZES, CHUNK_BUDGETS), 2):
        seen = {(value, row_value) for row in rows for value in row for row_value in row}
        assert set(itertools.product(one, other)) <= seen
    columns = zip(*each_value(), strict=True)
    for values, seen in zip((MODELS, BLOCK_SIZES, CHUNK_BUDGETS, BACKENDS), columns, strict=True):
        assert set(values) == set(seen)


def each_value() -> list[Setting]:
    """Every model, block size, chunk budget and backend at least once."""
    return [pairwise()[3 * m + m % 3] for m in range(len(MODELS))]


@pytest.mark.parametrize(
    "setting",
    in_short(
        {"-".join(map(str, row)): row for row in pairwise()},
        *("-".join(map(str, row)) for row in each_value()),
    ),
)
def test_tokens_equal_transformers(cluster, setting):
    check(cluster, *setting)


@pytest.mark.long
@pytest.mark.parametrize("setting", product(), ids=str)
def test_tokens_equal_transformers_for_all_settings(cluster, setting):
    check(cluster, *setting)


def check(cluster, model: str, block_size: int, budget: int, backend: str) -> None:
    """Two waves of requests, the second over the prefixes of the first."""
    running = cluster(
        model=DATA / model,
        prefill=1,
        decode=2,
        block_size=block_size,
        max_num_batched_tokens=budget,
        step_time=0,
        kernels=backend,
        transport="tcp" if block_size == 16 else "ipc",
    )
    first = cases_of(model)
    second = [*first, *(case.extended(3 + 5 * i) for i, case in enumerate(first))]
    third = [case.extended(1 + 7 * i) for i, case in enumerate(first)]
    with running.client() as client:
        answers = ask_all(client, jobs(first + third, log_probabilities=TOP))
        check_log_probs(model, answers[: len(first)])
        answers += ask_all(client, jobs(second))
        # All but the last token of a repeated prompt can be found in whole blocks.
        known = sum((len(case.prompt) - 1) // block_size * block_size for case in second)
        wait_until(
            lambda: worker_figures(client, "prefill", "prefix_hit_tokens") >= known,
            what="the report of prefix hits",
        )
        passed = all_handoffs(client, len(answers))
    ties = [c.near_tie(a.tokens) for c, a in zip([*first, *third, *second], answers, strict=True)]
    assert sum(ties) == 0, "the committed references have no near-ties"
    assert sum(h["cached_tokens"] for h in passed[IN_FLIGHT:]) > 0
    assert {a.decode for a in answers} == {"decode-0", "decode-1"}


def jobs(cases, **options) -> list[Job]:
    return [Job(case.prompt, greedy(len(case.greedy)), options) for case in cases]


def check_log_probs(model: str, answers) -> None:
    """The prefill worker's distribution of the first token, the decode worker's margins."""
    for case, wanted, answer in zip(cases_of(model), last_logprobs(model), answers, strict=True):
        chosen, top = answer.logprobs[0]
        assert len(top) == TOP
        assert abs(chosen - wanted[answer.tokens[0]]) < TOLERANCE
        assert set(top) == set(np.argsort(-wanted)[:TOP].tolist())
        assert max(abs(value - wanted[token]) for token, value in top.items()) < TOLERANCE
        for (_, step), margin in zip(answer.logprobs, case.margins, strict=True):
            best, other = sorted(step.values(), reverse=True)[:2]
            assert abs(best - other - margin) < 2 * TOLERANCE
