"""A model's tokenizer: converts text to token ids and back, and renders chat prompts.

A tokenizer is built from the text files of a Hugging Face folder, read from disk or received
through ``Describe``. This module uses no network. ``tokenizer.json`` decides ids and text; the
other files add special tokens, ids and the chat template.

Templates from a folder on this machine belong to the operator. They are rendered in this process
with an output limit. Templates received over the network run in a killable process
(:mod:`.guarded`). In both cases a failure is an :class:`InputError` whose message may be shown to
the user.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.proto.errors import CheckpointError, InputError

from .guarded import GuardedRenderer, GuardedTokenizer
from .lfs_pointers import IS_LFS_POINTER, LFS_POINTER
from .model_files import TOKENIZER_FILES, TokenizerSettings, read_files
from .plain_tokenizers import is_plain
from .render_errors import RenderError
from .stated_tokens import StatedToken
from .tokenizer_core import LocalCore, TokenizerCore, TokenizerFailed

__all__ = ["TOKENIZER_FILES", "ChatTemplate", "Tokenizer"]

Message = Mapping[str, Any]

MAX_MESSAGES = 4096

MAX_CHARS_PER_TOKEN = 64
"""Above the average of any tokenizer over a text, except for long runs of one character."""

_IMAGE_TOKENS = ("<|image_pad|>", "<|image|>")
"""Of Qwen's and Llama's models, whose settings may not name it."""

_BYTE_OF_CHAR: dict[str, int] = {}


class ChatTemplate:
    """The named templates of one model.

    Args:
        templates: Jinja sources by name. ``default`` is the usual template, ``tool_use`` is for
            requests with tools.
        variables: variables for every rendering, such as ``bos_token``.
        guard: renders templates that are not the operator's; None renders in this process.

    """

    def __init__(
        self,
        templates: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        *,
        guard: GuardedRenderer | None = None,
    ) -> None:
        self._templates = dict(templates)
        self._variables = dict(variables or {})
        self._guard = guard

    @property
    def names(self) -> list[str]:
        """Names of the templates; empty if the model is not a chat model."""
        return sorted(self._templates)

    @property
    def is_guarded(self) -> bool:
        """Whether templates are rendered in another process."""
        return self._guard is not None

    def close(self) -> None:
        """End the guard's process, if any."""
        if self._guard is not None:
            self._guard.close()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt text of ``messages``, each a mapping with ``role`` and ``content``.

        Raises:
            InputError: the model has no template, messages have the wrong shape, the template
                rejects a message, or the template fails or exceeds a limit.

        """
        check_messages(messages)
        source = self.source(with_tools=bool(tools))
        everything = {
            **self._variables,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            return self._renderer()(source, everything)
        except RenderError as error:
            raise InputError(f"chat template: {error}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"chat messages must be plain JSON values: {error}") from None

    def _renderer(self) -> Callable[[str, Mapping[str, Any]], str]:
        if self._guard is not None:
            return self._guard.render
        from .sandbox import render  # imports Jinja, which other processes do not need

        return render

    def source(self, *, with_tools: bool = False) -> str:
        """Return the template that renders a request. Raises InputError without a template."""
        wanted = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if wanted in self._templates:
            return self._templates[wanted]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        if not self._templates:
            raise InputError(
                "the model has no chat template; give the prompt as text: generate, or "
                "/v1/completions over HTTP"
            )
        raise InputError(f"the model has no default chat template, only {', '.join(self.names)}")


def check_messages(messages: Sequence[Message]) -> None:
    """Check the shape of chat messages before rendering.

    Raises:
        InputError: not a list of 1 to ``MAX_MESSAGES`` mappings with a string ``role``.

    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InputError("messages must be a list of {role, content} objects")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InputError(f"a chat must have 1 to {MAX_MESSAGES} messages, not {len(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{index}] must be an object with a role")


