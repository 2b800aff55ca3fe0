"""``generate`` and ``chat``, for one prompt or a list of prompts: the same for both clients.

A call is checked at once and becomes one :class:`Draft` per prompt. The clients differ in when
they prepare a draft, because that needs the served model and takes time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Generic, Literal, TypeVar, Unpack, overload

import msgspec
import numpy as np

from baton.images.processor import SharedImage
from baton.proto.contexts.text import TextContext
from baton.proto.errors import BatonError, InputError, InternalError
from baton.proto.ids import RequestID
from baton.proto.requests import check_features
from baton.proto.sampling import MAX_SEED, SamplingParams
from baton.proto.value_checks import choice, whole
from baton.proto.wire.messages import Message

from .images import split_messages
from .model import (
    Messages,
    Prepared,
    Prompt,
    Prompts,
    Sampling,
    ServedModel,
    chat_with_images,
    check_sampling,
    prepare,
    prepare_context,
    prepare_text,
)
from .options import (
    CHAT_OPTIONS,
    GenerationOptions,
    RequestOptions,
    batch_options,
    check_options,
    check_variables,
    options_of_each,
    split_sampling,
)
from .result import Completion, Result, results_of
from .window import Window

Each = Sequence[Sampling]
OnError = Literal["raise", "return"]
"""What the error of a prompt does: end the call, or become the ``error`` of the prompt's result."""
MAX_ANSWERS = 128
"""Maximum ``n``: answers to one prompt of one call."""
Answer = TypeVar("Answer", bound=Message)
Started = TypeVar("Started")
"""Iterator over the outputs of one request: Generation or AsyncGeneration."""


class Draft(msgspec.Struct, frozen=True):
    """A request whose prompt is not encoded yet.

    ``prompt``: text, token ids or a TextContext; or the messages of a chat, if there are
    ``variables`` for its template. ``index``: position of the prompt if the call has a list.
    ``whole``: the caller wants the whole answer, with its text if the model has a tokenizer.
    """

    request_id: str
    prompt: Any
    sampling: Sampling
    options: RequestOptions
    variables: Mapping[str, Any] | None
    index: int | None = None
    whole: bool = False

    @property
    def is_context(self) -> bool:
        """Whether the prompt is complete: it needs no tokenizer and no fact of the model.

        The model's card shows whether the cluster reads a ``logit_bias``.
        """
        prompt = self.prompt
        if self.variables is not None or not isinstance(prompt, TextContext):
            return False
        return not prompt.sampling_params.logit_bias

    @property
    def is_text(self) -> bool:
        """Whether the prompt must be tokenized, or has images; both take a while."""
        return bool(
            self.variables is not None or isinstance(self.prompt, str) or self.options.get("images")
        )

    def prepare(self, model: ServedModel) -> Prepared:
        """Encode the prompt and make the request. Raises InputError, TaskMismatch."""
        model.check_generates()
        options: RequestOptions = {**self.options, "request_id": self.request_id}
        if self.whole:
            options.setdefault("show_text", model.has_tokenizer)
        prompt: object = self.prompt
        if isinstance(prompt, TextContext) and self.variables is None:
            prepared = self.prepare_context()
            check_features(prepared.spec.context, model.card)
            return prepared
        if self.variables is None:
            return prepare(self.prompt, self.sampling, options, model)
        tokens, options = chat_with_images(self.prompt, model, self.variables, options)
        return prepare_text(tokens, self.sampling, options, model)

    def prepare_context(self) -> Prepared:
        """Make the request from a context. Raises InputError."""
        options: RequestOptions = {**self.options, "request_id": self.request_id}
        return prepare_context(self.prompt, self.sampling, options)


