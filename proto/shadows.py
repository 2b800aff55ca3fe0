"""Types to decode into before the classes themselves: nothing generic is ever built.

msgspec hands an array, a union of two dataclasses or a protocol to a hook as generic lists and
maps, which a hostile message can make far larger than itself, and cannot tell a subclass from
its base. So every dataclass or struct with such a field gets a *shadow*: a struct of the same
fields, with arrays as :class:`ArrayMap` and contexts as a union tagged by class. The shadow is
decoded by msgspec alone, and the object is built from it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from operator import attrgetter
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

Build = Callable[[Any], Any]

_NEVER = object()
"""Shadow of what cannot travel: code, grammar state."""


class ArrayMap(msgspec.Struct, rename={"np": "__np__", "shm": "__shm__"}, gc=False):
    """An array as a map: its bytes in C order, or the name of its shared memory."""

    np: bool = False
    shm: bool = False
    data: memoryview | None = None
    name: Annotated[str, Meta(max_length=256)] = ""
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=64)] | None = None
    dtype: Annotated[str, Meta(max_length=32)] = ""


class Shadows:
    """Makes shadows of types.

    ``array``: builds an array from its map. ``family``: the classes an object of a declared
    class may have; more than one, or one that says its ``type``, are told apart by that.
    ``known``: shadows, and what builds from them, of classes that need one of their own.
    """

    def __init__(
        self,
        array: Build,
        family: Callable[[type], Sequence[type]],
        known: Mapping[type, tuple[Any, Build]],
    ) -> None:
        # A field that was left out holds its default, which is an array already.
        self._array = lambda value: value if isinstance(value, np.ndarray) else array(value)
        self._family = family
        self._made: dict[type, tuple[Any, Build | None]] = dict(known)

    def of(self, kind: Any) -> tuple[Any, Build | None]:
        """Shadow of a type, and what builds the object from it (None: it is the object)."""
        origin, arguments = get_origin(kind), get_args(kind)
        if kind is np.ndarray or origin is np.ndarray:
            return ArrayMap, self._array
        if origin is Annotated:
            shadow, build = self.of(arguments[0])
            return (Annotated[(shadow, *arguments[1:])] if shadow is not _NEVER else shadow), build
        if origin in (Union, types.UnionType):
            return self._union(arguments)
        if origin is not None:
            return self._generic(origin, arguments)
        if isinstance(kind, type) and is_dataclass(kind):
            family = self._family(kind)
            return self._union(family, tagged=True) if family else self._record(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._record(kind)
        return (_NEVER if getattr(kind, "_is_protocol", False) else kind), None

    def becoming(self, form: type) -> tuple[Any, Build]:
        """Shadow of a dataclass tagged by its name, and what builds its ``context()`` from it."""
        shadow, build = self._record(form, tag=True)
        return shadow, lambda value: (build(value) if build else value).context()

    def _union(self, members: Sequence[Any], *, tagged: bool = False) -> tuple[Any, Build | None]:
        shadows: list[Any] = []
        builds: dict[Any, Build] = {}
        for member in members:
            shadow, build = self._record(member, tag=True) if tagged else self.of(member)
            if shadow is _NEVER:
                continue
            inner = get_args(shadow) if get_origin(shadow) is Union else (shadow,)
            shadows += inner
            for one in inner:
                plain = get_args(one)[0] if get_origin(one) is Annotated else one
                if build is not None:
                    builds[get_origin(plain) or plain] = build
        if not shadows:
            return _NEVER, None
        union: Any = Union[tuple(shadows)]  # noqa: UP007
        if not builds:
            return union, None

        def build_member(value: Any) -> Any:
            build = builds.get(type(value))
            return value if build is None else build(value)

        return union, build_member

    def _generic(self, origin: Any, arguments: tuple[Any, ...]) -> tuple[Any, Build | None]:
        pairs = [(a, None) if a is ... else self.of(a) for a in arguments]
        if origin is Callable or any(shadow is _NEVER for shadow, _ in pairs):
            return _NEVER, None
        builds = [build for _, build in pairs]
        shadow = origin[tuple(shadow for shadow, _ in pairs)]
        if not any(builds):
            return shadow, None
        return shadow, _builder_of(origin, arguments, builds)

    def _record(self, kind: Any, *, tag: bool = False) -> tuple[Any, Build | None]:
        if kind not in self._made:
            make = self._struct if issubclass(kind, msgspec.Struct) else self._dataclass
            self._made[kind] = make(kind, tag=tag)
        return self._made[kind]

    def _dataclass(self, kind: Any, *, tag: bool) -> tuple[Any, Build | None]:
        hints = get_type_hints(kind, include_extras=True)
        known = [item for item in fields(kind) if not (tag and item.name == "type")]
        shadows = {item.name: self.of(hints[item.name]) for item in known}
        if not tag and all(s is hints[n] or s == hints[n] for n, (s, _) in shadows.items()):
            return kind, None
        shadow = msgspec.defstruct(
            kind.__name__,
            [_field(item.name, shadows[item.name][0], item) for item in known],
            **({"tag_field": "type", "tag": kind.__name__} if tag else {}),
            kw_only=True,
        )
        steps = [(name, build) for name, (_, build) in shadows.items()]
        values = attrgetter(*shadows)
        post = getattr(kind, "__post_init__", None)

        def build_object(value: Any) -> Any:
            made = object.__new__(kind)
            found = values(value) if len(steps) > 1 else (values(value),)
            for (name, build), item in zip(steps, found, strict=True):
                object.__setattr__(made, name, item if build is None else build(item))
            if tag:
                made.type = kind.__name__
            if post is not None:
                post(made)
            return made

        return shadow, build_object

    def _struct(self, kind: Any, *, tag: bool) -> tuple[Any, Build | None]:
        known = msgspec.structs.fields(kind)
        shadows = {item.name: self.of(item.type) for item in known}
        if all(shadows[item.name][0] == item.type for item in known):
            return kind, None
        config = kind.__struct_config__
        shadow = msgspec.defstruct(
            kind.__name__,
            [_field(item.name, shadows[item.name][0], item) for item in known],
            tag_field=config.tag_field,
            tag=config.tag,
            array_like=config.array_like,
            forbid_unknown_fields=config.forbid_unknown_fields,
            rename={item.name: item.encode_name for item in known},
            kw_only=True,
        )

        def build_struct(value: Any) -> Any:
            items = {name: getattr(value, name) for name in shadows}
            builds = ((name, build) for name, (_, build) in shadows.items() if build is not None)
            return kind(**items | {name: build(items[name]) for name, build in builds})

        return shadow, build_struct


def _field(name: str, shadow: Any, item: Any) -> tuple[str, Any, Any]:
    shadow = None if shadow is _NEVER else shadow
    if item.default_factory not in (MISSING, msgspec.NODEFAULT):
        return name, shadow, msgspec.field(default_factory=item.default_factory)
    if item.default not in (MISSING, msgspec.NODEFAULT):
        return name, shadow, msgspec.field(default=item.default)
    return name, shadow, msgspec.field()


def _builder_of(origin: Any, arguments: tuple[Any, ...], builds: list[Build | None]) -> Build:
    """Builds the items of a list, set, tuple or dict."""
    plain: list[Build] = [build or (lambda value: value) for build in builds]
    if issubclass(origin, dict):
        return lambda value: {plain[0](k): plain[1](v) for k, v in value.items()}
    if origin is tuple and arguments[-1] is not ...:
        return lambda value: tuple(b(v) for b, v in zip(plain, value, strict=True))
    return lambda value: type(value)(map(plain[0], value))
