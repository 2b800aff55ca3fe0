"""Answers of text requests in OpenAI's JSON: whole, or as the chunks of a stream.

An answer consists of choices. A choice collects the outputs of one native request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..client.output import Output
from ..proto.contexts.outputs import LogProbabilities
from ..proto.contexts.status import GenerationStatus
from ..text.tokenizer import Tokenizer

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """One answer of a request. ``prompt_tokens`` is known from the first output on."""

    index: int
    texts: list[str] = field(default_factory=list)
    entries: list[tuple[int, LogProbabilities]] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None

    def take(self, output: Output, *, log_probs: bool) -> None:
        """Add an output."""
        if not self.prompt_tokens:
            self.prompt_tokens = output.position
        self.tokens += len(output.tokens)
        if output.text:
            self.texts.append(output.text)
        if log_probs:
            self.entries += _pairs(output)
        if output.final_status is not None:
            self.finish_reason = finish_reason(output)
            self.cached_tokens = output.cached_tokens


def finish_reason(output: Output) -> str:
    """Return OpenAI's word for the end of an answer."""
    return "length" if output.final_status is GenerationStatus.MAXIMUM_LENGTH else "stop"


def _pairs(output: Output) -> list[tuple[int, LogProbabilities]]:
    entries = output.log_probabilities or []
    return [
        (token, entry)
        for token, entry in zip(output.tokens, entries, strict=False)
        if entry is not None
    ]


def usage_of(choices: Iterable[Choice], prompts: int) -> dict[str, Any]:
    """Return the number of tokens. The choices of one prompt are neighbours and count it once."""
    found = list(choices)
    firsts = found[:: max(1, len(found) // prompts)]
    prompt_tokens = sum(choice.prompt_tokens for choice in firsts)
    answer_tokens = sum(choice.tokens for choice in found)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in firsts)},
    }


class TokenTexts:
    """Log-probabilities with the texts of their tokens."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top

    def chat(self, entries: Iterable[tuple[int, LogProbabilities]]) -> dict[str, Any]:
        """Return the form of chat answers: a record per token."""
        return {"content": [self._record(token, entry) for token, entry in entries]}

    def _record(self, token: int, entry: LogProbabilities) -> dict[str, Any]:
        record = self._token(token, entry.token_log_probabilities[0])
        record["top_logprobs"] = [self._token(*pair) for pair in self._likely(entry)]
        return record

    def _token(self, token: int, log_prob: float) -> dict[str, Any]:
        content = self._tokenizer.token_bytes(token)
        return {
            "token": content.decode("utf-8", "replace"),
            "logprob": max(log_prob, -9999.0),
            "bytes": list(content),
        }

    def _likely(self, entry: LogProbabilities) -> list[tuple[int, float]]:
        """The most likely tokens, as many as were asked for."""
        return list(entry.top_log_probabilities[0].items())[: self._top]

    def completion(
        self, entries: Iterable[tuple[int, LogProbabilities]], offset: int
    ) -> dict[str, Any]:
        """Return the form of completions: lists by kind. ``offset``: of the first token's text."""
        texts, log_probs, tops, offsets = [], [], [], []
        for token, entry in entries:
            text = self._text(token)
            texts.append(text)
            log_probs.append(max(entry.token_log_probabilities[0], -9999.0))
            tops.append({self._text(one): value for one, value in self._likely(entry)})
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": log_probs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


class ChatForm:
    """Chat answers: a message per choice, or its parts."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, log_probs: TokenTexts | None) -> None:
        self._log_probs = log_probs

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Return a finished choice."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": self._log_probs and self._log_probs.chat(choice.entries),
            "finish_reason": choice.finish_reason,
        }

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """Return what a stream says of a choice before its first text."""
        return self._part(choice, {"role": "assistant", "content": ""})

    def part(self, choice: Choice, output: Output) -> dict[str, Any]:
        """Return the part of a stream that one output makes."""
        delta = {"content": output.text} if output.text else {}
        return self._part(choice, delta, output)

    def _part(
        self, choice: Choice, delta: dict[str, Any], output: Output | None = None
    ) -> dict[str, Any]:
        log_probs = None
        if self._log_probs is not None and output is not None and output.tokens:
            log_probs = self._log_probs.chat(_pairs(output))
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": log_probs,
            "finish_reason": None if output is None else choice.finish_reason,
        }


class CompletionForm:
    """Completions: a text per choice. ``echo``: the texts of the prompts, in front of each."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, log_probs: TokenTexts | None, echo: Sequence[str] = ()) -> None:
        self._log_probs = log_probs
        self._echo = echo
        self._offsets: dict[int, int] = {}

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Return a finished choice."""
        echo = self._echo[choice.index] if self._echo else ""
        log_probs = self._log_probs
        return {
            "index": choice.index,
            "text": echo + "".join(choice.texts),
            "logprobs": log_probs and log_probs.completion(choice.entries, len(echo)),
            "finish_reason": choice.finish_reason,
        }

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """Return what a stream says of a choice before its first text."""
        if not self._echo:
            return None
        self._offsets[choice.index] = len(self._echo[choice.index])
        return self._part(choice, self._echo[choice.index], None, None)

    def part(self, choice: Choice, output: Output) -> dict[str, Any]:
        """Return the part of a stream that one output makes."""
        log_probs = None
        if self._log_probs is not None and output.tokens:
            offset = self._offsets.get(choice.index, 0)
            log_probs = self._log_probs.completion(_pairs(output), offset)
            self._offsets[choice.index] = offset + sum(map(len, log_probs["tokens"]))
        return self._part(choice, output.text or "", log_probs, choice.finish_reason)

    def _part(
        self, choice: Choice, text: str, log_probs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": log_probs,
            "finish_reason": reason,
        }


Form = ChatForm | CompletionForm


class Answer:
    """The JSON of one request: its id, time and model around the choices."""

    def __init__(self, form: Form, name: str, model: str) -> None:
        self._form = form
        self._head = {"id": name, "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice], prompts: int) -> bytes:
        """Return the whole answer."""
        parts = [self._form.whole(choice) for choice in choices]
        usage = usage_of(choices, prompts)
        return _encode(
            {**self._head, "object": self._form.object, "choices": parts, "usage": usage}
        )

    def first(self, choice: Choice, more: dict[str, Any]) -> bytes:
        """Return the event that opens a choice, or nothing. ``more``: further fields."""
        part = self._form.first(choice)
        return b"" if part is None else self._event([part], **more)

    def part(self, choice: Choice, output: Output, more: dict[str, Any]) -> bytes:
        """Return the event of one output, or nothing if it says nothing new."""
        if not output.text and not output.is_done and not output.log_probabilities:
            return b""
        return self._event([self._form.part(choice, output)], **more)

    def usage(self, choices: Sequence[Choice], prompts: int) -> bytes:
        """Return the event with the number of tokens, which has no choices."""
        return self._event([], usage=usage_of(choices, prompts))

    def _event(self, parts: list[dict[str, Any]], **more: Any) -> bytes:
        content = {**self._head, "object": self._form.chunk_object, "choices": parts, **more}
        return b"data: " + _encode(content) + b"\n\n"
