"""The only module that calls llguidance to read a tokenizer and to compile a schema.

llguidance reports schemas that it does not support, but does not limit the time, memory and stack
of a compilation. So untrusted schemas are first compiled in a trial (:mod:`.trial`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from baton.proto.errors import InputError, SchemaTooComplex
from baton.proto.json_schema import check_json_schema, grammar_of
from baton.runtime.small_files import check_file

from .enforceable import enforceable, enforceable_parts

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_LEXER_STATES = 32_000  # about 0.6 KiB each
_MESSAGE_CHARS = 300
_spelled_alike = re.compile("[!-~]+").fullmatch
"""In a byte-level vocabulary, only these characters stand for themselves."""


def load_tokenizer(folder: Path, vocab_size: int, eos: Iterable[int]) -> LLTokenizer:
    """Load a model folder's tokenizer. Raises InputError if it does not support grammars."""
    from llguidance import LLTokenizer

    ids = sorted(token for token in eos if 0 <= token < vocab_size)
    if not ids:
        raise InputError("json_schema needs a model with an end-of-sequence id")
    path = folder / "tokenizer.json"
    try:
        check_file(path)
        return LLTokenizer(
            _with_texts_as_tokens(path.read_bytes()).decode(),
            n_vocab=vocab_size,
            eos_token=ids,
            slices=LLTokenizer.json_slices(),
        )
    except OSError as error:
        reason = f"{path}: {error.strerror or error}"
    except (ValueError, msgspec.MsgspecError) as error:
        reason = one_line(str(error))
    raise InputError(f"json_schema needs a tokenizer.json that fits the model: {reason}")


def _with_texts_as_tokens(content: bytes) -> bytes:
    """Return a ``tokenizer.json`` whose added tokens are the special ones alone.

    llguidance takes every added token with a name in angle brackets for a special one, also the
    ``<tool_call>`` of Qwen, which is text. It then proposes the token and refuses it.
    """
    file = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(file.get("added_tokens", b"null")) or []
    texts = [token for token in added if not token.get("special", True)]
    model = (
        msgspec.json.decode(file.get("model", b"{}"), type=dict[str, msgspec.Raw]) if texts else {}
    )
    vocabulary = bytes(model.get("vocab", b"")).strip()
    if not vocabulary.startswith(b"{"):
        return content
    plain = [token for token in texts if _spelled_alike(token["content"])]
    more = msgspec.json.encode({token["content"]: token["id"] for token in plain})
    # A large vocabulary is not decoded. Of two entries with one name, the last one counts.
    both = b",".join(part for part in (vocabulary[1:-1].strip(), more[1:-1]) if part)
    model["vocab"] = msgspec.Raw(b"{" + both + b"}")
    file["model"] = msgspec.Raw(msgspec.json.encode(model))
    kept = [token for token in added if token not in plain]
    file["added_tokens"] = msgspec.Raw(msgspec.json.encode(kept))
    return msgspec.json.encode(file)


def compile_schema(tokenizer: LLTokenizer, schema: str) -> LLMatcher:
    """Compile a schema, or the grammar in it, and return the state before the first token.

    Raises InputError if the schema is invalid, unsatisfiable or not supported by
    llguidance, and SchemaTooComplex if it is too large.
    """
    from llguidance import LLMatcher, LLParserLimits

    check_json_schema(schema)
    value = msgspec.json.decode(schema)
    grammar = grammar_of(value)
    what = "json_schema" if grammar is None else "grammar"
    limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    try:
        if grammar is None:
            compiled = msgspec.json.encode(enforceable(value)).decode()
            text = LLMatcher.grammar_from_json_schema(compiled)
        else:
            text = LLMatcher.grammar_from_lark(enforceable_parts(grammar))
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
    except (MemoryError, InputError):
        raise
    except Exception as error:
        raise InputError(f"{what}: {one_line(str(error))}") from None
    except BaseException as error:
        if not type(error).__name__.startswith("Panic"):  # a panic of the Rust library
            raise
        raise InputError(f"{what} cannot be compiled: {one_line(str(error))}") from None
    if matcher.is_error():
        raise _refusal(what, matcher.get_error())
    if not any(first) and not matcher.is_accepting():
        raise InputError(f"{what}: no token can start an instance")
    return matcher


def _refusal(what: str, text: str) -> InputError:
    """Convert an error text of llguidance; its wording shows whether a limit was exceeded."""
    line = one_line(text)
    too_complex = any(word in line for word in ("too large", "too many", "Unable to determine"))
    kind = SchemaTooComplex if too_complex else InputError
    return kind(f"{what}: {line}")


def one_line(text: str) -> str:
    """Shorten a library's message to one line of limited length."""
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MESSAGE_CHARS else line[: _MESSAGE_CHARS - 1] + "…"
