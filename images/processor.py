"""Prepares the images of requests: pixels in the model's size, grid, number of tokens, hash.

Encoded images are decoded in helper processes with limits on time and memory. Whatever a file
contains, :meth:`ImageProcessor.process` returns or raises an InputError within its time limit.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.images import image_hash
from baton.proto.errors import InputError
from baton.proto.value_checks import shown
from baton.runtime.process.helper import HelperProcess
from baton.runtime.small_files import check_file

from .decode import check_size, pillow, resized_pixels
from .settings import Settings, read_settings

Image = Any
"""An encoded image (bytes), the path of one, a Pillow image, or an array; see
:meth:`ImageProcessor.process`."""

MAX_IMAGE_BYTES = 20 << 20
"""Of an encoded image."""
TIMEOUT_S = 10.0
CPU_S = 8
MEMORY_BYTES = 1536 << 20
"""Limit of the helper's address space: an image with the most pixels and transparency fits."""
HELPERS = 2
"""Images of one process that are decoded at a time."""

RECENT_BYTES = 32 << 20
"""Of the pixels of images that were prepared before and are kept."""

_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG")
_MAX_HEAD_BYTES = 4096


@dataclass(slots=True, frozen=True, eq=False, weakref_slot=True)
class ScaledImage:
    """An image that is scaled down before it is prepared: no side is longer than ``max_side``.

    ``content``: bytes of a file. ``max_side``: pixels; 0: the image is not scaled.
    """

    content: bytes
    max_side: int = 0


@dataclass(slots=True, frozen=True, eq=False)
class PreparedImage:
    """``pixels``: uint8 ``[height, width, 3]``. ``grid``: (1, rows, columns) in patches or tiles.

    ``tokens``: number of placeholder tokens; 0 if it depends on the model and not on the image.
    ``content_hash``: of the pixels and their shape.
    """

    pixels: npt.NDArray[np.uint8]
    grid: tuple[int, int, int]
    tokens: int
    content_hash: int


class SharedImage:
    """An image of several requests, which is prepared once. Thread-safe.

    The image is kept until it is prepared, and its pixels as long as this object.
    """

    def __init__(self, image: Image) -> None:
        self._image = image
        self._prepared: PreparedImage | None = None
        self._problem = ""
        self._lock = threading.Lock()

    def prepared(self, prepare: Callable[[Image], PreparedImage]) -> PreparedImage:
        """Return the image that the first call has prepared. Raises its InputError each time."""
        with self._lock:
            if self._prepared is None and not self._problem:
                try:
                    self._prepared = prepare(self._image)
                except InputError as error:
                    self._problem = str(error)
                self._image = None
        if self._prepared is None:
            raise InputError(self._problem)
        return self._prepared


