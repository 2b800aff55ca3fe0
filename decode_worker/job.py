"""One attempt of a request on a decode worker, and the messages that report it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Unpack

import msgspec

from baton.engine.cache.paged_cache import Allocation
from baton.engine.grammar.constraint import GrammarTask
from baton.engine.models.contexts import read_context
from baton.engine.scheduling.sequence import Sequence
from baton.kv_transfer.receiver_grants import Handover
from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.contexts.pixels import PixelContext
from baton.proto.contexts.speech import TTSContext
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.vision import TextAndVisionContext
from baton.proto.errors import HandoffFailed
from baton.proto.hashing import cache_salt
from baton.proto.ids import RequestID
from baton.proto.layout import ModelCard
from baton.proto.picture_runs import PictureRun, picture_run
from baton.proto.requests import check_continued, local_feature, prompt_feature
from baton.proto.wire.messages import (
    Assign,
    Commit,
    RequestState,
    Terminal,
    TokenRun,
    WorkerTimes,
)
from baton.proto.wire.proofs import terms_of
from baton.proto.wire.wire_context import WireContext, WirePixelContext
from baton.worker.assigned import assigned_context, assigned_sequence, check_assigned
from baton.worker.attempts import Key
from baton.worker.jobs import Ending, engine_name
from baton.worker.membership import WorkerIdentity
from baton.worker.token_replay import LOGPROBS_KEPT, runs_again

from .voice import Codec, Voice

_SEEN = {TextAndVisionContext.__name__}
"""Kinds of contexts with images."""


@dataclass(slots=True, frozen=True)
class LocalPrompt:
    """What decides when a local prompt starts.

    ``asked``: when the client asked. ``limit``: its own TTFT limit; 0: the worker's. ``again``: the
    client has its first token already.
    """

    asked: float
    limit: float
    again: bool


@dataclass(slots=True)
class Job:
    """One attempt of a request, from its Commit or Assign to its end on this worker.

    ``prefill``: the worker that computed its prompt. ``taken_at``: when this worker took it over.
    ``base``: position of its first generated token, as clients and routers count. ``shift``: added
    to such a position, it gives the position here, where a picture's row comes first.
    """

    key: Key
    router: str
    request_id: str
    prefill: str
    proof: bytes  # that a router assigned this attempt to this worker
    context: TextContext
    sequence: Sequence
    deadline: float
    taken_at: float
    base: int
    shift: int
    logprobs: deque[TokenLogProbs]  # of the newest tokens, if the client requested them
    grammar: GrammarTask | None = None  # still compiling; the engine does not have the request yet
    unchecked: WireContext | None = None  # its images' hashes are not checked yet; likewise
    local: LocalPrompt | None = None  # it waits for its turn; the engine does not have it yet
    voice: Voice | None = None  # of a request for speech
    media: dict[int, bytes] = field(default_factory=dict)  # sent with the token at a position

    @property
    def name(self) -> bytes:
        """The engine's name for this attempt."""
        return self.sequence.request

    @property
    def is_preparing(self) -> bool:
        """Whether the engine does not have the request yet."""
        waits = self.local is not None
        return waits or self.grammar is not None or self.unchecked is not None

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
            request_id=self.request_id,
            cached_tokens=min(self.sequence.cached_tokens, self.context.prompt_length),
            prefill=self.prefill,
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
    sequence.step_limit = commit.step_limit
    terms = terms_of(handover.reserve.ticket)
    if terms is not None and sequence.end_length > terms.tokens:
        text = f"the answer may have {sequence.end_length} tokens, the ticket is for {terms.tokens}"
        raise HandoffFailed(text)
    # What the prefill worker did not find it has computed, although it may have been cached here.
    sequence.cached_tokens = commit.cached_tokens
    sequence.num_computed_tokens = sequence.num_tokens - 1
    job = Job(
        key,
        commit.router,
        commit.request_id,
        commit.prefill,
        commit.proof,
        context,
        sequence,
        min(now + commit.deadline, handover.until),
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


def make_local_job(
    router: str, assign: Assign, me: WorkerIdentity, now: float, codec: Codec | None = None
) -> Job:
    """Return the job of a request whose prompt this worker computes itself.

    Raises HandoffFailed if this worker cannot do that, so that the router uses another one, and
    InputError or ValueError if no worker can run the context.
    """
    card, key = me.model, (assign.request, assign.attempt)
    if assign.decode_incarnation != me.incarnation:
        raise HandoffFailed("the request is assigned to another decode worker")
    if local_feature(assign.context) not in card.features:
        raise HandoffFailed(f"worker {me.worker} cannot compute this kind of prompt")
    unchecked = assign.context if check_assigned(assign, card) else None
    context = assigned_context(assign, assign.emitted, card)
    base = len(assign.context.tokens)
    sequence = assigned_sequence(key, assign, context, card, now)
    sequence.step_limit = assign.step_limit
    job = Job(
        key,
        router,
        assign.request_id,
        me.worker,
        assign.proof,
        context,
        sequence,
        now + assign.deadline,
        now,
        base,
        context.prompt_length - base,
        deque(maxlen=LOGPROBS_KEPT),
        unchecked=unchecked,
        local=LocalPrompt(now - assign.waited, assign.slo_ttft, bool(assign.emitted)),
    )
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


def with_local_prompts(card: ModelCard, *, vision: bool) -> ModelCard:
    """Add the features of the prompts that this worker can compute itself.

    ``vision``: its model has the vision tower. Pictures need the text encoders of a prefill worker.
    """
    without = {PixelContext.__name__} if vision else {PixelContext.__name__, *_SEEN}
    local = [prompt_feature(kind) for kind in card.kinds if kind not in without]
    return msgspec.structs.replace(card, features=[*card.features, *local])
