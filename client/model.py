"""What the cluster serves, as Describe tells it, and turning prompts into contexts for it.

Everything comes over the socket: the client never assumes a file system shared with the
cluster.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from ..proto.codec import EnvelopeDecoder, EnvelopeEncoder
from ..proto.context_maps import request_map
from ..proto.contexts import TextContext
from ..proto.errors import BatonError, InputError, InternalError
from ..proto.ids import RequestID
from ..proto.layout import ModelCard
from ..proto.limits import MAX_TOP_K
from ..proto.messages import ClientToRouter, Described, Message, Submit
from ..proto.requests import build_wire_context
from ..proto.sampling import (
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
)
from ..proto.value_checks import shown
from ..proto.wire import WireContext
from ..text.detokenizer import IncrementalDetokenizer
from ..text.stop import stop_sequences
from ..text.tokenizer import TOKENIZER_FILES, Tokenizer
from .events import RequestSpec
from .options import RequestOptions
from .output import Assembler

Int32 = npt.NDArray[np.int32]
TokensOrText = str | Sequence[int] | npt.NDArray[Any]
Prompt = TokensOrText | TextContext
Prompts = list[str] | list[list[int]] | list[npt.NDArray[Any]] | list[TextContext]
Messages = Sequence[Mapping[str, Any]]
Sampling = SamplingParams | SamplingParamsInput | None
DESCRIBED_FILES: list[str] = list(TOKENIZER_FILES)


@dataclass(slots=True, frozen=True)
class Description:
    """The served model: its card, the cluster's name for its folder, its text files."""

    card: ModelCard
    folder: str
    files: dict[str, bytes]
    available: list[str] = field(default_factory=list)


class ServedModel:
    """A description and what is made from it when first needed."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.card = description.card
        self.defaults = _generation_defaults(description.files)
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises CheckpointError when the model has no tokenizer files."""
        if self._tokenizer is None:
            origin = self.description.folder or self.card.name
            self._tokenizer = Tokenizer.from_files(self.description.files, origin=origin)
        return self._tokenizer

    def close(self) -> None:
        """End the process that renders chat templates, if one runs."""
        if self._tokenizer is not None:
            self._tokenizer.close()


class ModelCache:
    """The model a client knows, good for one connection: behind the next may be another."""

    def __init__(self) -> None:
        self._model: ServedModel | None = None
        self._connections = -1
        self.failures = 0
        self._failure: BatonError | None = None

    @contextmanager
    def attempt(self, failures: int) -> Iterator[None]:
        """Fetch in the body, in one call at a time.

        Raises the failure of the call that was waited for: each would wait as long in vain.
        ``failures``: how many there were when this call began to wait.
        """
        failure = self._failure
        if failures != self.failures and failure is not None:
            raise type(failure)(str(failure), retry_after=failure.retry_after)
        try:
            yield
        except BatonError as error:
            self.failures += 1
            self._failure = error
            raise

    def fresh(self, connections: int) -> ServedModel | None:
        """The model, if it was fetched over the connection that stands."""
        return self._model if connections == self._connections else None

    def confirm(self, answer: Described, connections: int) -> ServedModel | None:
        """The model known from an earlier connection, if it is still the same."""
        model = self._model
        if model is None or answer.model != model.card:
            return None
        if answer.folder != model.description.folder:
            return None
        self._connections = connections
        return model

    def store(self, description: Description, connections: int) -> ServedModel:
        """Remember what was fetched."""
        self.close()
        self._model = ServedModel(description)
        self._connections = connections
        return self._model

    def close(self) -> None:
        """Forget it."""
        if self._model is not None:
            self._model.close()
        self._model = None


def described(answer: Described) -> Description:
    """A complete answer as the user sees it."""
    if answer.model is None:
        raise InternalError("a description without a model")
    return Description(answer.model, answer.folder, answer.files, answer.available)


@dataclass(slots=True, frozen=True)
class Prepared:
    """A request ready to start, and who turns its tokens into outputs."""

    spec: RequestSpec
    assembler: Assembler


def prepare(
    prompt: TokensOrText, sampling: Sampling, options: RequestOptions, model: ServedModel
) -> Prepared:
    """Make a request of text or token ids. Raises InputError for what cannot be served.

    ``options``, here and below: as :func:`check_options` returns them.
    """
    if isinstance(prompt, str):
        return prepare_text(encode(prompt, model), sampling, options, model)
    return _prepare(ids_of(prompt), sampling, options, model, show_text=False)


def encode(text: str, model: ServedModel, *, add_special_tokens: bool = True) -> Int32:
    """Token ids of a text; InputError for one that is longer than the model can be served."""
    return model.tokenizer.encode(
        text, add_special_tokens=add_special_tokens, max_tokens=model.card.max_length
    )


def encode_chat(
    messages: Sequence[Mapping[str, Any]], model: ServedModel, variables: Mapping[str, Any]
) -> Int32:
    """Token ids of a conversation as the model's template renders it."""
    prompt = model.tokenizer.render_chat(messages, **variables)
    return encode(prompt, model, add_special_tokens=False)


