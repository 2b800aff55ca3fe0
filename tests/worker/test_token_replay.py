from hypothesis import given
from hypothesis import strategies as st

from baton.proto.contexts.outputs import TokenLogProbs
from baton.worker.token_replay import runs_again


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
def test_every_token_is_said_with_its_own_log_probability_or_none(count, known, skip):
    tokens = list(range(count))
    entries = [TokenLogProbs.of(float(token), {}) for token in tokens][-known:] if known else []
    again = tokens[min(skip, count) :]
    runs = runs_again((b"r", 3), 100 + min(skip, count), again, entries)
    said = []
    for run in runs:
        assert (run.request, run.attempt) == (b"r", 3)
        assert run.logprobs is None or len(run.logprobs) == len(run.tokens)
        for at, token in enumerate(run.tokens):
            said.append((run.position + at, token))
            if run.logprobs is not None:
                assert run.logprobs[at].logprob == token
            else:
                assert token < count - len(entries)
    assert said == [(100 + token, token) for token in again]
    assert len(runs) >= 1


def test_without_tokens_one_empty_run_says_that_it_is_here():
    (run,) = runs_again((b"r", 1), 7, [], [TokenLogProbs.of(0.5, {})])
    assert (run.position, run.tokens, run.logprobs) == (7, [], None)
