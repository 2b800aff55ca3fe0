"""State of a text request: its tokens, its end conditions and the undelivered tokens.

Invariants: the prompt boundary set at construction never moves, not even in ``reset``. Every
generated token is delivered once, in order. ``status`` depends only on the tokens and on
``update_status``, so a context rebuilt from its tokens continues identically.

A context is independent of blocks, batches and workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from ..compat.old_names import OldNames, takes_earlier_fields
from ..errors import InputError
from ..ids import RequestID
from ..limits import MAX_EOS_TOKEN_IDS
from ..sampling import SamplingParams
from ..wire.bounds import EosSequences
from ..wire.endpoints import check_target_endpoint
from .equality import same_fields
from .matching import Matched, Matcher
from .outputs import LogProbabilities, TextGenerationOutput, TokenLogProbs, token_output
from .status import GenerationStatus
from .tokens import FUTURE_TOKEN, TokenBuffer, wrap_tokens

Int32 = npt.NDArray[np.int32]

_NO_ROWS = np.zeros((0, 2), np.int32)


NOT_REALIZED = "Attempted to create generation output while future token is not yet realized."


@takes_earlier_fields
@dataclass(slots=True, kw_only=True, eq=False)
class TextContext(OldNames, Matched):
    """One text request.

    ``max_length``: total tokens at which generation ends. ``tokens``: a TokenBuffer, or any
    1-D integer array or list, which is copied to int64. ``eos_token_ids``: end the request
    unless ``ignore_eos``. ``eos_sequences``: end it always, if the generated tokens end with
    such a sequence. ``log_probabilities``: 0: off; n: also those of the n most likely tokens.
    ``target_endpoint``: worker that the request is pinned to. ``task``: "generate" or "embed".
    """

    max_length: int
    tokens: TokenBuffer
    request_id: RequestID = field(default_factory=RequestID)
    eos_token_ids: Annotated[set[int], Meta(max_length=MAX_EOS_TOKEN_IDS)] = field(
        default_factory=set
    )
    eos_sequences: EosSequences = field(default_factory=list)
    log_probabilities: int = 0
    log_probabilities_echo: bool = False
    ignore_eos: bool = False
    json_schema: str | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    model_name: str = ""
    _matcher: Matcher | None = field(default=None, compare=False)
    status: GenerationStatus = GenerationStatus.ACTIVE
    _log_probabilities_data: dict[int, LogProbabilities] = field(default_factory=dict)
    _is_initial_prompt: bool = True
    _draft_offset: int = 0
    target_endpoint: str | None = None
    lora_name: str | None = None
    cache_salt: str = ""
    task: str = "generate"
    _prompt_length: int = -1
    _carried_start: int = 0  # undelivered tokens that a reset removed from the completion window
    _carried_end: int = 0
    _committed_idx: int = 0
    _cache_seq_id: int | None = None
    type: str = field(default="TextContext", init=False, repr=False)
    """Name of the class on the wire, so that a decoder restores the same class."""

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, TokenBuffer):
            self.tokens = wrap_tokens(self.tokens)
        if isinstance(self.request_id, str):
            self.request_id = RequestID(self.request_id)
        if self.log_probabilities is None:
            self.log_probabilities = 0
        self.eos_token_ids = set(self.eos_token_ids)
        if not all(self.eos_sequences):
            raise InputError("an end-of-sequence token sequence is empty")
        if self._prompt_length < 0:
            self._prompt_length = self.tokens.prompt_length
        if self.min_tokens and self.min_tokens + self._prompt_length > self.max_length:
            raise InputError(
                f"min_new_tokens {self.min_tokens} + prompt length {self._prompt_length} is more "
                f"than max_length {self.max_length}"
            )
        if self.target_endpoint is not None:
            check_target_endpoint(self.target_endpoint)

    def __eq__(self, other: object) -> bool:
        """Compare class and values, without grammar state, which tokens can rebuild."""
        return same_fields(self, other) if isinstance(other, TextContext) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    # ------------------------------------------------------------------ state

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the original prompt; not changed by a reset."""
        return self._prompt_length

    @property
    def min_tokens(self) -> int:
        """Minimum tokens to generate before an EOS id may be sampled."""
        return self.sampling_params.min_new_tokens

    @property
    def is_done(self) -> bool:
        """Whether generation has ended."""
        return self.status is not GenerationStatus.ACTIVE

    @property
    def is_initial_prompt(self) -> bool:
        """Whether no token was accepted since construction or the last reset."""
        return self._is_initial_prompt

    def update_status(self, status: GenerationStatus) -> None:
        """Set the status."""
        self.status = status

    # ------------------------------------------------------------------ growth

    def update(
        self, new_token: int, log_probabilities: LogProbabilities | TokenLogProbs | None = None
    ) -> None:
        """Accept a sampled token; inside a chunked prompt, discard it and advance the chunk.

        The token is delivered, also if it ends the request. Raises ValueError after a placeholder,
        or if the grammar does not allow the token.
        """
        tokens = self.tokens
        if tokens._chunked:
            tokens.advance_chunk()
            return
        if tokens._store.item(tokens._length - 1) == FUTURE_TOKEN:
            raise ValueError("Cannot append a token after a future token.")
        if self._matcher is not None:
            self._match(new_token)
        if log_probabilities is not None:
            self._queue(tokens._length, log_probabilities)
        tokens.advance_with_token(new_token)
        end = tokens._end
        if new_token in self.eos_token_ids or self.eos_sequences or end >= self.max_length:
            status = self._status_at(tokens._length, new_token, end)
            if status is not None:
                self.status = status
        self._is_initial_prompt = False

    def jump_ahead(self, new_token: int) -> None:
        """Accept a token that was not sampled; the active window grows by this token."""
        tokens = self.tokens
        if tokens.is_chunked:
            tokens.advance_chunk()
            return
        if tokens[-1] == FUTURE_TOKEN:
            raise ValueError("Cannot append a token after a future token.")
        if self._matcher is not None:
            self._match(new_token)
        tokens.advance_with_token(new_token, mark_previous_as_processed=False)
        status = self._status_at(len(tokens), new_token, tokens.current_position)
        if status is not None:
            self.status = status
        self._is_initial_prompt = False

    def update_with_future_token(self) -> None:
        """Append a placeholder for a token that is still being computed."""
        if self._matcher is not None:
            raise ValueError("Cannot use future tokens when a matcher is present.")
        if self.tokens[-1] == FUTURE_TOKEN:
            raise ValueError("Cannot have multiple future tokens.")
        self.update(FUTURE_TOKEN)

    def realize_future_token(
        self, new_token: int, log_probabilities: LogProbabilities | TokenLogProbs | None = None
    ) -> None:
        """Replace the placeholder. An end of sequence has precedence over the maximum length."""
        tokens = self.tokens
        length = len(tokens)
        if length == self._prompt_length:
            raise ValueError("Cannot realize a future token when there are no generated tokens")
        if tokens[-1] != FUTURE_TOKEN:
            raise ValueError(f"Attempted to realize a non-future token: {tokens[-1]}")
        if log_probabilities is not None:
            self._queue(length - 1, log_probabilities)
        tokens.overwrite_last_token(new_token)
        if self._ends_sequence(length, new_token):
            self.status = GenerationStatus.END_OF_SEQUENCE

    def _queue(self, index: int, entry: LogProbabilities | TokenLogProbs) -> None:
        if isinstance(entry, TokenLogProbs):
            entry = LogProbabilities.of_token(entry)
        self._log_probabilities_data[index] = entry

    def _status_at(self, length: int, token: int, position: int) -> GenerationStatus | None:
        """Return the end that ``token``, the last of ``length`` tokens, causes, or None."""
        if token in self.eos_token_ids and not self.ignore_eos:
            return GenerationStatus.END_OF_SEQUENCE
        if self.eos_sequences and self._ends_sequence(length, token):
            return GenerationStatus.END_OF_SEQUENCE
        return GenerationStatus.MAXIMUM_LENGTH if position >= self.max_length else None

    def _ends_sequence(self, length: int, token: int) -> bool:
        if token in self.eos_token_ids and not self.ignore_eos:
            return True
        for sequence in self.eos_sequences:
            if sequence[-1] != token:  # decides nearly always; otherwise the first token does
                continue
            start = length - len(sequence)
            if start < self._prompt_length:
                continue
            store = self.tokens._store
            if store.item(start) == sequence[0] and store[start:length].tolist() == sequence:
                return True
        return False

    # ------------------------------------------------------------------ output

    def to_generation_output(self) -> TextGenerationOutput:
        """Take the undelivered tokens, possibly none.

        Raises ValueError, and takes nothing, while a placeholder is among them.
        """
        buffer = self.tokens
        queued = self._log_probabilities_data
        start, end = buffer._completion_start, buffer._completion_end
        if end == start + 1 and end <= buffer._length and not (queued or self._carried_end):
            token = buffer._store.item(start)  # nearly every decode step ends here
            if token == FUTURE_TOKEN:
                raise ValueError(NOT_REALIZED)
            buffer._completion_start = end
            return token_output(self.request_id, token, self.status)
        start, tokens = self._undelivered()
        if FUTURE_TOKEN in tokens:
            raise ValueError(NOT_REALIZED)
        entries = None
        if queued:
            found = [queued.pop(index, None) for index in range(start, start + len(tokens))]
            entries = found if any(entry is not None for entry in found) else None
        buffer._completion_start = buffer._completion_end
        self._carried_start = self._carried_end = 0
        return TextGenerationOutput(
            request_id=self.request_id,
            tokens=tokens,
            final_status=self.status,
            log_probabilities=entries,
        )

    def outstanding_completion_tokens(
        self, *, strip_eos: bool = False
    ) -> list[tuple[int, LogProbabilities | None]]:
        """Take the undelivered tokens with their log-probabilities.

        ``strip_eos``: drop the last token if it ended the sequence.
        """
        output = self.to_generation_output()
        entries = output.log_probabilities or [None] * len(output.tokens)
        pairs = list(zip(output.tokens, entries, strict=True))
        if strip_eos and pairs and self._ends_sequence(len(self.tokens), pairs[-1][0]):
            pairs.pop()
        return pairs

    def _undelivered(self) -> tuple[int, list[int]]:
        """Return the position of the first undelivered token, and all undelivered tokens."""
        tokens = self.tokens
        window: list[int] = []
        start, end = tokens._completion_start, tokens._completion_end
        if end > start:
            if end > tokens._length:
                raise ValueError("the completion window ends after the last token")
            store = tokens._store
            # One token, the usual case, takes a third of the time of a slice.
            window = [store.item(start)] if end == start + 1 else store[start:end].tolist()
        if self._carried_start < self._carried_end:
            carried: list[int] = tokens._store[self._carried_start : self._carried_end].tolist()
            return self._carried_start, carried + window
        return start, window

    def newest_log_probabilities(self) -> list[TokenLogProbs]:
        """Return the wire form of the newest token's log-probabilities, or an empty list."""
        entry = self._log_probabilities_data.get(len(self.tokens) - 1)
        return [] if entry is None else [entry.to_wire()]

    def compute_num_available_steps(self, max_seq_len: int) -> int:
        """Return the number of steps until ``max_seq_len`` tokens."""
        return max_seq_len - (len(self.tokens) - self.tokens.active_length)

    def get_min_token_logit_mask(self, num_steps: int) -> list[Int32]:
        """Return per step the EOS ids that must not be sampled yet: int32 rows ``(0, id)``.

        Ids ascend. The array is empty, ``[0, 2]``, after the minimum and under ``ignore_eos``.
        """
        first = self.tokens.current_position
        end = self._prompt_length + self.min_tokens
        ids = [] if self.ignore_eos else sorted(self.eos_token_ids)
        rows = np.array([(0, i) for i in ids], np.int32) if ids else _NO_ROWS
        return [
            rows.copy() if self._prompt_length <= first + step < end else _NO_ROWS.copy()
            for step in range(num_steps)
        ]

    def apply_processing_offset(self, offset: int) -> None:
        """See :meth:`.TokenBuffer.apply_processing_offset`."""
        self.tokens.apply_processing_offset(offset)

    # ------------------------------------------------------------------ reset, rollback

    def reset(self) -> None:
        """Make every token an unprocessed prompt token, so that all are computed again.

        The original prompt boundary, the status and the undelivered tokens are kept. A placeholder
        at the end is dropped.
        """
        tokens = self.tokens
        length = len(tokens)
        future = length > self._prompt_length and tokens[-1] == FUTURE_TOKEN
        kept = length - 1 if future else length
        start = tokens._completion_start
        if self._carried_start < self._carried_end:
            start = self._carried_start
        if future and length == tokens.prompt_length:  # an earlier reset made it prompt
            tokens.truncate(kept)
            future = False
        tokens.reset_as_new_prompt(delete_last_generated_token=future)
        self._log_probabilities_data.pop(kept, None)
        self._carried_start, self._carried_end = (start, kept) if start < kept else (0, 0)
        self._is_initial_prompt = True
        self._cache_seq_id = None
        self._committed_idx = 0

    def rollback(self, idx: int) -> None:
        """Drop the last ``idx`` tokens, their log-probabilities and an end that they caused.

        A matcher is rolled back too. Raises ValueError if this would drop prompt tokens or
        delivered tokens, and InputError if the matcher cannot roll back; then nothing changes.
        """
        tokens = self.tokens
        length = len(tokens) - idx
        self._check_rollback(idx, length)
        dropped = tokens._store[length : len(tokens)]
        self._unmatch(int(np.count_nonzero(dropped != FUTURE_TOKEN)))  # it got no placeholder
        tokens.truncate(length)
        for index in [i for i in self._log_probabilities_data if i >= length]:
            del self._log_probabilities_data[index]
        self._carried_end = min(self._carried_end, length)
        if self.status in (GenerationStatus.END_OF_SEQUENCE, GenerationStatus.MAXIMUM_LENGTH):
            self.status = self._derive_status()

    def _check_rollback(self, n: int, length: int) -> None:
        carried = self._carried_start < self._carried_end
        delivered = self._carried_start if carried else self.tokens.completion_range.start
        if n < 0:
            raise ValueError(f"cannot roll back {n} tokens")
        if length < 1:
            raise ValueError(f"cannot roll back {n} tokens, before the start of the context")
        if self.tokens.is_chunked:
            raise ValueError("cannot roll back a chunked prompt")
        if length < self._prompt_length:
            raise ValueError(f"cannot roll back {n} tokens, into the prompt")
        if length < delivered:
            raise ValueError(f"cannot roll back {n} tokens, some of them were delivered")

    def _derive_status(self) -> GenerationStatus:
        """Return the end that the generated tokens cause; the last end counts."""
        status = GenerationStatus.ACTIVE
        tokens = self.tokens._store[self._prompt_length : len(self.tokens)].tolist()
        for length, token in enumerate(tokens, self._prompt_length + 1):
            status = self._status_at(length, token, length) or status
        return status
