"""The engine alone: generates with a loaded model, without processes or sockets.

Used by tests, benchmarks and "engine alone" baselines. The engine does not handle text: prompts
are token ids.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.errors import BatonError, error_from_code
from baton.proto.sampling import SamplingParams

from .loading.loader import Runner
from .scheduling.events import Failed
from .scheduling.scheduler import SchedulerConfig
from .scheduling.step_loop import StepLoop


class LLMEngine(StepLoop):
    """Continuous batching over one loaded model, in one thread.

    ``runner``: model, KV memory and pipeline. ``config``: limits of a step. ``look_ahead``: as in
    :class:`StepLoop`.
    """

    def __init__(
        self, runner: Runner, config: SchedulerConfig | None = None, *, look_ahead: bool = True
    ) -> None:
        super().__init__(runner.pipeline, config, runner.card.fingerprint, look_ahead=look_ahead)
        self.runner = runner

    def generate(
        self, prompts: Many[Many[int]], params: SamplingParams | Many[SamplingParams]
    ) -> list[TextContext]:
        """Generate all answers in batches; return the contexts in the order of the prompts.

        ``params``: shared, or one per prompt; unset fields use the model's defaults. Raises
        the first failure after all requests have ended.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        contexts = [self._context(p, own) for p, own in zip(prompts, each, strict=True)]
        mine = {self.add(context) for context in contexts}
        failure: BatonError | None = None
        while self.has_work:
            for event in self.step():
                if isinstance(event, Failed) and event.request in mine and failure is None:
                    failure = error_from_code(event.code, event.message)
        if failure is not None:
            raise failure
        return contexts

    def _context(self, prompt: Many[int], given: SamplingParams) -> TextContext:
        params = given.merged(self.runner.generation_defaults)
        return TextContext(
            max_length=self.runner.card.max_length,
            tokens=TokenBuffer(np.array(prompt, np.int64)),
            eos_token_ids=set(self.runner.card.eos_token_ids),
            eos_sequences=[[token] for token in params.stop_token_ids or ()],
            ignore_eos=params.ignore_eos,
            sampling_params=params,
        )
