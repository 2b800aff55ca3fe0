"""A model small enough to simulate thousands of requests, and unforgiving about its KV.

Every token writes one number per layer into its KV slot, keys and values alike; the next
token is a digest of *all* KV cells before it, read back through the block table. A block
lost, swapped, shared, stale or shifted therefore changes the answer, as does a token at a
wrong position. A poison token, found among the cells, kills the worker that reads it.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from baton.engine.grammar.constraint import GrammarTask, follow
from baton.engine.scheduling.plan import Chunk, Sampled, StepPlan, StepResult, realized
from baton.proto.contexts.pixels import PixelContext
from baton.proto.errors import BatonError, InternalError
from baton.proto.layout import FEATURES, KVLayout, ModelCard
from baton.proto.picture_requests import (
    STATE_VOCABULARY,
    picture_seed,
    preview_steps,
    state_parts,
    state_tokens,
)
from baton.proto.wire.wire_context import WirePixelContext

LAYERS = 2
ANSWERS = 251
"""Tokens that the model may generate."""
KILLS_PREFILL = 251
KILLS_DECODE = 252
MUTE = 250
"""A text with this token has no embedding."""
VOCAB = 253
EOS = 0
MAX_LENGTH = 4096
DIMENSIONS = 4
_PRIME = 65_521
_TOKEN, _POSITION = 7919, 104_729
_PLACES = np.arange(MAX_LENGTH, dtype=np.int64) * _POSITION
_PLACES = _PLACES + np.arange(LAYERS * 2, dtype=np.int64).reshape(LAYERS, 2, 1) * 15_485_863
"""What position, layer and kind add to a cell."""


def toy_card(block_size: int = 4) -> ModelCard:
    """Return the toy model's card."""
    layout = KVLayout(num_layers=LAYERS, num_kv_heads=1, head_dim=1, block_size=block_size)
    return ModelCard(
        name="toy",
        architecture="Toy",
        fingerprint="toy",
        numerics="exact",
        vocab_size=VOCAB,
        max_length=MAX_LENGTH,
        eos_token_ids=[EOS],
        layout=layout,
        features=list(FEATURES),
    )


def embed_card() -> ModelCard:
    """Return the card of the toy embedding model."""
    return msgspec.structs.replace(toy_card(), task="embed", embedding_size=DIMENSIONS)


def picture_card(block_size: int) -> ModelCard:
    """Return the card of the toy picture model."""
    return msgspec.structs.replace(
        toy_card(block_size),
        task="draw",
        kinds=[PixelContext.__name__],
        vocab_size=STATE_VOCABULARY,
        eos_token_ids=[],
    )


def expected_media(wire: WirePixelContext, block_size: int) -> dict[int, bytes]:
    """Return the previews and the picture of a request, by the number of steps that are done."""
    row = state_tokens(wire, block_size)
    cells = _cells(row[: state_parts(wire, block_size)[-1].end], 0)
    latent, found = _noise(wire), {}
    for step in range(wire.num_inference_steps):
        latent = _denoised(latent, cells, step)
        media = _media(wire, step + 1, latent)
        if media is not None:
            found[step + 1] = media
    return found


def _noise(request: PixelContext | WirePixelContext) -> int:
    return picture_seed(request) or 0


def _denoised(latent: int, cells: npt.NDArray[np.float32], step: int) -> int:
    return zlib.crc32(np.ascontiguousarray(cells).tobytes(), (latent + step) & 0xFFFFFFFF)


def _media(request: PixelContext | WirePixelContext, done: int, latent: int) -> bytes | None:
    """Return the picture after the last step, a preview after some others, else None."""
    if done != request.num_inference_steps and done not in preview_steps(request):
        return None
    return f"{done} steps: {latent}".encode()


