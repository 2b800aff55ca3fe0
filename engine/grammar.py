"""JSON schemas as constraints on the tokens drawn, compiled by llguidance.

A :class:`GrammarCompiler` belongs to one model and is used on a thread of its own; what it
makes, a :class:`GrammarMatcher`, follows one request. A matcher is a function of the schema,
the tokenizer and the tokens accepted, so a worker that takes a request over rebuilds it by
accepting the same tokens again.

A matcher is used by one thread at a time: the compute thread asks it while a step of its
request runs, the thread of the scheduler advances it between steps.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..proto.contexts import TextContext
from ..proto.errors import (
    BatonError,
    CapacityError,
    InputError,
    InternalError,
    SchemaTooComplex,
)
from ..proto.json_schema import check_json_schema
from ..proto.matching import Matcher
from .plan import Bools
from .schema_compiler import compile_schema, load_tokenizer, one_line
from .schema_trial import SchemaCost, SchemaTrial

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_LIMIT_S = 10.0
"""Longest a schema may take; ordinary ones take milliseconds, the largest legal ones a second."""
TOKENIZER_LIMIT_S = 60.0
"""What the first schema may take on top, to read the tokenizer."""
CACHED_SCHEMAS = 64
MAX_SCHEMAS_BYTES = 1 << 30
"""Memory of all schemas that requests use or that are kept for the next ones."""
_LEAST_SCHEMA_BYTES = 1 << 20  # for what a measurement does not see
_SHARED_TOKENS = 16_384  # that answers may draw from one compiled schema before it is renewed
_AGAIN_S = 0.25  # what may be compiled again between two tokens
_MESSAGE_CHARS = 300


@dataclass(slots=True, frozen=True)
class GrammarTask:
    """A matcher wanted: by what schema, with which ids that end, behind which tokens."""

    schema: str
    eos: frozenset[int]
    emitted: tuple[int, ...] = ()

    def leads_to(self, other: GrammarTask) -> bool:
        """Whether this matcher becomes the other one by accepting further tokens."""
        same = (self.schema, self.eos) == (other.schema, other.eos)
        return same and other.emitted[: len(self.emitted)] == self.emitted


@dataclass(slots=True, frozen=True)
class CompileGrammar:
    """What a worker's core asks its shell for; answered with :class:`GrammarDone`."""

    key: tuple[bytes, int]
    task: GrammarTask


@dataclass(slots=True, frozen=True)
class DropGrammar:
    """Nobody waits for this matcher any more; it is not answered."""

    key: tuple[bytes, int]


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


class _Start:
    """A compiled schema before the first token.

    What its copies see of texts, they share, and there is a limit to it: so a new one takes the
    place of one that many answers, or one strange answer, have used up.
    """

    __slots__ = ("__weakref__", "cost", "followed", "matcher", "schema", "tokenizer")

    def __init__(self, tokenizer: LLTokenizer, schema: str, cost: SchemaCost) -> None:
        self.tokenizer = tokenizer
        self.schema = schema
        self.cost = cost
        self.matcher = compile_schema(tokenizer, schema)
        self.followed = 0  # tokens

    @property
    def nbytes(self) -> int:
        """Memory it is taken for."""
        return max(self.cost.nbytes, _LEAST_SCHEMA_BYTES)

    @property
    def used_up(self) -> bool:
        """Whether the next request should have another."""
        return self.followed >= _SHARED_TOKENS

    def alone(self) -> LLMatcher | None:
        """A state that shares nothing; None when compiling takes too long between two tokens."""
        self.followed = _SHARED_TOKENS
        if self.cost.seconds > _AGAIN_S:
            return None
        return compile_schema(self.tokenizer, self.schema)


