"""Workers of a simulated cluster that serves an embedding model: the real core, toy vectors."""

from __future__ import annotations

from ..prefill_worker.embed_core import BatchDone, EmbedCore, EmbedLimits, RunBatch
from ..proto.layout import ModelCard
from .toy_model import KILLS_PREFILL, MUTE, Poisoned, embed_card, expected_vector
from .workers import WorkerNode, warm_times


class EmbedNode(WorkerNode[EmbedCore]):
    """The real embedding core."""

    role = "prefill"

    def make_card(self) -> ModelCard:
        """The model it serves."""
        return embed_card()

    def make(self) -> None:
        """A fresh core."""
        limits = EmbedLimits(token_budget=4 * self.sizes.token_budget, max_batch=6, max_queue=64)
        self.core = EmbedCore(self.member, limits, warm_times())

    def perform(self, action: object) -> None:
        """What the shell would do."""
        if isinstance(action, RunBatch):
            batch = action
            self.run(batch.tokens, lambda seconds: self._finish(batch, seconds))
        else:
            super().perform(action)

    def _finish(self, run: RunBatch, seconds: float) -> None:
        """Vectors of all texts, but for those the model has nothing to say of."""
        vectors = {}
        for name, context in run.batch.items():
            tokens = context.tokens.all.tolist()
            if KILLS_PREFILL in tokens:
                raise Poisoned
            if MUTE not in tokens:
                vectors[name] = expected_vector(tokens)
        self.cluster.stats["batches"] += 1
        self.cluster.stats["batched"] += len(run.batch)
        self.feed(BatchDone(vectors, seconds))
