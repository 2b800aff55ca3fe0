"""TokenBuffer and every context against plain lists, by long runs of random operations.

The models keep whole lists of tokens and recompute everything from them; they share no
index arithmetic with the real classes. After every operation all observable values agree,
and both sides refuse the same operations, which then change nothing.

``--operations N`` sets the total number (``make soak``: ten million); hypothesis
draws the same operations once more in short runs, to shrink what fails.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.proto import (
    FUTURE_TOKEN,
    GenerationStatus,
    ImageMetadata,
    LogProbabilities,
    PixelContext,
    SamplingParams,
    TextAndVisionContext,
    TextContext,
    TokenBuffer,
    TTSContext,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
    update_batch,
)
from baton.proto.wire.context_maps import context_to_run, request_map


class Refused(Exception):
    pass


def need(condition):
    if not condition:
        raise Refused


def agree(real, model):
    """Run both, which must refuse alike. Return whether the operation was done."""
    try:
        model()
    except Refused:
        with pytest.raises(ValueError):
            real()
        return False
    real()
    return True


# ------------------------------------------------------------------ TokenBuffer


@dataclass
class BufferModel:
    """Four consecutive lists of tokens, and the list of tokens not consumed."""

    processed: list[int]
    window: list[int]  # the processing window; `offset` of it (or before it) is not active
    later: list[int]  # after a chunk
    prompt: int
    offset: int = 0
    pending: list[int] = field(default_factory=list)
    chunked: bool = False

    @property
    def all(self):
        return self.processed + self.window + self.later

    @property
    def active(self):
        return (self.processed + self.window)[len(self.processed) + self.offset :]

    def apply_offset(self, n):
        need(0 <= len(self.processed) + n <= len(self.processed + self.window))
        self.offset = n

    def rewind(self, n):
        need(0 <= n <= len(self.processed) and n <= len(self.processed) + self.offset)
        self.split(len(self.processed) - n)

    def skip(self, n):
        need(0 <= n < len(self.window) - self.offset and n <= len(self.window))
        self.split(len(self.processed) + n)

    def split(self, at):
        both = self.processed + self.window
        self.processed, self.window = both[:at], both[at:]

    def chunk(self, n):
        keep = self.offset + n
        need(n >= 1 and 0 <= keep < len(self.window))
        self.later = self.window[keep:] + self.later
        self.window = self.window[:keep]
        self.chunked = True

    def advance_chunk(self):
        need(self.chunked)
        self.processed += self.window
        self.window, self.later, self.offset, self.chunked = self.later, [], 0, False

    def append(self, token, mark):
        need(not self.chunked)
        if mark:
            self.processed, self.window = self.processed + self.window, []
        self.window.append(token)
        self.pending.append(token)
        self.offset = 0

    def overwrite(self, token):
        for part in (self.later, self.window, self.processed):
            if part:
                part[-1] = token
                break
        if self.pending:
            self.pending[-1] = token

    def consume(self):
        need(self.pending)
        self.pending = []

    def reset(self, delete):
        tokens = self.all
        if delete:
            need(len(tokens) > self.prompt)
            tokens.pop()
        self.processed, self.window, self.later = [], tokens, []
        self.prompt, self.pending, self.chunked = len(tokens), [], False
        self.offset = self.offset if 0 <= self.offset <= len(tokens) else 0

    def lend(self, n):
        """Return all and active tokens while room is lent; the model does not change."""
        tokens, end = self.all, len(self.processed + self.window) + n
        length = len(tokens) + n
        need(length >= 1 and end >= len(self.processed) + max(0, self.offset))
        lent = (tokens + [0] * max(0, n))[:length]
        return lent, lent[len(self.processed) + self.offset : end]

    def truncate(self, length):
        tokens = self.all
        need(1 <= length <= len(tokens))
        start = min(len(self.processed), length - 1)
        self.processed, self.window, self.later = tokens[:start], tokens[start:length], []
        gone = len(tokens) - length
        self.pending = self.pending[: max(0, len(self.pending) - gone)]
        self.prompt, self.offset, self.chunked = min(self.prompt, length), 0, False


def lend(tokens, model, n):
    """Lend room and take it back; in between, the tokens equal the model's."""
    end, length = tokens._end, len(tokens)
    tokens.lend(n)
    everything, active = model.lend(n)
    assert (tokens.all.tolist(), tokens.active.tolist()) == (everything, active)
    assert tokens.ids().tolist() == everything
    if n > 0:
        tokens.all[-n:] = 7  # written by the borrower
    tokens.take_back(end, length)


