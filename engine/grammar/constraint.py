"""JSON schemas as constraints on sampled tokens, compiled by llguidance.

A :class:`GrammarCompiler` belongs to one model and runs on a separate thread. It creates a
:class:`GrammarMatcher` per request. A matcher is a function of the schema, the tokenizer and the
accepted tokens, so a worker that takes over a request rebuilds the matcher by accepting the same
tokens again.

One thread at a time uses a matcher: the compute thread reads it while a step of its request runs,
and the scheduler's thread advances it when the step's result is applied. A step planned ahead reads
it after that (:data:`..scheduling.plan.Applied`).
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.matching import Matcher
from baton.proto.contexts.text import TextContext
from baton.proto.errors import (
    BatonError,
    CapacityError,
    InputError,
    InternalError,
    SchemaTooComplex,
)
from baton.proto.json_schema import check_json_schema

from ..scheduling.plan import Bools
from .compiler import compile_schema, load_tokenizer, one_line
from .trial import SchemaCost, SchemaTrial

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_LIMIT_S = 90.0
"""Time limit for trying and compiling a schema, seconds. Ordinary schemas take milliseconds, the
largest legal schemas one second; the trial alone may take 60 s on a busy machine."""
TOKENIZER_LIMIT_S = 60.0
"""Additional seconds for the first schema, to read the tokenizer."""
CACHED_SCHEMAS = 64
MAX_SCHEMAS_BYTES = 1 << 30
"""Memory limit for all schemas that requests use or the cache keeps."""
_LARGE_VOCABULARY = 16_384  # tokens; fewer are read in less than 0.15 s
_LEAST_SCHEMA_BYTES = 1 << 20  # lower bound, for memory that the measurement misses
_SHARED_TOKENS = 16_384  # tokens that answers may sample from one compiled schema before a new one
_AGAIN_S = 0.25  # longest compile time for compiling again between two tokens


@dataclass(slots=True, frozen=True)
class GrammarTask:
    """A request for a matcher: the schema, the ids that end the answer, the tokens so far."""

    schema: str
    eos: frozenset[int]
    emitted: tuple[int, ...] = ()

    def leads_to(self, other: GrammarTask) -> bool:
        """True if accepting further tokens turns this task's matcher into the other's."""
        same = (self.schema, self.eos) == (other.schema, other.eos)
        return same and other.emitted[: len(self.emitted)] == self.emitted


@dataclass(slots=True, frozen=True)
class CompileGrammar:
    """Action of a worker's core: compile a grammar, then report :class:`GrammarDone`."""

    key: tuple[bytes, int]
    task: GrammarTask


@dataclass(slots=True, frozen=True)
class DropGrammar:
    """Action of a worker's core: stop compiling a grammar; no :class:`GrammarDone` follows."""

    key: tuple[bytes, int]


@dataclass(slots=True, frozen=True)
class GrammarDone:
    """The matcher of a request, or the compiler's error."""

    key: tuple[bytes, int]
    result: Matcher | BatonError


def grammar_task(context: TextContext) -> GrammarTask | None:
    """Return the grammar that ``context`` needs before its next token; None if it needs none."""
    if context.json_schema is None or context.matcher is not None:
        return None
    emitted = context.tokens.all[context.prompt_length :].tolist()
    eos = frozenset() if context.ignore_eos else frozenset(context.eos_token_ids)
    return GrammarTask(context.json_schema, eos, tuple(emitted))


class _Start:
    """A compiled schema before the first token.

    All copies share a cache of lexer states, which has a size limit. Many answers, or one unusual
    answer, can exhaust it. Then a newly compiled schema replaces this one.
    """

    __slots__ = ("__weakref__", "cost", "followed", "matcher", "schema", "tokenizer")

    def __init__(self, tokenizer: LLTokenizer, schema: str, cost: SchemaCost) -> None:
        self.tokenizer = tokenizer
        self.schema = schema
        self.cost = cost
        self.matcher = compile_schema(tokenizer, schema)
        self.followed = 0  # tokens accepted by all copies

    @property
    def nbytes(self) -> int:
        """Memory accounted for this schema."""
        return max(self.cost.nbytes, _LEAST_SCHEMA_BYTES)

    @property
    def used_up(self) -> bool:
        """True if the next request should get a newly compiled schema."""
        return self.followed >= _SHARED_TOKENS

    def alone(self) -> LLMatcher | None:
        """Return a state that shares nothing; None if compiling takes too long between tokens."""
        self.followed = _SHARED_TOKENS
        if self.cost.seconds > _AGAIN_S:
            return None
        return compile_schema(self.tokenizer, self.schema)


_WordBits = tuple[tuple[int, int], ...]
"""Indexes of words of a mask, and bits of each."""


@dataclass(slots=True, frozen=True, eq=False)
class _Edits:
    """Bits to clear in llguidance's masks, and bits to set where the text is complete.

    Matchers with the same edits share one object, so grouping by it compares no contents.
    """

    removed: _WordBits
    added: _WordBits


