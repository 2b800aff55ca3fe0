"""JSON schemas as constraints on the tokens drawn, compiled by llguidance.

A :class:`GrammarCompiler` belongs to one model and is used on a thread of its own; what it
makes, a :class:`GrammarMatcher`, follows one request. A matcher is a function of the schema,
the tokenizer and the tokens accepted, so a worker that takes a request over rebuilds it by
accepting the same tokens again.

A matcher is used by one thread at a time: the compute thread asks it while a step of its
request runs, the thread of the scheduler advances it between steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..proto.contexts import Matcher, TextContext
from ..proto.errors import BatonError, InputError, InternalError
from ..proto.json_schema import check_json_schema
from .plan import Bools

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_LIMIT_S = 10.0
"""Longest a schema may take; ordinary ones take milliseconds, the largest legal ones a second."""
TOKENIZER_LIMIT_S = 60.0
"""What the first schema may take on top, to read the tokenizer."""
CACHED_SCHEMAS = 64
_MAX_LEXER_STATES = 32_000  # about 2 KiB each
_MESSAGE_CHARS = 300
# Blanks between JSON tokens are the model's choice, but a weak one must not write them for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"


@dataclass(slots=True, frozen=True)
class GrammarTask:
    """A matcher wanted: by what schema, with which ids that end, behind which tokens."""

    schema: str
    eos: frozenset[int]
    emitted: tuple[int, ...] = ()


@dataclass(slots=True, frozen=True)
class CompileGrammar:
    """What a worker's core asks its shell for; answered with :class:`GrammarDone`."""

    key: tuple[bytes, int]
    task: GrammarTask


@dataclass(slots=True, frozen=True)
class GrammarDone:
    """The matcher of a request, or why there is none."""

    key: tuple[bytes, int]
    result: Matcher | BatonError


def grammar_task(context: TextContext) -> GrammarTask | None:
    """What ``context`` needs before its next token can be drawn; None when nothing."""
    if context.json_schema is None or context.matcher is not None:
        return None
    emitted = context.tokens.all[context.prompt_length :].tolist()
    eos = frozenset() if context.ignore_eos else frozenset(context.eos_token_ids)
    return GrammarTask(context.json_schema, eos, tuple(emitted))


