"""One prompt or many in a call: which it is, and the parameters of each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..proto.contexts import TextContext
from ..proto.errors import BatonError, InputError
from ..proto.sampling import SamplingParams
from .model import Sampling, check_sampling
from .options import RequestOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

Each = Sequence[Sampling]


def prompts_of(prompt: Any) -> Sequence[Any] | None:
    """The prompts of a list of prompts; None for one prompt."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return None
    several = isinstance(prompt[0], str | list | tuple | np.ndarray | TextContext)
    return prompt if several else None


def chats_of(messages: Any) -> Sequence[Any] | None:
    """The conversations of a list of conversations; None for one conversation."""
    if not isinstance(messages, list | tuple) or not messages:
        return None
    several = isinstance(messages[0], Sequence) and not isinstance(messages[0], str | Mapping)
    return messages if several else None


def sampling_of_one(sampling: Sampling | Each) -> Sampling:
    """The parameters of the one prompt. Raises InputError for what is none."""
    check_sampling(sampling)
    return sampling  # type: ignore[return-value]  # just checked


def sampling_of_each(
    count: int, sampling: Sampling | Each, options: RequestOptions
) -> list[Sampling]:
    """Parameters for each of ``count`` prompts, from one for all or a list of as many.

    Where one for all does not give a seed, each prompt gets its own. Raises InputError.
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
    """InputError if two contexts of one call have the same request id."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"two prompts of the call have the request id {name!r}")
        seen.add(name)


@contextmanager
def at_prompt(index: int) -> Iterator[None]:
    """Name the prompt in the errors of the body."""
    try:
        yield
    except BatonError as error:
        raise type(error)(f"prompts[{index}]: {error}", retry_after=error.retry_after) from error