def check_buffer(tokens, model):
    everything = model.all
    assert tokens.all.tolist() == everything
    assert tokens.active.tolist() == model.active
    assert tokens.prompt.tolist() == everything[: model.prompt]
    assert tokens.generated.tolist() == everything[model.prompt :]
    assert (len(tokens), tokens[-1], tokens.is_chunked) == (
        len(everything),
        everything[-1],
        model.chunked,
    )
    assert tokens.processed_length == len(model.processed)
    assert tokens.active_length == len(model.window) - model.offset
    assert tokens.current_position == tokens.processed_length + tokens.active_length
    assert tokens.has_outstanding_generated_tokens == bool(model.pending)
    window = tokens.completion_range
    assert tokens.all[window.start : window.end].tolist() == model.pending


def buffer_step(rng, tokens, model):
    """Do a random operation on both; arguments are small, so that all refusals occur."""
    n, token = rng.randint(-2, 6), rng.randrange(1000)
    mark, delete = rng.random() < 0.7, rng.random() < 0.5
    kept = len(model.all) + n
    operations = [
        (6, lambda: tokens.advance_with_token(token, mark), lambda: model.append(token, mark)),
        (1, lambda: tokens.apply_processing_offset(n), lambda: model.apply_offset(n)),
        (1, lambda: tokens.rewind_processing(n), lambda: model.rewind(n)),
        (1, lambda: tokens.skip_processing(n), lambda: model.skip(n)),
        (2, lambda: tokens.chunk(n), lambda: model.chunk(n)),
        (2, tokens.advance_chunk, model.advance_chunk),
        (1, lambda: tokens.overwrite_last_token(token), lambda: model.overwrite(token)),
        (1, tokens.consume_recently_generated_tokens, model.consume),
        (0.3, lambda: tokens.reset_as_new_prompt(delete), lambda: model.reset(delete)),
        (1, lambda: lend(tokens, model, n), lambda: model.lend(n)),
        (0.5, lambda: tokens.truncate(len(tokens) + n), lambda: model.truncate(kept)),
    ]
    _, real, plain = rng.choices(operations, [weight for weight, _, _ in operations])[0]
    return agree(real, plain)


def drive_buffer(rng, operations):
    done = 0
    while operations > 0:
        start = [rng.randrange(1000) for _ in range(rng.randint(1, 9))]
        tokens = TokenBuffer(np.array(start, np.int64))
        model = BufferModel([], list(start), [], len(start))
        for _ in range(min(operations, 500)):
            done += buffer_step(rng, tokens, model)
            if rng.random() < 0.3:  # before the tokens are read
                assert tokens.ids().tolist() == model.all
            check_buffer(tokens, model)
        operations -= 500
        again = TokenBuffer.from_state(tokens.ids(), tokens.state())
        check_buffer(again, model)
        assert again == tokens
    return done


# ------------------------------------------------------------------ TextContext


class Grammar:
    """A matcher that refuses one token; its tokens must stay equal to those of the context."""

    REFUSED = 55

    def __init__(self, tokens=()):
        self.tokens = list(tokens)

    def consume_token(self, token):
        if token != self.REFUSED:
            self.tokens.append(token)
        return token != self.REFUSED

    def rollback(self, count):
        del self.tokens[len(self.tokens) - count :]


