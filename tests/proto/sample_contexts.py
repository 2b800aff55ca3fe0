"""Contexts of every kind, new and partly generated, for tests of all contexts."""

import numpy as np

from baton.proto import (
    GenerationStatus,
    ImageMetadata,
    LogProbabilities,
    PixelContext,
    RequestID,
    SamplingParams,
    TextAndVisionContext,
    TextContext,
    TokenBuffer,
    TTSContext,
)

SCHEMA = '{"type": "object", "properties": {"é": {"type": "integer"}}}'


def entry(value, tokens=1):
    return LogProbabilities(
        [value - i for i in range(tokens)],
        [{7: value, 1 << 20: float("-inf")}] + [{}] * (tokens - 1),
    )


def fields(**more):
    return {
        "max_length": 5000,
        "request_id": RequestID("request-1"),
        "eos_token_ids": {2, 30},
        "eos_sequences": [[5, 6], [7]],
        "log_probabilities": 2,
        "sampling_params": SamplingParams(
            temperature=0.7, top_p=0.9, seed=(1 << 64) - 1, stop=["é"], stop_token_ids=[7]
        ),
        "model_name": "m",
        "json_schema": SCHEMA,
        "target_endpoint": "tcp://[::1]:7000",
        "lora_name": "adapter",
        "cache_salt": "tenant",
    } | more


def text():
    return TextContext(tokens=np.arange(100, 130), **fields())


def vision():
    tokens = np.arange(100, 150)
    tokens[5:15] = tokens[20:30] = 9
    images = [
        ImageMetadata(
            start_idx=start,
            end_idx=start + 10,
            pixel_values=np.full((3, 40, 30), start, np.float32),
            image_hash=image_hash,
        )
        for start, image_hash in ((5, None), (20, -(1 << 63)))
    ]
    return TextAndVisionContext(
        tokens=tokens,
        vision_token_ids=[9, 10],
        images=images,
        extra_model_args={"grid": np.arange(6).reshape(2, 3), "empty": np.zeros((0, 3), bool)},
        **fields(),
    )


def old_vision():
    pixels = np.arange(8000, dtype=np.uint16).reshape(2, 4000)  # the bits of bfloat16
    return TextAndVisionContext(tokens=[1, 2, 3], pixel_values=(pixels,), **fields())


def speech():
    return TTSContext(
        tokens=np.arange(60),
        audio_prompt_tokens=np.arange(7, dtype=np.int32),
        streaming=True,
        **fields(),
    )


def pixel():
    return PixelContext(
        tokens=TokenBuffer(np.arange(1, 20)),
        request_id=RequestID("request-2"),
        mask=np.array([True, False, True]),
        tokens_2=TokenBuffer(np.array([1 << 40, -5])),
        negative_tokens=TokenBuffer(np.arange(5)),
        extra_params={"a": np.zeros((2, 2), np.float16)},
        timesteps=np.linspace(1, 0, 50, dtype=np.float32),
        sigmas=np.linspace(1, 0, 51, dtype=np.float32),
        latents=np.full((16, 128, 128), np.nan, np.float32),
        guidance=np.array([3.5], np.float32),
        height=512,
        true_cfg_scale=1.25,
    )


def under_way(ctx):
    """Make a context with delivered, undelivered and queued parts, an offset and a later chunk."""
    ctx.update(40, entry(-1.0))
    ctx.to_generation_output()
    ctx.update(41, entry(-2.0, tokens=3))
    ctx.reset()
    ctx.update(42)
    ctx.jump_ahead(43)
    ctx.update(44, entry(-3.0))
    ctx.tokens.apply_processing_offset(-1)
    ctx.set_draft_offset(3)
    ctx.assign_to_cache(17)
    ctx._committed_idx = 16
    return ctx


def with_future_token(ctx):
    ctx.update(40, entry(-1.0))
    ctx.update_with_future_token()
    return ctx


def ended(ctx):
    ctx.update(5)
    ctx.update(6)
    assert ctx.status is GenerationStatus.END_OF_SEQUENCE
    return ctx


def chunked(ctx):
    ctx.tokens.chunk(ctx.tokens.active_length // 2 - 10 if len(ctx.tokens) > 40 else 1)
    return ctx


class Grammar:
    """A matcher that accepts all tokens and records them."""

    def __init__(self):
        self.tokens = []

    def consume_token(self, token):
        self.tokens.append(token)
        return True

    def rollback(self, count):
        del self.tokens[len(self.tokens) - count :]


def matched(ctx):
    """Make a context with a matcher, which is not sent: the tokens rebuild it."""
    ctx.set_matcher(Grammar())
    ctx.update(40, entry(-1.0))
    ctx.update(41)
    assert ctx.matcher.tokens == [40, 41]
    return ctx


def grown(ctx):
    """Make a context long enough for a separate frame, partly delivered and rolled back."""
    for token in range(3000):
        ctx.update(1000 + token)
    ctx.to_generation_output()
    for token in range(9):
        ctx.update(8000 + token, entry(-token / 4))
    ctx.rollback(4)
    return ctx


def speaking(ctx):
    under_way(ctx)
    for count in (3, 0, 200):
        ctx.update_speech_tokens(np.arange(count, dtype=np.int32))
    ctx.set_decoded_index(128)
    ctx.buffer_speech_tokens = np.arange(9)
    ctx.audio_buffer = np.linspace(0, 1, 20, dtype=np.float32)
    ctx.prev_samples_beyond_offset = 11
    ctx.update_audio_generation_status(GenerationStatus.CANCELLED)
    return ctx


def painting(ctx):
    ctx.tokens.advance_with_token(7)
    ctx.negative_tokens.chunk(2)
    ctx.update(np.zeros((8, 8, 3), np.uint8))
    ctx.update_status(GenerationStatus.END_OF_SEQUENCE)
    return ctx


CONTEXTS = {
    f"{make.__name__} {how.__name__ if how else 'fresh'}": (
        lambda make=make, how=how: how(make()) if how else make()
    )
    for make, hows in {
        text: (None, under_way, with_future_token, ended, chunked, matched, grown),
        vision: (None, under_way, with_future_token, ended, chunked, matched, grown),
        old_vision: (None, under_way, with_future_token, matched),
        speech: (None, under_way, with_future_token, ended, chunked, matched, speaking),
        pixel: (None, painting),
    }.items()
    for how in hows
}
"""Name to function that makes one."""
