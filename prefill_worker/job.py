"""One attempt of a request on a prefill worker, and the messages that end it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Unpack

from baton.engine.grammar.constraint import GrammarTask
from baton.engine.scheduling.sequence import Sequence
from baton.kv_transfer import sender_handoff as handoff
from baton.kv_transfer.sender_handoff import Key
from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.contexts.speech import TTSContext
from baton.proto.contexts.text import TextContext
from baton.proto.layout import ModelCard
from baton.proto.picture_runs import PictureRun, committed_picture
from baton.proto.vision_requests import committed
from baton.proto.wire.context_maps import to_map
from baton.proto.wire.messages import (
    Assign,
    Commit,
    GrammarSpec,
    GrantRef,
    HandoffReport,
    RequestState,
    Reserve,
    Terminal,
    TokenRun,
    WorkerTimes,
)
from baton.proto.wire.wire_context import WireContext
from baton.worker.assigned import (
    assigned_context,
    assigned_sequence,
    check_assigned,
    ended_status,
)
from baton.worker.jobs import Ending
from baton.worker.token_replay import runs_again

from .link_names import link_name


class JobState(Enum):
    """Life of a job."""

    QUEUED = "queued"
    RESERVING = "reserving"
    COMPUTING = "computing"
    HANDING_OVER = "handing_over"
    RELEASING = "releasing"  # ended here; the grant at the decode worker is being released


@dataclass(slots=True)
class Job:
    """One attempt of a request, from Assign to its end on this worker."""

    key: Key
    router: str
    assign: Assign
    deadline: float
    asked: float  # time of the client's request, by this worker's clock
    received: float  # when the Assign arrived
    context: TextContext
    sequence: Sequence
    state: JobState = JobState.QUEUED
    tries: int = 0
    granted: float | None = None  # when the decode worker reserved blocks
    arrival: int = 0  # arrival number among all jobs
    started: float = 0.0  # when the job got its execution slot
    waits: bool = False  # in the queue
    place: str = ""  # key of the event that the job is parked for
    grammar: GrammarTask | None = None  # grammar that constrains the answer
    compiling: bool = False  # the grammar is not compiled yet
    checking: bool = False  # the hashes of the images are not checked yet
    token_end: int = 0  # end of the chunk in the running step
    last_chunk: bool = False
    last_logprobs: TokenLogProbs | None = None
    prompt_log_probs: bytes | None = None  # once the first token is sampled, if requested
    chunked: bool = False  # a replay of speech: only a decode worker may send its tokens
    cached_tokens: int = 0

    @property
    def name(self) -> bytes:
        """The engine's name for this attempt."""
        return self.sequence.request

    @property
    def link(self) -> str:
        """Name of the link to the decode worker."""
        return link_name(self.assign.decode, self.assign.decode_key)

    @property
    def cached_prompt(self) -> int:
        """Tokens of the prompt that were found in the prefix cache, so they were not computed."""
        return min(self.sequence.cached_tokens, self.context.prompt_length)

    @property
    def proof(self) -> bytes:
        """Proof that a router assigned this attempt to this worker."""
        return self.assign.proof

    @property
    def given_tokens(self) -> int:
        """Tokens that the router assigned for computing, counted as the router counts them."""
        return len(self.assign.context.tokens) + len(self.assign.emitted)

    @property
    def generated(self) -> list[int]:
        """All tokens after the prompt, including replayed ones."""
        tokens: list[int] = self.context.tokens.all[self.context.prompt_length :].tolist()
        return tokens

    @property
    def shift(self) -> int:
        """Added to a position as routers count, it gives the position here.

        0 for text; the row of a picture has another length than the tokens of its request.
        """
        return self.context.prompt_length - len(self.assign.context.tokens)

    @property
    def logprobs(self) -> list[TokenLogProbs]:
        """Log-probabilities of the token sampled here, if they were requested."""
        return [] if self.last_logprobs is None else [self.last_logprobs]

    @property
    def media(self) -> dict[int, bytes]:
        """What travels with the token sampled here, by its position."""
        given = self.prompt_log_probs
        return {} if given is None else {len(self.assign.context.tokens): given}

    def replay(self, position: int) -> list[TokenRun]:
        """Return the tokens from ``position`` on; an empty run confirms ownership."""
        if self.chunked:
            return [TokenRun(*self.key, max(position, len(self.assign.context.tokens)), [])]
        position = max(position, len(self.assign.context.tokens))
        tokens = self.context.tokens.all[position + self.shift :].tolist()
        return runs_again(self.key, position, tokens, self.logprobs, self.media)

    def held(self) -> RequestState:
        """Return the state that Hello reports to routers."""
        position, prompt = len(self.context.tokens), len(self.assign.context.tokens)
        return RequestState(
            *self.key, position - self.shift, prompt, router=self.router, proof=self.proof
        )

    def reserve(
        self, incarnation: int, serial: int, growth: int, block_size: int, now: float
    ) -> Reserve:
        """Return the Reserve message for the decode worker, which has blocks of ``block_size``.

        A picture gets the blocks of all its steps, because its state cannot be computed there again
        if it lost them to another request.
        """
        sequence = self.sequence
        if sequence.picture is not None:
            growth = sequence.remaining_tokens
        return Reserve(
            request=self.key[0],
            attempt=self.key[1],
            incarnation=incarnation,
            hashes=sequence.hashes_by(block_size),
            num_tokens=sequence.num_tokens,
            growth=min(sequence.remaining_tokens, growth),
            serial=serial,
            deadline=self.deadline - now,
            grammar=None if self.grammar is None else _spec(self.grammar),
            ticket=self.assign.ticket,
        )

    def commit_maker(self, worker: str, now: float) -> handoff.CommitMaker:
        """Return a function that builds the Commit from its manifest."""
        images = self.sequence.images
        if isinstance(self.context, PictureRun):
            context: WireContext = committed_picture(self.context)
        else:
            context = committed(to_map(self.context), 0 if images is None else images.delta)

        def make(grant: GrantRef, frames: int, nbytes: int, digest: int) -> Commit:
            return Commit(
                request=self.key[0],
                attempt=self.key[1],
                grant=grant,
                frames=frames,
                bytes=nbytes,
                digest=digest,
                context=context,
                router=self.router,
                request_id=self.assign.request_id,
                prefill=worker,
                cached_tokens=self.cached_prompt,
                deadline=self.deadline - now,
                proof=self.assign.decode_proof,
                media=self.prompt_log_probs,
                step_limit=self.assign.step_limit,
            )

        return make

    def times(self, now: float, sent_at: float = 0.0) -> WorkerTimes:
        """Return when the job reached its steps; ``sent_at``: the first frame's time, or 0.0."""
        sequence = self.sequence
        return WorkerTimes(
            self._since(self.started or None),
            self._since(self.granted),
            self._since(sequence.admitted),
            self._since(sent_at or None),
            self._since(sequence.first_token),
            self._since(now),
            self.tries,
        )

    def _since(self, when: float | None) -> float | None:
        """Return the seconds from the Assign to ``when``."""
        return None if when is None else max(0.0, when - self.received)

    def terminal(self, worker: str, now: float, **ending: Unpack[Ending]) -> Terminal:
        """Return the terminal for a request that ends on this worker."""
        return Terminal(
            request=self.key[0],
            attempt=self.key[1],
            position=len(self.context.tokens) - self.shift,
            request_id=self.assign.request_id,
            cached_tokens=self.cached_prompt,
            prefill=worker,
            times=self.times(now),
            **ending,
        )


