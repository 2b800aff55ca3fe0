"""A model's tokenizer: text to token ids and back, special ids, chat prompts.

It is made from the text files of a Hugging Face folder, read from disk or fetched through
``Describe``; nothing here reaches a network. ``tokenizer.json`` alone decides ids and text;
the other files only add which ids are special and the chat template.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..proto.errors import CheckpointError, InputError
from .chat_template import ChatTemplate, Message
from .guarded import GuardedRenderer

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)
"""The files a tokenizer is made from, in no order; all but the first may be missing."""

_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_BYTE_OF_CHAR: dict[str, int] = {}


class Tokenizer:
    """Encode, decode and chat prompts of one model; immutable and thread-safe.

    Attributes:
        special_tokens: text of the named special tokens (``bos_token``, ``eos_token``, ...).
        bos_token_id, eos_token_id, pad_token_id: their ids, or None.
        eos_token_ids: every id that ends an answer: those of ``generation_config.json`` (of
            ``config.json`` when that has none) and the tokenizer's own.
        special_ids: ids that ``decode`` leaves out with ``skip_special_tokens``.
        chat_template: renders messages; see :class:`ChatTemplate`.

    """

    def __init__(self, core: tokenizers.Tokenizer, settings: Settings) -> None:
        self._core = core
        self._bytes: dict[int, bytes] = {}
        self.special_tokens = settings.special_tokens
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = frozenset((*settings.eos_token_ids, *own))
        added = core.get_added_tokens_decoder()
        self.added_tokens = {token.content: index for index, token in added.items()}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.chat_template = ChatTemplate(
            settings.templates, settings.special_tokens, guard=settings.guard
        )

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Read a model folder of this machine; its chat template counts as the operator's own.

        Raises:
            CheckpointError: no ``tokenizer.json``, or a file that cannot be read.

        """
        root = Path(folder)
        files = {}
        for name in TOKENIZER_FILES:
            try:
                files[name] = (root / name).read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CheckpointError(f"{root / name}: {error.strerror}") from None
        return cls.from_files(files, trusted=True, origin=str(root))

    @classmethod
    def from_files(
        cls, files: Mapping[str, bytes], *, trusted: bool = False, origin: str = "the model"
    ) -> Tokenizer:
        """Make a tokenizer from file contents by name, as ``Describe`` delivers them.

        Args:
            files: contents of ``TOKENIZER_FILES``; other names are ignored.
            trusted: render the chat template in this process.
            origin: what error messages call the source.

        Raises:
            CheckpointError: ``tokenizer.json`` is missing, or a file is not what it should be.

        """
        if "tokenizer.json" not in files:
            raise CheckpointError(f"{origin} has no tokenizer.json; give prompts as token ids")
        settings = Settings(files, None if trusted else GuardedRenderer(), origin)
        return cls(_load_core(files["tokenizer.json"], origin), settings)

    # ------------------------------------------------------------------ text and ids

    @property
    def vocab_size(self) -> int:
        """Number of tokens with the added ones."""
        return int(self._core.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> npt.NDArray[np.int32]:
        """Token ids of ``text``, int32 ``[n]``.

        Special tokens written out in ``text`` become their ids. With ``add_special_tokens``
        the tokenizer adds what the model expects around a plain prompt, often a BOS id.

        Raises:
            InputError: ``text`` holds a lone surrogate.

        """
        try:
            encoding = self._core.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InputError(f"the text cannot be tokenized: {error}") from None
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids outside the vocabulary have none."""
        plain = [int(i) for i in ids]
        return str(self._core.decode(plain, skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        """The id of one vocabulary entry as the vocabulary spells it."""
        index: int | None = self._core.token_to_id(token)
        return index

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether text is the joined bytes of the tokens, so that each token decodes alone."""
        from tokenizers.decoders import ByteLevel

        return isinstance(self._core.decoder, ByteLevel)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for in a byte-level vocabulary; none for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._core.id_to_token(token_id) if token_id >= 0 else None
            known = self._bytes[token_id] = _bytes_of(token or "")
        return known

    # ------------------------------------------------------------------------- chats

    def render_chat(self, messages: Sequence[Message], **variables: Any) -> str:
        """Prompt text of ``messages``; arguments and errors of :meth:`ChatTemplate.render`."""
        return self.chat_template.render(messages, **variables)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> npt.NDArray[np.int32]:
        """Token ids of the rendered prompt, int32 ``[n]``; the template places special tokens."""
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def close(self) -> None:
        """End the process that renders foreign templates, if one runs."""
        self.chat_template.close()

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.token_id(text)


class Settings:
    """What the files beside ``tokenizer.json`` say; each file may be missing.

    Attributes:
        special_tokens: text by name; ``tokenizer_config.json`` wins over the older
            ``special_tokens_map.json``.
        eos_token_ids: of ``generation_config.json``, else of ``config.json``.
        templates: chat templates by name; ``chat_template.jinja`` wins over
            ``tokenizer_config.json``.
        guard: renderer of foreign templates, None for the operator's own.

    """

    def __init__(
        self, files: Mapping[str, bytes], guard: GuardedRenderer | None, origin: str
    ) -> None:
        config = _json_object(files, "tokenizer_config.json", origin)
        older = _json_object(files, "special_tokens_map.json", origin)
        self.special_tokens = {
            f"{name}_token": text
            for name in _NAMED_TOKENS
            if (text := _token_text(config, older, f"{name}_token")) is not None
        }
        self.eos_token_ids = _eos_ids(files, origin)
        self.templates = _named_templates(config.get("chat_template"))
        if "chat_template.jinja" in files:
            self.templates["default"] = _text(files, "chat_template.jinja", origin)
        self.guard = guard


def _load_core(content: bytes, origin: str) -> tokenizers.Tokenizer:
    # One prompt is one thread's work here; the library's own threads would also warn on fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import tokenizers

    try:
        core = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises the bare class
        raise CheckpointError(f"{origin}: tokenizer.json cannot be read: {error}") from None
    core.no_truncation()
    core.no_padding()
    return core


def _text(files: Mapping[str, bytes], name: str, origin: str) -> str:
    try:
        return files[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{origin}: {name} is not UTF-8: {error}") from None


def _json_object(files: Mapping[str, bytes], name: str, origin: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        value = json.loads(_text(files, name, origin))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{origin}: {name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{origin}: {name} must hold an object")
    return value


def _token_text(config: dict[str, Any], older: dict[str, Any], name: str) -> str | None:
    value = config[name] if name in config else older.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(files: Mapping[str, bytes], origin: str) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = _json_object(files, name, origin).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(i, int) for i in ids):
                raise CheckpointError(f"{origin}: eos_token_id in {name} must hold token ids")
            return tuple(ids)
    return ()


def _named_templates(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }


def _bytes_of(token: str) -> bytes:
    """Undo the byte-level spelling, in which every byte is one printable character."""
    table = _BYTE_OF_CHAR or _fill_byte_table()
    try:
        return bytes([table[char] for char in token])
    except KeyError:  # an added token with other characters stands for itself
        return token.encode()


def _fill_byte_table() -> dict[str, int]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    _BYTE_OF_CHAR.update({chr(byte): byte for byte in printable})
    _BYTE_OF_CHAR.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return _BYTE_OF_CHAR
