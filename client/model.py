"""The served model as the router describes it, and requests made from prompts for that model.

All files of the model come over the socket, because client and cluster may share no file system.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from numbers import Real
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.contexts.text import TextContext
from baton.proto.errors import BatonError, InputError, TaskMismatch
from baton.proto.ids import RequestID
from baton.proto.requests import build_wire_context, refuse_task
from baton.proto.sampling import (
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
    with_limited_top_k,
)
from baton.proto.value_checks import shown
from baton.proto.vision_requests import complete_images
from baton.proto.wire.context_maps import request_map
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import ClientToRouter, Described, Message, Submit
from baton.proto.wire.wire_context import WireContext, WireRequestID
from baton.text.detokenizer import IncrementalDetokenizer
from baton.text.model_files import PICTURE_FILES, has_tokenizer_files
from baton.text.picture_prompts import PicturePrompts
from baton.text.stop import stop_sequences
from baton.text.tokenizer import Tokenizer

from .description import Description
from .events import RequestSpec
from .images import ModelImages, PlacedImages, split_messages
from .options import RequestOptions
from .output import Assembler, PromptRequest

Int32 = npt.NDArray[np.int32]
TokensOrText = str | Sequence[int] | npt.NDArray[Any]
Prompt = TokensOrText | TextContext
Prompts = list[str] | list[list[int]] | list[npt.NDArray[Any]] | list[TextContext]
Messages = Sequence[Mapping[str, Any]]
Sampling = SamplingParams | SamplingParamsInput | None
QUICK_CHARS = 1024


class ServedModel:
    """A model's description, its generation defaults, and its tokenizer, loaded on first use.

    ``own_folder``: the user's folder of the model. If it has the same tokenizer files, the user
    vouches for them, and no helper processes are needed.
    """

    def __init__(self, description: Description, own_folder: str = "") -> None:
        self._own_folder = own_folder
        self.description = description
        self.card = description.card
        self.defaults = _generation_defaults(description.files)
        self._tokenizer: Tokenizer | None = None
        self._pictures: PicturePrompts | None = None
        self._loads = threading.Lock()  # several requests may be prepared at a time
        origin = description.folder or description.card.name
        self._images = ModelImages(description.files, origin, description.card)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises CheckpointError if the model has no tokenizer files."""
        if self._tokenizer is not None:
            return self._tokenizer
        with self._loads:
            if self._tokenizer is None:
                files, folder = self.description.files, self._own_folder
                trusted = bool(folder) and has_tokenizer_files(folder, files)
                origin = self.description.folder or self.card.name
                self._tokenizer = Tokenizer.from_files(files, trusted=trusted, origin=origin)
            return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has tokenizer files."""
        return "tokenizer.json" in self.description.files

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images."""
        return "TextAndVisionContext" in self.card.kinds

    @property
    def draws(self) -> bool:
        """Whether the model draws pictures."""
        return "PixelContext" in self.card.kinds

    @property
    def pictures(self) -> PicturePrompts:
        """Tokenizers and defaults of a picture model. Raises CheckpointError for its files."""
        with self._loads:
            if self._pictures is None:
                files, folder = self.description.files, self._own_folder
                trusted = bool(folder) and has_tokenizer_files(folder, files, PICTURE_FILES)
                origin = self.description.folder or self.card.name
                self._pictures = PicturePrompts.from_files(files, trusted=trusted, origin=origin)
            return self._pictures

    def is_quick(self, chars: int) -> bool:
        """Whether so much text is rendered and tokenized in a fraction of a millisecond.

        A thread for it would take longer.
        """
        tokenizer = self._tokenizer  # else it is loaded first
        return chars <= QUICK_CHARS and tokenizer is not None and tokenizer.runs_here

    def check_text(self) -> None:
        """Raise TaskMismatch if the model takes no text alone: it draws pictures."""
        if self.draws:
            raise TaskMismatch(
                f"{self.card.name!r} is a picture model and generates no text; use image"
            )

    def check_generates(self) -> None:
        """Raise TaskMismatch if the model generates nothing that a prompt of text begins."""
        self.check_text()
        if self.card.task == "embed":
            refuse_task(self.card)

    def place_images(self, tokens: Int32, images: Sequence[Any]) -> PlacedImages:
        """Prepare images and expand a prompt's placeholders. Raises InputError.

        Raises CheckpointError if the model takes images but has no settings for them.
        """
        placeholder = self.tokenizer.image_token_id
        if not self.takes_images or placeholder is None:
            raise InputError(f"{self.card.name!r} takes no images")
        return self._images.place(tokens, images, placeholder)

    def close(self) -> None:
        """Stop the processes that render chat templates and decode images, if they run."""
        if self._tokenizer is not None:
            self._tokenizer.close()
        if self._pictures is not None:
            self._pictures.tokenizer.close()
        self._images.close()


