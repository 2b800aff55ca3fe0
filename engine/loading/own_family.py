"""The user's own model family, with which this process reads model folders.

A class of the extension point ``model_family`` translates the config.json of a folder into that of
one of Baton's architectures, and may replace the class of the model. It holds for the whole
process, because a supervisor and its workers read the folder in many places. Only a setting names
it: nothing in a model folder can name code.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from baton.extend.resolve import FAMILY, resolve, told
from baton.proto.errors import CheckpointError

T = TypeVar("T")
_RAISED = (Exception, SystemExit)


class OwnFamily:
    """A user's class. Raises ExtensionError if it cannot be loaded.

    Its methods raise CheckpointError, with the class's name, if those of the class fail.
    """

    def __init__(self, name: str, folder: str) -> None:
        self.settings = name, folder
        self.name = name
        self.said = FAMILY.said(name)
        """The option and the class, for errors."""
        self._made = resolve(FAMILY, name, folder)
        source = inspect.getsourcefile(type(self._made))
        self._source = source
        code = b"" if source is None else Path(source).read_bytes()
        self._code = blake2b(name.encode() + b"\0" + code, digest_size=8)

    def config(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the config.json of one of Baton's architectures, for that of a folder."""
        found = self._called("config", lambda: self._made.config(copy.deepcopy(raw)))
        try:
            plain = msgspec.json.decode(msgspec.json.encode(found))
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"{self.said}: config() returned no JSON: {error}") from error
        if not isinstance(plain, dict):
            raise CheckpointError(f"{self.said}: config() returned no dict: {str(found)[:80]}")
        return plain

    def decoder(self, raw: dict[str, Any], base: type[T]) -> type[T]:
        """Return the class of the model: ``base`` or a subclass of it."""
        found = self._called("decoder", lambda: self._made.decoder(copy.deepcopy(raw), base))
        if not (isinstance(found, type) and issubclass(found, base)):
            raise CheckpointError(
                f"{self.said}: decoder() returned neither {base.__name__} nor a subclass of it"
            )
        return found

    def numerics(self, raw: dict[str, Any]) -> str:
        """Return a name for its code and the folder's config, which decide a result's bits."""
        digest = self._code.copy()
        digest.update(msgspec.json.encode(raw, order="sorted"))
        return f"family-{digest.hexdigest()}"

    def place_of(self, error: BaseException) -> str:
        """Return the class and the last line of its file that an error passed; empty if none."""
        frames = reversed(traceback.extract_tb(error.__traceback__))
        line = next((one.lineno for one in frames if one.filename == self._source), None)
        file = Path(self._source or "").name  # not its folder, because a client may read the text
        return "" if line is None else f" ({self.said}: {file}, line {line})"

    def _called(self, method: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except _RAISED as error:
            text = f"{self.said}: {method}() raised {told(error)}"
            raise CheckpointError(text) from error


_current: OwnFamily | None = None


def use_family(name: str, folder: str) -> None:
    """Read model folders with the class ``name`` from now on; empty: without one.

    ``folder``: where modules are looked for last. Raises ExtensionError.
    """
    global _current
    if not name:
        _current = None
    elif _current is None or _current.settings != (name, folder):
        _current = OwnFamily(name, folder)


def own_family() -> OwnFamily | None:
    """Return the class with which this process reads model folders, if any."""
    return _current
