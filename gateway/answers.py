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

from baton.client.output import Output
from baton.proto.contexts.outputs import LogProbabilities
from baton.proto.contexts.status import GenerationStatus
from baton.proto.prompt_log_probs import PromptLogProb
from baton.text.detokenizer import IncrementalDetokenizer
from baton.text.tokenizer import Tokenizer

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
        self, entries: Iterable[tuple[int, LogProbabilities]], offsets: TextOffsets
    ) -> dict[str, Any]:
        """Return the format of completions: parallel lists. ``offsets``: of the choice."""
        lists = self._lists()
        for token, entry in entries:
            log_prob, top = entry.token_log_probabilities[0], entry.top_log_probabilities[0]
            self._add(lists, token, log_prob, top, offsets)
        return lists.shown()

    def prompt(self, scored: Iterable[PromptLogProb]) -> dict[str, Any]:
        """Return the format of completions for the tokens of an echoed prompt."""
        lists, offsets = self._lists(), self.offsets(0)
        for one in scored:
            self._add(lists, one.token, one.logprob, one.top, offsets)
        return lists.shown()

    def offsets(self, start: int) -> TextOffsets:
        """Return the offsets of tokens whose text begins at ``start``, in characters."""
        return TextOffsets(self._tokenizer, start)

    def _lists(self) -> TokenLists:
        return TokenLists(tops=[] if self._top else None)

    def _add(
        self,
        lists: TokenLists,
        token: int,
        log_prob: float | None,
        top: Mapping[int, float],
        offsets: TextOffsets,
    ) -> None:
        """Add a token with the most likely ones; ``log_prob`` None: the first of a prompt.

        Its own is among them even if it is less likely, as OpenAI's reference says. If two tokens
        have one text, the more likely one stays.
        """
        text, tops = self._text(token), None
        if log_prob is not None:
            log_prob = max(log_prob, -9999.0)
            tops = {text: log_prob}
            for one, value in self._first(top):
                shown = self._text(one)
                tops[shown] = max(value, tops.get(shown, -9999.0))
        lists.add(text, log_prob, tops, offsets.next(token))

    def _first(self, top: Mapping[int, float]) -> list[tuple[int, float]]:
        return list(top.items())[: self._top]

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


class TextOffsets:
    """Where the text of each token begins, counted in characters from the prompt's beginning.

    A token that goes on with an unfinished character has the offset of this character.
    """

    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._at = start

    def next(self, token: int) -> int:
        """Return the offset of the next token."""
        at = self._at
        self._at += len(self._detokenizer.push_all((token,)))
        return at


@dataclass(slots=True)
class TokenLists:
    """The parallel lists of a completion's log-probabilities.

    ``tops``: None if no most likely tokens were requested.
    """

    tokens: list[str] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    tops: list[dict[str, float] | None] | None = None
    offsets: list[int] = field(default_factory=list)

    def add(
        self, text: str, log_prob: float | None, tops: dict[str, float] | None, offset: int
    ) -> None:
        """Add a token."""
        self.tokens.append(text)
        self.log_probs.append(log_prob)
        if self.tops is not None:
            self.tops.append(tops)
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
    if first is None:
        return second
    return {
        name: None if values is None else first[name] + values for name, values in second.items()
    }


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
    """Format of completions: each choice has a text.

    ``prompts``: the prompt's text of each choice, for ``echo`` or log-probabilities. ``echo``: put
    it before the choice's text.
    """

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, log_probs: TokenTexts | None, prompts: Sequence[str] = (), *, echo: bool = False
    ) -> None:
        self._log_probs = log_probs
        self._prompts = prompts
        self._echo = echo
        self._offsets: dict[int, TextOffsets] = {}

    @property
    def is_plain(self) -> bool:
        """Whether the events of a choice differ in nothing but their text."""
        return self._log_probs is None

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Return a finished choice."""
        log_probs = self._answered(choice, choice.entries)
        if log_probs is not None:
            log_probs = joined_lists(self._echoed(choice), log_probs)
        echo = self._prompts[choice.index] if self._echo else ""
        return {
            "index": choice.index,
            "text": echo + "".join(choice.texts),
            "logprobs": log_probs,
            "finish_reason": choice.finish_reason,
        }

    def _answered(
        self, choice: Choice, entries: Iterable[tuple[int, LogProbabilities]]
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of further tokens, if they were requested."""
        if self._log_probs is None:
            return None
        offsets = self._offsets.get(choice.index)
        if offsets is None:
            offsets = self._log_probs.offsets(len(self._prompts[choice.index]))
            self._offsets[choice.index] = offsets
        return self._log_probs.completion(entries, offsets)

    def _echoed(self, choice: Choice) -> dict[str, Any] | None:
        """Return the log-probabilities of an echoed prompt, if they were requested."""
        if not self._echo or self._log_probs is None or choice.scored is None:
            return None
        return self._log_probs.prompt(choice.scored)

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """Return the choice's entry in its opening event; None if it needs no such event."""
        if not self._echo:
            return None
        return self._part(choice, self._prompts[choice.index], self._echoed(choice), None)

    def parts(self, choice: Choice, output: Output) -> list[dict[str, Any]]:
        """Return the choice's entries in the events of one output, none if it adds nothing."""
        if not output.text and not output.is_done and not output.log_probabilities:
            return []
        log_probs = self._answered(choice, _pairs(output)) if output.tokens else None
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

    def promise_usage(self) -> None:
        """Give each event ``usage``: null, except the one that has it."""
        self._head["usage"] = None

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
