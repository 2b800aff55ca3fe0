"""Find the class that a setting names as ``package.module:Class``.

One resolver for all extension points. Every problem is an :class:`ExtensionError` that says what is
missing. Modules come from PYTHONPATH and installed packages, then from the folder of extensions,
which is last, so that a file there never hides another module.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from baton.proto.errors import ConfigError

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class ExtensionError(ConfigError):
    """A class of an extension point cannot be used, or has failed."""


@dataclass(slots=True, frozen=True)
class Point:
    """An extension point. ``methods``: names of its methods, and the numbers of their arguments."""

    name: str
    methods: dict[str, int]

    def said(self, name: str) -> str:
        """Return the option and the class ``name`` for the beginning of an error."""
        return f"--{self.name.replace('_', '-')} {name[:200]}"


POLICY = Point("policy", {"choose": 2})
DECIDER = Point("decider", {"local": 1})
ORDER = Point("prefill_order", {"rank": 1})
METRIC = Point("metric", {"ended": 1, "families": 0})
TRANSPORT = Point("kv_transport", {"put": 1, "get": 2})
FAMILY = Point("model_family", {"config": 1, "decoder": 2})
POINTS = {point.name: point for point in (POLICY, DECIDER, ORDER, METRIC, TRANSPORT, FAMILY)}


def is_extension(value: str) -> bool:
    """Whether a setting's value names a class instead of one of Baton's own choices."""
    return ":" in value


def resolve(point: Point, name: str, folder: str = "") -> Any:
    """Return a new object of the class ``name``. Raises ExtensionError.

    ``folder``: where modules are looked for last.
    """
    said = point.said(name)
    if not _NAME.fullmatch(name):
        raise ExtensionError(f"{said}: not of the form package.module:Class")
    module_name, _, class_name = name.partition(":")
    module = _module(module_name, folder, said)
    found = _attribute(module, class_name, said)
    if found is None:
        raise ExtensionError(f"{said}: {_file_of(module)} has no {class_name}")
    if not isinstance(found, type):
        raise ExtensionError(f"{said}: {class_name} is no class, but {type(found).__name__}")
    try:
        made = found()
    except BaseException as error:
        began = error.__traceback__ is not None and error.__traceback__.tb_next is not None
        place = "" if began else _place_of(found)  # its constructor wants arguments
        raise ExtensionError(f"{said}: {class_name}() raised {told(error)}{place}") from error
    for method, arguments in point.methods.items():
        _check_method(made, method, arguments, said)
    return made


def _module(name: str, folder: str, said: str) -> ModuleType:
    if folder and folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name or name.startswith(f"{missing}."):
            where = f"{folder} or PYTHONPATH" if folder else "PYTHONPATH"
            raise ExtensionError(f"{said}: no module {missing} in {where}") from error
        raise ExtensionError(f"{said}: importing {name} raised {told(error)}") from error
    except BaseException as error:
        raise ExtensionError(f"{said}: importing {name} raised {told(error)}") from error


def _check_method(made: object, method: str, arguments: int, said: str) -> None:
    call = _attribute(made, method, said)
    if not callable(call):
        raise ExtensionError(f"{said}: {type(made).__name__} has no method {method}")
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return  # of a class in C: found at the first call
    except BaseException as error:  # of the user's own __signature__
        raise ExtensionError(f"{said}: {method} raised {told(error)}") from error
    try:
        signature.bind(*range(arguments))
    except TypeError as error:
        text = f"{said}: {method}{_shown(signature)} does not take {arguments} arguments ({error})"
        raise ExtensionError(text) from error


def _attribute(owner: object, name: str, said: str) -> Any:
    """Return an attribute, or None. Raises ExtensionError if the user's code for it raises."""
    try:
        return getattr(owner, name, None)
    except BaseException as error:
        raise ExtensionError(f"{said}: {name} raised {told(error)}") from error


def _shown(value: object) -> str:
    """Return the text of a user's object, whose own ``__str__`` may raise."""
    try:
        return str(value)
    except BaseException:
        return "it has no text"


def told(error: BaseException) -> str:
    """Return an exception as text, with the last place in the extension's own file."""
    if isinstance(error, SyntaxError) and error.filename:
        text = f"{type(error).__name__}: {error.msg}"
        return f"{text} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    ours = ("importlib", __file__)
    last = next((f for f in reversed(frames) if not any(o in f.filename for o in ours)), None)
    place = f" ({last.filename}, line {last.lineno})" if last is not None else ""
    return f"{type(error).__name__}: {_shown(error)[:500]}{place}"


def _place_of(found: type) -> str:
    """Return where a class begins, in parentheses; empty if its source cannot be read."""
    try:
        return f" ({inspect.getsourcefile(found)}, line {inspect.getsourcelines(found)[1]})"
    except (OSError, TypeError):
        return ""


def _file_of(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__
