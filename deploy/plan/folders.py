"""The memory that the model in a folder needs, whatever its task."""

from __future__ import annotations

from baton.engine.loading.checkpoint import load_checkpoint
from baton.engine.loading.embedding_config import DRAW
from baton.engine.loading.kv_types import AUTO
from baton.engine.loading.tasks import folder_task
from baton.proto.picture_requests import longest_row

from .memory import ModelMemory, model_memory

USUAL_PROMPT_TOKENS = 512
"""Tokens of a picture's prompt for the last text encoder."""


def folder_memory(
    folder: str, max_length: int, block_size: int, kv_type: str = AUTO
) -> ModelMemory:
    """Return the memory of the model in a folder. ``kv_type``: of its keys and values.

    The context of a picture model is the state of a picture with a negative prompt, of the usual
    number of tokens. Raises CheckpointError for the folder's files.
    """
    if folder_task(folder) != DRAW:
        return model_memory(load_checkpoint(folder), max_length, kv_type)
    from baton.engine.pictures.folder import DRAWING_PARTS, open_folder
    from baton.engine.pictures.memory import USUAL_PIXELS, picture_bytes

    pictures = open_folder(folder)
    layout = pictures.state_layout(block_size)
    row = max_length or longest_row(block_size, USUAL_PROMPT_TOKENS)
    return ModelMemory(
        weights=pictures.parts_bytes(pictures.family.encoder_parts),
        context=layout.token_bytes * row,
        drawing=pictures.parts_bytes(DRAWING_PARTS),
        picture=picture_bytes(pictures, USUAL_PIXELS),
    )