@dataclass
class ContextModel:
    """The prompt, the generated tokens with log-probabilities, and the number delivered."""

    prompt: list[int]
    max_length: int
    eos: set[int]
    sequences: list[list[int]]
    generated: list[int] = field(default_factory=list)
    entries: list[LogProbabilities | None] = field(default_factory=list)
    delivered: int = 0
    status: str = "active"
    initial: bool = True
    chunked: bool = False
    grammar: bool = False

    def accept(self, token):
        need(not self.grammar or token != Grammar.REFUSED)

    def ends(self, generated):
        if generated[-1] in self.eos:
            return True
        return any(
            len(sequence) <= len(generated) and generated[-len(sequence) :] == sequence
            for sequence in self.sequences
        )

    def judge(self, generated):
        if self.ends(generated):
            return "end_of_sequence"
        return "maximum_length" if len(self.prompt + generated) >= self.max_length else None

    def update(self, token, entry=None):
        if self.chunked:
            self.chunked = False
            return
        need(self.generated[-1:] != [FUTURE_TOKEN])
        self.accept(token)
        self.generated.append(token)
        self.entries.append(entry)
        self.status = self.judge(self.generated) or self.status
        self.initial = False

    def future(self):
        need(not self.grammar and self.generated[-1:] != [FUTURE_TOKEN])
        self.update(FUTURE_TOKEN)

    def realize(self, token, entry):
        need(self.generated[-1:] == [FUTURE_TOKEN])
        self.generated[-1] = token
        if entry is not None:
            self.entries[-1] = entry
        if self.ends(self.generated):
            self.status = "end_of_sequence"

    def output(self):
        need(FUTURE_TOKEN not in self.generated[self.delivered :])
        self.delivered = len(self.generated)

    def reset(self):
        if self.generated[-1:] == [FUTURE_TOKEN]:
            self.generated.pop()
            self.entries.pop()
        self.initial, self.chunked = True, False

    def rollback(self, n):
        need(n >= 0 and not self.chunked and len(self.generated) - n >= self.delivered)
        kept = len(self.generated) - n
        self.generated, self.entries = self.generated[:kept], self.entries[:kept]
        if self.status in ("end_of_sequence", "maximum_length"):
            self.status = "active"
            for end in range(1, kept + 1):
                self.status = self.judge(self.generated[:end]) or self.status

    def chunk(self, active):
        need(active > 1 and not self.chunked)
        self.chunked = True


def check_context(ctx, model):
    everything = model.prompt + model.generated
    assert ctx.tokens.all.tolist() == everything
    assert ctx.prompt_tokens.tolist() == model.prompt
    assert ctx.generated_tokens.tolist() == model.generated
    assert (str(ctx.status), ctx.is_initial_prompt) == (model.status, model.initial)
    assert ctx.is_done == (model.status != "active")
    if model.grammar:
        assert ctx.matcher.tokens == model.generated
    left = model.prompt_minimum_end() - ctx.tokens.current_position
    masks = ctx.get_min_token_logit_mask(3)
    assert [len(mask) for mask in masks] == [
        len(model.eos) if k < left and ctx.tokens.current_position + k >= len(model.prompt) else 0
        for k in range(3)
    ]


def take(ctx, model):
    """Drain both and compare the outputs."""
    start = model.delivered
    entries = model.entries[start:]

    def real():
        output = ctx.to_generation_output()
        assert output.tokens == model.generated[start:]
        some = any(entry is not None for entry in entries)
        assert output.log_probabilities == (entries if some else None)
        assert str(output.final_status) == model.status

    return agree(real, model.output)


