"""The client for threads: calls block, and one background thread owns the connection.

Any number of threads may use one Client at the same time. Their requests share the connection.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack, overload

import numpy as np
import numpy.typing as npt

from baton.proto.errors import BatonError, ConnectionLost
from baton.proto.wire.messages import Describe, Described, Drained, Message, StatusReport
from baton.runtime.keys.keyring import GivenKeys, Keys, client_keys
from baton.runtime.net.loop import Loop
from baton.runtime.net.room import require_room

from .calls import Answer, Calls, Draft, Each, OnError, Whole, answer_of_kind, at_prompt
from .connection import FILES, THREADS, Connection
from .description import DESCRIBED_FILES, Description, described
from .embedding import Embedding, embed_specs
from .environment import find_cluster
from .events import Ended, NewTokens, RequestSpec
from .model import (
    Messages,
    ModelCache,
    Prepared,
    Prompt,
    Prompts,
    Sampling,
    ServedModel,
    TokensOrText,
)
from .options import (
    GenerationOptions,
    RequestOptions,
    StatusOptions,
    check_timeouts,
    drain_query,
    query_timeout,
    status_query,
)
from .output import Output
from .pictures import OnPreview, OnProgress, Picture, PictureJob, PictureOptions
from .result import Completion, Result, collected
from .speech import I16, AudioPrompt, no_speech, samples_of, speech_context
from .window import Sink, Window

Item = TypeVar("Item")
LOOK_S = 1.0
"""Seconds between checks of a waiting call that the background thread still runs."""


class _Background:
    """The connection and its thread. Both end with the Client, also by garbage collection."""

    def __init__(
        self,
        address: Sequence[str],
        keys: Keys | None,
        timeouts: tuple[float, float],
    ) -> None:
        require_room(FILES, THREADS + 1)
        self._loop = Loop()
        try:
            self.connection = Connection(
                self._loop,
                address,
                keys=keys,
                connect_timeout=timeouts[0],
                reconnect_timeout=timeouts[1],
            )
        except BaseException:
            self._loop.close()
            raise
        self._lock = threading.RLock()  # a finalizer may post within a post
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run, name="baton-client", daemon=True)
        self._thread.start()

    def post(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` on the connection's thread.

        Raises ConnectionLost if the client is closed or the thread does not run.
        """
        self.check()
        with self._lock:
            if self._closed:
                raise ConnectionLost("the client is closed")
            self._loop.post(callback)

    def check(self) -> None:
        """Raise ConnectionLost if the thread does not run, as in a forked process."""
        if self._thread.is_alive():
            return
        text = "the client is closed"
        if not self._closed:
            text = "the client's thread does not run in this process; make a Client in each process"
        raise ConnectionLost(text)

    @property
    def state(self) -> str:
        """The end of the client's ``repr``: empty while it can be used."""
        return ", closed" if self._closed else ""

    def wait(self, news: queue.SimpleQueue[Item]) -> Item:
        """Wait for an item from the connection's thread, and check that the thread runs."""
        while True:
            try:
                return news.get(timeout=LOOK_S)
            except queue.Empty:
                if news.empty():
                    self.check()

    def close(self) -> None:
        """Close the connection and stop its thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.post(self._shut)
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def _shut(self) -> None:
        self.connection.close()
        self._loop.stop()


class Client(Calls["Generation"]):
    """Connection to a cluster's router at ``address`` (``ipc://path`` or ``tcp://host:port``).

    Without ``address``, the client uses BATON_ADDRESS (and BATON_KEYS), else the default address of
    this user's cluster. ``address`` may contain several routers of the cluster: a list, or a text
    with addresses separated by commas. The client uses one router, drawn at random. If that router
    dies or times out, the client moves to the next router with all running requests. It returns to
    the first router after that is back, when no request runs.

    ``connect_timeout``: seconds that a new request waits for routers that do not answer.
    ``reconnect_timeout``: the same for running requests, for example while the router restarts.
    ``keys``: key folder of the cluster, for ``tcp://``. Raises ConfigError for an invalid address
    and for a key folder that cannot be used.

    ``generate`` and ``chat`` encode the prompts before they return. So they also raise InputError
    for a wrong prompt, and ConnectionLost if no router answers.
    """

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        keys: GivenKeys = None,
        connect_timeout: float = 5.0,
        reconnect_timeout: float = 30.0,
    ) -> None:
        connect, reconnect = check_timeouts(
            connect_timeout=connect_timeout, reconnect_timeout=reconnect_timeout
        )
        addresses, keys = find_cluster(address, keys)
        self._addresses = tuple(addresses)
        self._background = _Background(addresses, client_keys(keys), (connect, reconnect))
        self._timeout = connect
        self._models = ModelCache()
        self._models_lock = threading.Lock()
        self._finalizer = weakref.finalize(self, self._background.close)

    # ------------------------------------------------------------------ generation

    def _start_requests(self, drafts: Sequence[Draft], window: Window | None) -> list[Generation]:
        prepared = [self._prepare(draft) for draft in drafts]
        return [Generation(self, self._background, one, window) for one in prepared]

    def _prepare(self, draft: Draft) -> Prepared:
        with at_prompt(draft.index):
            return draft.prepare_context() if draft.is_context else draft.prepare(self._model())

    @overload
    def complete(
        self,
        prompt: Prompt,
        sampling_params: Sampling = None,
        *,
        n: int = 1,
        on_error: OnError = "raise",
        **options: Unpack[GenerationOptions],
    ) -> Result: ...
    @overload
    def complete(
        self,
        prompt: Prompts,
        sampling_params: Sampling | Each = None,
        *,
        n: int = 1,
        on_error: OnError = "raise",
        **options: Unpack[GenerationOptions],
    ) -> list[Result]: ...
    def complete(
        self,
        prompt: Prompt | Prompts,
        sampling_params: Sampling | Each = None,
        *,
        n: int = 1,
        on_error: OnError = "raise",
        **options: Unpack[GenerationOptions],
    ) -> Result | list[Result]:
        """Like :meth:`generate`, but wait for the whole answers.

        Returns a :class:`Result`, or for a list of prompts a list in the same order. ``n``: number
        of answers to each prompt; with a seed, the first has this seed and the others the next
        ones. A list of any length stays within the cluster's limit of requests. ``on_error``: with
        "raise", the first error ends the call and cancels its other requests; with "return", a
        prompt that fails gets a result with this ``error``.
        """
        return self.run(Whole.of_prompt(prompt, sampling_params, n, options, on_error))

    @overload
    def complete_chat(
        self,
        messages: Messages,
        sampling_params: Sampling = None,
        *,
        n: int = 1,
        variables: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
        **options: Unpack[GenerationOptions],
    ) -> Result: ...
    @overload
    def complete_chat(
        self,
        messages: Sequence[Messages],
        sampling_params: Sampling | Each = None,
        *,
        n: int = 1,
        variables: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
        **options: Unpack[GenerationOptions],
    ) -> list[Result]: ...
    def complete_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Sampling | Each = None,
        *,
        n: int = 1,
        variables: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
        **options: Unpack[GenerationOptions],
    ) -> Result | list[Result]:
        """Like :meth:`complete`, for messages that the model's chat template renders."""
        return self.run(Whole.of_chat(messages, sampling_params, n, variables, options, on_error))

    def run(
        self, call: Whole, on_end: Callable[[Completion | BatonError], object] | None = None
    ) -> Result | list[Result]:
        """Run a checked call for whole answers; ``on_end`` gets each answer, in order."""
        generations: list[Generation | BatonError] = []
        answers: list[Completion | BatonError] = []
        prepared: list[Prepared | BatonError] = []
        for at, draft in enumerate(call.drafts):
            errors: list[BatonError] = []
            with call.errors_of(at, errors):
                prepared.append(self._prepare(draft))
            prepared += errors
        try:
            for one in prepared:
                if isinstance(one, BatonError):
                    generations.append(one)
                else:
                    generations.append(Generation(self, self._background, one, call.window))
            for at, generation in enumerate(generations):
                failures: list[BatonError] = []
                with call.errors_of(at, failures):
                    if isinstance(generation, BatonError):
                        raise generation
                    answers.append(collected(generation, call.index(at)))
                answers += failures
                if on_end is not None:
                    on_end(answers[-1])
        finally:
            for generation in generations[len(answers) :]:
                if not isinstance(generation, BatonError):
                    generation.close()
        return call.result(answers)

    def embed(
        self, texts: Sequence[TokensOrText], **options: Unpack[RequestOptions]
    ) -> npt.NDArray[np.float32]:
        """Return the embeddings of all texts (or token ids), float32 ``[len(texts), dim]``.

        Rows are in the order of the texts. ``options``: target_endpoint, pin, fallback, pool,
        max_retries, and deadline, in seconds for the whole call. Raises the error of the first
        text that fails, and TaskMismatch if the cluster serves a generation model.
        """
        began, model = time.monotonic(), self._model()
        job = Embedding(embed_specs(texts, options, model), model.card.embedding_size, began)
        news: queue.SimpleQueue[NewTokens | Ended] = queue.SimpleQueue()
        sink: Sink = news.put
        try:
            while not job.done:
                self._start_all(job.start(time.monotonic()), sink)
                ended = self._background.wait(news)
                if isinstance(ended, Ended):
                    job.take(ended)
        except BaseException:
            self._stop_all(job.running, sink)
            raise
        return job.vectors

    def speak(
        self,
        text: str,
        sampling_params: Sampling = None,
        *,
        voice: str | AudioPrompt | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[I16, None, None]:
        """Yield the speech of a text in chunks of samples, int16, as they arrive.

        ``model().card.audio`` has their rate. ``voice``: a name, an :class:`AudioPrompt`, or None
        for the model's first. Closing the iterator cancels the request. Raises TaskMismatch if the
        model does not speak, InputError for an empty text or an unusable voice, and at the end if
        no sample came.
        """
        context = speech_context(self._model(), text, voice, sampling_params)
        silent = True
        with self.generate(context, **options) as outputs:
            for output in outputs:
                if output.media:
                    silent = False
                    yield samples_of(output.media)
        if silent:
            raise no_speech(text)

    def image(
        self,
        prompt: str,
        *,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
        **options: Unpack[PictureOptions],
    ) -> Picture:
        """Return a picture of a prompt.

        ``on_progress(done, total)``: called in this thread after each step; an error of it cancels
        the request. ``on_preview(png, done, total)``: likewise, after some of the steps, with a PNG
        file of at most 65,536 pixels. ``options``: see :class:`PictureOptions`. Raises TaskMismatch
        if the model draws no pictures, InputError for a wrong argument, before anything is sent.
        """
        job = PictureJob(self._model(), prompt, options, on_progress, on_preview)
        news: queue.SimpleQueue[NewTokens | Ended] = queue.SimpleQueue()
        sink: Sink = news.put
        self._start_all([job.spec], sink)
        try:
            while job.picture is None:
                job.take(self._background.wait(news))
        except BaseException:
            self._stop_all([job.spec.request_id], sink)
            raise
        return job.picture

    def _start_all(self, specs: Sequence[RequestSpec], sink: Sink) -> None:
        connection = self._background.connection

        def start() -> None:
            for spec in specs:
                connection.start(spec, sink)

        if specs:
            self._background.post(start)

    def _stop_all(self, names: Iterable[str], sink: Sink) -> None:
        connection, running = self._background.connection, list(names)

        def stop() -> None:
            for name in running:
                connection.stop(name, sink)

        with contextlib.suppress(ConnectionLost):
            self._background.post(stop)

    # ------------------------------------------------------------------ queries

    def model(self) -> ServedModel:
        """Return the served model with its tokenizer, confirmed after each reconnection."""
        return self._model()

    def describe(self) -> Description:
        """Fetch the served model's card and text files from the router."""
        answer = self._ask(Describe(files=DESCRIBED_FILES), Described, self._timeout)
        return described(answer)

    def status(
        self, *, timeout: float | None = None, **options: Unpack[StatusOptions]
    ) -> dict[str, Any]:
        """Fetch the router's report: workers, handoffs, requests; see ``StatusOptions``."""
        report = self._ask(status_query(**options), StatusReport, timeout)
        state: dict[str, Any] = json.loads(report.report)
        return state

    def drain(self, worker: str, *, force: bool = False, timeout: float | None = None) -> str:
        """Drain a worker: it finishes its requests and accepts no new request.

        Returns the router's description of the drain. Raises InputError for the last ready worker
        of a role, unless ``force``.
        """
        return self._ask(drain_query(worker, force), Drained, timeout).message

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Cancel all running requests and disconnect."""
        self._background.close()
        self._models.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({', '.join(map(repr, self._addresses))}{self._background.state})"

    # ------------------------------------------------------------------ inner

    def _model(self) -> ServedModel:
        """Return the served model. Confirm it with the router after each reconnection."""
        self._background.check()
        failures = self._models.failures
        with self._models_lock, self._models.attempt(failures):
            connections = self._background.connection.connections
            model = self._models.fresh(connections)
            if model is None:
                card_only = self._ask(Describe(), Described, self._timeout)
                model = self._models.confirm(card_only, connections)
            if model is None:
                model = self._models.store(self.describe(), connections)
            return model

    def _ask(self, query: Message, kind: type[Answer], timeout: float | None) -> Answer:
        answers: queue.SimpleQueue[Message | BatonError] = queue.SimpleQueue()
        seconds = query_timeout(timeout, self._timeout)
        connection = self._background.connection
        self._background.post(lambda: connection.ask(query, seconds, answers.put))
        return answer_of_kind(kind, query, self._background.wait(answers))


class Generation:
    """Iterator over the outputs of one request.

    :meth:`result` returns the rest as a whole. :meth:`close`, or deleting the iterator, cancels
    the request.
    """

    def __init__(
        self,
        client: Client,
        background: _Background,
        prepared: Prepared,
        window: Window | None = None,
    ) -> None:
        self._client = client  # keeps the client alive as long as its requests
        self._background = background
        self._assembler = prepared.assembler
        self._news: queue.SimpleQueue[NewTokens | Ended] = queue.SimpleQueue()
        # The sink must not reference the Generation, or __del__ would never run.
        self._sink: Sink = self._news.put
        self._done = False
        self.request_id = prepared.spec.request_id
        spec, sink, connection = prepared.spec, self._sink, background.connection
        background.post(lambda: connection.start(spec, sink, window))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Output:
        while not self._done:
            output = self._take(self._background.wait(self._news))
            if output is not None:
                return output
        raise StopIteration

    def result(self) -> Completion:
        """Wait for the end, and return all outputs that have not been read, as a whole."""
        return collected(self)

    def close(self) -> None:
        """Cancel the request if it still runs. The iterator then stops."""
        if not self._done:
            self._done = True
            self._stop(report=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            self.close()

    def _take(self, news: NewTokens | Ended) -> Output | None:
        if isinstance(news, Ended):
            self._done = True
            return self._assembler.end(news)
        output = self._assembler.tokens(news)
        if output is not None and self._assembler.stopped:
            self._stop(report=True)
        return output

    def _stop(self, *, report: bool) -> None:
        request_id, sink = self.request_id, self._sink
        connection = self._background.connection
        with contextlib.suppress(ConnectionLost):  # the client is closed, so no request runs
            self._background.post(lambda: connection.stop(request_id, sink, report=report))
