"""What the cluster serves, as Describe tells it, and turning prompts into contexts for it.

Everything comes over the socket: the client never assumes a file system shared with the
cluster.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from ..proto.codec import EnvelopeEncoder
from ..proto.contexts import TextContext
from ..proto.errors import DeadlineExceeded, InputError, InternalError
from ..proto.ids import RequestID
from ..proto.json_schema import json_schema_text
from ..proto.layout import ModelCard
from ..proto.limits import MAX_REQUEST_ID_CHARS
from ..proto.messages import Described, Submit
from ..proto.requests import build_wire_context
from ..proto.sampling import (
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
)
from ..proto.wire import WireContext
from ..text.detokenizer import IncrementalDetokenizer
from ..text.stop import stop_sequences
from ..text.tokenizer import TOKENIZER_FILES, Tokenizer
from .events import RequestSpec
from .options import check_options
from .output import Assembler

Int32 = npt.NDArray[np.int32]
TokensOrText = str | Sequence[int] | npt.NDArray[Any]
Prompt = TokensOrText | TextContext
Sampling = SamplingParams | SamplingParamsInput | None
DESCRIBED_FILES: list[str] = list(TOKENIZER_FILES)


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``chat``.

    ``target_endpoint``: address of the worker to use; ``pin="strict"`` forbids a replay
    elsewhere, ``fallback=True`` lets the router choose when that worker cannot take it.
    ``deadline``: seconds. ``pool``: which workers. ``request_id``: default a random one.
    ``log_probabilities``: of each token and that many most likely ones. ``cache_salt``:
    prefix cache shared only with requests of the same salt. ``json_schema``: JSON text or a
    mapping; the answer's text is an instance of it.
    """

    target_endpoint: str | None
    deadline: float | None
    pool: str | None
    pin: str
    fallback: bool
    request_id: str | None
    log_probabilities: int
    cache_salt: str
    json_schema: str | Mapping[str, Any] | None


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
    """Make a request of text or token ids. Raises InputError for what cannot be served."""
    if isinstance(prompt, str):
        return prepare_text(encode(prompt, model), sampling, options, model)
    return _prepare(_ids(prompt), sampling, options, model, show_text=False)


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
    """Make a request of a context, which brings its own parameters."""
    check_options(options, RequestOptions.__annotations__)
    if sampling is not None:
        raise InputError("a context has its own sampling_params; give none beside it")
    wire = context.to_wire()
    target = options.get("target_endpoint")
    if target is not None:
        wire = msgspec.structs.replace(wire, target_endpoint=target)
    schema = options.get("json_schema")
    if schema is not None:
        wire = msgspec.structs.replace(wire, json_schema=json_schema_text(schema))
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
    check_options(options, RequestOptions.__annotations__)
    params = _params(sampling, model.defaults)
    stop, schema = params.stop or [], options.get("json_schema")
    wire = build_wire_context(
        tokens,
        model.card,
        params,
        stop_sequences=stop_sequences(model.tokenizer, stop) if stop else (),
        log_probabilities=options.get("log_probabilities", 0),
        target_endpoint=options.get("target_endpoint"),
        cache_salt=options.get("cache_salt", ""),
        json_schema=None if schema is None else json_schema_text(schema),
    )
    detokenizer = None
    if stop or (show_text and params.detokenize):
        detokenizer = IncrementalDetokenizer(model.tokenizer, stop)
    assembler = Assembler(detokenizer, show_text=show_text and params.detokenize)
    return Prepared(make_spec(wire, options, options.get("request_id")), assembler)


def make_spec(wire: WireContext, options: RequestOptions, name: str | None) -> RequestSpec:
    """A request with a name of its own unless it has one."""
    request_id = str(RequestID()) if name is None else name
    if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise InputError(f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} characters")
    deadline = options.get("deadline")
    if deadline is not None and not deadline > 0:
        raise DeadlineExceeded(f"the deadline of {deadline:g} s is over already")
    spec = RequestSpec(
        request_id=request_id,
        context=wire,
        deadline=None if deadline is None else float(deadline),
        pool=options.get("pool"),
        pin=options.get("pin", "prefer"),
        fallback=options.get("fallback", False),
    )
    _check_sendable(spec)
    return spec


def _check_sendable(spec: RequestSpec) -> None:
    """InputError for what no message can carry; it would be tried again and again in vain."""
    try:
        message = Submit(request_id=spec.request_id, context=spec.context, pool=spec.pool)
        EnvelopeEncoder().encode([message])
    except Exception as error:  # whatever the user put in: huge numbers, foreign objects
        raise InputError(f"the request cannot be sent: {error}") from error


def _params(sampling: Sampling, defaults: SamplingParamsGenerationConfigDefaults) -> SamplingParams:
    if isinstance(sampling, SamplingParams):
        return sampling
    given = sampling if sampling is not None else SamplingParamsInput()
    if not isinstance(given, SamplingParamsInput):
        kinds = "SamplingParams or SamplingParamsInput"
        raise InputError(f"sampling_params must be {kinds}, not {type(given).__name__}")
    return SamplingParams.from_input_and_generation_config(given, defaults)


def _ids(prompt: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    array = np.asarray(prompt)
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
    return SamplingParamsGenerationConfigDefaults(**msgspec.structs.asdict(config))


def new_identity() -> bytes:
    """Routing id of one connection; fresh each time, since a router keeps an old one a while."""
    return b"client-" + uuid.uuid4().bytes
