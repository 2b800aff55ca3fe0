"""Codec benchmark: envelopes compared with msgpack maps, pickle 5, msgpack-numpy and a copy.

Each number is microseconds per call, the best of several rounds. The calls are measured in turn, so
that a busy machine slows all columns equally. msgpack-numpy is measured only if it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pickle
import random
import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import zmq

from baton.proto import (
    TextContext,
    TokenBuffer,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
    update_batch,
)
from baton.proto.contexts.tokens import wrap_tokens
from baton.proto.errors import ProtocolError
from baton.proto.wire.envelope import (
    EnvelopeDecoder,
    EnvelopeEncoder,
    decode_kv_header,
    encode_kv_header,
)
from baton.proto.wire.messages import (
    ClientToRouter,
    GrantRef,
    KVFrame,
    Submit,
    TokenRun,
    Tokens,
    WorkerToRouter,
)
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens, WireVisionContext

from .scratch import scratch_folder

Call = Callable[[], object]

_KV_HEADER = KVFrame(
    grant=GrantRef(1 << 60, 3, 9),
    index=4,
    layer_start=0,
    layer_count=6,
    block_start=0,
    block_count=16,
    nbytes=1 << 20,
    checksum=(1 << 63) + 5,
)


def measure(calls: dict[str, Call], rounds: int = 7, seconds: float = 0.02) -> dict[str, float]:
    """Return the best microseconds of each call; the calls are measured in turn."""
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
    """Return a typical request with a prompt of ``tokens`` tokens."""
    context = WireContext(
        tokens=WireTokens(np.arange(tokens, dtype=np.int32) % 32000),
        max_length=tokens + 256,
        sampling=WireSampling(temperature=0.8, top_p=0.9, max_new_tokens=256, seed=12345),
        model_name="demo",
        eos_token_ids=[2],
    )
    return Submit(request_id="0123456789abcdef0123456789abcdef", context=context)


def tokens_message(runs: int) -> Tokens:
    """Return the message of one step of a worker with ``runs`` requests."""
    return Tokens(
        runs=[
            TokenRun(request=bytes([i]) * 16, attempt=1, position=1000 + i, tokens=[20000 + i])
            for i in range(runs)
        ]
    )


def _print(title: str, figures: dict[str, float], more: str = "") -> None:
    shown = "".join(f"  {name} {value:8.2f}" for name, value in figures.items())
    print(f"{title:22s}{shown}{more}")


def _context_rows(encoder: EnvelopeEncoder) -> None:
    decode = EnvelopeDecoder[ClientToRouter](ClientToRouter).decode
    map_encode, map_decode = msgpack_numpy_encoder(), msgpack_numpy_decoder(dict[str, np.ndarray])
    for count in (32, 1024, 32768):
        message = submit_message(count)
        frames = encoder.encode([message])
        maps = {"tokens": message.context.tokens.array}
        as_map, pickled = map_encode(maps), pickle.dumps(maps, 5)
        figures = measure(
            {
                "encode": partial(encoder.encode, [message]),
                "decode": partial(decode, frames),
                "map enc": partial(map_encode, maps),
                "map dec": partial(map_decode, as_map),
                "pickle enc": partial(pickle.dumps, maps, 5),
                "pickle dec": partial(pickle.loads, pickled),
                "copy": message.context.tokens.array.copy,
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
    frame = encode_kv_header(_KV_HEADER)
    figures = measure(
        {
            "encode": partial(encode_kv_header, _KV_HEADER),
            "decode": partial(decode_kv_header, frame),
        }
    )
    _print("KV frame header", figures)


def _growing(sequences: list[list[int]]) -> TextContext:
    return TextContext(
        max_length=1 << 40,
        tokens=TokenBuffer(np.array([1, 2, 3])),
        eos_token_ids={2},
        eos_sequences=sequences,
    )


def _update_row() -> None:
    batch, tokens = [_growing([]) for _ in range(64)], [7] * 64
    stops = [[1, 2, 3], [4, 5, 7]]
    delivered = _growing([])

    def update_and_output() -> None:
        delivered.update(7)
        delivered.to_generation_output()

    figures = measure(
        {
            "update": partial(_growing([]).update, 7),
            "and its output": update_and_output,
            "2 stop sequences": partial(_growing(stops).update, 7),
            "per request of 64": partial(update_batch, batch, tokens),
        }
    )
    figures["per request of 64"] /= 64
    _print("context", figures)


def _peer(value: object) -> dict[str, Call]:
    """Return the calls of msgpack-numpy for the same value; empty if it is not installed."""
    try:
        peer = importlib.import_module("msgpack_numpy")
    except ImportError:
        return {}
    packed = peer.packb(value)
    return {
        "msgpack-numpy enc": partial(peer.packb, value),
        "msgpack-numpy dec": partial(peer.unpackb, packed),
    }


def _long_context(ids: np.ndarray) -> TextContext:
    return TextContext(
        max_length=1 << 40, tokens=TokenBuffer(ids), eos_token_ids={2}, model_name="demo"
    )


def _snapshot_rows() -> None:
    """Measure a whole context of 32k tokens in the middle of its generation.

    Cases: the context was sent before; it gets one more token before each send, and the update
    counts; it is sent for the first time. The first send is measured for a context made from an
    array, which is copied and narrowed to int32 when the context is made (``make``), and for a
    context around its buffer's own int64 array, which is narrowed when it is sent. In the last
    case other code holds the buffer's array, so every send checks all token ids. Peers: the map
    and pickle 5 of the context, and an int32 array of its tokens.
    """
    ids = np.arange(32768, dtype=np.int64) % 32000
    context, growing, shared = (_long_context(array) for array in (ids.copy(), ids.copy(), ids))
    context.update(7)

    def make() -> TextContext:
        return TextContext(max_length=1 << 40, tokens=wrap_tokens(ids), eos_token_ids={2})

    def update_and_encode() -> None:
        growing.update(7)
        encode(growing)

    encode = msgpack_numpy_encoder().frames
    decode = msgpack_numpy_decoder(TextContext, copy=False)
    as_map, from_map = msgpack_numpy_encoder(), msgpack_numpy_decoder(TextContext, copy=False)
    frames, message, pickled = encode(context), as_map(context), pickle.dumps(context, 5)
    plain = {"tokens": ids.astype(np.int32)}
    figures = measure(
        {
            "sent before": partial(encode, context),
            "a token more": update_and_encode,
            "array held by others": partial(encode, shared),
            "decode": partial(decode, frames),
            "make": make,
            "map enc": partial(as_map, context),
            "map dec": partial(from_map, message),
            "pickle enc": partial(pickle.dumps, context, 5),
            "pickle dec": partial(pickle.loads, pickled),
            **_peer(plain),
            "copy": plain["tokens"].copy,
        }
    )
    figures["first send"] = _once(make, encode)
    figures["first send, own array"] = _once(lambda: _long_context(ids.copy()), encode)
    print("whole context, 32k tokens")
    for case in _CASES:
        both = figures[case] + figures["decode"]
        bar = f"{both:8.2f}  (bar {_CONTEXT_BAR:.0f}{', missed' if both > _CONTEXT_BAR else ''})"
        print(f"  {case:22s}  encode {figures.pop(case):8.2f}  encode + decode {bar}")
    _print("  decode, and peers", figures)
    size = sum(memoryview(frame).nbytes for frame in frames)
    print(
        f"{'':22s}  wire {size} bytes, {size / (4 * len(context.tokens)):.4f} of an int32 payload"
    )


_CASES = (
    "sent before",
    "a token more",
    "first send",
    "first send, own array",
    "array held by others",
)
_CONTEXT_BAR, _ROUND_TRIP_BAR = 15.0, 90.0


def _once(make: Callable[[], TextContext], send: Callable[[TextContext], object]) -> float:
    """Return the best microseconds of a call that happens once per context."""
    best = float("inf")
    for _ in range(300):
        context = make()
        start = time.perf_counter()
        send(context)
        best = min(best, (time.perf_counter() - start) * 1e6)
    return best


def _array_rows() -> None:
    """Measure a KV array of 16 MiB as a data message, as part of a context, and as one buffer."""
    array = np.ones((16, 2, 8, 64, 256), np.float32)
    header = msgspec.structs.replace(_KV_HEADER, nbytes=array.nbytes)

    def send() -> list[bytes | memoryview]:
        return [encode_kv_header(header), array.data.cast("B")]

    def receive(sent: list[bytes | memoryview]) -> np.ndarray:
        decode_kv_header(sent[0])
        return np.frombuffer(sent[1], np.float32).reshape(array.shape)

    _print("KV frame of 16 MiB", measure({"encode": send, "decode": partial(receive, send())}))
    message = Submit(
        request_id="r",
        context=WireVisionContext(
            tokens=WireTokens(np.arange(8, dtype=np.int32)),
            max_length=9,
            extra_model_args={"kv": array},
        ),
    )
    encoder = EnvelopeEncoder()
    decode = EnvelopeDecoder[ClientToRouter](ClientToRouter).decode
    frames = encoder.encode([message])
    one, view = msgpack_numpy_encoder(), msgpack_numpy_decoder(np.ndarray, copy=False)
    buffer, target = one(array), np.empty_like(array)
    figures = measure(
        {
            "encode": partial(encoder.encode, [message]),
            "decode": partial(decode, frames),
            "one buffer enc": partial(one, array),
            "one buffer dec": partial(view, buffer),
            "pickle enc": partial(pickle.dumps, array, 5),
            **_peer(array),
            "fresh copy": array.copy,
            "memcpy": partial(np.copyto, target, array),
        }
    )
    _print("array of 16 MiB", figures)


def _round_trip_row(title: str) -> None:
    """Measure a request of 32k tokens over ipc to a ROUTER and back, both ends in one thread.

    The peer is the same number of raw bytes. ZeroMQ's sockets have their own threads, so the number
    of cores matters.
    """
    message = submit_message(32768)
    encoder = EnvelopeEncoder()
    decode = EnvelopeDecoder[ClientToRouter](ClientToRouter).decode
    payload = bytes(4 * 32768)
    with scratch_folder() as folder, zmq.Context() as sockets:
        router, dealer = sockets.socket(zmq.ROUTER), sockets.socket(zmq.DEALER)
        with router, dealer:
            router.bind(f"ipc://{folder}/s")
            dealer.connect(f"ipc://{folder}/s")

            def coded() -> None:
                dealer.send_multipart(encoder.encode([message]))
                peer, *frames = router.recv_multipart(copy=False)
                back = decode([frame.buffer for frame in frames])
                router.send_multipart([peer, *encoder.encode(back)])
                decode([frame.buffer for frame in dealer.recv_multipart(copy=False)])

            def raw() -> None:
                dealer.send(payload)
                router.send_multipart(router.recv_multipart())
                dealer.recv_multipart()

            figures = measure({"envelopes": coded, "raw bytes": raw}, rounds=30)
    missed = ", missed" if figures["envelopes"] > _ROUND_TRIP_BAR else ""
    _print(title, figures, f"  (bar {_ROUND_TRIP_BAR:.0f}{missed})")


def _round_trip_rows() -> None:
    """Measure on all cores, then on one, where no hop has to wake an idle core."""
    cores = os.sched_getaffinity(0)
    _round_trip_row(f"round trip, 32k, {len(cores)} cores")
    try:
        os.sched_setaffinity(0, {max(cores)})
        _round_trip_row("the same, one core")
    finally:
        os.sched_setaffinity(0, cores)


def _hostile_row() -> None:
    """Measure the CPU time of decoders for messages with a few wrong bytes."""
    rng = random.Random(5)
    context = _long_context(np.arange(300))
    context.update(7)
    submit, step = submit_message(300), tokens_message(64)
    encode, as_map = EnvelopeEncoder().encode, msgpack_numpy_encoder()
    from_client = EnvelopeDecoder[ClientToRouter](ClientToRouter).decode
    from_worker = EnvelopeDecoder[WorkerToRouter](WorkerToRouter).decode
    decoders: list[tuple[Callable[[bytes], object], bytes]] = [
        (lambda data: from_client([data]), bytes(encode([submit])[0])),
        (lambda data: from_worker([data]), bytes(encode([step])[0])),
        (msgpack_numpy_decoder(TextContext), as_map(context)),
        (decode_kv_header, encode_kv_header(_KV_HEADER)),
    ]
    milliseconds = []
    for _ in range(4000):
        for decode, data in decoders:
            changed = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                changed[rng.randrange(3, len(changed))] = rng.randrange(256)
            start = time.process_time()
            with contextlib.suppress(ProtocolError):
                decode(bytes(changed))
            milliseconds.append((time.process_time() - start) * 1e3)
    milliseconds.sort()
    shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
    figures = {name: milliseconds[int(share * len(milliseconds))] for name, share in shares.items()}
    _print("hostile bytes, ms CPU", figures)


def main() -> None:
    """Print the tables."""
    argparse.ArgumentParser(prog="codec", description=__doc__).parse_args()
    encoder = EnvelopeEncoder()
    print("microseconds per call")
    _context_rows(encoder)
    _snapshot_rows()
    _array_rows()
    _token_rows(encoder)
    _kv_row()
    _update_row()
    _round_trip_rows()
    _hostile_row()


if __name__ == "__main__":
    main()
