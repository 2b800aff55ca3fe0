"""Whole results of requests, made from their outputs. Pure.

A prompt has one :class:`Result`. The result holds ``n`` completions, one per native request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.proto.errors import BatonError, InternalError

from .logprobs import TokenLogprob
from .output import Output


@dataclass(slots=True, frozen=True)
class Usage:
    """Numbers of tokens. ``cached_tokens``: of the prompt, taken from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True, frozen=True, kw_only=True)
class Completion:
    """One answer to a prompt.

    ``finish_reason``: "stop" after an end-of-sequence token or a stop string, "length" at the
    maximum length, "cancelled". ``logprobs``: one record per token if they were requested, and
    ``prompt_logprobs`` one per token of the prompt.
    """

    index: int
    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    prefill: str = ""
    decode: str = ""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the answer's tokens, if they were requested."""
        return None if self.logprobs is None else sum(one.logprob for one in self.logprobs)


@dataclass(slots=True, frozen=True)
class Result:
    """All answers to one prompt: ``outputs`` has ``n`` completions.

    ``prompt``: as given: text, token ids, a context, or the messages of a chat. ``error``: of a
    prompt that failed in a call with ``on_error="return"``; the result then has no completion. The
    properties are those of the first completion; they raise the error of a failed prompt.
    """

    outputs: list[Completion]
    prompt: Any = field(default=None, repr=False)
    error: BatonError | None = None

    @property
    def _first(self) -> Completion:
        if self.error is not None:
            raise self.error
        return self.outputs[0]

    @property
    def text(self) -> str:
        """Text of the answer, without a stop string."""
        return self._first.text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the answer."""
        return self._first.token_ids

    @property
    def finish_reason(self) -> str:
        """Why the answer ended: see :class:`Completion`."""
        return self._first.finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Log-probabilities of the answer's tokens, if they were requested."""
        return self._first.logprobs

    @property
    def prompt_logprobs(self) -> list[TokenLogprob] | None:
        """Log-probabilities of the prompt's tokens, if they were requested."""
        return self._first.prompt_logprobs

    @property
    def request_id(self) -> str:
        """Id of the first completion's request."""
        return self._first.request_id

    @property
    def usage(self) -> Usage:
        """Tokens of all completions; the prompt counts once."""
        parts = [self._first.usage, *(one.usage for one in self.outputs[1:])]
        completed = sum(part.completion_tokens for part in parts)
        return Usage(parts[0].prompt_tokens, completed, parts[0].cached_tokens)


@dataclass(slots=True)
class Collector:
    """Joins the outputs of one request."""

    _prompt_tokens: int | None = None
    _tokens: list[int] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _logprobs: list[TokenLogprob] | None = None
    _prompt_logprobs: list[TokenLogprob] | None = None
    _last: Output | None = None

    def add(self, output: Output) -> None:
        """Add the next output."""
        if self._prompt_tokens is None:
            self._prompt_tokens = output.position
        self._tokens += output.tokens
        self._texts.append(output.text)
        found = output.logprobs
        if found is not None:
            self._logprobs = found if self._logprobs is None else [*self._logprobs, *found]
        if output.prompt_log_probabilities is not None:
            self._prompt_logprobs = output.prompt_logprobs
        self._last = output

    def completion(self, index: int = 0) -> Completion:
        """Return the whole answer. Raises InternalError if its end is missing."""
        last = self._last
        if last is None or last.finish_reason is None:
            raise InternalError("the answer has no end")
        usage = Usage(self._prompt_tokens or 0, len(self._tokens), last.cached_tokens)
        return Completion(
            index=index,
            request_id=last.request_id,
            text="".join(self._texts),
            token_ids=self._tokens,
            finish_reason=last.finish_reason,
            usage=usage,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            prefill=last.prefill,
            decode=last.decode,
        )


def collected(outputs: Iterable[Output], index: int = 0) -> Completion:
    """Return the completion of a request whose outputs arrive one after the other."""
    collector = Collector()
    for output in outputs:
        collector.add(output)
    return collector.completion(index)


def results_of(answers: Sequence[Completion | BatonError], prompts: Sequence[Any]) -> list[Result]:
    """Return one result per prompt. The answers to a prompt are neighbours."""
    n = len(answers) // max(1, len(prompts))
    results = []
    for at, prompt in enumerate(prompts):
        own = answers[at * n : (at + 1) * n]
        error = next((one for one in own if isinstance(one, BatonError)), None)
        done = [one for one in own if isinstance(one, Completion)] if error is None else []
        results.append(Result(done, prompt, error))
    return results
