"""Outputs of a generation, made from the core's events. Token ids become text here.

Invariant: the joined texts of all outputs are the answer, without any stop string. No output
contains a token after the token that completed a stop string.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.contexts.outputs import LogProbabilities, TokenLogProbs
from baton.proto.contexts.status import GenerationStatus
from baton.proto.errors import InternalError
from baton.proto.limits import MAX_LOG_PROBABILITIES
from baton.proto.prompt_log_probs import PromptLogProb, read_prompt_log_probs
from baton.proto.wire.messages import ServedTimes
from baton.text.detokenizer import IncrementalDetokenizer
from baton.text.tokenizer import Tokenizer

from .events import Ended, NewTokens
from .logprobs import TokenLogprob, prompt_logprobs, token_logprobs

_FINISH_REASONS = {
    GenerationStatus.END_OF_SEQUENCE: "stop",
    GenerationStatus.MAXIMUM_LENGTH: "length",
    GenerationStatus.CANCELLED: "cancelled",
}
_STATUSES: dict[str | None, GenerationStatus] = {one.value: one for one in GenerationStatus}


class Output(msgspec.Struct, kw_only=True, repr_omit_defaults=True):
    """New tokens of one request.

    ``tokens``: new token ids. ``text``: their text, empty for a prompt of token ids unless
    ``show_text`` is set; an unfinished character or possible stop string is delayed to a later
    output. ``position``: absolute index of the first token (the prompt starts at 0).
    ``log_probabilities``: one entry per token if requested; :attr:`logprobs` adds their texts.
    ``prompt_log_probabilities``: in the first output, one entry per token of the prompt if
    requested; :attr:`prompt_logprobs` adds their texts.
    ``media``: samples of speech that are complete with the last token, little-endian 16 bit.
    ``final_status``: None except in the last output, which may have no tokens. Only in the last
    output: ``prefill`` and ``decode`` are the workers' ids, and ``cached_tokens`` is the number of
    prompt tokens taken from the prefix cache; ``tokens_s`` is the time from the first tokens to the
    end, of a whole answer. ``served``: where the time before the first token went; a gateway's
    first output has it too, and the workers.
    """

    request_id: str
    tokens: list[int]
    text: str
    position: int
    log_probabilities: list[LogProbabilities] | None = None
    prompt_log_probabilities: list[PromptLogProb] | None = None
    final_status: GenerationStatus | None = None
    prefill: str = ""
    decode: str = ""
    cached_tokens: int = 0
    media: bytes | None = None
    tokenizer: Tokenizer | None = None
    tokens_s: float = 0.0
    served: ServedTimes | None = None

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """The log-probabilities with the texts of their tokens, if they were requested."""
        entries = self.log_probabilities
        return None if entries is None else token_logprobs(self.tokens, entries, self.tokenizer)

    @property
    def prompt_logprobs(self) -> list[TokenLogprob] | None:
        """The log-probabilities of the prompt's tokens with their texts, in the first output."""
        entries = self.prompt_log_probabilities
        return None if entries is None else prompt_logprobs(entries, self.tokenizer)

    @property
    def finish_reason(self) -> str | None:
        """Return "stop", "length" or "cancelled" in the last output, else None."""
        return None if self.final_status is None else _FINISH_REASONS.get(self.final_status)

    @property
    def is_done(self) -> bool:
        """Whether this is the last output."""
        return self.final_status is not None


@dataclass(slots=True, frozen=True)
class PromptRequest:
    """A prompt whose log-probabilities were requested.

    ``tokens``: int32. ``top``: most likely tokens in a record. ``shown``: those in outputs.
    """

    tokens: npt.NDArray[np.int32]
    top: int
    shown: int

    def read(self, records: bytes) -> list[PromptLogProb]:
        """Return the entries of the prompt's tokens. Raises DecodeFailed."""
        return read_prompt_log_probs(records, self.tokens.tolist(), self.top, self.shown)


