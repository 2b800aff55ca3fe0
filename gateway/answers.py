"""OpenAI's responses to chat and completion requests: one JSON object, or the events of a stream.

A response consists of choices. A choice collects the outputs of one native request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..client.output import Output
from ..proto.contexts.outputs import LogProbabilities
from ..proto.contexts.status import GenerationStatus
from ..proto.prompt_log_probs import PromptLogProb
from ..text.tokenizer import Tokenizer
from .reader import MessageReader, ReadMessage, read_message
from .tool_calls import CallArguments, CallBegin, Event, Reasoning, Text

_encode = msgspec.json.encode
_MARK = "\0text\0"
"""Stands for the text of an event, which is all that differs between most events of a choice."""
_MARKED = Output(request_id="", tokens=[], text=_MARK, position=0)
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """One choice of a response. ``prompt_tokens`` is 0 before the first output."""

    index: int
    texts: list[str] = field(default_factory=list)
    entries: list[tuple[int, LogProbabilities]] = field(default_factory=list)
    scored: list[PromptLogProb] | None = None  # of the prompt's tokens
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None

    def count(self, output: Output) -> None:
        """Count the tokens of an output, and note the end."""
        if not self.prompt_tokens:
            self.prompt_tokens = output.position
        self.tokens += len(output.tokens)
        if output.prompt_log_probabilities is not None:
            self.scored = output.prompt_log_probabilities
        if output.final_status is not None:
            self.finish_reason = finish_reason(output)
            self.cached_tokens = output.cached_tokens

    def take(self, output: Output, *, log_probs: bool) -> None:
        """Add an output."""
        self.count(output)
        if output.text:
            self.texts.append(output.text)
        if log_probs:
            self.entries += _pairs(output)


def finish_reason(output: Output) -> str:
    """Return OpenAI's ``finish_reason`` of a finished choice."""
    return "length" if output.final_status is GenerationStatus.MAXIMUM_LENGTH else "stop"


def _pairs(output: Output) -> list[tuple[int, LogProbabilities]]:
    entries = output.log_probabilities or []
    return [
        (token, entry)
        for token, entry in zip(output.tokens, entries, strict=False)
        if entry is not None
    ]


