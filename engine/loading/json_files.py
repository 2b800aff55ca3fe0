"""JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.proto.errors import CheckpointError
from baton.runtime.small_files import check_file


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises :class:`CheckpointError` if unreadable or not an object."""
    try:
        check_file(path)
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
