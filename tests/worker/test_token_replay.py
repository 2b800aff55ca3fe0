from hypothesis import given
from hypothesis import strategies as st

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.limits import MAX_CHUNK_BYTES
from baton.proto.wire.messages import TokenRun
from baton.proto.wire.token_runs import messages_of
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


@given(st.integers(0, 6), st.integers(0, 6), st.sets(st.integers(98, 108)))
def test_a_run_ends_with_the_token_that_completes_its_media(count, known, places):
    tokens = list(range(count))
    entries = [TokenLogProbs.of(float(token), {}) for token in tokens][-known:] if known else []
    media = {place: bytes([place]) for place in places}
    runs = runs_again((b"r", 3), 100, tokens, entries, media)
    assert [t for run in runs for t in run.tokens] == tokens
    found = {}
    for run in runs:
        assert run.tokens or not count
        assert run.logprobs is None or [p.logprob for p in run.logprobs] == run.tokens
        if run.media is not None:
            found[run.position + len(run.tokens) - 1] = run.media
    assert found == {at: chunk for at, chunk in media.items() if 100 <= at < 100 + count}


def test_messages_are_split_before_their_media_are_too_large_for_an_envelope():
    runs = [TokenRun(b"r", 1, at, [at], None, bytes(MAX_CHUNK_BYTES // 2)) for at in range(5)]
    messages = messages_of([TokenRun(b"r", 1, 9, [9]), *runs])
    assert [len(message.runs) for message in messages] == [3, 2, 1]
    assert [run for message in messages for run in message.runs][1:] == runs
    assert messages_of([]) == []
