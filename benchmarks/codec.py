"""Codec: envelopes beside arrays as maps, pickle 5 and a plain copy of the same bytes.

Microseconds per call, best of several rounds taken in turn, so that a busy machine slows
all columns alike.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from ..proto import TextContext, TokenBuffer, msgpack_numpy_decoder, msgpack_numpy_encoder
from ..proto.codec import EnvelopeDecoder, EnvelopeEncoder, decode_kv_header, encode_kv_header
from ..proto.messages import (
    ClientToRouter,
    GrantRef,
    KVFrame,
    Submit,
    TokenRun,
    Tokens,
    WorkerToRouter,
)
from ..proto.wire import WireContext, WireSampling

Call = Callable[[], object]


def measure(calls: dict[str, Call], rounds: int = 7, seconds: float = 0.02) -> dict[str, float]:
    """Best microseconds of each call, the calls measured in turn."""
    best = dict.fromkeys(calls, float("inf"))
    counts = {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        counts[name] = max(1, int(seconds / max(time.perf_counter() - start, 1e-7)))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / counts[name] * 1e6)
    return best


def submit_message(tokens: int) -> Submit:
    """A typical request with a prompt of ``tokens`` tokens."""
    context = WireContext(
        tokens=np.arange(tokens, dtype=np.int32) % 32000,
        max_length=tokens + 256,
        sampling=WireSampling(temperature=0.8, top_p=0.9, max_new_tokens=256, seed=12345),
        model_name="demo",
        eos_token_ids=[2],
    )
    return Submit(request_id="0123456789abcdef0123456789abcdef", context=context)


def tokens_message(runs: int) -> Tokens:
    """One step of a worker with ``runs`` requests."""
    return Tokens(
        runs=[
            TokenRun(request=bytes([i]) * 16, attempt=1, position=1000 + i, tokens=[20000 + i])
            for i in range(runs)
        ]
    )


def _print(title: str, figures: dict[str, float]) -> None:
    print(f"{title:22s}" + "".join(f"  {name} {value:8.2f}" for name, value in figures.items()))


def _context_rows(encoder: EnvelopeEncoder) -> None:
    decode = EnvelopeDecoder[ClientToRouter](ClientToRouter).decode
    map_encode, map_decode = msgpack_numpy_encoder(), msgpack_numpy_decoder(dict[str, np.ndarray])
    for count in (32, 1024, 32768):
        message = submit_message(count)
        frames = encoder.encode([message])
        maps = {"tokens": message.context.tokens}
        as_map, pickled = map_encode(maps), pickle.dumps(maps, 5)
        figures = measure(
            {
                "encode": partial(encoder.encode, [message]),
                "decode": partial(decode, frames),
                "map enc": partial(map_encode, maps),
                "map dec": partial(map_decode, as_map),
                "pickle enc": partial(pickle.dumps, maps, 5),
                "pickle dec": partial(pickle.loads, pickled),
                "copy": message.context.tokens.copy,
            }
        )
        _print(f"submit, {count} tokens", figures)


def _token_rows(encoder: EnvelopeEncoder) -> None:
    decode = EnvelopeDecoder[WorkerToRouter](WorkerToRouter).decode
    for runs in (1, 16, 256):
        message = tokens_message(runs)
        frames = encoder.encode([message])
        plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        packed = msgspec.msgpack.encode(plain)
        pickled = pickle.dumps(plain, 5)
        figures = measure(
            {
                "encode": partial(encoder.encode, [message]),
                "decode": partial(decode, frames),
                "map enc": partial(msgspec.msgpack.encode, plain),
                "map dec": partial(msgspec.msgpack.decode, packed),
                "pickle enc": partial(pickle.dumps, plain, 5),
                "pickle dec": partial(pickle.loads, pickled),
            }
        )
        _print(f"tokens, {runs} runs", figures)


def _kv_row() -> None:
    header = KVFrame(
        grant=GrantRef(1 << 60, 3, 9),
        index=4,
        layer_start=0,
        layer_count=6,
        block_start=0,
        block_count=16,
        nbytes=1 << 20,
        checksum=(1 << 63) + 5,
    )
    frame = encode_kv_header(header)
    figures = measure(
        {"encode": partial(encode_kv_header, header), "decode": partial(decode_kv_header, frame)}
    )
    _print("KV frame header", figures)


def _update_row() -> None:
    def grow(sequences: list[list[int]]) -> Call:
        context = TextContext(
            max_length=1 << 40,
            tokens=TokenBuffer(np.array([1, 2, 3])),
            eos_token_ids={2},
            eos_sequences=sequences,
        )
        return partial(context.update, 7)

    figures = measure({"update": grow([]), "2 stop sequences": grow([[1, 2, 3], [4, 5, 7]])})
    _print("context", figures)


def main() -> None:
    """Print the tables."""
    encoder = EnvelopeEncoder()
    print("microseconds per call")
    _context_rows(encoder)
    _token_rows(encoder)
    _kv_row()
    _update_row()


if __name__ == "__main__":
    main()
