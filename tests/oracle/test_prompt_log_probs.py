"""Log-probabilities of whole prompts equal transformers', for every family in float32.

The tolerance is 1e-5, and three float32 steps of the largest logit: random models have logits of 40
and more, whose sums are rounded that much.
"""

import numpy as np
import pytest

from baton.engine.scheduling.events import Failed, TokenEvent
from baton.engine.scheduling.scheduler import SchedulerConfig
from baton.engine.scheduling.step_loop import StepLoop
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.prompt_log_probs import record_type
from baton.proto.sampling import SamplingParams

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="torch is not installed; run make test-oracle")
pytest.importorskip("transformers", reason="transformers is not installed; run make test-oracle")

from .test_fresh_checkpoints import CASES, SEED, backends, maker, open_runner, save  # noqa: E402

TOP = 4


def records_of(runner, tokens, budget):
    loop = StepLoop(runner.pipeline, SchedulerConfig(token_budget=budget))
    context = TextContext(
        max_length=len(tokens) + 1,
        tokens=TokenBuffer(np.array(tokens, np.int64)),
        log_probabilities=TOP,
        log_probabilities_echo=True,
        ignore_eos=True,
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
    )
    loop.add(context)
    records = None
    while loop.has_work:
        for event in loop.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, TokenEvent):
                records = np.frombuffer(event.prompt_log_probs, record_type(TOP))
    return records


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("name", CASES)
def test_whole_prompts(tmp_path, name, backend):
    family, overrides = CASES[name]
    model = save(tmp_path, family, overrides, SEED)
    runner = open_runner(tmp_path, backend)
    rng = np.random.default_rng(SEED)
    for length, budget in ((2, 0), (77, 32), (300, 0)):
        tokens = rng.integers(0, runner.card.vocab_size, length)
        logits = torch.from_numpy(maker.logits_of(model, tokens)).double()
        wanted = torch.log_softmax(logits, dim=-1).numpy()[:-1]
        records = records_of(runner, tokens, budget)
        near = {"atol": 1e-5 + 4e-7 * float(logits.abs().max()), "rtol": 0}
        own = wanted[np.arange(length - 1), tokens[1:]]
        np.testing.assert_allclose(records["logprob"], own, **near)
        best = np.sort(wanted, axis=1)[:, ::-1][:, :TOP]
        np.testing.assert_allclose(records["logprobs"], best, **near)
        named = np.take_along_axis(wanted, records["ids"].astype(np.int64), axis=1)
        np.testing.assert_allclose(named, best, **near)
        above = (wanted > own[:, None]).sum(axis=1)
        assert np.abs(records["rank"] - 1 - above).max() <= 1, "beside near-ties"
