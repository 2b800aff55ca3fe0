"""Rules of regular expressions and choices are valid, and match the requested texts."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.gateway.grammars import choice_rule, regex_rule

BYTES = LLTokenizer("byte")


def matches(rule: str, text: str) -> bool:
    """Whether a rule, which must be valid, accepts exactly ``text``."""
    grammar = LLMatcher.grammar_from_lark(f"start: {rule}")
    assert not LLMatcher.validate_grammar(grammar), rule
    matcher = LLMatcher(BYTES, grammar)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a/b", "a/b"), (r"a\/b", "a/b"), (r"a\\/b", "a\\/b"), (r"a\\\/b", "a\\/b"),
        (r"\\", "\\"), (r"[/\\]{2}", "/\\"), ("a\nb", "a\nb"), ("a\\\nb", "a\nb"),
        (r"\d/\.", "1/."),
    ],
    ids=ascii,
)  # fmt: skip
def test_slashes_and_newlines_of_a_regex(pattern, text):
    assert matches(regex_rule(pattern), text)
    assert not matches(regex_rule(pattern), text + "x")


@pytest.mark.parametrize(
    "text", ["a", "\x7f", "\\\x7f", '"', "\\", "/", "\n", "\x01", "\x85", "\u2028", "é"], ids=ascii
)
def test_any_text_can_be_a_choice(text):
    assert matches(choice_rule(["other", text]), text)