def prepare_text(
    tokens: npt.NDArray[np.int32], sampling: Sampling, options: RequestOptions, model: ServedModel
) -> Prepared:
    """Make a request whose answer is wanted as text."""
    return _prepare(tokens, sampling, options, model, show_text=True)


def prepare_context(context: TextContext, sampling: Sampling, options: RequestOptions) -> Prepared:
    """Make a request of a context, which is complete: no default of the model is filled in."""
    if sampling is not None:
        raise InputError("a context has its own sampling_params; give none beside it")
    context.sampling_params.check()
    wire = request_map(context)
    target = options.get("target_endpoint")
    if target is not None:
        wire = msgspec.structs.replace(wire, target_endpoint=target)
    schema = options.get("json_schema")
    if schema is not None:
        wire = msgspec.structs.replace(wire, json_schema=schema)
    name = options.get("request_id") or str(context.request_id)
    return Prepared(make_spec(wire, options, name), Assembler(None, show_text=False))


def _prepare(
    tokens: npt.NDArray[Any],
    sampling: Sampling,
    options: RequestOptions,
    model: ServedModel,
    *,
    show_text: bool,
) -> Prepared:
    params = _params(sampling, model.defaults)
    stop = params.stop or []
    wire = build_wire_context(
        tokens,
        model.card,
        params,
        stop_sequences=stop_sequences(model.tokenizer, stop) if stop else (),
        log_probabilities=options.get("log_probabilities", 0),
        target_endpoint=options.get("target_endpoint"),
        cache_salt=options.get("cache_salt", ""),
        json_schema=cast("str | None", options.get("json_schema")),
    )
    detokenizer = None
    if stop or (show_text and params.detokenize):
        detokenizer = IncrementalDetokenizer(model.tokenizer, stop)
    assembler = Assembler(detokenizer, show_text=show_text and params.detokenize)
    return Prepared(make_spec(wire, options, options.get("request_id")), assembler)


def make_spec(wire: WireContext, options: RequestOptions, name: str | None) -> RequestSpec:
    """A request with a name of its own unless it has one."""
    spec = RequestSpec(
        request_id=str(RequestID()) if name is None else name,
        context=wire,
        deadline=options.get("deadline"),
        pool=options.get("pool"),
        pin=options.get("pin", "prefer"),
        fallback=options.get("fallback", False),
    )
    _check_sendable(spec)
    return spec


def _check_sendable(spec: RequestSpec) -> None:
    """InputError for what no router could read; it would be repeated in vain.

    Options and parameters were checked by field; a context of the user's own was not.
    """
    message = Submit(request_id=spec.request_id, context=spec.context, pool=spec.pool)
    try:
        _router_decoder().decode(EnvelopeEncoder().encode([message]))
    except Exception as error:  # whatever the user put in: huge numbers, foreign objects
        raise InputError(f"the request cannot be sent: {error}") from error


@cache
def _router_decoder() -> EnvelopeDecoder[Message]:
    return EnvelopeDecoder(ClientToRouter)


def check_sampling(sampling: object) -> None:
    """InputError for what is no set of sampling parameters."""
    if sampling is None or isinstance(sampling, SamplingParams | SamplingParamsInput):
        return
    hint = "" if not isinstance(sampling, dict) else "; write SamplingParams(**values)"
    if isinstance(sampling, Real):
        hint = f"; write SamplingParams(temperature={sampling}) to set the temperature"
    raise InputError(f"sampling_params must be SamplingParams, not {shown(sampling)}{hint}")


def _params(sampling: Sampling, defaults: SamplingParamsGenerationConfigDefaults) -> SamplingParams:
    if isinstance(sampling, SamplingParams):
        return sampling.merged(defaults)
    given = sampling if sampling is not None else SamplingParamsInput()
    return SamplingParams.from_input_and_generation_config(given, defaults)


def ids_of(prompt: object) -> npt.NDArray[Any]:
    """Token ids of a prompt that is no text, unchecked but for their being some."""
    if not isinstance(prompt, np.ndarray | Sequence) or isinstance(prompt, bytes | bytearray):
        kinds = "text, token ids, a TextContext, or a list of these"
        raise InputError(f"a prompt must be {kinds}, not {shown(prompt)}")
    try:
        array = np.asarray(prompt)
    except (ValueError, OverflowError) as error:
        raise InputError(f"token ids must be a list of whole numbers: {error}") from None
    return array.astype(np.int32) if array.size == 0 else array


class _GenerationConfig(msgspec.Struct):
    """What of generation_config.json concerns sampling; null means unsaid."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None


def _generation_defaults(files: Mapping[str, bytes]) -> SamplingParamsGenerationConfigDefaults:
    text = files.get("generation_config.json")
    if text is None:
        return SamplingParamsGenerationConfigDefaults()
    try:
        config = msgspec.json.decode(text, type=_GenerationConfig, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the model's generation_config.json cannot be read: {error}") from error
    if config.top_k is not None:  # as the cluster reads the same file (docs/sampling.md)
        config.top_k = min(config.top_k, MAX_TOP_K)
    return SamplingParamsGenerationConfigDefaults(**msgspec.structs.asdict(config))


def new_identity() -> bytes:
    """Routing id of one connection; fresh each time, since a router keeps an old one a while."""
    return b"client-" + uuid.uuid4().bytes