class Calls(ABC, Generic[Started]):
    """The calls that start requests. ``Started``: an iterator over the outputs of one request."""

    @abstractmethod
    def _start_requests(self, drafts: Sequence[Draft], window: Window | None) -> list[Started]:
        """Start the requests of one call; ``window`` limits how many of a list run."""

    @overload
    def generate(
        self, prompt: Prompt, sampling_params: Sampling = None, **options: Unpack[GenerationOptions]
    ) -> Started: ...
    @overload
    def generate(
        self,
        prompt: Prompts,
        sampling_params: Sampling | Each = None,
        **options: Unpack[GenerationOptions],
    ) -> list[Started]: ...
    def generate(
        self,
        prompt: Prompt | Prompts,
        sampling_params: Sampling | Each = None,
        **options: Unpack[GenerationOptions],
    ) -> Started | list[Started]:
        """Start a request and return an iterator over its outputs.

        Closing the iterator cancels the request. ``prompt``: text, token ids or a TextContext. A
        list of prompts starts one request per prompt and returns a list of iterators in the same
        order. ``sampling_params``: parameters for all prompts, or a list with one item per
        prompt; unset fields come from the model's generation config. ``options``: see
        :class:`RequestOptions`; a deadline counts from the call. Raises InputError for a wrong
        option or parameter. The iterator raises errors of the cluster.
        """
        sampling_params, given = split_sampling(sampling_params, options)
        checked = check_options(given)
        prompts = prompts_of(prompt)
        return self._call(prompt, prompts, sampling_params, checked, variables=None)

    @overload
    def chat(
        self,
        messages: Messages,
        sampling_params: Sampling = None,
        *,
        variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Started: ...
    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        sampling_params: Sampling | Each = None,
        *,
        variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[Started]: ...
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Sampling | Each = None,
        *,
        variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Started | list[Started]:
        """Like :meth:`generate`, for messages that the model's chat template renders.

        ``messages``: mappings with ``role`` and ``content``, or a list of such conversations.
        ``variables``: variables for the template.
        """
        sampling_params, rest = split_sampling(sampling_params, options)
        checked, given = chat_options(rest, variables)
        chats = chats_of(messages)
        return self._call(messages, chats, sampling_params, checked, variables=given)

    def _call(
        self,
        prompt: Any,
        prompts: Sequence[Any] | None,
        sampling: Sampling | Each,
        options: RequestOptions,
        *,
        variables: Mapping[str, Any] | None,
    ) -> Started | list[Started]:
        if prompts is None:
            one = sampling_of_one(sampling)
            draft = Draft(_name(prompt, options), prompt, one, options, variables)
            return self._start_requests([draft], None)[0]
        each = sampling_of_each(len(prompts), sampling, options)
        own = options_of_each(len(prompts), batch_options(options))
        drafts = [
            Draft(_name(prompt, options), prompt, each[index], own[index], variables, index)
            for index, prompt in enumerate(prompts)
        ]
        refuse_same_ids([draft.request_id for draft in drafts])
        return self._start_requests(drafts, Window())


class Whole:
    """A call for whole answers, for one prompt or several: its requests, and their results.

    ``keeps_errors``: the error of a prompt becomes its result, and does not end the call.
    """

    keeps_errors = False

    def __init__(
        self,
        prompt: Any,
        prompts: Sequence[Any] | None,
        sampling: Sampling | Each,
        options: RequestOptions,
        *,
        n: object,
        variables: Mapping[str, Any] | None,
    ) -> None:
        self._single = prompts is None
        self._n = number = int(_count("n", n))
        given = [prompt] if prompts is None else prompts
        each = [sampling_of_one(sampling)] if prompts is None else []
        each = each or sampling_of_each(len(given), sampling, options)
        several = len(given) * number > 1
        if several:
            _refuse_one_id(options, len(given) * number)
            options = batch_options(options)
        self.window = Window() if several else None
        own = [options] if prompts is None else options_of_each(len(given), options)
        if number > 1:
            given, own = _shared_images(given, own, are_chats=variables is not None)
        self.drafts = [
            Draft(
                _name(one, options),
                one,
                params,
                own[index],
                variables,
                None if self._single else index,
                whole=True,
            )
            for index, one in enumerate(given)
            for params in _samplings(each[index], number)
        ]
        refuse_same_ids([draft.request_id for draft in self.drafts])

    @classmethod
    def of_prompt(
        cls,
        prompt: Any,
        sampling: Sampling | Each,
        n: object,
        options: GenerationOptions,
        on_error: object = "raise",
    ) -> Whole:
        """Check a call of ``complete``. Raises InputError."""
        sampling, given = split_sampling(sampling, options)
        checked = check_options(given)
        call = cls(prompt, prompts_of(prompt), sampling, checked, n=n, variables=None)
        call.keeps_errors = _on_error("on_error", on_error) == "return"
        return call

    @classmethod
    def of_chat(
        cls,
        messages: Any,
        sampling: Sampling | Each,
        n: object,
        variables: Mapping[str, Any] | None,
        options: GenerationOptions,
        on_error: object = "raise",
    ) -> Whole:
        """Check a call of ``complete_chat``. Raises InputError."""
        sampling, rest = split_sampling(sampling, options)
        checked, given = chat_options(rest, variables)
        call = cls(messages, chats_of(messages), sampling, checked, n=n, variables=given)
        call.keeps_errors = _on_error("on_error", on_error) == "return"
        return call

    def index(self, draft: int) -> int:
        """Return the index of a draft's answer among the answers to its prompt."""
        return draft % self._n

    @contextmanager
    def errors_of(self, at: int, kept: list[BatonError]) -> Iterator[None]:
        """Add errors that the body raises for draft ``at`` to ``kept``, or raise them."""
        try:
            with at_prompt(self.drafts[at].index):
                yield
        except BatonError as error:
            if not self.keeps_errors:
                raise
            kept.append(error)

    def result(self, completions: Sequence[Completion | BatonError]) -> Result | list[Result]:
        """Return the call's result."""
        prompts = [draft.prompt for draft in self.drafts[:: self._n]]
        results = results_of(completions, prompts)
        return results[0] if self._single else results


_on_error = choice("raise", "return")
_count = whole(1, MAX_ANSWERS, f"a whole number, 1 to {MAX_ANSWERS}")


def _samplings(sampling: Sampling, number: int) -> list[Sampling]:
    """Return parameters for ``number`` answers, with a random stream each.

    With a seed, answer 0 has this seed and the others the next ones.
    """
    if sampling is None or sampling.seed is None:
        return [sampling] * number
    several: list[Sampling] = [sampling]
    for index in range(1, number):
        other = copy(sampling)
        other.seed = (sampling.seed + index) & MAX_SEED
        several.append(other)
    return several


def _refuse_one_id(options: RequestOptions, count: int) -> None:
    if options.get("request_id") is not None:
        raise InputError(f"request_id names one request, but the call has {count} requests")


def _name(prompt: object, options: RequestOptions) -> str:
    """Return the request id: from the options, from the context, or random."""
    given = options.get("request_id")
    if given:
        return given
    return str(prompt.request_id if isinstance(prompt, TextContext) else RequestID())


def answer_of_kind(kind: type[Answer], query: Message, answer: Message | BatonError) -> Answer:
    """Return the answer to a query. Raises the error that prevented it, or InternalError."""
    if isinstance(answer, BatonError):
        raise answer
    if not isinstance(answer, kind):
        raise InternalError(f"a {type(query).__name__} got a {type(answer).__name__}")
    return answer


def prompts_of(prompt: Any) -> Sequence[Any] | None:
    """Return a list of prompts, or None if ``prompt`` is a single prompt.

    An empty list is a batch without prompts: a prompt without tokens cannot be continued.
    """
    if not isinstance(prompt, list | tuple):
        return None
    if not prompt:
        return prompt
    several = isinstance(prompt[0], str | list | tuple | np.ndarray | TextContext)
    return prompt if several else None


def chats_of(messages: Any) -> Sequence[Any] | None:
    """Return a list of conversations, or None if ``messages`` is a single conversation."""
    if not isinstance(messages, list | tuple):
        return None
    if not messages:
        return messages
    several = isinstance(messages[0], Sequence) and not isinstance(messages[0], str | Mapping)
    return messages if several else None


def chat_options(
    options: Mapping[str, Any], variables: Mapping[str, Any] | None
) -> tuple[RequestOptions, Mapping[str, Any]]:
    """Check the options of a chat; return them, and the template's variables with the tools."""
    checked: Any = check_options(options, CHAT_OPTIONS)
    given = check_variables(variables)
    tools = checked.pop("tools", None)
    if tools is None:
        return checked, given
    if "tools" in given:
        raise InputError("tools are given twice: as an option and in variables")
    return checked, {**given, "tools": tools}


def _shared_images(
    prompts: Sequence[Any], options: Sequence[RequestOptions], *, are_chats: bool
) -> tuple[list[Any], list[RequestOptions]]:
    """Return prompts and options whose images are prepared once for all answers to a prompt."""
    pairs: list[tuple[Any, RequestOptions]] = []
    for at, (prompt, own) in enumerate(zip(prompts, options, strict=True)):
        images = own.get("images") or []
        if are_chats:
            with at_prompt(at if len(prompts) > 1 else None):
                prompt, images = split_messages(prompt, images)
        pairs.append((prompt, {**own, "images": [SharedImage(one) for one in images]}))
    return [prompt for prompt, _ in pairs], [own for _, own in pairs]


def sampling_of_one(sampling: Sampling | Each) -> Sampling:
    """Check the parameters of a single prompt. Raises InputError."""
    check_sampling(sampling)
    return sampling  # type: ignore[return-value]  # just checked


def sampling_of_each(
    count: int, sampling: Sampling | Each, options: RequestOptions
) -> list[Sampling]:
    """Return parameters for each of ``count`` prompts.

    ``sampling``: parameters for all prompts, or a list with ``count`` items. If parameters for
    all prompts have no seed, each prompt gets a different seed. Raises InputError.
    """
    if options.get("request_id") is not None and count != 1:
        raise InputError(f"request_id names one request, but the call has {count} prompts")
    if not isinstance(sampling, list | tuple):
        check_sampling(sampling)
        one: Any = sampling
        return [one, *(_reseeded(one) for _ in range(count - 1))]
    if len(sampling) != count:
        raise InputError(f"{len(sampling)} sampling_params for {count} prompts")
    for item in sampling:
        check_sampling(item)
    return list(sampling)


def _reseeded(sampling: Sampling) -> Sampling:
    return sampling.reseeded() if isinstance(sampling, SamplingParams) else sampling


def refuse_same_ids(names: Sequence[str]) -> None:
    """Raise InputError if two prompts of a call have the same request id."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"two prompts of the call have the request id {name!r}")
        seen.add(name)


@contextmanager
def at_prompt(index: int | None) -> Iterator[None]:
    """Add the index of the prompt, if the call has a list, to errors that the body raises."""
    try:
        yield
    except BatonError as error:
        if index is None or str(error).startswith("prompts["):
            raise
        raise type(error)(f"prompts[{index}]: {error}", retry_after=error.retry_after) from error
