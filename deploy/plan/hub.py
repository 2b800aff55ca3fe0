"""Models named as on the Hugging Face hub: ``org/name`` becomes a folder of the hub's cache.

``org/name/FILE.gguf`` names one GGUF file of such a model.

huggingface_hub does the download, so its variables count: HF_HOME, HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE. Only data is fetched, never code: the files that :mod:`...engine.loading` and
:mod:`...text` read. A folder of that name wins over the hub.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from baton.engine.loading.gguf import part_paths
from baton.proto.errors import ConfigError

from ..config import ServeSettings

_PARTS = {
    "text_encoder": "model.safetensors",
    "text_encoder_2": "model.safetensors",
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
}
"""Folders of a picture model with weights, and the file of each; other names are other formats."""
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "modules.json",  # embedding models, with one folder per module
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
    "speech.json",  # speech models, with the codec in its default folder
    "snac/config.json",
    "snac/model.safetensors",
    "model_index.json",  # picture models, with one folder per part
    "scheduler/scheduler_config.json",
    *(f"{part}/config.json" for part in _PARTS),
    *(f"{part}/{name}" for part, name in _PARTS.items()),
    *(f"{part}/{name}.index.json" for part, name in _PARTS.items()),
    *(f"{part}/{name.replace('.', '-0*.')}" for part, name in _PARTS.items()),  # shards
    *(f"{part}/{name}" for part in ("tokenizer", "tokenizer_2") for name in _TOKENIZER),
)
NOT = ("model*/*.safetensors",)
"""A star of the patterns also matches slashes, and copies in other formats lie in folders."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FILE_NAME = re.compile(rf"({_NAME.pattern})/([\w.-]{{1,200}}\.gguf)")

Say = Callable[[str], object]


def is_hub_name(model: str) -> bool:
    """Whether ``model`` is ``org/name`` or ``org/name/FILE.gguf``, and no file or folder here."""
    named = _NAME.fullmatch(model) or _FILE_NAME.fullmatch(model)
    return bool(named) and not Path(model).exists()


def with_local_model(settings: ServeSettings, say: Say, *, fetch: bool = True) -> ServeSettings:
    """Return settings whose model is local: a model of the hub is downloaded first.

    ``say`` receives a line before and after. ``fetch=False``: use the cache alone. Raises
    ConfigError, with the reason in one sentence, if the model cannot be had.
    """
    if not is_hub_name(settings.model):
        return settings
    file = _FILE_NAME.fullmatch(settings.model)
    if file is None:
        folder = download(settings.model, say, fetch=fetch)
        return msgspec.structs.replace(settings, model=folder)
    names = [part.name for part in part_paths(Path(file[2]))]
    folder = download(file[1], say, fetch=fetch, files=names)
    for name in names:
        if not (Path(folder) / name).is_file():
            raise ConfigError(f"{file[1]} has no file {name}")
    return msgspec.structs.replace(settings, model=str(Path(folder) / file[2]))


def download(name: str, say: Say, *, fetch: bool = True, files: Sequence[str] = FILES) -> str:
    """Return the folder of the hub's cache with the model ``name``. Raises ConfigError."""
    from huggingface_hub import constants, snapshot_download  # takes a second to import
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not _is_terminal():
        disable_progress_bars()
    fetch = fetch and not constants.HF_HUB_OFFLINE

    def get(*, only_cached: bool) -> str:
        found = snapshot_download(
            name,
            allow_patterns=[*files],
            ignore_patterns=[*NOT],
            local_files_only=only_cached,
        )
        return str(found)

    try:
        if not fetch:
            return get(only_cached=True)
        say(f"getting {name} from {constants.ENDPOINT} (cache: {constants.HF_HUB_CACHE})")
        folder = get(only_cached=False)
    except (HfHubHTTPError, OSError, ValueError) as problem:
        why = _reason(name, problem, fetch=fetch, offline=constants.HF_HUB_OFFLINE)
        raise ConfigError(why) from problem
    say(f"{name} is in {folder}")
    return folder


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _reason(name: str, problem: Exception, *, fetch: bool, offline: bool) -> str:
    """Return one sentence about why a model cannot be had."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    hub = constants.ENDPOINT
    cause = problem.__cause__ if isinstance(problem.__cause__, Exception) else problem
    start = f"{name} is no folder here, and"
    if not fetch:
        why = " and HF_HUB_OFFLINE is set" if offline else ""
        return f"{start} is not in the hub's cache {constants.HF_HUB_CACHE}{why}"
    if isinstance(cause, GatedRepoError):
        return f"{name} is gated: accept its terms at {hub}/{name}, then set HF_TOKEN"
    status = getattr(getattr(cause, "response", None), "status_code", 0)
    if isinstance(cause, RepositoryNotFoundError) or status in (401, 403, 404):
        return f"{start} {hub} has no such model, or shows it only with an HF_TOKEN"
    if isinstance(cause, HfHubHTTPError):
        return f"{start} {hub} answers {status}"
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    if isinstance(cause, OSError) and cause.strerror:
        lines = [os.strerror(cause.errno) if cause.errno else cause.strerror]
    return f"{start} cannot be downloaded from {hub}: {lines[0][:200]}"