def context_step(rng, ctx, model):
    token = rng.choices([rng.randrange(50, 60), 9, 7, 8], [12, 1, 3, 3])[0]
    entry = LogProbabilities([-token / 7], [{token: 1.0}]) if rng.random() < 0.3 else None
    n = rng.choice([0, 1, 1, 2, 5, -1])

    def chunk():
        ctx.tokens.chunk(1)

    operations = [
        (8, lambda: ctx.update(token, entry), lambda: model.update(token, entry)),
        (2, lambda: update_batch([ctx], [token]), lambda: model.update(token)),
        (2, lambda: ctx.jump_ahead(token), lambda: model.update(token)),
        (2, ctx.update_with_future_token, model.future),
        (3, lambda: ctx.realize_future_token(token, entry), lambda: model.realize(token, entry)),
        (0.7, ctx.reset, model.reset),
        (1, lambda: ctx.rollback(n), lambda: model.rollback(n)),
        (1, chunk, lambda: model.chunk(ctx.tokens.active_length)),
    ]
    if rng.random() < 0.15:
        return take(ctx, model)
    _, real, plain = rng.choices(operations, [weight for weight, _, _ in operations])[0]
    return agree(real, plain)


class MinimumModel(ContextModel):
    minimum = 3

    def prompt_minimum_end(self):
        return len(self.prompt) + self.minimum


def start_context(rng):
    prompt = [rng.randrange(100) for _ in range(rng.randint(1, 6))]
    sequences = [[7, 8], [8, 8, 7]] if rng.random() < 0.7 else []
    limit = len(prompt) + rng.choice([4, 30, 1000])
    ctx = TextContext(
        max_length=limit,
        tokens=prompt,
        eos_token_ids={9, 5},
        eos_sequences=sequences,
        sampling_params=SamplingParams(min_new_tokens=MinimumModel.minimum),
    )
    model = MinimumModel(prompt, limit, {9, 5}, sequences, grammar=rng.random() < 0.2)
    if model.grammar:
        ctx.set_matcher(Grammar())
    return ctx, model


ENCODE = msgpack_numpy_encoder().frames
DECODE = msgpack_numpy_decoder(TextContext | PixelContext, copy=False)
ENCODE_MAP, DECODE_MAP = msgpack_numpy_encoder(), msgpack_numpy_decoder(TextContext | PixelContext)


def travelled(rng, ctx):
    """Encode and decode the context in one of the two forms."""
    if rng.random() < 0.5:
        return DECODE([bytes(frame) for frame in ENCODE(ctx)])
    return DECODE_MAP(ENCODE_MAP(ctx))


def drive(rng, operations, start, step, check):
    """Do 100 random operations on each new context, sometimes encoding and decoding it."""
    done = 0
    while operations > 0:
        ctx, model = start(rng)
        for at in range(min(operations, 100)):
            done += step(rng, ctx, model)
            check(ctx, model)
            if at % 20 == 19:
                ctx = travelled(rng, ctx)
                if getattr(model, "grammar", False):  # rebuilt from the tokens
                    ctx.set_matcher(Grammar(ctx.generated_tokens.tolist()))
        operations -= 100
    return done


def drive_text(rng, operations):
    return drive(rng, operations, start_context, context_step, check_context)


# ------------------------------------------------------------------ TextAndVisionContext


@dataclass
class VisionModel(ContextModel):
    """Which tokens are processed and where the step ends, and the images as ranges."""

    minimum = 3
    images: list[tuple[int, int]] = field(default_factory=list)
    processed: int = 0
    end: int = 0

    def prompt_minimum_end(self):
        return len(self.prompt) + self.minimum

    def inside(self, at):
        return any(start < at < end for start, end in self.images)

    def chunk_at(self, n):
        need(n >= 1)
        length = len(self.prompt + self.generated) if not self.chunked else self.end
        at = min(self.processed + n, length)
        while at > self.processed and self.inside(at):
            at -= 1
        while at <= self.processed or self.inside(at):
            at += 1
        self.chunked = self.chunked or at < length
        self.end = at

    def update(self, token, entry=None):
        before = self.chunked
        super().update(token, entry)
        self.processed = self.end
        self.end = len(self.prompt + self.generated)
        assert before or self.end > 0

    def jump(self, token):
        processed, chunked = self.processed, self.chunked
        self.update(token)
        if not chunked:
            self.processed = processed

    def reset(self):
        super().reset()
        self.processed, self.end = 0, len(self.prompt + self.generated)

    def rollback(self, n):
        super().rollback(n)
        self.end = len(self.prompt + self.generated)
        self.processed = min(self.processed, self.end - 1)
        while self.inside(self.processed):
            self.processed -= 1