class ImageProcessor:
    """Prepares images for one model. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        *,
        timeout: float = TIMEOUT_S,
        cpu_seconds: int = CPU_S,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self.settings = settings
        self._helpers: queue.LifoQueue[_Helper] = queue.LifoQueue()
        self._all = [_Helper(timeout, str(memory_bytes), str(cpu_seconds)) for _ in range(HELPERS)]
        for helper in self._all:
            self._helpers.put(helper)
        self._recent: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._recent_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], origin: str = "the model") -> ImageProcessor:
        """Make the processor of a model's text files. Raises CheckpointError."""
        return cls(read_settings(files, origin))

    def process(self, image: Image) -> PreparedImage:
        """Return an image in the model's size.

        ``image``: bytes of a PNG, JPEG, WebP, GIF or BMP file, the path of one, a Pillow image, or
        an array, uint8 ``[height, width]`` or ``[height, width, 3 or 4]``, or a ScaledImage or
        SharedImage. Raises InputError for everything else. Without Pillow it raises ConfigError for
        all but RGB arrays in the model's size.
        """
        if isinstance(image, SharedImage):
            return image.prepared(self.process)
        if isinstance(image, str | os.PathLike):
            image = _file_content(Path(image))
        if isinstance(image, ScaledImage):
            return self._decoded(image.content, image.max_side)
        if isinstance(image, bytes | bytearray | memoryview):
            return self._decoded(bytes(image))
        if isinstance(image, np.ndarray):
            if self._is_ready(image):  # also without Pillow
                height, width, _ = image.shape
                return self._prepared(*self.settings.fit(height, width), image.tobytes())
            found = resized_pixels(_from_array(image), self.settings)
        elif isinstance(image, pillow().Image):
            found = resized_pixels(image, self.settings)
        else:
            raise InputError(
                "an image must be bytes, a path, a Pillow image or an array of uint8, "
                f"not {shown(image)}"
            )
        return self._prepared(*found)

    def close(self) -> None:
        """End the helper processes. A later call starts them again."""
        for helper in self._all:
            helper.end()

    def _decoded(self, content: bytes, max_side: int = 0) -> PreparedImage:
        """Return an encoded image. Each turn of a chat sends its images again, so some are kept."""
        if not content:
            raise InputError("the image is empty")
        if len(content) > MAX_IMAGE_BYTES:
            raise InputError(f"the image has {len(content)} bytes, limit {MAX_IMAGE_BYTES}")
        key = blake2b(content, digest_size=32, salt=max_side.to_bytes(8, "little")).digest()
        with self._lock:
            known = self._recent.get(key)
            if known is not None:
                self._recent.move_to_end(key)
                return known
        prepared = self._prepared(*self._decode(content, max_side))
        with self._lock:
            if key not in self._recent:
                self._recent[key] = prepared
                self._recent_bytes += prepared.pixels.nbytes
            while self._recent_bytes > RECENT_BYTES:
                self._recent_bytes -= self._recent.popitem(last=False)[1].pixels.nbytes
        return prepared

    def _is_ready(self, array: npt.NDArray[Any]) -> bool:
        """Return True for RGB pixels in the model's size."""
        rgb = array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3
        size = array.shape[:2]
        return bool(rgb and array.size) and self.settings.fit(*size)[:2] == size

    def _prepared(
        self, height: int, width: int, grid: tuple[int, int, int], pixels: bytes
    ) -> PreparedImage:
        array = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
        tokens = self.settings.tokens(height, width)
        return PreparedImage(array, grid, tokens, image_hash(array))

    def _decode(
        self, content: bytes, max_side: int
    ) -> tuple[int, int, tuple[int, int, int], bytes]:
        pillow()  # an error here is clear, and one in the helper is not
        helper = self._helpers.get()
        try:
            kind = type(self.settings).__name__
            head = json.dumps([max_side, kind, *astuple(self.settings)]).encode() + b"\n"
            answer = helper.ask(head + content, 3 * self.settings.most_pixels + _MAX_HEAD_BYTES)
        finally:
            self._helpers.put(helper)
        about, _, pixels = answer.partition(b"\n")
        found = json.loads(about)
        if "error" in found:
            raise InputError(found["error"])
        height, width = found["size"]
        rows, columns = found["grid"][1:]
        return height, width, (1, rows, columns), pixels


class _Helper:
    """One helper process, started when needed and replaced after a failure."""

    def __init__(self, timeout: float, *arguments: str) -> None:
        self._timeout = timeout
        self._arguments = arguments
        self._process: HelperProcess | None = None
        self._lock = threading.Lock()

    def ask(self, request: bytes, max_answer_bytes: int) -> bytes:
        """Return the answer. Raises InputError for an image that exceeds a limit.

        Raises CapacityError if the process cannot start.
        """
        with self._lock:
            process = self._process
            if process is None or not process.running:
                self._end()
                process = self._process = self._start()
            try:
                return process.exchange(request, self._timeout, max_answer_bytes)
            except TimeoutError:
                self._end()
                raise InputError(f"the image takes more than {self._timeout:g} s") from None
            except (OSError, EOFError):
                self._end()
                raise InputError("the image takes too much processor time or memory") from None
            except BaseException:
                self._end()  # an interrupted exchange leaves a stale answer in the pipe
                raise

    def end(self) -> None:
        """Kill the process, if it runs, also during a request."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _start(self) -> HelperProcess:
        return HelperProcess(
            f"{__package__}.guarded_worker",
            *self._arguments,
            environment={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            own_session=True,  # Ctrl-C in a terminal must reach the parent only
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()


def _file_content(path: Path) -> bytes:
    try:
        check_file(path)
        size = path.stat().st_size
        if size > MAX_IMAGE_BYTES:
            raise InputError(f"{path} has {size} bytes, limit {MAX_IMAGE_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read the image {path}: {reason}") from None


def _from_array(array: npt.NDArray[Any]) -> Any:
    grey = array.ndim == 2
    if array.dtype != np.uint8 or not (grey or (array.ndim == 3 and array.shape[2] in (3, 4))):
        raise InputError(
            "an image array must be uint8 [height, width] or [height, width, 3 or 4], not "
            f"{array.dtype} of shape {array.shape}"
        )
    if not array.size:
        raise InputError(f"an image array of shape {array.shape} is empty")
    check_size(array.shape[1], array.shape[0])
    return pillow().fromarray(np.ascontiguousarray(array))