def expected_vector(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the embedding of a text, float32 ``[DIMENSIONS]``; depends on all tokens in order."""
    content = np.array(tokens, np.int32).tobytes()
    digest = hashlib.blake2b(content, digest_size=2 * DIMENSIONS).digest()
    return np.frombuffer(digest, np.uint16).astype(np.float32)


class ToyMatcher:
    """A grammar that allows one answer: its schema is the list of the answer's tokens.

    If a token is skipped or repeated, the matcher rejects the next token.
    """

    def __init__(self, task: GrammarTask) -> None:
        self._answer: list[int] = json.loads(task.schema)
        self._seen = 0
        follow(self, task.emitted)

    def consume_token(self, token: int) -> bool:
        """Accept the answer's next token. Return False for any other token."""
        fits = self._answer[self._seen : self._seen + 1] == [token]
        self._seen += fits
        return fits


def _cells(tokens: npt.NDArray[np.int32], start: int) -> npt.NDArray[np.float32]:
    """Return the KV ``[LAYERS, 2, n]`` of tokens at positions ``start ..``; exact in float32."""
    base = np.multiply(tokens, _TOKEN, dtype=np.int64)
    cells = (base + _PLACES[:, :, start : start + len(tokens)]) % _PRIME
    return cells.astype(np.float32)


def _next_token(cells: npt.NDArray[np.float32]) -> int:
    digest = zlib.crc32(np.ascontiguousarray(cells).tobytes())
    return digest % ANSWERS


def expected_tokens(prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Return the toy model's answer to ``prompt``, computed without any cache."""
    count, end = len(prompt), len(prompt) + max_new_tokens
    cells = np.empty((LAYERS, 2, end), np.float32)
    cells[:, :, :count] = _cells(np.array(prompt, np.int32), 0)
    answer: list[int] = []
    while count < end and answer[-1:] != [EOS]:
        token = _next_token(cells[:, :, :count])
        answer.append(token)
        cells[:, :, count] = _cells(np.array([token], np.int32), count)[:, :, 0]
        count += 1
    return answer


class Poisoned(Exception):
    """The engine met a token that crashes it."""


class ToyExecutor:
    """Runs plans on a real paged pool whose cells start with values that no token writes.

    ``kills``: the token that crashes the process.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, kills: int) -> None:
        self.layout = layout
        self._poison = _cells(np.full(MAX_LENGTH, kills, np.int32), 0)[0, 0]
        self._drawn: dict[bytes, int] = {}
        self.pool = np.full((layout.num_layers, num_blocks, *layout.block_shape), -1.0, np.float32)

    def execute(self, plan: StepPlan, seconds: float) -> StepResult:
        """Write the chunks' KV and sample a token where the plan asks for one."""
        sampled = []
        failed: dict[bytes, BatonError] = {}
        for chunk in realized(plan, self._drawn, failed):
            self._write(chunk)
            if chunk.sample is not None:
                cells = self._read(chunk.block_table, chunk.start + len(chunk.tokens))
                if np.count_nonzero(cells[0, 0] == self._poison[: cells.shape[2]]):
                    raise Poisoned
                sampled.append(Sampled(chunk.request, _next_token(cells)))
        self._drawn = {row.request: row.token for row in sampled}
        return StepResult(plan.step, tuple(sampled), seconds, plan.num_tokens, failed)

    def _write(self, chunk: Chunk) -> None:
        size = self.layout.block_size
        cells, done, count = _cells(chunk.tokens, chunk.start), 0, len(chunk.tokens)
        while done < count:
            block, first = divmod(chunk.start + done, size)
            more = min(size - first, count - done)
            place = self.pool[:, chunk.block_table[block], :, 0, first : first + more, 0]
            place[...] = cells[:, :, done : done + more]
            done += more

    def _read(self, table: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.float32]:
        blocks = table[: self.layout.blocks_for(count)]
        rows = self.pool[:, :, :, 0, :, 0][:, blocks]  # [layers, blocks, 2, block_size]
        layers, _, kinds, _ = rows.shape
        return rows.transpose(0, 2, 1, 3).reshape(layers, kinds, -1)[:, :, :count]


class ToyPictures(ToyExecutor):
    """Draws pictures: each step digests the whole state, read from its blocks, and the last latent.

    Like the engine, it keeps the latents of the requests in the last plan alone.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, kills: int) -> None:
        super().__init__(layout, num_blocks, kills)
        self._latents: dict[bytes, tuple[int, int]] = {}

    def execute(self, plan: StepPlan, seconds: float) -> StepResult:
        """Write the rows of new pictures, or compute a step of each."""
        before, self._latents = self._latents, {}
        sampled = [self._next(chunk, before) for chunk in plan.chunks]
        return StepResult(plan.step, tuple(sampled), seconds, plan.num_tokens)

    def _next(self, chunk: Chunk, before: dict[bytes, tuple[int, int]]) -> Sampled:
        picture = chunk.picture
        if picture is None:
            raise InternalError("a chunk without a picture")
        if chunk.start < picture.length:
            self._write(chunk)
            return Sampled(chunk.request, 0)
        request, step = picture.request, chunk.start - picture.length
        cells = self._read(chunk.block_table, picture.parts[-1].end)
        at, latent = before.get(chunk.request, (0, _noise(request)))
        if at > step:
            at, latent = 0, _noise(request)
        for again in range(at, step + 1):
            latent = _denoised(latent, cells, again)
        self._latents[chunk.request] = step + 1, latent
        return Sampled(chunk.request, step + 1, result=_media(request, step + 1, latent))
