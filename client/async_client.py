"""The client for asyncio: the connection runs inside the running event loop.

The loop watches ZeroMQ's descriptors with ``add_reader``, because zmq.asyncio costs several times
as much per message.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Self, Unpack, overload

import numpy as np
import numpy.typing as npt

from baton.proto.errors import BatonError, ConnectionLost, InputError
from baton.proto.sampling import SamplingParams
from baton.proto.wire.messages import Describe, Described, Drained, Message, StatusReport
from baton.runtime.keys.keyring import GivenKeys, client_keys
from baton.runtime.net.loop import Loop
from baton.runtime.net.room import require_room

from .async_generation import AsyncGeneration
from .calls import Answer, Calls, Draft, Each, OnError, Whole, answer_of_kind, at_prompt
from .connection import FILES, THREADS, Batch, Connection
from .description import DESCRIBED_FILES, Description, described
from .embedding import Embedding, embed_specs
from .environment import find_cluster
from .events import Ended, NewTokens
from .images import image_threads
from .model import (
    Messages,
    ModelCache,
    Prepared,
    Prompt,
    Prompts,
    Sampling,
    ServedModel,
    TokensOrText,
    prepare,
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
from .pictures import OnPreview, OnProgress, Picture, PictureJob, PictureOptions
from .result import Completion, Result
from .speech import I16, AudioPrompt, no_speech, samples_of, speech_context
from .window import Window


class AsyncClient(Calls["AsyncGeneration"]):
    """Like :class:`baton.client.Client`, but for one asyncio event loop.

    The client connects on first use. Disconnect with :meth:`close` or ``async with``.

    ``generate`` and ``chat`` return at once, with an iterator for ``async for``. The iterator also
    raises the errors of encoding its prompt. Cancel a request with ``aclose`` on its iterator, or
    by deleting the iterator.

    ``model_folder``: your own folder of the served model. If its tokenizer files are those of the
    cluster, prompts are rendered and tokenized in this process, and not in guarded processes.

    ``batch``: called before and after the outputs of a message of the router are delivered.
    """

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        keys: GivenKeys = None,
        connect_timeout: float = 5.0,
        reconnect_timeout: float = 30.0,
        model_folder: str = "",
        batch: Batch | None = None,
    ) -> None:
        connect, reconnect = check_timeouts(
            connect_timeout=connect_timeout, reconnect_timeout=reconnect_timeout
        )
        self._addresses, keys = find_cluster(address, keys)
        self._keys = client_keys(keys)
        self._timeout = connect
        self._reconnect_timeout = reconnect
        self._batch = batch
        self._models = ModelCache(model_folder)
        self._models_lock = asyncio.Lock()
        self._loop: Loop | None = None
        self._connection: Connection | None = None
        self._closed = False

    # ------------------------------------------------------------------ generation

    def _start_requests(
        self, drafts: Sequence[Draft], window: Window | None
    ) -> list[AsyncGeneration]:
        if not drafts:
            return []
        connection = self._connected()
        started = [AsyncGeneration(self, connection, one.request_id, window) for one in drafts]
        first, model = drafts[0], self._models.fresh(connection.connections)
        if model is not None and window is None and not (first.is_text or first.is_context):
            started[0].start(partial(first.prepare, model))  # a task would cost half as much again
            return started
        for generation, draft in zip(started, drafts, strict=True):
            generation.start_later(partial(self._prepare, draft))
        return started

    def begin(
        self, prompt: TokensOrText, params: SamplingParams, options: RequestOptions
    ) -> AsyncGeneration:
        """Start one request, as :meth:`generate`, in less time.

        ``options``: the result of :func:`check_options`, with a ``request_id``.
        """
        connection = self._connected()
        request_id = options.get("request_id") or ""
        generation = AsyncGeneration(self, connection, request_id)
        model = self._models.fresh(connection.connections)
        chars = len(prompt) if isinstance(prompt, str) else 0
        at_once = model is not None and not model.draws and "images" not in options
        if model is not None and at_once and (not chars or model.is_quick(chars)):
            generation.start(partial(prepare, prompt, params, options, model))
        else:
            draft = Draft(request_id, prompt, params, options, None)
            generation.start_later(partial(self._prepare, draft))
        return generation

    async def _prepare(self, draft: Draft) -> Prepared:
        with at_prompt(draft.index):
            if draft.is_context:
                return draft.prepare_context()
            model = await self._model()
            if draft.options.get("images"):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(image_threads(), draft.prepare, model)
            if draft.is_text:
                return await asyncio.to_thread(draft.prepare, model)
            return draft.prepare(model)

    @overload
    async def complete(
        self,
        prompt: Prompt,
        sampling_params: Sampling = None,
        *,
        n: int = 1,
        on_error: OnError = "raise",
        **options: Unpack[GenerationOptions],
    ) -> Result: ...
    @overload
    async def complete(
        self,
        prompt: Prompts,
        sampling_params: Sampling | Each = None,
        *,
        n: int = 1,
        on_error: OnError = "raise",
        **options: Unpack[GenerationOptions],
    ) -> list[Result]: ...
    async def complete(
        self,
        prompt: Prompt | Prompts,
        sampling_params: Sampling | Each = None,
        *,
        n: int = 1,
        on_error: OnError = "raise",
        **options: Unpack[GenerationOptions],
    ) -> Result | list[Result]:
        """Like :meth:`baton.client.Client.complete`. Cancelling the task cancels the requests."""
        return await self._whole(Whole.of_prompt(prompt, sampling_params, n, options, on_error))

    @overload
    async def complete_chat(
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
    async def complete_chat(
        self,
        messages: Sequence[Messages],
        sampling_params: Sampling | Each = None,
        *,
        n: int = 1,
        variables: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
        **options: Unpack[GenerationOptions],
    ) -> list[Result]: ...
    async def complete_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Sampling | Each = None,
        *,
        n: int = 1,
        variables: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
        **options: Unpack[GenerationOptions],
    ) -> Result | list[Result]:
        """Like :meth:`baton.client.Client.complete_chat`."""
        return await self._whole(
            Whole.of_chat(messages, sampling_params, n, variables, options, on_error)
        )

    async def _whole(self, call: Whole) -> Result | list[Result]:
        generations = self._start_requests(call.drafts, call.window)
        answers: list[Completion | BatonError] = []
        try:
            for at, generation in enumerate(generations):
                failures: list[BatonError] = []
                with call.errors_of(at, failures):
                    answers.append(await generation.result(call.index(at)))
                answers += failures
        finally:
            for generation in generations[len(answers) :]:
                await generation.aclose()
        return call.result(answers)

    async def embed(
        self, texts: Sequence[TokensOrText], **options: Unpack[RequestOptions]
    ) -> npt.NDArray[np.float32]:
        """Like :meth:`baton.client.Client.embed`. Cancelling the task cancels the requests."""
        began, model = time.monotonic(), await self._model()
        specs = await asyncio.to_thread(embed_specs, texts, options, model)
        job = Embedding(specs, model.card.embedding_size, began)
        news: asyncio.Queue[NewTokens | Ended] = asyncio.Queue()
        connection, sink = self._connected(), news.put_nowait
        try:
            while not job.done:
                for spec in job.start(time.monotonic()):
                    connection.start(spec, sink)
                ended = await news.get()
                if isinstance(ended, Ended):
                    job.take(ended)
        except BaseException:
            for name in list(job.running):
                connection.stop(name, sink)
            raise
        return job.vectors

    async def speak(
        self,
        text: str,
        sampling_params: Sampling = None,
        *,
        voice: str | AudioPrompt | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[I16, None]:
        """Like :meth:`baton.client.Client.speak`."""
        model = await self._model()
        context = await asyncio.to_thread(speech_context, model, text, voice, sampling_params)
        silent = True
        async with aclosing(self.generate(context, **options)) as outputs:
            async for output in outputs:
                if output.media:
                    silent = False
                    yield samples_of(output.media)
        if silent:
            raise no_speech(text)

    async def image(
        self,
        prompt: str,
        *,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
        **options: Unpack[PictureOptions],
    ) -> Picture:
        """Like :meth:`baton.client.Client.image`. Cancelling the task cancels the request."""
        model = await self._model()
        job = await asyncio.to_thread(PictureJob, model, prompt, options, on_progress, on_preview)
        return await self._draw(job)

    async def _draw(self, job: PictureJob) -> Picture:
        news: asyncio.Queue[NewTokens | Ended] = asyncio.Queue()
        connection, sink = self._connected(), news.put_nowait
        connection.start(job.spec, sink)
        try:
            while job.picture is None:
                job.take(await news.get())
        except BaseException:
            connection.stop(job.spec.request_id, sink)
            raise
        return job.picture

    # ------------------------------------------------------------------ queries

    async def model(self) -> ServedModel:
        """Return the served model with its tokenizer, confirmed after each reconnection."""
        return await self._model()

    async def describe(self) -> Description:
        """Fetch the served model's card and text files from the router."""
        answer = await self._ask(Describe(files=DESCRIBED_FILES), Described, self._timeout)
        return described(answer)

    async def status(
        self, *, timeout: float | None = None, **options: Unpack[StatusOptions]
    ) -> dict[str, Any]:
        """Fetch the router's report: workers, handoffs, requests; see ``StatusOptions``."""
        report = await self._ask(status_query(**options), StatusReport, timeout)
        state: dict[str, Any] = json.loads(report.report)
        return state

    async def drain(self, worker: str, *, force: bool = False, timeout: float | None = None) -> str:
        """Drain a worker: it finishes its requests and accepts no new request.

        Returns the router's description of the drain. Raises InputError for the last ready worker
        of a role, unless ``force``.
        """
        return (await self._ask(drain_query(worker, force), Drained, timeout)).message

    # ------------------------------------------------------------------ end

    async def close(self) -> None:
        """Cancel all running requests and disconnect."""
        self._closed = True
        self._models.close()
        if self._connection is not None and self._loop is not None:
            self._connection.close()
            self._loop.close()
            self._connection = None

    def __repr__(self) -> str:
        end = ", closed" if self._closed else ""
        return f"AsyncClient({', '.join(map(repr, self._addresses))}{end})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------------ inner

    def _connected(self) -> Connection:
        if self._closed:
            raise ConnectionLost("the client is closed")
        running = asyncio.get_running_loop()
        if self._connection is None:
            require_room(FILES, THREADS)
            self._loop = Loop(running)
            self._connection = Connection(
                self._loop,
                self._addresses,
                keys=self._keys,
                connect_timeout=self._timeout,
                reconnect_timeout=self._reconnect_timeout,
                batch=self._batch,
            )
        elif self._loop is not None and self._loop.asyncio_loop is not running:
            raise InputError("an AsyncClient belongs to the event loop of its first use")
        return self._connection

    async def _model(self) -> ServedModel:
        """Return the served model. Confirm it with the router after each reconnection."""
        model = self._models.fresh(self._connected().connections)
        if model is not None:
            return model
        failures = self._models.failures
        async with self._models_lock:
            with self._models.attempt(failures):
                return await self._fetch_model()

    async def _fetch_model(self) -> ServedModel:
        connections = self._connected().connections
        model = self._models.fresh(connections)
        if model is None:
            card_only = await self._ask(Describe(), Described, self._timeout)
            model = self._models.confirm(card_only, connections)
        if model is None:
            model = self._models.store(await self.describe(), connections)
        return model

    async def _ask(self, query: Message, kind: type[Answer], timeout: float | None) -> Answer:
        future: asyncio.Future[Message | BatonError] = asyncio.get_running_loop().create_future()

        def settle(answer: Message | BatonError) -> None:
            if not future.done():  # the awaiting task may have been cancelled
                future.set_result(answer)

        seconds = query_timeout(timeout, self._timeout)
        self._connected().ask(query, seconds, settle)
        return answer_of_kind(kind, query, await future)
