"""The helper process that decodes images: ``... MEMORY_BYTES CPU_SECONDS``.

A request is the longest side, the kind of settings and the settings as JSON, a newline, and the
encoded image. The answer is JSON, a newline, and the pixels: ``{"size": [height, width], "grid":
[1, rows, columns]}``, or ``{"error": message}`` without pixels.
"""

from __future__ import annotations

import gc
import json
import sys

if __name__ == "__main__":
    gc.disable()  # until baton.runtime.process.garbage.end_of_imports

from baton.proto.errors import InputError
from baton.runtime.process.helper import limit_process, serve

from .decode import open_image, pillow, resized_pixels
from .settings import ImageSettings
from .tiles import TileSettings

KINDS = {kind.__name__: kind for kind in (ImageSettings, TileSettings)}


def answer(request: bytes) -> bytes:
    """Decode one image."""
    head, _, content = request.partition(b"\n")
    max_side, kind, *fields = json.loads(head)
    try:
        height, width, grid, pixels = resized_pixels(
            open_image(content), KINDS[kind](*fields), max_side
        )
    except InputError as error:
        return json.dumps({"error": str(error)}).encode() + b"\n"
    except MemoryError:
        return json.dumps({"error": "the image needs too much memory"}).encode() + b"\n"
    return json.dumps({"size": [height, width], "grid": grid}).encode() + b"\n" + pixels


def main(memory_bytes: str, cpu_seconds: str) -> None:
    """Entry point."""
    pillow().preinit()
    from PIL import MpoImagePlugin, WebPImagePlugin  # noqa: F401 -- before the limits

    limit_process(int(memory_bytes))
    serve(answer, int(cpu_seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