def usage_of(choices: Iterable[Choice], prompts: int) -> dict[str, Any]:
    """Return OpenAI's ``usage``. Each prompt counts once; its choices are adjacent."""
    found = list(choices)
    firsts = found[:: max(1, len(found) // prompts)]
    prompt_tokens = sum([choice.prompt_tokens for choice in firsts])
    answer_tokens = sum([choice.tokens for choice in found])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": sum([one.cached_tokens for one in firsts])},
    }


class TokenTexts:
    """Log-probabilities with the texts of their tokens."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top

    def chat(self, entries: Iterable[tuple[int, LogProbabilities]]) -> dict[str, Any]:
        """Return the format of chat completions: one record per token."""
        return {"content": [self._record(token, entry) for token, entry in entries]}

    def of_output(self, output: Output) -> dict[str, Any]:
        """Return the form of chat answers for the tokens of an output."""
        return self.chat(_pairs(output))

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
        """Return the requested number of most likely tokens."""
        return self._first(entry.top_log_probabilities[0])

    def completion(
        self, entries: Iterable[tuple[int, LogProbabilities]], offset: int
    ) -> dict[str, Any]:
        """Return the format of completions: parallel lists.

        ``offset``: position of the first token's text in the choice's text, in characters.
        """
        lists = TokenLists()
        for token, entry in entries:
            tops = {self._text(one): value for one, value in self._likely(entry)}
            lists.add(self._text(token), entry.token_log_probabilities[0], tops, offset)
            offset += len(lists.tokens[-1])
        return lists.shown()

    def prompt(self, scored: Iterable[PromptLogProb]) -> dict[str, Any]:
        """Return the format of completions for the tokens of an echoed prompt."""
        lists, offset = TokenLists(), 0
        for one in scored:
            tops = {self._text(token): value for token, value in self._first(one.top)}
            lists.add(self._text(one.token), one.logprob, tops, offset)
            offset += len(lists.tokens[-1])
        return lists.shown()

    def _first(self, top: Mapping[int, float]) -> list[tuple[int, float]]:
        return list(top.items())[: self._top]

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


@dataclass(slots=True)
class TokenLists:
    """The parallel lists of a completion's log-probabilities."""

    tokens: list[str] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    tops: list[dict[str, float] | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add(self, text: str, log_prob: float | None, tops: dict[str, float], offset: int) -> None:
        """Add a token; ``log_prob`` None: the first of a prompt, which nothing predicts."""
        self.tokens.append(text)
        self.log_probs.append(None if log_prob is None else max(log_prob, -9999.0))
        self.tops.append(None if log_prob is None else tops)
        self.offsets.append(offset)

    def shown(self) -> dict[str, Any]:
        """Return the lists by their names."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.log_probs,
            "top_logprobs": self.tops,
            "text_offset": self.offsets,
        }


class PromptTexts:
    """vLLM's ``prompt_logprobs``: for each prompt token a map of token ids, or null.

    ``top``: the number of most likely tokens to show beside the prompt's own.
    """

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top

    def shown(self, scored: Iterable[PromptLogProb]) -> list[dict[str, Any] | None]:
        """Return the entries of a prompt's tokens; the first is null."""
        return [None if one.logprob is None else self._entry(one, one.logprob) for one in scored]

    def _entry(self, one: PromptLogProb, logprob: float) -> dict[str, Any]:
        likely = list(one.top.items())[: self._top]
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(likely, 1)}
        ranked[one.token] = (logprob, one.rank)
        return {
            str(token): {
                "logprob": max(value, -9999.0),
                "rank": rank,
                "decoded_token": self._tokenizer.token_bytes(token).decode("utf-8", "replace"),
            }
            for token, (value, rank) in ranked.items()
        }


def joined_lists(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    """Return the lists of a prompt and of its answer as one."""
    return second if first is None else {name: first[name] + second[name] for name in second}


class ChatForm:
    """Format of chat completions: each choice has a message; each event has a delta of it.

    ``new_reader``: makes the reader of a choice's text; None if all of it is content.
    """

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, log_probs: TokenTexts | None, new_reader: Callable[[], MessageReader] | None = None
    ) -> None:
        self._log_probs = log_probs
        self._new_reader = new_reader
        self._deltas: dict[int, ChatDeltas] = {}

    @property
    def is_plain(self) -> bool:
        """Whether the events of a choice differ in nothing but their text."""
        return self._log_probs is None and self._new_reader is None

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Return a finished choice."""
        text, reason = "".join(choice.texts), choice.finish_reason
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._new_reader is not None:
            read = read_message(self._new_reader(), text, cut=reason == "length")
            message |= _read_fields(read)
            reason = _reason(reason, read)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._log_probs and self._log_probs.chat(choice.entries),
            "finish_reason": reason,
        }

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """Return the choice's entry in its opening event; None if it needs no such event."""
        if self._new_reader is not None:
            self._deltas[choice.index] = ChatDeltas(self._new_reader())
        return self._part(choice, {"role": "assistant", "content": ""})

    def parts(self, choice: Choice, output: Output) -> list[dict[str, Any]]:
        """Return the choice's entries in the events of one output, none if it adds nothing."""
        log_probs = None
        if self._log_probs is not None and output.tokens:
            log_probs = self._log_probs.of_output(output)
        deltas, reason = [{"content": output.text}] if output.text else [], choice.finish_reason
        if self._new_reader is not None:
            deltas, reason = self._deltas[choice.index].read(output.text or "", reason)
        if not deltas and (reason is not None or log_probs is not None):
            deltas = [{}]
        parts = [self._part(choice, delta) for delta in deltas]
        if parts:
            parts[0]["logprobs"] = log_probs
            parts[-1]["finish_reason"] = reason
        return parts

    def _part(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}


class ChatDeltas:
    """The deltas of one streamed choice whose text must be read."""

    def __init__(self, reader: MessageReader) -> None:
        self._reader = reader
        self._message = ReadMessage()
        self._calls = 0

    def read(self, text: str, reason: str | None) -> tuple[list[dict[str, Any]], str | None]:
        """Return the deltas of some text, and the reason of the end if this is the end."""
        events = self._reader.push(text)
        if reason is not None:
            events += self._reader.finish(cut=reason == "length")
        self._message.add(events)
        deltas = [delta for event in events if (delta := self._delta(event))]
        return deltas, reason and _reason(reason, self._message)

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallBegin(name):
                self._calls += 1
                call = {"index": self._calls - 1, **_call_record(name, "")}
                return {"tool_calls": [call]}
            case CallArguments(text):
                call = {"index": self._calls - 1, "function": {"arguments": text}}
                return {"tool_calls": [call]}
            case _:  # a broken call: the sent parts cannot be taken back
                return None


def _read_fields(read: ReadMessage) -> dict[str, Any]:
    """Return the fields of a message that was read."""
    fields: dict[str, Any] = {"content": read.content}
    if read.calls:
        fields["content"] = read.content or None
        fields["tool_calls"] = [_call_record(call.name, call.arguments) for call in read.calls]
    if read.reasoning:
        fields["reasoning_content"] = read.reasoning
    return fields


def _call_record(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _reason(reason: str | None, read: ReadMessage) -> str | None:
    return "tool_calls" if read.calls and reason == "stop" else reason


class CompletionForm:
    """Format of completions: each choice has a text. ``echo``: prompts, put before the texts."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, log_probs: TokenTexts | None, echo: Sequence[str] = ()) -> None:
        self._log_probs = log_probs
        self._echo = echo
        self._offsets: dict[int, int] = {}

    @property
    def is_plain(self) -> bool:
        """Whether the events of a choice differ in nothing but their text."""
        return self._log_probs is None

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Return a finished choice."""
        echo = self._echo[choice.index] if self._echo else ""
        log_probs = None
        if self._log_probs is not None:
            answer = self._log_probs.completion(choice.entries, len(echo))
            log_probs = joined_lists(self._echoed(choice), answer)
        return {
            "index": choice.index,
            "text": echo + "".join(choice.texts),
            "logprobs": log_probs,
            "finish_reason": choice.finish_reason,
        }

    def _echoed(self, choice: Choice) -> dict[str, Any] | None:
        """Return the log-probabilities of an echoed prompt, if they were requested."""
        if not self._echo or self._log_probs is None or choice.scored is None:
            return None
        return self._log_probs.prompt(choice.scored)

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """Return the choice's entry in its opening event; None if it needs no such event."""
        if not self._echo:
            return None
        self._offsets[choice.index] = len(self._echo[choice.index])
        return self._part(choice, self._echo[choice.index], self._echoed(choice), None)

    def parts(self, choice: Choice, output: Output) -> list[dict[str, Any]]:
        """Return the choice's entries in the events of one output, none if it adds nothing."""
        if not output.text and not output.is_done and not output.log_probabilities:
            return []
        log_probs = None
        if self._log_probs is not None and output.tokens:
            offset = self._offsets.get(choice.index, 0)
            log_probs = self._log_probs.completion(_pairs(output), offset)
            self._offsets[choice.index] = offset + sum(map(len, log_probs["tokens"]))
        return [self._part(choice, output.text or "", log_probs, choice.finish_reason)]

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
    """Encodes the response to one request: choices with id, time and model."""

    def __init__(
        self,
        form: Form,
        name: str,
        model: str,
        prompt_texts: PromptTexts | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self._form = form
        self._prompt_texts = prompt_texts
        # A stream has the warnings in its first event.
        self._warnings = {"warnings": list(warnings)} if warnings else {}
        self._head = {"id": name, "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice], prompts: int) -> bytes:
        """Return the response as one JSON object."""
        parts = [self._form.whole(choice) for choice in choices]
        content = {**self._head, "object": self._form.object, "choices": parts}
        content["usage"] = usage_of(choices, prompts)
        content |= self._warnings
        if self._prompt_texts is not None:
            shown = [self._prompt_texts.shown(choice.scored or ()) for choice in choices]
            if isinstance(self._form, ChatForm):  # where vLLM has them: one prompt, so once
                content["prompt_logprobs"] = shown[0]
            else:
                for part, entries in zip(parts, shown, strict=True):
                    part["prompt_logprobs"] = entries
        return _encode(content)

    def first(self, choice: Choice, more: dict[str, Any]) -> bytes:
        """Return the opening event of a choice, or nothing. ``more``: additional fields."""
        part = self._form.first(choice)
        return b"" if part is None else self._event([part], **more, **self._news())

    def part(self, choice: Choice, output: Output, more: dict[str, Any]) -> bytes:
        """Return the events of one output, empty if the output adds nothing visible."""
        parts = self._form.parts(choice, output)
        return b"".join([self._event([part], **more, **self._news()) for part in parts])

    def _news(self) -> dict[str, Any]:
        news, self._warnings = self._warnings, {}
        return news

    def halves(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """Return the bytes before and after the JSON of the text in an event of a choice.

        None if events differ in more than their text. The opening and the last event always do.
        """
        if not self._form.is_plain:
            return None
        marked = self._event(self._form.parts(choice, _MARKED))
        before, _, after = marked.partition(_encode(_MARK))
        return before, after

    def usage(self, choices: Sequence[Choice], prompts: int) -> bytes:
        """Return the event with the usage; its list of choices is empty."""
        return self._event([], usage=usage_of(choices, prompts))

    def _event(self, parts: list[dict[str, Any]], **more: Any) -> bytes:
        content = {**self._head, "object": self._form.chunk_object, "choices": parts, **more}
        return b"data: " + _encode(content) + b"\n\n"
