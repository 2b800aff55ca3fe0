"""The description of the served model that a router sends.

All files of the model come over the socket, because client and cluster may share no file system.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.images.settings import SETTINGS_FILES
from baton.proto.errors import InternalError
from baton.proto.layout import ModelCard
from baton.proto.wire.messages import Described
from baton.text.model_files import PICTURE_FILES, SPEECH_FILE
from baton.text.tokenizer import TOKENIZER_FILES

DESCRIBED_FILES: list[str] = [*TOKENIZER_FILES, *SETTINGS_FILES, SPEECH_FILE, *PICTURE_FILES]
"""The files that clients ask for."""


@dataclass(slots=True, frozen=True)
class Description:
    """The served model.

    ``card``: facts of the model. ``folder``: the model's folder on the cluster. ``files``: its
    text files by name. ``available``: names of files that the router can send.
    """

    card: ModelCard
    folder: str
    files: dict[str, bytes]
    available: list[str] = field(default_factory=list)


def described(answer: Described) -> Description:
    """Convert a router's answer to a Description. Raises InternalError if the model is missing."""
    if answer.model is None:
        raise InternalError("the router's description has no model")
    return Description(answer.model, answer.folder, answer.files, answer.available)