def start_vision(rng):
    prompt, images = [], []
    for _ in range(rng.randint(1, 3)):
        prompt += [rng.randrange(100) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.7:
            images.append((len(prompt), len(prompt) + rng.randint(1, 5)))
            prompt += [200] * (images[-1][1] - images[-1][0])
    limit = len(prompt) + rng.choice([4, 1000])
    ctx = TextAndVisionContext(
        max_length=limit,
        tokens=prompt,
        vision_token_ids=[200],
        images=[
            ImageMetadata(start_idx=a, end_idx=b, pixel_values=np.full(3, a)) for a, b in images
        ],
        eos_token_ids={9, 5},
        eos_sequences=[[7, 8]],
        sampling_params=SamplingParams(min_new_tokens=3),
    )
    model = VisionModel(prompt, limit, {9, 5}, [[7, 8]], images=images, end=len(prompt))
    return ctx, model


def vision_step(rng, ctx, model):
    token = rng.choices([rng.randrange(50, 60), 9, 7, 8], [12, 1, 3, 3])[0]
    entry = LogProbabilities([-token / 7], [{}]) if rng.random() < 0.3 else None
    n = rng.choice([0, 1, 1, 2, 5, -1])
    operations = [
        (6, lambda: ctx.update(token, entry), lambda: model.update(token, entry)),
        (2, lambda: ctx.jump_ahead(token), lambda: model.jump(token)),
        (1, ctx.update_with_future_token, model.future),
        (2, lambda: ctx.realize_future_token(token, entry), lambda: model.realize(token, entry)),
        (2, ctx.reset, model.reset),
        (1, lambda: ctx.rollback(n), lambda: model.rollback(n)),
        (4, lambda: ctx.chunk_at_image(n), lambda: model.chunk_at(n)),
    ]
    if rng.random() < 0.1:
        return take(ctx, model)
    _, real, plain = rng.choices(operations, [weight for weight, _, _ in operations])[0]
    return agree(real, plain)


def check_vision(ctx, model):
    check_context(ctx, model)
    assert (ctx.tokens.processed_length, ctx.tokens.current_position) == (
        model.processed,
        model.end,
    )
    waiting = [end for _, end in model.images if end > model.processed]
    assert [image.end_idx for image in ctx.next_images] == waiting
    assert ctx.needs_vision_encoding == bool(waiting)
    assert not model.inside(ctx.tokens.processed_length)
    assert not model.inside(ctx.tokens.current_position)


def drive_vision(rng, operations):
    return drive(rng, operations, start_vision, vision_step, check_vision)


# ------------------------------------------------------------------ TTSContext, PixelContext


@dataclass
class SpeechModel(MinimumModel):
    speech: list[int] = field(default_factory=list)
    decoded: int = 0
    blocks: int = 0
    audio: str = "active"

    def speak(self, tokens):
        self.speech += tokens
        self.blocks += 1


def start_speech(rng):
    ctx, model = start_context(rng)
    ctx = TTSContext(
        max_length=ctx.max_length,
        tokens=model.prompt,
        eos_token_ids=model.eos,
        eos_sequences=model.sequences,
        sampling_params=ctx.sampling_params,
    )
    return ctx, SpeechModel(model.prompt, model.max_length, model.eos, model.sequences)


def speech_step(rng, ctx, model):
    kind = rng.random()
    if kind < 0.3:
        tokens = [rng.randrange(1, 5000) for _ in range(rng.choice([0, 1, 3, 127, 128, 129]))]
        ctx.update_speech_tokens(np.array(tokens, np.int32))
        model.speak(tokens)
    elif kind < 0.5:
        model.decoded = rng.randint(0, len(model.speech))
        ctx.set_decoded_index(model.decoded)
    elif kind < 0.6:
        model.audio = rng.choice(["active", "cancelled"])
        ctx.update_audio_generation_status(GenerationStatus(model.audio))
    else:
        return context_step(rng, ctx, model)
    return True


def check_speech(ctx, model):
    assert ctx.is_done == (model.audio != "active")
    model_done, ctx_done = model.status, str(ctx.status)
    assert model_done == ctx_done
    assert ctx.tokens.all.tolist() == model.prompt + model.generated
    assert (ctx.speech_tokens.tolist(), ctx.block_counter) == (model.speech, model.blocks)
    for chunk, buffer in ((None, None), (5, 3), (200, None)):
        new = model.speech[model.decoded :][: len(model.speech) if chunk is None else chunk]
        old = model.speech[: model.decoded][-buffer:] if buffer else []
        tokens, again = ctx.next_speech_tokens(chunk, buffer)
        assert (tokens.tolist(), again) == (old + new, len(old))
    assert ctx.has_undecoded_speech_tokens(2) == bool(model.speech[model.decoded : -2])


def drive_speech(rng, operations):
    return drive(rng, operations, start_speech, speech_step, check_speech)


@dataclass
class PixelModel:
    latents: list[int] = field(default_factory=list)
    status: str = "active"


def start_pixel(rng):
    return PixelContext(tokens=[1, 2]), PixelModel()


def pixel_step(rng, ctx, model):
    if rng.random() < 0.6:
        model.latents = [rng.randrange(256) for _ in range(rng.randrange(1, 5))]
        ctx.update(np.array([model.latents], np.uint8))
    elif rng.random() < 0.5:
        model.status = rng.choice(["active", "cancelled", "end_of_sequence"])
        ctx.update_status(GenerationStatus(model.status))
    else:
        model.status = "active"
        ctx.reset()
    return True


def check_pixel(ctx, model):
    assert (ctx.latents.reshape(-1).tolist(), str(ctx.status)) == (model.latents, model.status)
    assert ctx.is_done == (model.status != "active")


def drive_pixel(rng, operations):
    return drive(rng, operations, start_pixel, pixel_step, check_pixel)


# ------------------------------------------------------------------ all of them

DRIVERS = {
    drive_buffer: 0.4,
    drive_text: 0.25,
    drive_vision: 0.25,
    drive_speech: 0.08,
    drive_pixel: 0.02,
}
"""Which part of all operations each takes."""
SEEDS = 2


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.__name__)
def test_follows_the_model(request, driver, seed):
    operations = (
        int(request.config.getoption("--operations", default=100_000) * DRIVERS[driver]) // SEEDS
    )
    assert driver(random.Random(seed), operations) > operations // 4


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.__name__)
def test_follows_the_model_in_short_runs_that_shrink(driver):
    @settings(max_examples=30, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False), st.integers(1, 40))
    def check(rng, operations):
        driver(rng, operations)

    check()


@pytest.mark.parametrize("seed", range(2))
def test_a_rebuilt_context_continues_like_the_one_that_went_on(seed):
    """Handoff and replay: only prompt and emitted tokens decide the later state."""
    rng = random.Random(seed)
    for _ in range(200):
        ctx, _ = start_context(rng)
        for _ in range(rng.randrange(12)):
            if ctx.is_done:
                break
            ctx.update(rng.choice([7, 8, 50, 51]))
        emitted = ctx.generated_tokens.tolist()
        ctx.to_generation_output()
        again = context_to_run(request_map(ctx), ctx.request_id, emitted)
        assert (again.status, again.prompt_length) == (ctx.status, ctx.prompt_length)
        assert again.tokens.all.tolist() == ctx.tokens.all.tolist()
        while not ctx.is_done and len(ctx.tokens) < 60:
            token = rng.choice([7, 8, 9, 50, 51])
            ctx.update(token)
            again.update(token)
            assert again.to_generation_output() == ctx.to_generation_output()
