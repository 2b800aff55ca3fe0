"""Calls with one prompt or with a list of prompts, and the parameters of each prompt. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..proto.contexts.text import TextContext
from ..proto.errors import BatonError, InputError
from ..proto.sampling import SamplingParams
from .model import Sampling, check_sampling
from .options import RequestOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

Each = Sequence[Sampling]


def prompts_of(prompt: Any) -> Sequence[Any] | None:
    """Return a list of prompts, or None if ``prompt`` is a single prompt."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return None
    several = isinstance(prompt[0], str | list | tuple | np.ndarray | TextContext)
    return prompt if several else None


def chats_of(messages: Any) -> Sequence[Any] | None:
    """Return a list of conversations, or None if ``messages`` is a single conversation."""
    if not isinstance(messages, list | tuple) or not messages:
        return None
    several = isinstance(messages[0], Sequence) and not isinstance(messages[0], str | Mapping)
    return messages if several else None


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
def at_prompt(index: int) -> Iterator[None]:
    """Add the index of the prompt to errors that the body raises."""
    try:
        yield
    except BatonError as error:
        raise type(error)(f"prompts[{index}]: {error}", retry_after=error.retry_after) from error