class Assembler:
    """Turns the events of one request into outputs.

    ``detokenizer``: converts tokens to text and finds stop strings; None: neither is needed.
    ``show_text``: put the text into the outputs. ``tokenizer``: for the texts of log-probabilities.
    ``log_probs``: the most likely tokens to show beside each token; 0: no log-probabilities.
    ``prompt``: for the log-probabilities of the prompt's tokens. ``stops``: a stop string may end
    the text; ``stopped``: it has.
    """

    __slots__ = (
        "_detokenizer", "_log_probs", "_position", "_push_all", "_show_text", "_stops",
        "_tokenizer", "prompt", "stopped", "stops",
    )  # fmt: skip

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer | None,
        *,
        show_text: bool,
        tokenizer: Tokenizer | None = None,
        log_probs: int = MAX_LOG_PROBABILITIES,
    ) -> None:
        self._tokenizer = tokenizer
        self._log_probs = log_probs
        self.prompt: PromptRequest | None = None
        self._detokenizer = detokenizer
        # Most requests have no stop strings; text without them takes less time.
        self._stops: IncrementalDetokenizer | None = None
        self._push_all: Callable[[list[int]], str] | None = None
        if detokenizer is not None and detokenizer.stops:
            self._stops = detokenizer
        elif detokenizer is not None and show_text:
            self._push_all = detokenizer.push_all
        self.stops = self._stops is not None
        self._show_text = show_text
        self._position = 0
        self.stopped = False  # then all further tokens are ignored

    def tokens(self, news: NewTokens) -> Output | None:
        """Return the output for new tokens, or None after a stop string."""
        if self.stopped:
            return None
        tokens, position, logprobs = news.tokens, news.position, news.logprobs
        text = ""
        push_all = self._push_all
        if push_all is not None:
            text = push_all(tokens)
            if logprobs is None and news.media is None and news.begun is None:  # nearly all
                return Output(
                    request_id=news.request_id, tokens=tokens, text=text, position=position
                )
        elif self._stops is not None:
            delta = self._stops.push(tokens)
            text, self.stopped = delta.text, delta.stopped
            tokens = tokens[: delta.num_tokens]
        count = len(tokens)
        self._position = position + count
        media, prompt = news.media, None
        if media is not None and self.prompt is not None:
            prompt, media = self.prompt.read(media), None
        likely = self._log_probs
        return Output(
            request_id=news.request_id,
            tokens=tokens,
            text=text if self._show_text else "",
            position=position,
            log_probabilities=_entries(logprobs, count, likely) if logprobs and likely else None,
            prompt_log_probabilities=prompt,
            media=media,
            tokenizer=self._tokenizer,
            prefill="" if news.begun is None else news.begun.prefill,
            decode="" if news.begun is None else news.begun.decode,
            served=None if news.begun is None else news.begun.times,
        )

    def whole(self, news: NewTokens, ended: Ended) -> Output:
        """Return the only output of an answer: all its tokens, without log-probabilities.

        Not with stop strings. Raises the error of a failed request.
        """
        text = "" if self._push_all is None else self._push_all(news.tokens)
        last = self.end(ended)
        last.tokens, last.position = news.tokens, news.position
        if text:
            last.text = text + last.text
        return last

    def end(self, ended: Ended) -> Output:
        """Return the last output. Raises the error of a failed request."""
        if ended.error is not None and not self.stopped:
            raise ended.error
        text = ""
        if self._detokenizer is not None and not self.stopped:
            text = self._detokenizer.finish().text
        return Output(
            request_id=ended.request_id,
            tokens=[],
            text=text if self._show_text else "",
            position=self._position if self.stopped else ended.position,
            final_status=self._status(ended),
            prefill=ended.prefill,
            decode=ended.decode,
            cached_tokens=ended.cached_tokens,
            tokens_s=ended.tokens_s,
            served=ended.served,
        )

    def _status(self, ended: Ended) -> GenerationStatus:
        if self.stopped:
            return GenerationStatus.END_OF_SEQUENCE
        status = _STATUSES.get(ended.status)
        if status is None:
            raise InternalError(f"the router ended a request with {ended.status!r}")
        return status


def _entries(logprobs: list[TokenLogProbs], count: int, likely: int) -> list[LogProbabilities]:
    """Return the first ``count`` entries, each with at most ``likely`` alternatives."""
    entries = [LogProbabilities.of_token(entry) for entry in logprobs[:count]]
    for entry in entries:
        (top,) = entry.top_log_probabilities
        if len(top) > likely:
            entry.top_log_probabilities = [dict(islice(top.items(), likely))]
    return entries