class ModelCache:
    """The model last fetched. After a reconnection, the cluster may serve another model.

    ``own_folder``: as of :class:`ServedModel`.
    """

    def __init__(self, own_folder: str = "") -> None:
        self._own_folder = own_folder
        self._model: ServedModel | None = None
        self._connections = -1
        self.failures = 0
        self._failure: BatonError | None = None

    @contextmanager
    def attempt(self, failures: int) -> Iterator[None]:
        """Guard a fetch in the body. Callers hold a lock, so that one call fetches at a time.

        ``failures``: value of :attr:`failures` before this call waited for the lock. Raises the
        error of a fetch that failed during that wait: another fetch would wait as long and fail.
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
        """Return the model if it was fetched or confirmed over the current connection."""
        return self._model if connections == self._connections else None

    def confirm(self, answer: Described, connections: int) -> ServedModel | None:
        """Return the model of an earlier connection if ``answer`` describes the same model."""
        model = self._model
        if model is None or answer.model != model.card:
            return None
        if answer.folder != model.description.folder:
            return None
        self._connections = connections
        return model

    def store(self, description: Description, connections: int) -> ServedModel:
        """Store a fetched model and return it."""
        self.close()
        self._model = ServedModel(description, self._own_folder)
        self._connections = connections
        return self._model

    def close(self) -> None:
        """Remove the model from the cache."""
        if self._model is not None:
            self._model.close()
        self._model = None


class Prepared(msgspec.Struct, frozen=True):
    """A request ready to start, and the assembler that turns its tokens into outputs."""

    spec: RequestSpec
    assembler: Assembler


def prepare(
    prompt: TokensOrText, sampling: Sampling, options: RequestOptions, model: ServedModel
) -> Prepared:
    """Make a request from text or token ids. Raises InputError for an invalid prompt.

    ``options``, here and below: the result of :func:`check_options`.
    """
    if isinstance(prompt, str):
        return prepare_text(encode(prompt, model), sampling, options, model)
    show_text = options.get("show_text", False)
    return _prepare(ids_of(prompt), sampling, options, model, show_text=show_text)


def encode(text: str, model: ServedModel, *, add_special_tokens: bool = True) -> Int32:
    """Encode a text to token ids. Raises InputError if it exceeds the maximum context length."""
    return model.tokenizer.encode(
        text, add_special_tokens=add_special_tokens, max_tokens=model.card.max_length
    )


def chat_with_images(
    messages: Messages,
    model: ServedModel,
    variables: Mapping[str, Any],
    options: RequestOptions,
) -> tuple[Int32, RequestOptions]:
    """Return a conversation's token ids, and options with all of its images."""
    plain, images = split_messages(messages, options.get("images") or ())
    tokens = encode_chat(plain, model, variables)
    return tokens, ({**options, "images": images} if images else options)


def encode_chat(
    messages: Sequence[Mapping[str, Any]], model: ServedModel, variables: Mapping[str, Any]
) -> Int32:
    """Render a conversation with the model's chat template, and encode it to token ids."""
    prompt = model.tokenizer.render_chat(messages, **variables)
    return encode(prompt, model, add_special_tokens=False)


def prepare_text(
    tokens: npt.NDArray[np.int32], sampling: Sampling, options: RequestOptions, model: ServedModel
) -> Prepared:
    """Make a request whose outputs contain text."""
    return _prepare(tokens, sampling, options, model, show_text=True)


def prepare_context(context: TextContext, sampling: Sampling, options: RequestOptions) -> Prepared:
    """Make a request from a context. The model's generation defaults are not applied to it."""
    if sampling is not None:
        raise InputError(
            "sampling_params cannot be combined with a context, which contains its own"
        )
    if options.get("images"):
        raise InputError("images cannot be combined with a context, which contains its own")
    context.sampling_params.check()
    wire = complete_images(request_map(context))
    target = options.get("target_endpoint")
    if target is not None:
        wire = msgspec.structs.replace(wire, target_endpoint=target)
    schema = options.get("json_schema")
    if schema is not None:
        wire = msgspec.structs.replace(wire, json_schema=schema)
    name = options.get("request_id") or str(context.request_id)
    spec = make_spec(wire, options, name)
    _check_sendable(spec)
    return Prepared(spec, Assembler(None, show_text=False))


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
    images = options.get("images")
    placed = model.place_images(_int32(tokens), images) if images else None
    tokens = tokens if placed is None else placed.tokens
    drawn, scored = options.get("log_probabilities", 0), options.get("prompt_log_probabilities")
    likely = drawn if scored is None else max(1, drawn, scored)
    wire = build_wire_context(
        tokens,
        model.card,
        params,
        stop_sequences=stop_sequences(model.tokenizer, stop) if stop else (),
        log_probabilities=likely,
        log_probabilities_echo=scored is not None,
        target_endpoint=options.get("target_endpoint"),
        cache_salt=options.get("cache_salt", ""),
        json_schema=cast("str | None", options.get("json_schema")),
    )
    if placed is not None:
        wire = placed.added_to(wire)
    detokenizer = None
    if stop or (show_text and params.detokenize):
        detokenizer = IncrementalDetokenizer(model.tokenizer, stop)
    assembler = Assembler(
        detokenizer,
        show_text=show_text and params.detokenize,
        tokenizer=model.tokenizer if likely and model.has_tokenizer else None,
        log_probs=drawn,
    )
    if scored is not None:
        assembler.prompt = PromptRequest(wire.tokens.array, likely, scored)
    spec = make_spec(wire, options, options.get("request_id"))
    if placed is not None:
        _check_sendable(spec)
    return Prepared(spec, assembler)


