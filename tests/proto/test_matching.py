"""After a rollback, a context and the matcher of llguidance have the same tokens."""

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.proto import InputError, TextContext

TOKENIZER = LLTokenizer("byte")
EOS = TOKENIZER.eos_token
A, B = b"ab"


def matcher_of(pattern, tokens=()):
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_regex(pattern))
    assert matcher.consume_tokens(list(tokens))
    return matcher


def plain_context():
    return TextContext(max_length=100, tokens=np.array([1, 2]), eos_token_ids={EOS})


def context_of(pattern, tokens):
    context = plain_context()
    context.set_matcher(matcher_of(pattern))
    for token in tokens:
        context.update(token)
    return context


def seen(matcher):
    return matcher.compute_bitmask(), matcher.is_accepting(), matcher.is_stopped()


@pytest.mark.parametrize("pattern", ["[ab]{3}", "[ab]{1,3}", "[ab]{1,5}"])
@pytest.mark.parametrize("count", range(5))
def test_the_matcher_stands_where_the_tokens_do_after_a_rollback(pattern, count):
    """llguidance does not count an end token that follows the end of a grammar."""
    answer = [A, B, A, EOS]
    context = context_of(pattern, answer)
    context.rollback(count)
    kept = answer[: len(answer) - count]
    assert context.tokens.all.tolist() == [1, 2, *kept]
    assert seen(context.matcher) == seen(matcher_of(pattern, kept))
    for token in answer[len(kept) :]:
        context.update(token)
    context.rollback(len(answer))
    assert seen(context.matcher) == seen(matcher_of(pattern))


@pytest.mark.parametrize("append", [TextContext.update, TextContext.jump_ahead])
@pytest.mark.parametrize("answer", [[], [A, B], [A, B, A], [A, B, A, EOS]])
def test_a_token_that_the_matcher_refuses_changes_nothing(append, answer):
    """Otherwise llguidance would refuse all later tokens."""
    context = context_of("[ab]{3}", answer)
    state, mask = context.tokens.state(), seen(context.matcher)
    with pytest.raises(ValueError, match="does not allow token 122"):
        append(context, ord("z"))
    assert (context.tokens.state(), seen(context.matcher)) == (state, mask)
    append(context, A if len(answer) < 3 else EOS)


def test_a_rollback_that_the_matcher_refuses_changes_nothing():
    """The matcher saw only the last of the two tokens."""
    context = plain_context()
    context.update(A)
    context.set_matcher(matcher_of("[ab]{1,5}"))
    context.update(B)
    state, mask = context.tokens.state(), seen(context.matcher)
    with pytest.raises(InputError, match="roll back"):
        context.rollback(2)
    assert (context.tokens.state(), seen(context.matcher)) == (state, mask)
    context.rollback(1)
    assert seen(context.matcher) == seen(matcher_of("[ab]{1,5}"))


def test_a_matcher_that_says_false_and_cannot_be_copied_refuses_too():
    class Refusing:
        def consume_token(self, token):
            return True

        def rollback(self, count):
            return False

    context = plain_context()
    context.set_matcher(Refusing())
    context.update(A)
    with pytest.raises(InputError, match="roll back"):
        context.rollback(1)
    assert context.tokens.all.tolist() == [1, 2, A]
