"""Settings of a process as a frozen msgspec struct; unknown keys are rejected."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...proto.errors import ConfigError

Config = TypeVar("Config", bound=msgspec.Struct)


def parse_json(text: str | bytes, kind: type[Config], source: str = "settings") -> Config:
    """Parse a JSON object as ``kind``. Raises ConfigError with the invalid key."""
    try:
        return from_mapping(msgspec.json.decode(text), kind, source)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: not valid JSON: {error}") from error


def parse_toml(text: str, kind: type[Config], source: str = "settings") -> Config:
    """Parse a TOML document as ``kind``. Raises ConfigError with the invalid key."""
    try:
        return from_mapping(tomllib.loads(text), kind, source)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error


def load(path: str | Path, kind: type[Config]) -> Config:
    """Read ``kind`` from a ``.json`` or ``.toml`` file. Raises ConfigError."""
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read settings {path}: {error}") from error
    parse = parse_toml if path.suffix == ".toml" else parse_json
    return parse(text, kind, str(path))


def from_mapping(values: Any, kind: type[Config], source: str = "settings") -> Config:
    """Convert a decoded object to ``kind``. Raises ConfigError with the invalid key."""
    unknown = _unknown_keys(values, kind)
    if unknown:
        known = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
        raise ConfigError(f"{source}: unknown key {unknown[0]!r}; known: {known}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def dump(config: msgspec.Struct) -> str:
    """Return a config as JSON, for a child process."""
    return msgspec.json.encode(config).decode()


def _unknown_keys(values: Any, kind: type[msgspec.Struct]) -> list[str]:
    """Return the keys of ``values`` that ``kind`` or its nested structs lack, as dotted paths."""
    if not isinstance(values, dict):
        return []
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    unknown = [str(key) for key in values if key not in fields]
    for key in values.keys() & fields.keys():
        inner = fields[key]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            unknown += [f"{key}.{name}" for name in _unknown_keys(values[key], inner)]
    return unknown
