"""The other process of test_crossing: decodes every context, encodes it again and sends it back."""

import sys

import zmq

from baton.proto import (
    PixelContext,
    TextContext,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)


def main(endpoint):
    encode = msgpack_numpy_encoder().frames
    decode = msgpack_numpy_decoder(TextContext | PixelContext, copy=False)
    encode_map = msgpack_numpy_encoder(use_shared_memory=True, shared_memory_threshold=4000)
    decode_map = msgpack_numpy_decoder(TextContext | PixelContext, copy=False)
    socket = zmq.Context().socket(zmq.REP)
    socket.connect(endpoint)
    while (frames := socket.recv_multipart()) != [b"end"]:
        if frames[0] == b"map":
            context = decode_map(frames[1])
            reply = [encode_map(context)]
        else:
            context = decode(frames)
            reply = encode(context)
        socket.send_multipart([type(context).__name__.encode(), *reply])
    socket.send(b"bye")


if __name__ == "__main__":
    main(sys.argv[1])
