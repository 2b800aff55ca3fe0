"""One attempt of a request on a decode worker, and the messages that report it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Unpack

from baton.engine.cache.paged_cache import Allocation
from baton.engine.grammar.constraint import GrammarTask
from baton.engine.models.registry import read_context
from baton.engine.scheduling.sequence import Sequence
from baton.kv_transfer.receiver_grants import Handover
from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.contexts.speech import TTSContext
from baton.proto.contexts.text import TextContext
from baton.proto.errors import HandoffFailed
from baton.proto.hashing import cache_salt
from baton.proto.ids import RequestID
from baton.proto.layout import ModelCard
from baton.proto.picture_runs import PictureRun, picture_run
from baton.proto.requests import check_continued
from baton.proto.wire.messages import Commit, RequestState, Terminal, TokenRun, WorkerTimes
from baton.proto.wire.wire_context import WirePixelContext
from baton.worker.attempts import Key
from baton.worker.jobs import Ending, engine_name
from baton.worker.token_replay import LOGPROBS_KEPT, runs_again

from .voice import Codec, Voice


@dataclass(slots=True)
class Job:
    """One attempt of a request, from its Commit to its end on this worker.

    ``base``: position of its first generated token, as clients and routers count. ``shift``: added
    to such a position, it gives the position here, where a picture's row comes first.
    """

    key: Key
    router: str
    commit: Commit
    context: TextContext
    sequence: Sequence
    deadline: float
    taken_at: float  # when this worker took the request over
    base: int
    shift: int
    logprobs: deque[TokenLogProbs]  # of the newest tokens, if the client requested them
    grammar: GrammarTask | None = None  # still compiling; the engine does not have the request yet
    voice: Voice | None = None  # of a request for speech
    media: dict[int, bytes] = field(default_factory=dict)  # sent with the token at a position

    @property
    def name(self) -> bytes:
        """The engine's name for this attempt."""
        return self.sequence.request

    @property
    def num_tokens(self) -> int:
        """Position after the last known token."""
        return self.sequence.num_tokens - self.shift

    @property
    def work(self) -> int:
        """Tokens in the load of this worker: all, and those to generate. A step has many rows."""
        picture = self.sequence.picture
        rows = 1 if picture is None else picture.step_rows
        return self.num_tokens + self.sequence.remaining_tokens * rows

    def known_tokens(self, position: int) -> list[int]:
        """Return the tokens from ``position`` on, without a placeholder for the next token."""
        first, end = position + self.shift, self.sequence.num_tokens
        tokens: list[int] = self.context.tokens.all[first:end].tolist()
        return tokens

    def newest_token(self) -> TokenRun:
        """Return the run of the newest token in the Commit; prefill's message may be lost."""
        tokens, newest = self.context.tokens, list(self.logprobs) or None
        position = len(tokens) - 1 - self.shift
        return TokenRun(*self.key, position, [tokens[-1]], newest, self.media.get(position))

    def replay(self, position: int) -> list[TokenRun]:
        """Return the tokens from ``position`` on; an empty run confirms ownership.

        The tokens of speech follow with their chunks, which may have to be decoded first.
        """
        if self.voice is not None:
            self.voice.seek(position)
            return [TokenRun(*self.key, self.voice.sent, [])]
        position = max(position, self.base)
        tokens = self.known_tokens(position)
        return runs_again(self.key, position, tokens, self.logprobs, self.media)

    def held(self) -> RequestState:
        """Return the state that Hello reports to routers."""
        return RequestState(
            *self.key, self.num_tokens, self.base, router=self.router, proof=self.proof
        )

    @property
    def proof(self) -> bytes:
        """Proof that a router assigned this attempt to this worker."""
        return self.commit.proof

    def times(self, now: float) -> WorkerTimes:
        """Return when the job reached its steps; it ends now."""
        sequence = self.sequence
        return WorkerTimes(
            computing=self._since(sequence.admitted),
            computed=self._since(sequence.first_token),
            ended=self._since(now),
            preemptions=sequence.preemptions,
        )

    def _since(self, when: float | None) -> float | None:
        """Return the seconds from the takeover to ``when``."""
        return None if when is None else max(0.0, when - self.taken_at)

    def terminal(self, worker: str, now: float, **ending: Unpack[Ending]) -> Terminal:
        """Return the terminal for a request that ends on this worker."""
        return Terminal(
            request=self.key[0],
            attempt=self.key[1],
            position=self.num_tokens,
            request_id=self.commit.request_id,
            cached_tokens=self.sequence.cached_tokens,
            prefill=self.commit.prefill,
            decode=worker,
            times=self.times(now),
            **ending,
        )


def make_job(
    handover: Handover[Allocation], card: ModelCard, now: float, codec: Codec | None = None
) -> Job:
    """Return the job of a committed request; its KV is computed up to its newest token.

    Raises HandoffFailed if the context of the Commit is invalid.
    """
    commit = handover.commit
    key = (commit.request, commit.attempt)
    context = _read_context(commit, card)
    base = context.base if isinstance(context, PictureRun) else context.prompt_length
    sequence = Sequence(
        engine_name(key),
        context,
        block_size=card.layout.block_size,
        salt=cache_salt(card.fingerprint, commit.context.cache_salt),
        arrival=now,
    )
    sequence.allocation = handover.allocation
    sequence.source = handover.allocation.source
    # What the prefill worker did not find it has computed, although it may have been cached here.
    sequence.cached_tokens = commit.cached_tokens
    sequence.num_computed_tokens = sequence.num_tokens - 1
    job = Job(
        key,
        commit.router,
        commit,
        context,
        sequence,
        now + commit.deadline,
        now,
        base,
        context.prompt_length - base,
        deque(context.newest_log_probabilities(), maxlen=LOGPROBS_KEPT),
    )
    if commit.media is not None:
        job.media[base] = commit.media
    if codec is not None and isinstance(context, TTSContext):
        job.voice = Voice(codec, base, job.known_tokens(base))
    return job


def _read_context(commit: Commit, card: ModelCard) -> TextContext:
    try:
        request_id = RequestID(commit.request_id)
        check_continued(commit.context, card)
        if isinstance(commit.context, WirePixelContext):
            return picture_run(commit.context, request_id, card.layout.block_size)
        return read_context(card.architecture, commit.context, request_id)
    except ValueError as error:
        raise HandoffFailed(str(error)) from error