class GrammarMatcher:
    """Where one request stands in its grammar.

    ``matcher``: a state of its own. ``size``: entries of a row of logits. ``eos``: ids that
    end the request; they are allowed exactly where the text so far is a whole instance.
    ``foreign``: ids llguidance takes for the end, whatever the request thinks of them.
    """

    __slots__ = ("_ended", "_eos", "_eos_ids", "_foreign", "_foreign_ids", "_matcher", "_size")

    def __init__(
        self, matcher: LLMatcher, size: int, eos: Iterable[int], foreign: Iterable[int]
    ) -> None:
        self._matcher = matcher
        self._size = size
        self._eos = frozenset(eos)
        self._eos_ids = _ids(token for token in self._eos if 0 <= token < size)
        self._foreign = frozenset(foreign) - self._eos
        self._foreign_ids = _ids(self._foreign)
        self._ended = False

    def consume_token(self, token: int) -> bool:
        """Advance by ``token``; False, for good, if the grammar does not allow it."""
        if self._ended or token in self._foreign:
            return False
        if token in self._eos:
            self._ended = bool(self._matcher.is_accepting())
            return self._ended
        return 0 <= token < self._size and bool(self._matcher.consume_token(token))

    def allowed(self) -> Bools:
        """Which tokens may come next, bool ``[size]``; the array is the caller's.

        Raises InputError when the grammar has become too complex to tell.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            reason = _line(self._matcher.get_error())
            raise InputError(f"json_schema cannot be followed any further: {reason}")
        allowed = np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)
        allowed[self._foreign_ids] = False
        allowed[self._eos_ids] = not self._ended and self._matcher.is_accepting()
        return allowed


class GrammarCompiler:
    """Compiles schemas for the tokenizer of one model folder; the latest ones are kept.

    ``vocab_size``: entries of a row of logits. ``eos_token_ids``: those of the model.
    Nothing is read before the first schema. Any thread may call it.
    """

    def __init__(
        self,
        folder: str | Path,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        cached: int = CACHED_SCHEMAS,
    ) -> None:
        self._folder = Path(folder)
        self._vocab_size = vocab_size
        self._eos = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._cached = cached
        self._known: OrderedDict[bytes, LLMatcher | InputError] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._lock = Lock()  # of what is kept; never held while something is compiled
        self.compiled = 0

    def time_limit(self) -> float:
        """Seconds the next :meth:`compile` may take."""
        return COMPILE_LIMIT_S + (TOKENIZER_LIMIT_S if self._tokenizer is None else 0.0)

    def compile(self, task: GrammarTask) -> GrammarMatcher:
        """The matcher behind the emitted tokens.

        Raises InputError for a schema that is wrong, unsatisfiable, too large or beyond what
        llguidance can hold an answer to; and for tokens that do not fit it.
        """
        start = self._start(task.schema)
        matcher = GrammarMatcher(start.deep_copy(), self._vocab_size, task.eos, self._eos)
        for position, token in enumerate(task.emitted):
            if not matcher.consume_token(token):
                raise InputError(f"token {position} of the answer does not fit the json_schema")
        return matcher

    def _start(self, schema: str) -> LLMatcher:
        """The state before the first token, compiled or kept; not to be advanced."""
        digest = blake2b(schema.encode(errors="surrogatepass"), digest_size=16).digest()
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
        if known is None:
            known = self._compile(schema)
            with self._lock:
                self._known[digest] = known
                while len(self._known) > self._cached:
                    self._known.popitem(last=False)
        if isinstance(known, InputError):
            raise InputError(str(known))
        return known

    def _compile(self, schema: str) -> LLMatcher | InputError:
        try:
            check_json_schema(schema)
            tokenizer = self._load()
        except InputError as error:
            return error
        from llguidance import LLMatcher, LLParserLimits

        if schema.strip() in ("true", "false"):  # options need an object to stand in
            schema = "{}" if schema.strip() == "true" else '{"enum":[]}'
        self.compiled += 1
        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        try:
            text = LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_pattern": _WHITESPACE}
            )
            matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        except Exception as error:
            return InputError(f"json_schema: {_line(str(error))}")
        except BaseException as error:
            if not type(error).__name__.startswith("Panic"):  # how a panic of the library arrives
                raise
            return InputError(f"json_schema cannot be compiled: {_line(str(error))}")
        if matcher.is_error():
            return InputError(f"json_schema: {_line(matcher.get_error())}")
        return matcher

    def _load(self) -> LLTokenizer:
        if self._tokenizer is not None:
            return self._tokenizer
        from llguidance import LLTokenizer

        if not self._eos:
            raise InputError("json_schema needs a model with an end-of-sequence id")
        try:
            content = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(
                content,
                n_vocab=self._vocab_size,
                eos_token=self._eos,
                slices=LLTokenizer.json_slices(),
            )
        except (OSError, ValueError) as error:
            raise InputError(
                f"json_schema needs a tokenizer.json that fits the model: {_line(str(error))}"
            ) from None
        return self._tokenizer


def as_result(answer: object) -> Matcher | BatonError:
    """A compile thread's answer as :class:`GrammarDone` carries it."""
    if isinstance(answer, GrammarMatcher | BatonError):
        return answer
    if isinstance(answer, TimeoutError):
        return InputError(f"json_schema is too complex: not compiled within {COMPILE_LIMIT_S:g} s")
    return InternalError(f"compiling json_schema: {answer!r}"[:_MESSAGE_CHARS])


def _ids(tokens: Iterable[int]) -> npt.NDArray[np.intp]:
    return np.array(sorted(tokens), np.intp)


def _line(text: str) -> str:
    """A foreign message on one line of bounded length."""
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MESSAGE_CHARS else line[: _MESSAGE_CHARS - 1] + "…"
