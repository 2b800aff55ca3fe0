"""Relay TCP connections with a delay: ``python relay.py LISTEN_PORT HOST PORT SECONDS``."""

import asyncio
import contextlib
import sys


async def delayed(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seconds: float):
    """Forward bytes in order, each ``seconds`` after its arrival."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def write() -> None:
        while True:
            due, data = await waiting.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                sink.close()
                return
            sink.write(data)
            await sink.drain()

    writing = asyncio.create_task(write())
    data = b"begin"
    with contextlib.suppress(OSError):
        while data:
            data = await source.read(1 << 16)
            waiting.put_nowait((loop.time() + seconds, data))
    if data:
        waiting.put_nowait((loop.time() + seconds, b""))
    with contextlib.suppress(OSError):
        await writing


async def main(listen: str, host: str, port: str, seconds: str) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            out_reader, out_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            delayed(reader, out_writer, float(seconds)),
            delayed(out_reader, writer, float(seconds)),
        )

    server = await asyncio.start_server(accept, "127.0.0.1", int(listen))
    await server.serve_forever()


asyncio.run(main(*sys.argv[1:]))