class GrammarMatcher:
    """Where one request stands in its grammar.

    ``start``: the compiled schema. ``size``: entries of a row of logits. ``eos``: ids that
    end the request; they are allowed exactly where the text so far is a whole instance.
    ``foreign``: ids llguidance takes for the end, whatever the request thinks of them.
    """

    __slots__ = (
        "_alone", "_bits", "_ended", "_eos", "_eos_ids", "_foreign", "_foreign_ids", "_matcher",
        "_size", "_start", "_tokens",
    )  # fmt: skip

    def __init__(
        self, start: _Start, size: int, eos: Iterable[int], foreign: Iterable[int]
    ) -> None:
        self._start = start
        self._matcher = start.matcher.deep_copy()
        self._alone = False  # shares nothing with other requests
        self._tokens: list[int] = []  # accepted, without the one that ended
        self._bits: bytes | None = None  # what may follow them, once it was asked for
        self._size = size
        self._eos = frozenset(eos)
        self._eos_ids = _ids(token for token in self._eos if 0 <= token < size)
        self._foreign = frozenset(foreign) - self._eos
        self._foreign_ids = _ids(self._foreign)
        self._ended = False

    def __deepcopy__(self, memo: dict[int, object]) -> GrammarMatcher:
        """Another one at the same place."""
        twin = copy.copy(self)
        twin._matcher = self._matcher.deep_copy()
        twin._tokens = self._tokens.copy()
        return twin

    def consume_token(self, token: int) -> bool:
        """Advance by ``token``; False, and nothing changes, if the grammar does not allow it.

        Raises SchemaTooComplex when the grammar has become too complex to tell.
        """
        if self._ended or token in self._foreign:
            return False
        if token in self._eos:
            self._ended = bool(self._matcher.is_accepting())
            return self._ended
        if not 0 <= token < self._size or not self._fits(token):
            return False
        if not self._matcher.consume_token(token):
            self._retreat()
            if not self._matcher.consume_token(token):
                raise self._too_complex()
        self._tokens.append(token)
        self._bits = None
        self._start.followed += 1
        return True

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens accepted; ValueError when there are fewer."""
        kept = len(self._tokens) + self._ended - count
        if count < 0 or kept < 0:
            raise ValueError(f"cannot take back {count} tokens of a grammar")
        self._ended = self._ended and not count
        taken = len(self._tokens) - kept
        if taken <= 0:
            return
        del self._tokens[kept:]
        self._bits = None
        if not self._matcher.rollback(taken):
            self._stand_alone()

    def allowed(self) -> Bools:
        """Which tokens may come next, bool ``[size]``; the array is the caller's.

        Raises SchemaTooComplex when the grammar has become too complex to tell, InputError
        when nothing can follow and the text is no instance.
        """
        bits = np.frombuffer(self._following(), np.uint8)
        allowed = np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)
        allowed[self._foreign_ids] = False
        allowed[self._eos_ids] = not self._ended and self._matcher.is_accepting()
        if not self._ended and not allowed.any():
            raise InputError("json_schema: nothing can follow, and the text is no instance")
        return allowed

    def _following(self) -> bytes:
        """One bit per token."""
        if self._bits is None:
            self._bits = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                self._retreat()
                self._bits = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise self._too_complex()
        return self._bits

    def _fits(self, token: int) -> bool:
        """Whether the grammar allows it, by what was asked before or by asking for it alone."""
        if self._bits is not None:
            return bool(self._bits[token >> 3] >> (token & 7) & 1)
        return bool(self._matcher.validate_tokens([token]))

    def _retreat(self) -> None:
        """Others may have used up what is shared: go on without them."""
        if self._alone:
            raise self._too_complex()
        self._stand_alone()

    def _stand_alone(self) -> None:
        """Rebuild the state from the tokens, on a schema compiled for this request."""
        matcher = self._start.alone()
        if matcher is None or not matcher.consume_tokens(self._tokens):
            raise self._too_complex()
        self._matcher, self._alone = matcher, True

    def _too_complex(self) -> SchemaTooComplex:
        self._bits = None
        reason = one_line(self._matcher.get_error())
        return SchemaTooComplex(f"json_schema cannot be followed any further: {reason}")


def follow(matcher: Matcher, tokens: Sequence[int]) -> None:
    """Advance by tokens somebody drew; InputError when they do not fit."""
    for position, token in enumerate(tokens):
        if not matcher.consume_token(token):
            raise InputError(f"token {position} of the answer does not fit the json_schema")


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
        max_bytes: int = MAX_SCHEMAS_BYTES,
    ) -> None:
        self._folder = Path(folder)
        self._vocab_size = vocab_size
        self._eos = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._cached = cached
        self._max_bytes = max_bytes
        self._known: OrderedDict[bytes, _Start | InputError] = OrderedDict()
        self._starts: weakref.WeakSet[_Start] = weakref.WeakSet()  # kept, or used by a request
        self._tokenizer: LLTokenizer | None = None
        self._trial = SchemaTrial(self._folder, vocab_size, self._eos)
        self._lock = Lock()  # of what is kept; never held while something is compiled
        self.compiled = 0

    def time_limit(self) -> float:
        """Seconds the next :meth:`compile` may take."""
        return COMPILE_LIMIT_S + (TOKENIZER_LIMIT_S if self._tokenizer is None else 0.0)

    def compile(self, task: GrammarTask) -> GrammarMatcher:
        """The matcher behind the emitted tokens.

        Raises InputError for a schema that is wrong, unsatisfiable or beyond what llguidance
        can hold an answer to, and for tokens that do not fit it; SchemaTooComplex for one that
        takes too much; CapacityError when others take all that there is.
        """
        matcher = GrammarMatcher(self._start(task.schema), self._vocab_size, task.eos, self._eos)
        follow(matcher, task.emitted)
        return matcher

    def close(self) -> None:
        """End the helper process."""
        self._trial.close()

    def _start(self, schema: str) -> _Start:
        """The state before the first token, compiled or kept; not to be advanced."""
        digest = blake2b(schema.encode(errors="surrogatepass"), digest_size=16).digest()
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
        if known is None or (isinstance(known, _Start) and known.used_up):
            known = self._make(schema, None if known is None else known.cost)
            with self._lock:
                self._known[digest] = known
                while len(self._known) > self._cached:
                    self._known.popitem(last=False)
        if isinstance(known, InputError):
            raise type(known)(str(known))
        return known

    def _make(self, schema: str, cost: SchemaCost | None) -> _Start | InputError:
        """A compiled schema, or what is wrong with it; ``cost`` if it was tried before."""
        try:
            check_json_schema(schema)
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self._folder, self._vocab_size, self._eos)
            cost = cost or self._trial.cost(schema)
            self._make_room(max(cost.nbytes, _LEAST_SCHEMA_BYTES))
            self.compiled += 1
            start = _Start(self._tokenizer, schema, cost)
        except InputError as error:
            return error
        self._starts.add(start)
        return start

    def _make_room(self, nbytes: int) -> None:
        """Forget kept schemas until another fits beside those in use, or raise CapacityError."""
        with self._lock:
            oldest = [key for key, known in self._known.items() if isinstance(known, _Start)]
            for key in oldest:
                if self._taken() + nbytes <= self._max_bytes:
                    return
                del self._known[key]
            if self._taken() + nbytes > self._max_bytes:
                text = "the schemas of running requests take all memory there is for them"
                raise CapacityError(text, retry_after=1.0)

    def _taken(self) -> int:
        return sum(start.nbytes for start in self._starts)


def as_result(answer: object) -> Matcher | BatonError:
    """A compile thread's answer as :class:`GrammarDone` carries it."""
    if isinstance(answer, GrammarMatcher | BatonError):
        return answer
    if isinstance(answer, TimeoutError):
        return SchemaTooComplex(
            f"json_schema is too complex: not compiled within {COMPILE_LIMIT_S:g} s"
        )
    return InternalError(f"compiling json_schema: {answer!r}"[:_MESSAGE_CHARS])


def _ids(tokens: Iterable[int]) -> npt.NDArray[np.intp]:
    return np.array(sorted(tokens), np.intp)