class Tokenizer:
    """Encodes and decodes text and renders chat prompts for one model; immutable, thread-safe.

    Attributes:
        special_tokens: text of the named special tokens (``bos_token``, ``eos_token``, ...).
        bos_token_id, eos_token_id, pad_token_id: their ids, or None.
        image_token: text of the placeholder for an image; image_token_id: its id, or None.
        eos_token_ids: every id that ends an answer: the tokenizer's own id, and the ids of
            ``generation_config.json`` (or of ``config.json`` if the former names none).
        is_byte_level: the text is the joined bytes of the tokens, so each token decodes alone.
        special_ids: ids that ``decode`` omits with ``skip_special_tokens``.
        chat_template: renders messages; see :class:`ChatTemplate`.

    """

    def __init__(
        self,
        core: TokenizerCore,
        settings: TokenizerSettings,
        guard: GuardedRenderer | None = None,
    ) -> None:
        self._core = core
        self._bytes: dict[int, bytes] = {}
        self.whole_texts: dict[int, str] = {}  # of tokens whose bytes are whole characters
        self.special_tokens = settings.special_tokens
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        self.image_token = self._image_token(settings)
        self.image_token_id = core.token_to_id(self.image_token)
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = frozenset((*settings.eos_token_ids, *own))
        added = core.added_tokens
        self.added_tokens = {token.content: token.index for token in added}
        self.special_ids = frozenset(token.index for token in added if token.special)
        self.is_byte_level = core.is_byte_level
        self.chat_template = ChatTemplate(settings.templates, settings.special_tokens, guard=guard)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Read a model folder of this machine. Its chat template is trusted as the operator's.

        Raises:
            CheckpointError: ``tokenizer.json`` is missing, or a file cannot be read.

        """
        files = read_files(folder, TOKENIZER_FILES)
        return cls.from_files(files, trusted=True, origin=os.fspath(folder))

    @classmethod
    def from_files(
        cls, files: Mapping[str, bytes], *, trusted: bool = False, origin: str = "the model"
    ) -> Tokenizer:
        """Build a tokenizer from file contents by name, as ``Describe`` returns them.

        Args:
            files: contents of ``TOKENIZER_FILES``; other names are ignored.
            trusted: render the chat template and tokenize in this process. Otherwise templates,
                and tokenizers that are not plain, run in separate processes.
            origin: name of the source in error messages.

        Raises:
            CheckpointError: ``tokenizer.json`` is missing, or a file is malformed.

        """
        if "tokenizer.json" not in files:
            raise CheckpointError(
                f"{origin} has no tokenizer.json, which texts, chats, stop strings and the routes "
                "over HTTP need; the Python client also takes prompts as token ids"
            )
        settings = TokenizerSettings(files, origin)
        guard = None if trusted else GuardedRenderer()
        core = _load_core(files["tokenizer.json"], settings.stated_tokens, origin, trusted=trusted)
        try:
            _check_ids(core, settings.stated_tokens, origin)
            return cls(core, settings, guard)
        except CheckpointError:
            core.close()
            raise
        except TokenizerFailed as error:
            core.close()
            raise _unreadable(origin, error) from None

    # ------------------------------------------------------------------ text and ids

    @property
    def is_guarded(self) -> bool:
        """Whether chat templates are rendered in another process."""
        return self.chat_template.is_guarded

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including the added tokens."""
        return self._core.vocab_size

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int = 0
    ) -> npt.NDArray[np.int32]:
        """Return the token ids of ``text``, int32 ``[n]``.

        Special tokens spelled out in ``text`` become their ids. With ``add_special_tokens`` the
        tokenizer adds the special ids that the model expects around a plain prompt, often BOS.

        Raises:
            InputError: ``text`` contains a lone surrogate, or is too long for ``max_tokens``
                (0: unlimited) in any language. The length is checked before tokenizing, because
                tokenizing takes seconds for a few megabytes.

        """
        if max_tokens and len(text) > MAX_CHARS_PER_TOKEN * max_tokens:
            raise InputError(
                f"text too long: {len(text)} characters exceed the limit of {max_tokens} tokens"
            )
        try:
            ids = self._core.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            raise InputError(
                "the text cannot be tokenized: it is not valid Unicode (was it read from UTF-8?)"
            ) from None
        except TokenizerFailed as error:
            raise InputError(f"the text cannot be tokenized: {error}") from None
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; ids outside the vocabulary add no text.

        Raises:
            CheckpointError: the model's tokenizer fails or takes too long.

        """
        plain = [int(i) for i in ids]
        try:
            return self._core.decode(plain, skip_special_tokens=skip_special_tokens)
        except TokenizerFailed as error:
            raise CheckpointError(f"the model's tokenizer cannot decode: {error}") from None

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry in the vocabulary's spelling, or None."""
        return self._core.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for inside a text; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            try:
                token = self._core.id_to_token(token_id) if token_id >= 0 else None
            except TokenizerFailed as error:
                raise CheckpointError(f"the model's tokenizer cannot decode: {error}") from None
            is_spelled = not self.is_byte_level and token not in self.added_tokens
            spelled = _piece_bytes if is_spelled else _bytes_of
            known = self._bytes[token_id] = spelled(token or "")
        return known

    # ------------------------------------------------------------------------- chats

    def render_chat(self, messages: Sequence[Message], **variables: Any) -> str:
        """Return the prompt text of ``messages``; see :meth:`ChatTemplate.render`."""
        return self.chat_template.render(messages, **variables)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> npt.NDArray[np.int32]:
        """Return the token ids of the rendered prompt, int32 ``[n]``.

        No special tokens are added: the template contains them.
        """
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    @property
    def runs_here(self) -> bool:
        """Whether this process renders and tokenizes, and no guarded one."""
        return not (self.chat_template.is_guarded or isinstance(self._core, GuardedTokenizer))

    def close(self) -> None:
        """End the processes of untrusted templates and tokenizers, if any."""
        self.chat_template.close()
        self._core.close()

    def _image_token(self, settings: TokenizerSettings) -> str:
        """Return the placeholder of images: of config.json, of the tokenizer, or a usual one."""
        if settings.image_token_id is not None and settings.image_token_id >= 0:
            stated = self._core.id_to_token(settings.image_token_id)
            if stated is not None:
                return stated
        known = (token for token in _IMAGE_TOKENS if self._core.token_to_id(token) is not None)
        return settings.special_tokens.get("image_token") or next(known, _IMAGE_TOKENS[0])

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.token_id(text)


