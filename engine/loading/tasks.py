"""The task of a model folder: what its files and its architecture allow, and what was asked."""

from __future__ import annotations

from pathlib import Path

from baton.proto.errors import ConfigError

from ..models.registry import architecture_of
from .embedding_config import DRAW, EMBED, GENERATE, TASKS, load_embedding_settings
from .gguf_folder import local_folder
from .model_config import ModelConfig, load_model_config
from .own_family import own_family

PICTURE_INDEX = "model_index.json"
"""The file that a folder of a picture model has, in the diffusers layout."""


def folder_task(folder: str | Path, asked: str = "") -> str:
    """Return the task of a model folder: ``asked``, else the folder's own.

    Raises CheckpointError for the folder's files, ConfigError if the model does not support the
    task.
    """
    folder, own = local_folder(folder), own_family()
    if not (Path(folder) / PICTURE_INDEX).is_file():
        return model_task(load_model_config(Path(folder)), Path(folder), asked)
    if own is not None:
        raise ConfigError(f"{folder} is a picture model, which {own.said} cannot serve")
    if asked not in ("", DRAW):
        raise ConfigError(f"{folder} is a picture model; its task is {DRAW}, not {asked!r}")
    return DRAW


def model_task(config: ModelConfig, folder: Path, asked: str = "") -> str:
    """Return the task of a model: ``asked``, else the task of its folder and architecture.

    Raises ConfigError if the task is unknown or the model does not support it.
    """
    entry, own = architecture_of(config, folder), own_family()
    if own is not None and entry.generator is None:
        raise ConfigError(
            f"{own.said}: config() returned {config.architecture}, an embedding model; return one "
            "that generates text, such as LlamaForCausalLM"
        )
    if asked not in ("", *TASKS):
        raise ConfigError(f"task must be one of {', '.join(TASKS)}, not '{asked}'")
    task = asked or entry.task
    if not asked and entry.embedder and load_embedding_settings(folder):
        task = EMBED
    makers = {GENERATE: entry.generator, EMBED: entry.embedder}
    if makers.get(task) is None:
        raise ConfigError(f"{folder}: a {config.architecture} cannot {task}")
    if own is not None and task != GENERATE:
        raise ConfigError(f"{own.said}: a model family of your own generates text, task is {task}")
    return task