def _spec(task: GrammarTask) -> GrammarSpec:
    return GrammarSpec(task.schema, sorted(task.eos), list(task.emitted))


def make_job(key: Key, router: str, assign: Assign, card: ModelCard, now: float) -> Job:
    """Return a queued job. Raises InputError or ValueError if the context cannot be run.

    The hashes of its images are still to be checked, which takes milliseconds for each.

    A replay of speech begins with the last token that the router has: the next token may complete
    a chunk of samples, or end the request, and only a decode worker has the codec.
    """
    checking = check_assigned(assign, card)
    job = _job(key, router, assign, assign.emitted, card, now)
    job.checking = checking
    if assign.emitted and isinstance(job.context, TTSContext):
        if ended_status(job.sequence) is None:
            job = _job(key, router, assign, assign.emitted[:-1], card, now)
            job.sequence.given = assign.emitted[-1]
        job.chunked = True
    return job


def _job(
    key: Key, router: str, assign: Assign, emitted: list[int], card: ModelCard, now: float
) -> Job:
    context = assigned_context(assign, emitted, card)
    sequence = assigned_sequence(key, assign, context, card, now)
    asked = now - assign.waited
    return Job(key, router, assign, now + assign.deadline, asked, now, context, sequence)


def report(
    done: handoff.Done, times: WorkerTimes, prefill: str, decode: str, transport: str
) -> HandoffReport:
    """Return the report that the router records for a finished handoff."""
    return HandoffReport(
        request=done.key[0],
        attempt=done.key[1],
        prefill=prefill,
        decode=decode,
        transport=transport,
        bytes_sent=done.bytes_sent,
        bytes_received=done.bytes_received,
        blocks=done.blocks,
        cached_tokens=done.cached_tokens,
        frames=done.frames,
        resent_frames=done.resent,
        seconds=done.seconds,
        times=times,
    )
