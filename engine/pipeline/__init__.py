"""Runs models: the pipeline interfaces of contexts.md and the pipelines of the workers."""

from baton.proto.contexts.generators import AudioGenerator, EmbeddingsGenerator, EmbeddingsOutput

from .embeddings import EmbeddingsPipeline
from .model import KVCacheMixin, KVManager, ModelInputs, ModelOutputs, PipelineModel
from .speech import SpeechPipeline
from .text_generation import TextGenerationPipeline, token_steps

__all__ = [
    "AudioGenerator",
    "EmbeddingsGenerator",
    "EmbeddingsOutput",
    "EmbeddingsPipeline",
    "KVCacheMixin",
    "KVManager",
    "ModelInputs",
    "ModelOutputs",
    "PipelineModel",
    "SpeechPipeline",
    "TextGenerationPipeline",
    "token_steps",
]