def _int32(tokens: npt.NDArray[Any]) -> Int32:
    """Return token ids as int32, to find placeholders. Raises InputError."""
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError("token ids must be a list of whole numbers")
    return tokens.astype(np.int32)


def make_spec(wire: WireContext, options: RequestOptions, name: str | None) -> RequestSpec:
    """Make a request from options, and name its context. Without ``name`` it gets a random id."""
    name = str(RequestID()) if name is None else name
    if wire.request_id is None or wire.request_id.value != name:
        wire = msgspec.structs.replace(wire, request_id=WireRequestID(name))
    return RequestSpec(
        request_id=name,
        context=wire,
        deadline=options.get("deadline"),
        pool=options.get("pool"),
        pin=options.get("pin", "prefer"),
        fallback=options.get("fallback", False),
        max_retries=options.get("max_retries", 0),
        gateway=options.get("gateway", ""),
        traceparent=options.get("traceparent", ""),
        slo_ttft=options.get("slo_ttft"),
        slo_itl=options.get("slo_itl"),
        # A stop text may end the request here, so its tokens must come at once.
        whole=options.get("whole", False) and not wire.sampling.stop,
    )


def _check_sendable(spec: RequestSpec) -> None:
    """Raise InputError for a request that no router can decode: repeating it would not help.

    For a user's context, and for images, which may be too large together. Options and parameters
    are checked field by field.
    """
    message = Submit(request_id=spec.request_id, context=spec.context, pool=spec.pool)
    try:
        _router_decoder().decode(EnvelopeEncoder().encode([message]))
    except Exception as error:  # a user's context may contain huge numbers or foreign objects
        raise InputError(f"the request cannot be sent: {error}") from error


@cache
def _router_decoder() -> EnvelopeDecoder[Message]:
    return EnvelopeDecoder(ClientToRouter)


def check_sampling(sampling: object) -> None:
    """Raise InputError unless ``sampling`` is None or a set of sampling parameters."""
    if sampling is None or isinstance(sampling, SamplingParams | SamplingParamsInput):
        return
    hint = "" if not isinstance(sampling, dict) else "; write SamplingParams(**values)"
    if isinstance(sampling, Real):
        hint = f"; write SamplingParams(temperature={sampling}) to set the temperature"
    raise InputError(f"sampling_params must be SamplingParams, not {shown(sampling)}{hint}")


def sampling_with_defaults(sampling: Sampling, model: ServedModel) -> SamplingParams:
    """Return parameters whose unset fields have the model's defaults."""
    return _params(sampling, model.defaults)


def _params(sampling: Sampling, defaults: SamplingParamsGenerationConfigDefaults) -> SamplingParams:
    if isinstance(sampling, SamplingParams):
        return sampling.merged(defaults)
    given = sampling if sampling is not None else SamplingParamsInput()
    return SamplingParams.from_input_and_generation_config(given, defaults)


def ids_of(prompt: object) -> npt.NDArray[Any]:
    """Convert a prompt of token ids to an array. Raises InputError; does not check the ids."""
    if type(prompt) is np.ndarray and prompt.size:
        return prompt
    if not isinstance(prompt, np.ndarray | Sequence) or isinstance(prompt, bytes | bytearray):
        kinds = "text, token ids, a TextContext, or a list of these"
        raise InputError(f"a prompt must be {kinds}, not {shown(prompt)}")
    try:
        array = np.asarray(prompt)
    except (ValueError, OverflowError) as error:
        raise InputError(f"token ids must be a list of whole numbers: {error}") from None
    return array.astype(np.int32) if array.size == 0 else array


def _generation_defaults(files: Mapping[str, bytes]) -> SamplingParamsGenerationConfigDefaults:
    text = files.get("generation_config.json")
    if text is None:
        return SamplingParamsGenerationConfigDefaults()
    try:
        defaults = msgspec.json.decode(
            text, type=SamplingParamsGenerationConfigDefaults, strict=False
        )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the model's generation_config.json cannot be read: {error}") from error
    return with_limited_top_k(defaults)  # as the cluster does


def new_identity() -> bytes:
    """Make a new routing id for a connection. A router keeps a closed connection's id a while."""
    return b"client-" + uuid.uuid4().bytes
