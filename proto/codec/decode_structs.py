"""Types that a decoder builds before the users' classes, so that no generic objects are built.

For an array or a context inside a user's type, msgspec calls a hook with generic lists and maps. A
hostile message can make these far larger than itself. So a dataclass or struct with such a field
gets a *decode struct*: a struct with the same fields, but with arrays as
:class:`..wire.arrays.ArrayMap` and contexts as their maps (:mod:`..wire.wire_context`). msgspec
decodes it without a hook, and the object is built from it.

A record with only defaults takes one byte in a message, and hundreds of bytes as an object. So the
decode structs of records inside a container count the bytes before the objects are built.
Containers in containers stay the bytes they are in the message (``msgspec.Raw``) until the memory
of their values is counted (:mod:`.plain_size`).
"""

from __future__ import annotations

import sys
import types
from collections.abc import (
    Callable,
    Collection,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from collections.abc import (
    Set as AbstractSet,
)
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from ..wire.arrays import ArrayMap, ArrayReader
from .plain_size import has_sets, is_hashable, is_nested, is_plain, may_grow

Build = Callable[[Any, ArrayReader], Any]
"""Builds an object from its decoded form."""

Count = Callable[[int], None]
"""Counts bytes that an object will need; raises LimitExceeded over the limit."""

_CONTAINERS: frozenset[Any] = frozenset(
    {list, set, frozenset, tuple, dict, Collection, Sequence, MutableSequence}
    | {AbstractSet, MutableSet, Mapping, MutableMapping}
)
_LEAST_RECORD = 400
"""Minimum bytes counted for a record. It also bounds their number, and the time to build them."""
_SLOT, _DICT, _OBJECT = 8, 184, 48

_NEVER = object()
"""Form of types that cannot be sent: code and grammar state."""


class DecodeStructs:
    """Makes the forms of types that msgspec decodes: decode structs, and containers of them.

    ``known``: form and builder of some classes. ``count``: called with the bytes of each object
    inside a container before the object is built. ``plain``: makes the builder of a plain type,
    which counts its values in their bytes first.

    ``uncounted``: there are nested plain types that msgspec decodes itself, so the whole message
    must be counted first. ``numbers``: there are flat lists of numbers, so that must be done if the
    message has many small ones. ``sets``: any of these are sets.
    """

    def __init__(
        self, known: Mapping[type, tuple[Any, Build]], count: Count, plain: Callable[[Any], Build]
    ) -> None:
        self._known = known
        self._count = count
        self._plain = plain
        self._made: dict[tuple[Any, bool], tuple[Any, Build | None]] = {}
        self._open: set[tuple[Any, bool]] = set()
        self.uncounted = self.numbers = self.sets = False

    def of(self, kind: Any, many: bool = False) -> tuple[Any, Build | None]:
        """Return the form of a type and its builder (None: the form is the object).

        ``many``: the type is part of a container, so a message may have any number of its objects.
        """
        origin, arguments = get_origin(kind), get_args(kind)
        if is_plain(kind):
            return self._counted_plain(kind)
        if kind is np.ndarray or origin is np.ndarray:
            return ArrayMap, _read
        if origin is Annotated:
            form, build = self.of(arguments[0], many)
            return (Annotated[(form, *arguments[1:])] if form is not _NEVER else form), build
        if origin in (Union, types.UnionType):
            return self._union(arguments, many)
        if origin is not None:
            return self._generic(kind, many)
        if _is_record(kind):
            return self._record(kind, many)
        return (_NEVER if getattr(kind, "_is_protocol", False) else kind), None

    def _counted_plain(self, kind: Any) -> tuple[Any, Build | None]:
        if not is_nested(kind):
            self.numbers = self.numbers or (kind is not int and may_grow(kind))
            return kind, None
        if is_hashable(kind):  # Raw is not
            return self._uncounted(kind), None
        return msgspec.Raw, self._plain(kind)

    def _uncounted(self, kind: Any) -> Any:
        self.uncounted, self.sets = True, self.sets or has_sets(kind)
        return kind

    def _union(self, members: tuple[Any, ...], many: bool) -> tuple[Any, Build | None]:
        forms: list[Any] = []
        builds: dict[Any, Build] = {}
        for member in members:
            nested = is_plain(member) and is_nested(member)
            form, build = (self._uncounted(member), None) if nested else self.of(member, many)
            if form is _NEVER:
                continue
            inner = get_args(form) if get_origin(form) is Union else (form,)
            forms += inner
            for one in inner:
                plain = get_args(one)[0] if get_origin(one) is Annotated else one
                if build is not None:
                    builds[get_origin(plain) or plain] = build
        if not forms:
            return _NEVER, None
        union: Any = Union[tuple(dict.fromkeys(forms))]  # noqa: UP007
        if not builds:
            return union, None

        def build_member(value: Any, reader: ArrayReader) -> Any:
            build = builds.get(type(value))
            return value if build is None else build(value, reader)

        return union, build_member

    def _generic(self, kind: Any, many: bool) -> tuple[Any, Build | None]:
        origin: Any = get_origin(kind)
        arguments = get_args(kind)
        if _is_record(origin):
            return self._record(kind, many)
        many = origin in _CONTAINERS and (many or not _is_fixed(origin, arguments))
        pairs = [(a, None) if a is ... else self.of(a, many) for a in arguments]
        if origin is Callable or any(form is _NEVER for form, _ in pairs):
            return _NEVER, None
        builds = [build for _, build in pairs]
        form = origin[tuple(form for form, _ in pairs)]
        if not any(builds):
            return form, None
        return form, _builder_of(origin, arguments, builds)

    def _record(self, kind: Any, many: bool) -> tuple[Any, Build | None]:
        if kind in self._known:
            return self._known[kind]
        key = kind, many
        if key in self._open:
            raise TypeError(f"{kind} holds itself: such types have no decoder")
        if key not in self._made:
            struct = issubclass(get_origin(kind) or kind, msgspec.Struct)
            self._open.add(key)
            self._made[key] = (self._struct if struct else self._dataclass)(kind, many)
            self._open.remove(key)
        return self._made[key]

    def _counted(self, kind: Any, items: Sequence[Any]) -> dict[str, Any]:
        """Return the namespace of a form that counts the bytes of its object."""
        size = 2 * (_OBJECT + _SLOT * len(items)) + (_DICT if kind.__dictoffset__ else 0)
        made = [i.default_factory for i in items if i.default_factory not in _NO_DEFAULT]
        size = max(size + sum(sys.getsizeof(make()) for make in made), _LEAST_RECORD)
        count = self._count
        return {"__post_init__": lambda _: count(size)}

    def _dataclass(self, alias: Any, many: bool) -> tuple[Any, Build | None]:
        kind: Any = get_origin(alias) or alias
        hints = field_types(alias)
        forms = {item.name: self.of(hints[item.name], many) for item in fields(kind)}
        if not many and all(form is hints[n] or form == hints[n] for n, (form, _) in forms.items()):
            return alias, None
        form = msgspec.defstruct(
            kind.__name__,
            [_field(item.name, forms[item.name][0], item) for item in fields(kind)],
            namespace=self._counted(kind, fields(kind)) if many else None,
            frozen=many,  # thus hashable, for sets and keys
            kw_only=True,
        )
        post = getattr(kind, "__post_init__", None)

        def build_object(value: Any, reader: ArrayReader) -> Any:
            made = object.__new__(kind)
            for name, (_, build) in forms.items():
                object.__setattr__(made, name, _built(getattr(value, name), build, reader))
            if post is not None:
                post(made)
            return made

        return form, build_object

    def _struct(self, alias: Any, many: bool) -> tuple[Any, Build | None]:
        kind: Any = get_origin(alias) or alias
        known = msgspec.structs.fields(alias)
        forms = {item.name: self.of(item.type, many) for item in known}
        if not many and all(forms[item.name][0] == item.type for item in known):
            return alias, None
        config = kind.__struct_config__
        form = msgspec.defstruct(
            kind.__name__,
            [_field(item.name, forms[item.name][0], item) for item in known],
            namespace=self._counted(kind, known) if many else None,
            frozen=many,
            tag_field=config.tag_field,
            tag=config.tag,
            array_like=config.array_like,
            forbid_unknown_fields=config.forbid_unknown_fields,
            rename={item.name: item.encode_name for item in known},
            kw_only=True,
        )

        def build_struct(value: Any, reader: ArrayReader) -> Any:
            return kind(**{n: _built(getattr(value, n), b, reader) for n, (_, b) in forms.items()})

        return form, build_struct


def field_types(alias: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, with the arguments of a generic one in place."""
    kind = get_origin(alias) or alias
    types: dict[str, Any] = {}
    for base in getattr(kind, "__orig_bases__", ()):
        if get_origin(base) is not Generic and is_dataclass(get_origin(base) or base):
            types |= field_types(base)
    hints = get_type_hints(kind, include_extras=True)
    types = {name: types.get(name, hint) for name, hint in hints.items()}
    own = dict(zip(getattr(kind, "__parameters__", ()), get_args(alias), strict=False))
    return {name: _with_arguments(hint, own) for name, hint in types.items()}


def _with_arguments(hint: Any, arguments: Mapping[Any, Any]) -> Any:
    """Return a type with its type variables replaced; those without an argument are ``Any``."""
    if isinstance(hint, TypeVar):
        return arguments.get(hint, Any)
    free = getattr(hint, "__parameters__", ())
    return hint[tuple(arguments.get(one, Any) for one in free)] if free else hint


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, msgspec.Struct))


def _is_fixed(origin: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether a container is a tuple with a declared length."""
    return origin is tuple and arguments[-1:] != (...,)


_NO_DEFAULT = (MISSING, msgspec.NODEFAULT)


def _read(value: Any, reader: ArrayReader) -> Any:
    # A field that was left out has its default, which is already an array.
    return reader.read(value) if isinstance(value, ArrayMap) else value


def _built(value: Any, build: Build | None, reader: ArrayReader) -> Any:
    return value if build is None else build(value, reader)


def _field(name: str, form: Any, item: Any) -> tuple[str, Any, Any]:
    form = None if form is _NEVER else form
    if item.default_factory not in _NO_DEFAULT:
        return name, form, msgspec.field(default_factory=item.default_factory)
    if item.default not in _NO_DEFAULT:
        return name, form, msgspec.field(default=item.default)
    return name, form, msgspec.field()


def _builder_of(origin: Any, arguments: tuple[Any, ...], builds: list[Build | None]) -> Build:
    """Return the builder of a list, set, tuple or dict."""
    plain: list[Build] = [build or (lambda value, _: value) for build in builds]
    if issubclass(origin, Mapping):
        return lambda value, reader: {
            plain[0](k, reader): plain[1](v, reader) for k, v in value.items()
        }
    if origin is tuple and arguments[-1] is not ...:
        return lambda value, reader: tuple(b(v, reader) for b, v in zip(plain, value, strict=True))
    return lambda value, reader: type(value)(plain[0](item, reader) for item in value)