def _load_core(
    content: bytes, stated: Sequence[StatedToken], origin: str, *, trusted: bool
) -> TokenizerCore:
    """Load the library's tokenizer, guarded if needed. Raises CheckpointError."""
    if content.startswith(LFS_POINTER):
        raise CheckpointError(f"{origin}: tokenizer.json {IS_LFS_POINTER}")
    try:
        text = content.decode("utf-8")
        if trusted or is_plain(content):
            return LocalCore(text, stated)
        return GuardedTokenizer(text, stated=stated)
    except (TokenizerFailed, UnicodeDecodeError) as error:
        raise _unreadable(origin, error) from None


def _check_ids(core: TokenizerCore, stated: Sequence[StatedToken], origin: str) -> None:
    """Raise CheckpointError if a token has another id than a file states."""
    ids = {token.content: token.index for token in core.added_tokens}
    for token in stated:
        found = ids.get(token.content)
        if token.number is not None and found is not None and found != token.number:
            raise CheckpointError(
                f"{origin}: token {token.content!r} has id {found} by tokenizer.json, but "
                f"{token.number} by added_tokens_decoder in tokenizer_config.json or by "
                "added_tokens.json"
            )


def _unreadable(origin: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{origin}: tokenizer.json cannot be read: {error}")


def _bytes_of(token: str) -> bytes:
    """Undo the byte-level spelling, which writes every byte as a printable character."""
    table = _BYTE_OF_CHAR or _fill_byte_table()
    try:
        return bytes([table[char] for char in token])
    except KeyError:  # an added token with other characters is plain text
        return token.encode()


def _piece_bytes(token: str) -> bytes:
    """Undo SentencePiece's spelling: a lower block for a space, and bytes in hexadecimal."""
    byte = _BYTE_PIECE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


def _fill_byte_table() -> dict[str, int]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    _BYTE_OF_CHAR.update({chr(byte): byte for byte in printable})
    _BYTE_OF_CHAR.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return _BYTE_OF_CHAR
