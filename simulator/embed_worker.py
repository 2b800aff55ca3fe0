"""Workers of a simulated embedding cluster: the real core with toy embeddings."""

from __future__ import annotations

from ..prefill_worker.embed_core import BatchDone, EmbedCore, EmbedLimits, RunBatch
from ..proto.layout import ModelCard
from .toy_model import KILLS_PREFILL, MUTE, Poisoned, embed_card, expected_vector
from .workers import WorkerNode, warm_times


class EmbedNode(WorkerNode[EmbedCore]):
    """An embedding worker with the real core."""

    role = "prefill"

    def make_card(self) -> ModelCard:
        """Return the card of the embedding model."""
        return embed_card()

    def make(self) -> None:
        """Create a new core."""
        limits = EmbedLimits(token_budget=4 * self.sizes.token_budget, max_batch=6, max_queue=64)
        self.core = EmbedCore(self.member, limits, warm_times())

    def perform(self, action: object) -> None:
        """Perform an action as the shell would."""
        if isinstance(action, RunBatch):
            batch = action
            self.run(batch.tokens, lambda seconds: self._finish(batch, seconds))
        else:
            super().perform(action)

    def _finish(self, run: RunBatch, seconds: float) -> None:
        """Compute the embeddings of a batch, except for texts the model cannot embed."""
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