@lru_cache(CACHED_SCHEMAS)
def _edits(size: int, eos: frozenset[int], foreign: frozenset[int]) -> _Edits:
    """Return the edits for rows of ``size`` logits; see :class:`GrammarMatcher`."""
    ends = sorted(token for token in eos if 0 <= token < size)
    unused = range(size, -(-size // 32) * 32)
    return _Edits(_word_bits([*ends, *sorted(foreign), *unused]), _word_bits(ends))


class GrammarMatcher:
    """The position of one request in its grammar.

    ``start``: the compiled schema. ``size``: entries of a row of logits. ``eos``: ids that
    end the request; allowed exactly where the text so far is a complete instance.
    ``foreign``: ids that llguidance treats as the end although the request does not.
    """

    __slots__ = (
        "_alone", "_bits", "_edits", "_ended", "_eos", "_eos_ids", "_foreign", "_foreign_ids",
        "_mask_bytes", "_matcher", "_size", "_start", "_tokens",
    )  # fmt: skip

    def __init__(
        self, start: _Start, size: int, eos: Iterable[int], foreign: Iterable[int]
    ) -> None:
        self._start = start
        self._matcher = start.matcher.deep_copy()
        self._alone = False  # True after the state was rebuilt without sharing
        self._tokens: list[int] = []  # accepted tokens, without the token that ended the answer
        self._bits: bytes | None = None  # cached bitmask of the next tokens
        self._size = size
        self._eos = frozenset(eos)
        self._eos_ids = _ids(token for token in self._eos if 0 <= token < size)
        self._foreign = frozenset(foreign) - self._eos
        self._foreign_ids = _ids(self._foreign)
        self._edits = _edits(size, self._eos, self._foreign)
        self._mask_bytes = 4 * -(-start.tokenizer.vocab_size // 32)
        self._ended = False

    def __deepcopy__(self, memo: dict[int, object]) -> GrammarMatcher:
        """Return a copy at the same position."""
        twin = copy.copy(self)
        twin._matcher = self._matcher.deep_copy()
        twin._tokens = self._tokens.copy()
        return twin

    def consume_token(self, token: int) -> bool:
        """Accept ``token``. Return False, unchanged, if the grammar does not allow the token.

        Raises SchemaTooComplex if the grammar became too complex to decide.
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
        """Undo the last ``count`` accepted tokens. Raises ValueError if there are fewer."""
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
        """Return the allowed next tokens, bool ``[size]``; the caller owns the array.

        Raises SchemaTooComplex if the grammar became too complex to decide, and InputError
        if no token is allowed and the text is not an instance.
        """
        bits = np.frombuffer(self._following(), np.uint8)
        allowed = np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)
        allowed[self._foreign_ids] = False
        allowed[self._eos_ids] = not self._ended and self._matcher.is_accepting()
        if not self._ended and not allowed.any():
            raise InputError("json_schema: no token can follow, and the text is incomplete")
        return allowed

    def _following(self) -> bytes:
        """Return the bitmask of allowed tokens, one bit per token."""
        if self._bits is None:
            self._bits = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                self._retreat()
                self._bits = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise self._too_complex()
        return self._bits

    def _write_following(self, row: memoryview, address: int) -> bytes:
        """Write the bitmask of allowed tokens to ``row``, whose memory is at ``address``.

        Returns :meth:`_following`. After an error the row's contents are undefined.
        """
        if self._bits is None and len(row) == self._mask_bytes:
            self._matcher.unsafe_compute_mask_ptr(address, self._mask_bytes)
            if not self._matcher.is_error():
                self._bits = row.tobytes()
                return self._bits
        bits = self._following()[: len(row)]
        row[:] = bits
        return bits

    def _fits(self, token: int) -> bool:
        """True if the grammar allows the token, from the cached bitmask if there is one."""
        if self._bits is not None:
            return bool(self._bits[token >> 3] >> (token & 7) & 1)
        return bool(self._matcher.validate_tokens([token]))

    def _retreat(self) -> None:
        """Continue without sharing, because other requests may have exhausted the shared cache."""
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
        return SchemaTooComplex(f"json_schema is too complex to follow any further: {reason}")


def write_words(
    matchers: Sequence[GrammarMatcher], rows: Sequence[int], words: npt.NDArray[np.uint32]
) -> list[int]:
    """Write :meth:`GrammarMatcher.allowed` of each matcher into its row of ``words``.

    ``words``: uint32 ``[R, ceil(size / 32)]``, a bit per token, the lowest id in the lowest bit.
    Returns the indexes of the matchers whose rows have undefined contents: ``allowed`` of such a
    matcher may raise. This takes less time than ``allowed`` of each. Raises InternalError if a row
    is outside ``words``.
    """
    if rows and not 0 <= min(rows) <= max(rows) < len(words):
        raise InternalError("a mask's row is outside the array")
    flat, width, address = words.data.cast("B"), 4 * words.shape[1], words.ctypes.data
    none = bytes(width)
    left: list[int] = []
    edits: dict[_Edits, tuple[list[int], list[int]]] = {}
    for index, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
        if matcher._ended:
            left.append(index)
            continue
        at = row * width
        try:
            bits = matcher._write_following(flat[at : at + width], address + at)
            complete = matcher._matcher.is_accepting()
        except Exception:  # one grammar's error is not the others'
            left.append(index)
            continue
        # Without an end that may follow, a token must. An end's bits are not a token's.
        if not matcher._edits.added if complete else bits == none:
            left.append(index)
            continue
        written, accepting = edits.setdefault(matcher._edits, ([], []))
        written.append(row)
        if complete:
            accepting.append(row)
    for shared, (written, accepting) in edits.items():
        for word, some in shared.removed:
            words[written, word] &= np.uint32(~some & 0xFFFFFFFF)
        for word, some in shared.added:
            words[accepting, word] |= np.uint32(some)
    return left


def follow(matcher: Matcher, tokens: Sequence[int]) -> None:
    """Accept tokens sampled earlier. Raises InputError if the grammar does not allow them."""
    for position, token in enumerate(tokens):
        if not matcher.consume_token(token):
            raise InputError(f"token {position} of the answer does not fit the json_schema")


class GrammarCompiler:
    """Compiles schemas for the tokenizer of one model folder, and caches the latest ones.

    ``vocab_size``: entries of a row of logits. ``eos_token_ids``: ids of the model.
    The tokenizer is read with the first schema, or by :meth:`prepare`. Thread-safe.
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
        self._starts: weakref.WeakSet[_Start] = weakref.WeakSet()  # cached or used by a request
        self._tokenizer: LLTokenizer | None = None
        self._trial = SchemaTrial(self._folder, vocab_size, self._eos)
        self._lock = Lock()  # guards the cache; never held while compiling
        self.compiled = 0

    def time_limit(self) -> float:
        """Time limit of the next :meth:`compile`, in seconds."""
        return COMPILE_LIMIT_S + (TOKENIZER_LIMIT_S if self._tokenizer is None else 0.0)

    def prepare(self) -> None:
        """Read a large tokenizer now, when no request runs.

        llguidance holds the interpreter while it reads: 1.2 s for 151,936 tokens on an idle
        machine, in which a worker would send neither tokens nor heartbeats. A tokenizer that
        does not support grammars is an error of the first schema, not of the worker.
        """
        if self._tokenizer is None and self._vocab_size >= _LARGE_VOCABULARY:
            with suppress(InputError):
                self._tokenizer = load_tokenizer(self._folder, self._vocab_size, self._eos)

    def compile(self, task: GrammarTask) -> GrammarMatcher:
        """Return the matcher after the emitted tokens.

        Raises InputError if the schema is invalid, unsatisfiable or not supported by
        llguidance, or if the tokens do not fit it; SchemaTooComplex if the schema
        takes too much time or memory; CapacityError if other schemas use all the memory.
        """
        matcher = GrammarMatcher(self._start(task.schema), self._vocab_size, task.eos, self._eos)
        follow(matcher, task.emitted)
        return matcher

    def close(self) -> None:
        """End the helper process."""
        self._trial.close()

    def _start(self, schema: str) -> _Start:
        """Return the state before the first token, cached or compiled; do not advance it."""
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
        """Compile a schema or return its error; ``cost``: the result of an earlier trial."""
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
        """Evict cached schemas until another fits beside those in use, or raise CapacityError."""
        with self._lock:
            oldest = [key for key, known in self._known.items() if isinstance(known, _Start)]
            for key in oldest:
                if self._taken() + nbytes <= self._max_bytes:
                    return
                del self._known[key]
            if self._taken() + nbytes > self._max_bytes:
                text = "the schemas of running requests use all the memory reserved for schemas"
                raise CapacityError(text, retry_after=1.0)

    def _taken(self) -> int:
        return sum(start.nbytes for start in self._starts)


NOT_COMPILED = "the grammar of this request could not be compiled; the worker's log has the cause"
"""Everything that a client learns about an exception of the compiler."""


def as_result(answer: object) -> Matcher | BatonError:
    """Convert a compile thread's answer to the result of :class:`GrammarDone`."""
    if isinstance(answer, GrammarMatcher | BatonError):
        return answer
    if isinstance(answer, TimeoutError):
        text = f"json_schema was not compiled within {COMPILE_LIMIT_S:g} s: the machine is too busy"
        return CapacityError(text, retry_after=1.0)
    error = InternalError(NOT_COMPILED)
    error.__cause__ = answer if isinstance(answer, Exception) else None
    return error


def _ids(tokens: Iterable[int]) -> npt.NDArray[np.intp]:
    return np.array(sorted(tokens), np.intp)


def _word_bits(tokens: Iterable[int]) -> _WordBits:
    """Return the words of a mask that have bits of the tokens, with these bits."""
    words: dict[int, int] = {}
    for token in tokens:
        words[token >> 5] = words.get(token >> 5, 0) | 1 << (token & 31)
    return tuple(words.items())
