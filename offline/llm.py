"""``LLM``: start a cluster on this machine, answer lists of prompts, and end the cluster.

Invariant: the cluster's processes and files are gone after :meth:`LLM.close`, after the object is
deleted, and after this process has ended in any way.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from baton.client import Client, GenerationOptions, Picture, PictureOptions, RequestOptions, Result
from baton.client.calls import Each, OnError, Whole
from baton.client.model import Messages, Prompt, Prompts, Sampling, TokensOrText
from baton.client.pictures import OnPreview, OnProgress
from baton.client.result import Completion
from baton.client.speech import I16, AudioPrompt
from baton.proto.errors import BatonError, ConfigError
from baton.text.tokenizer import Tokenizer

from .cluster import OwnCluster
from .settings import ClusterSettings

_EMBED_AT_ONCE = 512
"""Texts of one call of the client, while a progress bar is shown."""
DRAW_EVERY_S = 0.1
"""Least seconds between two drawings."""
BAR_CHARS = 24
"""Characters of a full bar."""


class LLM:
    """A model on a new cluster on this machine.

    ::

        with LLM("~/models/Qwen3-0.6B", decode=2) as llm:
            for result in llm.generate(["Hello", "The capital of France is"]):
                print(result.text)

    ``model``: folder of a checkpoint, ``org/name`` of a model on the Hugging Face hub, or None for
    the embedded demo model. ``prefill``, ``decode``: number of workers. ``settings``: the settings
    of ``baton serve``, such as ``max_model_len=4096`` or ``kv_memory="2GiB"``; no gateway runs.
    ``progress``: show a progress bar on standard error; None: if that is a terminal. ``log``: file
    for the cluster's log. ``start_timeout``: seconds for the start.

    Raises ConfigError for a wrong setting, CheckpointError for a wrong model, and RequestFailed if
    the cluster does not start. Usable from any thread, without ``if __name__ == "__main__"``, and
    where an event loop runs, as in a notebook. End the cluster with :meth:`close` or ``with``; it
    also ends with the object and with the process.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        prefill: int = 1,
        decode: int = 1,
        progress: bool | None = None,
        log: str | None = None,
        start_timeout: float = 600.0,
        **settings: Unpack[ClusterSettings],
    ) -> None:
        if "address" in settings:
            raise ConfigError(
                "LLM starts a cluster of its own; for a running one write Client(address)"
            )
        self._progress = progress
        self._cluster = OwnCluster(
            {"model": str(model or ""), "prefill": prefill, "decode": decode, **settings},
            log=log,
            timeout=start_timeout,
        )
        try:
            self.client = Client(self._cluster.address)
        except BaseException:
            self._cluster.close()
            raise

    @property
    def address(self) -> str:
        """The cluster's address, for further clients of this user."""
        return self._cluster.address

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises CheckpointError if the model has none."""
        return self.client.model().tokenizer

    # ------------------------------------------------------------------ requests

    def generate(
        self,
        prompts: Prompt | Prompts,
        sampling_params: Sampling | Each = None,
        *,
        n: int = 1,
        on_error: OnError = "raise",
        **options: Unpack[GenerationOptions],
    ) -> list[Result]:
        """Continue prompts and return their results in the same order.

        ``prompts``: one prompt (text or token ids), or a list. ``sampling_params``: for all
        prompts, or a list with one item per prompt. ``n``: answers to each prompt. ``options``: see
        :class:`baton.RequestOptions`. ``on_error``: "raise" the first error, and cancel the other
        requests; "return" it as the ``error`` of the prompt's result.
        """
        call = Whole.of_prompt(prompts, sampling_params, n, options, on_error)
        return self._run(call, "prompts")

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Sampling | Each = None,
        *,
        n: int = 1,
        variables: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
        **options: Unpack[GenerationOptions],
    ) -> list[Result]:
        """Like :meth:`generate`, for one conversation or a list of conversations."""
        call = Whole.of_chat(messages, sampling_params, n, variables, options, on_error)
        return self._run(call, "conversations")

    def embed(
        self, texts: Sequence[TokensOrText], **options: Unpack[RequestOptions]
    ) -> npt.NDArray[np.float32]:
        """Return the embeddings of texts, float32 ``[len(texts), dim]``, in the same order.

        Raises TaskMismatch if the model generates text.
        """
        with Progress(len(texts), "texts", self._progress) as progress:
            size = _EMBED_AT_ONCE if progress.shown else len(texts)
            parts = []
            for at in range(0, max(1, len(texts)), max(1, size)):
                parts.append(self.client.embed(texts[at : at + size], **options))
                progress.add(len(parts[-1]))
            return np.concatenate(parts)

    def image(
        self,
        prompt: str,
        *,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
        **options: Unpack[PictureOptions],
    ) -> Picture:
        """Return a picture of a prompt, as :meth:`baton.client.Client.image`."""
        return self.client.image(prompt, on_progress=on_progress, on_preview=on_preview, **options)

    def speak(
        self,
        text: str,
        sampling_params: Sampling = None,
        *,
        voice: str | AudioPrompt | None = None,
        **options: Unpack[RequestOptions],
    ) -> I16:
        """Return the samples of a text, int16 ``[n]``, as :meth:`baton.client.Client.speak`."""
        return np.concatenate(
            list(self.client.speak(text, sampling_params, voice=voice, **options))
        )

    def _run(self, call: Whole, what: str) -> list[Result]:
        with Progress(len(call.drafts), what, self._progress) as progress:
            found = self.client.run(call, lambda ended: progress.add(1, _tokens_of(ended)))
        return found if isinstance(found, list) else [found]

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """End the cluster. Running requests are cancelled."""
        self.client.close()
        self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tokens_of(ended: Completion | BatonError) -> int:
    return 0 if isinstance(ended, BatonError) else ended.usage.completion_tokens


# --------------------------------------------------------------------------- progress bar


def line_of(done: int, total: int, tokens: int, seconds: float, what: str) -> str:
    """Return the text of the bar: share, number, elapsed and remaining time, rates."""
    share = done / total if total else 1.0
    full = int(share * BAR_CHARS)
    bar = "#" * full + "." * (BAR_CHARS - full)
    rate = done / seconds if seconds > 0 else 0.0
    left = _clock((total - done) / rate) if rate else "?"
    text = f"{share:4.0%} [{bar}] {done}/{total} {what}, {_clock(seconds)} (left {left})"
    text += f", {rate:.1f} {what}/s"
    return f"{text}, {tokens / seconds:.0f} tokens/s" if tokens and seconds > 0 else text


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Progress:
    """Draws a bar while work is done. ``shown``: None means if standard error is a terminal."""

    def __init__(
        self,
        total: int,
        what: str,
        shown: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shown = _is_terminal() if shown is None else shown
        self._total = total
        self._what = what
        self._clock = clock
        self._began = clock()
        self._drawn_at = float("-inf")
        self._done = self._tokens = 0

    def add(self, done: int, tokens: int = 0) -> None:
        """Count finished work, and the tokens it produced."""
        self._done += done
        self._tokens += tokens
        if self.shown and self._clock() - self._drawn_at >= DRAW_EVERY_S:
            self._draw()

    def _draw(self, end: str = "") -> None:
        self._drawn_at = now = self._clock()
        text = line_of(self._done, self._total, self._tokens, now - self._began, self._what)
        width = max(1, shutil.get_terminal_size().columns - 1)
        sys.stderr.write(f"\r\x1b[K{text[:width]}{end}")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        if self.shown:
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self._draw("\n")


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # no standard error, or a closed one
        return False
