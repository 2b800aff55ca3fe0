"""Special and added tokens that the files beside ``tokenizer.json`` state.

A folder may name a token in ``tokenizer_config.json``, ``special_tokens_map.json`` or
``added_tokens.json`` that ``tokenizer.json`` lacks. The rules are those of transformers 5:
``added_tokens_decoder`` makes the two older files void; otherwise ``special_tokens_map.json`` takes
precedence over ``tokenizer_config.json``. A missing token gets the next free id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from baton.proto.errors import CheckpointError

_USUAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_CONFIG = "tokenizer_config.json"


class StatedToken(NamedTuple):
    """A token that another file than ``tokenizer.json`` states; ``number`` None: the next id."""

    content: str
    number: int | None
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


def special_tokens(config: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the named special tokens, such as ``eos_token``.

    ``config``: ``tokenizer_config.json``. ``older``: ``special_tokens_map.json``.
    """
    merged = _merged(config, older)
    more = merged.get(_LISTS[0])
    named = {**merged, **(more if isinstance(more, dict) else {})}
    ordered = (*_USUAL, *(name for name in named if name not in _USUAL))
    texts = {name: _text(named.get(name)) for name in ordered if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def stated_tokens(
    config: Mapping[str, Any], older: Mapping[str, Any], added: Mapping[str, Any], origin: str
) -> list[StatedToken]:
    """Return the stated tokens in the order in which missing ones get their ids.

    ``added``: ``added_tokens.json``. Raises CheckpointError for malformed entries.
    """
    named = special_tokens(config, older)
    extra = [] if isinstance(config.get(_LISTS[0]), dict) else list(_extra(config))
    if "added_tokens_decoder" in config:
        numbered = list(_numbered(config["added_tokens_decoder"], named.values(), origin))
    else:
        usual = [text for name, text in named.items() if name in _USUAL]
        plain = {*added} - {*usual, *map(_text, extra)}
        special = {*added} - plain | {*named.values()}
        numbered = [_from_pair(pair, plain, special, origin) for pair in added.items()]
    extra = extra or list(_extra(_merged(config, older)))
    listed = [_token(token, None, named.values()) for token in (*named.values(), *extra)]
    every: dict[str, StatedToken] = {}
    for token in (*sorted(numbered, key=lambda token: token.number or 0), *filter(None, listed)):
        first = every.setdefault(token.content, token)
        if token.number not in (None, first.number):
            ids = f"{first.number} and {token.number}"
            raise CheckpointError(f"{origin}: token {token.content!r} has ids {ids} in {_CONFIG}")
    return list(every.values())


def _merged(config: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in which an older file overrides ``tokenizer_config.json``."""
    return dict(config) if "added_tokens_decoder" in config else {**config, **older}


def _text(token: object) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _extra(settings: Mapping[str, Any]) -> Iterator[Any]:
    lists = (settings[name] for name in _LISTS if isinstance(settings.get(name), list))
    yield from next(filter(None, lists), [])


def _numbered(decoder: object, special: Iterable[str], origin: str) -> Iterator[StatedToken]:
    if not isinstance(decoder, dict):
        raise CheckpointError(f"{origin}: added_tokens_decoder in {_CONFIG} must be an object")
    for index, value in decoder.items():
        token = _token(value, index, special) if isinstance(value, dict) else None
        if token is None or token.number is None:
            raise CheckpointError(f"{origin}: added_tokens_decoder in {_CONFIG}: bad token {index}")
        yield token


def _from_pair(
    pair: tuple[str, object], plain: set[str], special: set[str], origin: str
) -> StatedToken:
    content, index = pair
    if type(index) is not int:
        raise CheckpointError(f"{origin}: added_tokens.json: the id of {content!r} is no number")
    return StatedToken(content, index, special=content in special, normalized=content in plain)


def _token(value: object, index: str | None, special: Iterable[str]) -> StatedToken | None:
    """Return the token of a text or of an object with flags; None for another value."""
    content = _text(value)
    if not content:
        return None
    if not isinstance(value, dict):
        return StatedToken(content, None, special=True, normalized=False)
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    kept = {name: value[name] for name in flags if isinstance(value.get(name), bool)}
    kept.setdefault("normalized", not kept.get("special", False))
    kept["special"] = kept.get("special", index is None) or content in special
    number = int(index) if index is not None and index.isdecimal() else None
    return StatedToken(content, number, **kept)
