"""Text generation: runs plans, or whole batches of contexts with a built-in scheduler.

Running a plan means: lay out the chunks as rows, run one forward pass, sample one token per
sampling chunk. Workers call :meth:`TextGenerationPipeline.execute` on their compute thread, with
plans of a scheduler on another thread. :meth:`TextGenerationPipeline.next_token` schedules and
computes in the caller's thread.

An error fails only the request that caused it. A chunk that does not fit the model or the
pool is left out of the pass, and a row with non-finite logits or a sampling error fails
alone. If the pass itself fails, every request in it fails, because the cause is unknown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.outputs import TextGenerationOutput
from baton.proto.contexts.status import GenerationStatus
from baton.proto.contexts.text import TextContext
from baton.proto.errors import BatonError, InternalError, error_from_code
from baton.proto.ids import RequestID
from baton.proto.prompt_log_probs import Records
from baton.proto.sampling import SamplingParams

from ..loading.own_family import own_family
from ..scheduling.events import Failed
from ..scheduling.plan import (
    Applied,
    Chunk,
    OnLayers,
    Sampled,
    SampleSpec,
    Scored,
    StepPlan,
    StepResult,
    Unwanted,
    abandoned_step,
    realized,
)
from ..scheduling.step_loop import StepLoop
from .model import KVManager, LayerDone, ModelInputs, PipelineModel, ScoreDone
from .runner import StepPipeline
from .steps import HostSteps, Queued, StepComputer, describe

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
LEFT_BYTES = 4 << 20
"""Bytes of a prompt that are worth no further report: they take as long as their message."""


class _Abandoned(Exception):
    """No request needs the running step any more."""


@dataclass(slots=True, eq=False)
class BegunStep:
    """A step between :meth:`TextGenerationPipeline.begin` and its result.

    ``result``: None while the device computes. ``queued``: the device's step. ``before``: a step
    that was not over when this one began; its tokens are the inputs of this one. ``applied``: to be
    called before masks are read; None if the plan is not ahead.
    """

    plan: StepPlan
    began: float
    result: StepResult | None = None
    queued: Queued | None = None
    layer_done: LayerDone | None = None
    before: BegunStep | None = None
    applied: Applied | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def drawn(self) -> dict[bytes, int]:
        """Return the sampled tokens by request, if the step is over."""
        return {} if self.result is None else {r.request: r.token for r in self.result.sampled}


class TextGenerationPipeline:
    """A text model with its KV memory; for one thread, but :meth:`finish` may have another one.

    ``layer_group``: layers between two reports to ``on_layers``; 0: by :func:`report_layers`.
    ``computer``: runs rows and samples tokens; by default the model, with the sampler on the host.
    Use either :meth:`execute` or :meth:`next_token`, because both allocate the blocks of ``kv``.
    """

    def __init__(
        self,
        model: PipelineModel,
        kv: KVManager,
        layer_group: int = 0,
        computer: StepComputer | None = None,
    ) -> None:
        self.model = model
        self._computer = computer or HostSteps(model)
        self.kv = kv
        self.pool = kv.pool
        self.layers_done = 0  # since the start; other threads may read it
        self.layer_group = layer_group
        self._blocks, self._block_size = kv.num_blocks, kv.layout.block_size
        self._last: tuple[Sequence[Chunk], ModelInputs] | None = None  # the previous step
        self._previous: BegunStep | None = None  # the step begun last
        self._ended = 0.0  # time when a step was over
        self._loop: StepLoop | None = None
        self._keys: dict[RequestID, bytes] = {}

    # ------------------------------------------------------------------ batches of contexts

    def next_token(
        self, batch: Mapping[RequestID, TextContext], num_steps: int = 1
    ) -> dict[RequestID, TextGenerationOutput]:
        """Generate up to ``num_steps`` tokens for every context; return them with the status.

        A context's first step computes its whole prompt. A context that ends early gets no more
        tokens; a context without KV memory waits and may get none. Contexts of earlier calls
        that are not in the batch are paused; the prefix cache may keep their KV.
        If contexts fail, raises the error of the first after all others are done; their tokens
        are in the next call's outputs. Raises InputError before computing if the model cannot
        run a context, such as a text model one with images.
        """
        for context in batch.values():
            self.check(context)
        loop = self._loop = self._loop or StepLoop(self)
        for request_id in self._keys.keys() - batch.keys():
            loop.abort(self._keys.pop(request_id))
        for request_id, context in batch.items():
            if request_id not in self._keys and not context.status.is_done:
                self._keys[request_id] = loop.add(context)
        failed: list[Failed] = []
        for _ in range(num_steps):
            if not loop.has_work:
                break
            failed += [event for event in loop.step() if isinstance(event, Failed)]
        over = {event.request for event in failed}
        for request_id, key in list(self._keys.items()):
            if key in over or batch[request_id].status.is_done:
                del self._keys[request_id]
        if failed:
            raise error_from_code(failed[0].code, failed[0].message)
        return {request_id: c.to_generation_output() for request_id, c in batch.items()}

    def release(self, context: TextContext) -> None:
        """Remove a context and free its blocks, if it is known."""
        key = self._keys.pop(context.request_id, None)
        if key is not None and self._loop is not None:
            self._loop.abort(key)

    def check(self, context: TextContext) -> None:
        """Raise InputError if the model cannot run the context."""
        self.model.check(context)

    # ------------------------------------------------------------------ plans

    def execute(
        self,
        plan: StepPlan,
        on_layers: OnLayers | None = None,
        unwanted: Unwanted | None = None,
        applied: Applied | None = None,
    ) -> StepResult:
        """Run a plan and sample.

        ``on_layers(request, layer_end)`` is called during the step for every chunk with
        ``stream_layers``: keys and values of layers ``0 .. layer_end`` are in the pool.
        ``unwanted()`` is checked before the first layer and, if the computer can stop, after
        each layer. Once it returns True, the step is abandoned and no longer writes to its blocks.
        ``applied()`` is called before the masks of a plan ahead are read, after as much of the step
        as does not need them. If it raises, the step fails.
        """
        return self.finish(self.begin(plan, on_layers, unwanted, applied))

    @property
    def can_queue(self) -> bool:
        """True if :meth:`begin` returns before a decode step is over."""
        return self._computer.can_queue

    def begin(
        self,
        plan: StepPlan,
        on_layers: OnLayers | None = None,
        unwanted: Unwanted | None = None,
        applied: Applied | None = None,
    ) -> BegunStep:
        """Begin a plan as :meth:`execute`; :meth:`finish` returns its result.

        At most two steps are begun and not finished, the second of them planned ahead. Steps are
        finished in their order; the first one may be finished within ``applied()``.
        """
        step = BegunStep(plan, time.perf_counter())
        if plan.ahead:
            step.applied = applied or _nothing_applied
        previous, self._previous = self._previous, step
        if unwanted is not None and unwanted():
            step.result = abandoned_step(plan, 0.0)
            return step
        try:
            if previous is not None and previous.result is None and plan.ahead:
                self._queue(step, plan.chunks, on_layers, previous)
            if step.queued is None:
                if previous is not None:
                    self.finish(previous)
                self._compute(step, previous, on_layers, unwanted)
        except _Abandoned:
            step.result = abandoned_step(plan, time.perf_counter() - step.began)
        except Exception as error:  # whatever the error, the loop must continue
            step.result = self._failed(step, error)
        return step

    def finish(self, step: BegunStep) -> StepResult:
        """Wait for a step and return its result; any thread may call it."""
        with step.lock:
            if step.result is None:
                try:
                    step.result = self._collected(step)
                except Exception as error:  # whatever the error, the loop must continue
                    step.result = self._failed(step, error)
                step.queued = step.before = step.layer_done = step.applied = None
            return step.result

    def _queue(
        self,
        step: BegunStep,
        chunks: Sequence[Chunk],
        on_layers: OnLayers | None,
        before: BegunStep | None = None,
    ) -> None:
        """Queue a step, if the computer can; with ``before``, whose tokens are its inputs."""
        step.queued = self._computer.queue(chunks, fed=before is not None, applied=step.applied)
        if step.queued is not None:
            step.before = before
            step.layer_done = self._reporter(chunks, on_layers, None)

    def _compute(
        self,
        step: BegunStep,
        previous: BegunStep | None,
        on_layers: OnLayers | None,
        unwanted: Unwanted | None,
    ) -> None:
        """Queue a step whose tokens are known, or compute it."""
        plan, encoded = step.plan, self.model.encode_seconds
        failed: dict[bytes, BatonError] = {}
        drawn = previous.drawn() if previous is not None and plan.ahead else {}
        chunks = realized(plan, drawn, failed)
        if chunks and not failed:
            self._queue(step, chunks, on_layers)
            if step.queued is not None:
                return
        chunks, inputs = self._admit(chunks, failed)
        sampled: list[Sampled] = []
        scored: list[Scored] = []
        if inputs is not None:
            inputs.score_done = _collector(chunks, scored)
            inputs.layer_done = self._reporter(chunks, on_layers, unwanted)
            try:
                sampled = self._computer.run(chunks, inputs, failed, step.applied)
            except _Abandoned:
                raise
            except Exception as error:  # of the rows of this pass, which may not be all
                why = _pass_failed(error)
                failed.update({c.request: why for c in chunks})
        encoding = self.model.encode_seconds - encoded
        step.result = self._over(step, sampled, failed, encoding, scored)

    def _collected(self, step: BegunStep) -> StepResult:
        failed: dict[bytes, BatonError] = {}
        if step.before is not None:  # a request without a token has no next one
            failed.update(self.finish(step.before).failed)
        if step.queued is None:
            raise InternalError("the step was never queued")
        sampled = step.queued.collect(failed)
        if step.layer_done is not None:
            for layer in range(len(self.pool)):
                step.layer_done(layer + 1)
        return self._over(step, sampled, failed)

    def _over(
        self,
        step: BegunStep,
        sampled: Sequence[Sampled],
        failed: dict[bytes, BatonError],
        encoding: float = 0.0,
        scored: Sequence[Scored] = (),
    ) -> StepResult:
        """Return the result of a step that is over now. Its time starts after the step before."""
        now, plan = time.perf_counter(), step.plan
        seconds, self._ended = now - max(step.began, self._ended), now
        return StepResult(
            plan.step,
            tuple(sampled),
            seconds,
            plan.num_tokens,
            failed,
            encode_seconds=encoding,
            scored=tuple(scored),
        )

    def _failed(self, step: BegunStep, error: Exception) -> StepResult:
        why = _pass_failed(error)
        return self._over(step, (), {c.request: why for c in step.plan.chunks})

    def trials(self) -> list[Chunk]:
        """Return chunks for the first steps of a worker: a prompt, then two tokens."""
        empty = np.empty(0, np.int32)
        spec = SampleSpec(SamplingParams(temperature=0), 1, empty, 1)
        prompt = min(2, self.model.max_length, self._block_size)
        return [
            Chunk(b"warm-up", 0, np.zeros(count, np.int32), np.zeros(1, np.int32), spec)
            for count in (prompt, 1, 1)
        ]

    def clear(self, block: int) -> None:
        """Zero a block of the pool; no request may hold it."""
        self._computer.clear(self.pool, block)

    def _admit(
        self, chunks: Sequence[Chunk], failed: dict[bytes, BatonError]
    ) -> tuple[Sequence[Chunk], ModelInputs | None]:
        """Lay out the chunks that the kernels can run; fail the others."""
        chunks = _without(chunks, self._misfit, failed)
        inputs = self._prepare(chunks) if chunks else None
        if inputs is None or self._in_range(inputs.tokens, inputs.block_tables):
            return chunks, inputs
        # Out-of-range ids are rare, so the chunks are checked one by one only now.
        chunks = _without(chunks, self._stray, failed)
        return chunks, self._prepare(chunks) if chunks else None

    def _prepare(self, chunks: Sequence[Chunk]) -> ModelInputs:
        """Lay out rows, from the previous step's rows if every chunk continues it."""
        if self._last is not None and _go_on(chunks, self._last[0]):
            tokens = np.concatenate([c.tokens for c in chunks])
            inputs = self.model.prepare_next_token_inputs(tokens, self._last[1])
        else:
            inputs = self.model.prepare_initial_token_inputs(chunks)
        self._last = chunks, inputs
        return inputs

    def _misfit(self, chunk: Chunk) -> BatonError | None:
        end = chunk.start + len(chunk.tokens)
        if not len(chunk.tokens) or chunk.start < 0 or end > self.model.max_length:
            limit = self.model.max_length
            return InternalError(f"positions {chunk.start}..{end} outside 0..{limit}")
        if len(chunk.block_table) * self._block_size < end:
            return InternalError(f"{len(chunk.block_table)} blocks are too few for {end} tokens")
        if not chunk.images:
            return None
        refusals = (self.model.refusal(image) for image in chunk.images)
        return next((why for why in refusals if why is not None), None)

    def _stray(self, chunk: Chunk) -> BatonError | None:
        if self._in_range(chunk.tokens, chunk.block_table):
            return None
        vocab = self.model.vocab_size
        return InternalError(
            f"token ids outside 0..{vocab - 1} or blocks outside 0..{self._blocks - 1}"
        )

    def _in_range(self, tokens: I32, blocks: I32) -> bool:
        return bool(
            tokens.min() >= 0
            and tokens.max() < self.model.vocab_size
            and blocks.min() >= 0
            and blocks.max() < self._blocks
        )

    def _reporter(
        self, chunks: Sequence[Chunk], on_layers: OnLayers | None, unwanted: Unwanted | None
    ) -> LayerDone:
        """Return the function that the model calls after each layer."""
        asked = unwanted if self._computer.can_stop else None
        streaming = [c for c in chunks if c.stream_layers] if on_layers else []
        due: dict[int, list[bytes]] = {}
        for chunk in streaming:
            for end in self._reports(chunk):
                due.setdefault(end, []).append(chunk.request)

        def layer_done(layer_end: int) -> None:
            self.layers_done += 1
            if asked is not None and asked():
                raise _Abandoned
            if on_layers:
                for request in due.get(layer_end, ()):
                    on_layers(request, layer_end)

        return layer_done

    def _reports(self, chunk: Chunk) -> list[int]:
        """Return the layers after which a chunk's keys and values are reported."""
        layers, group = len(self.pool), self.layer_group
        if group:
            return [*range(group, layers, group), layers]
        blocks = -(-len(chunk.tokens) // self._block_size)
        nbytes = blocks * self.kv.layout.block_bytes if chunk.sample is not None else 0
        return report_layers(layers, nbytes)


def queuing(pipeline: StepPipeline) -> TextGenerationPipeline | None:
    """Return the pipeline if it begins a step before the one before is over, else None."""
    if isinstance(pipeline, TextGenerationPipeline) and pipeline.can_queue:
        return pipeline
    return None


def report_layers(layers: int, nbytes: int) -> list[int]:
    """Return the layers after which KV is sent, so that little is left to send after the last one.

    Each report covers a quarter of the layers. The last quarter is halved until what remains is at
    most :data:`LEFT_BYTES`, or one layer; ``nbytes``: of a prompt's end in one layer, 0 before it.
    """
    group = max(1, -(-layers // 4))
    ends = [*range(group, layers, group)]
    done = ends[-1] if ends else 0
    while layers - done > 1 and (layers - done) * nbytes > LEFT_BYTES:
        done += -(-(layers - done) // 2)
        ends.append(done)
    return ends if ends[-1:] == [layers] else [*ends, layers]


def _collector(chunks: Sequence[Chunk], scored: list[Scored]) -> ScoreDone | None:
    """Return the function that adds log-probabilities of prompt tokens to ``scored``."""
    owners = [chunk for chunk in chunks if chunk.score is not None]
    if not owners:
        return None

    def score_done(group: int, first: int, records: Records) -> None:
        chunk = owners[group]
        scored.append(Scored(chunk.request, chunk.start + first, records.tobytes()))

    return score_done


def _nothing_applied() -> None:
    raise InternalError("a mask of a plan ahead is not known before the step before is applied")


def _pass_failed(error: Exception) -> InternalError:
    own = own_family()  # whose class may have replaced the model's methods
    place = "" if own is None else own.place_of(error)
    return InternalError(f"forward pass: {describe(error)}{place}")


def _go_on(chunks: Sequence[Chunk], before: Sequence[Chunk]) -> bool:
    """True if each chunk is the token after its predecessor, in the same blocks."""
    if len(chunks) != len(before):
        return False
    for chunk, last in zip(chunks, before, strict=True):
        if (
            chunk.block_table is not last.block_table
            or chunk.start != last.start + len(last.tokens)
            or len(chunk.tokens) != 1
            or chunk.sample is None
            or chunk.images
            or chunk.score is not None
        ):
            return False
    return True


def _without(
    chunks: Sequence[Chunk],
    fault: Callable[[Chunk], BatonError | None],
    failed: dict[bytes, BatonError],
) -> Sequence[Chunk]:
    """Return the chunks without a fault; the others go to ``failed``."""
    faults = {c.request: reason for c in chunks if (reason := fault(c)) is not None}
    failed.update(faults)
    return [c for c in chunks if c.request not in faults]


def token_steps(
    outputs: Mapping[RequestID, TextGenerationOutput],
) -> list[dict[RequestID, TextGenerationOutput]]:
    """Split the outputs of :meth:`TextGenerationPipeline.next_token` into steps of one token.

    A request that is missing in a later step has ended or had no memory for a token.
    """
    longest = max((len(output.tokens) for output in outputs.values()), default=0)
    return [
        {r: _step(output, i) for r, output in outputs.items() if i < len(output.tokens)}
        for i in range(longest)
    ]


def _step(output: TextGenerationOutput, index: int) -> TextGenerationOutput:
    last = index == len(output.tokens) - 1
    logprobs = output.log_probabilities
    return replace(
        output,
        tokens=output.tokens[index : index + 1],
        final_status=output.final_status if last else GenerationStatus.ACTIVE,
        log_probabilities=None if logprobs is None else logprobs[index : index + 1],
    )
