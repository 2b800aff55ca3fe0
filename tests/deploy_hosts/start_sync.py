"""The gRPC call that ends a process of Ray: `StartSync` without metadata, as raw HTTP/2.

Arguments: HOST PORT. Prints the response, so that a test can check that the server refused the call
before it read the call. Uses only the standard library, because gRPC may not be installed.
"""

import socket
import sys

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, END_HEADERS = 4, 1, 4
FIELDS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/ray.rpc.syncer.RaySyncer/StartSync",
    ":authority": "ray",
    "content-type": "application/grpc",
    "te": "trailers",
}


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def fields() -> bytes:
    """Encode header fields literally, without index or compression."""
    text = b""
    for name, value in FIELDS.items():
        text += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return text


def main(host: str, port: str) -> None:
    with socket.create_connection((host, int(port)), 5) as connection:
        connection.settimeout(5)
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        connection.sendall(frame(HEADERS, END_HEADERS, 1, fields()))
        received = b""
        try:
            while more := connection.recv(4096):
                received += more
        except OSError as problem:
            print(type(problem).__name__)
    print(f"received {len(received)} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
