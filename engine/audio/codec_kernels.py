"""Which kernels decode the audio of a model, and their name in the model's numerics.

Invariant: the codec runs where the model runs. So all workers whose numerics are equal make the
same samples, and a prefill worker, which has no codec, can name the arithmetic of the samples.
"""

from __future__ import annotations

from baton.proto.errors import InternalError

from ..kernels.audio import AudioBackend
from ..kernels.backend import Backend
from ..kernels.load import load_backend


def codec_kernels(backend: Backend) -> AudioBackend:
    """Return the kernels of the codec beside a model on ``backend``, with separate scratch memory.

    On a GPU they run on a new stream of lower priority than the model's steps.
    """
    if backend.on_host:
        return load_backend(backend.name, threads=backend.threads)
    from ..kernels.cuda.audio import CudaAudio
    from ..kernels.cuda.backend import CudaBackend

    if not isinstance(backend, CudaBackend):
        raise InternalError(f"no kernels decode audio on {backend.name}")
    return CudaAudio(backend.device)


def codec_numerics(backend: Backend) -> str:
    """Return what the numerics of a model on ``backend`` lack to name the codec's arithmetic.

    "" on the host, where codec and model have the same kernels. On a GPU the model's numerics
    already name the target, the compiler and cuBLAS.
    """
    if backend.on_host:
        return ""
    from ..kernels.cuda.audio import REVISION

    return f"audio{REVISION}-f32"
