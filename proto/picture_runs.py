"""A picture request as workers run it: a row of positions, then one token per step.

The scheduler, the caches and the handoff see a text request: its prompt is the row of
:func:`.picture_requests.state_tokens`, and its tokens are 0, 1 ... ``num_inference_steps``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from .contexts.pixels import PixelContext
from .contexts.text import TextContext
from .contexts.tokens import TokenBuffer
from .errors import InputError
from .ids import RequestID
from .picture_requests import (
    BASE,
    Picture,
    base_length,
    state_length,
    state_parts,
    state_tokens,
)
from .sampling import SamplingParams
from .wire.context_maps import check_progress, from_map, to_map, token_buffer
from .wire.wire_context import WirePixelContext


@dataclass(slots=True, kw_only=True, eq=False)
class PictureRun(TextContext):
    """A picture request with the steps that are done.

    ``base``: length of the request's own ``tokens``. Clients and routers count positions from
    there, and workers from the end of the row.
    """

    picture: Picture
    base: int


def picture_run(wire: WirePixelContext, request_id: RequestID, block_size: int) -> PictureRun:
    """Return a request as a worker runs it. A Commit's has generated tokens.

    Tokens that were delivered before a replay are not passed on: their steps are computed again.
    Raises InputError if a prompt is missing, or if the row has another length than its prompts.
    """
    parts = state_parts(wire, block_size)
    length = state_length(parts)
    base = base_length(wire)
    if base:
        tokens = token_buffer(wire.tokens)
        if tokens.prompt_length != length:
            raise InputError(f"a row of {tokens.prompt_length} positions; expected {length}")
    else:
        tokens = TokenBuffer(state_tokens(wire, block_size).astype(np.int64))
    request = from_map(wire)
    if not isinstance(request, PixelContext):
        raise InputError("the request is not for a picture")
    request.request_id = request_id
    if base:
        request.tokens = TokenBuffer(np.zeros(1, np.int64))
    run = PictureRun(
        tokens=tokens,
        max_length=length + wire.num_inference_steps + 1,
        request_id=request_id,
        model_name=wire.model_name,
        cache_salt=wire.cache_salt,
        task=wire.task,
        ignore_eos=True,
        sampling_params=SamplingParams(seed=0),  # unused; the default would draw a seed
        _is_initial_prompt=not base,
        picture=Picture(request, parts),
        base=base or len(wire.tokens),
    )
    check_progress(run)
    return run


def committed_picture(run: PictureRun) -> WirePixelContext:
    """Return the map of a request whose state was computed, for a decode worker."""
    request = run.picture.request
    named = {**request.extra_params, BASE: np.array([run.base], np.int64)}
    made = to_map(dataclasses.replace(request, tokens=run.tokens, extra_params=named))
    if not isinstance(made, WirePixelContext):
        raise InputError("the request is not for a picture")
    return made
