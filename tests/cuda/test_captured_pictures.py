"""Denoising steps that are captured as graphs: the latents of steps launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.kernels.cuda.device import CaptureFailed
from baton.engine.kernels.cuda.kept import CapturedWork
from baton.engine.kernels.cuda.pictures import CudaPictures
from baton.engine.models.workspace import Workspace
from baton.engine.pictures import captured
from baton.engine.pictures.captured import CapturedSteps
from baton.engine.pictures.flux import FluxTransformer
from baton.engine.pictures.folder import open_folder
from baton.engine.pictures.pipeline import Denoiser, Drawing
from baton.proto.contexts.pixels import PixelContext
from baton.proto.contexts.tokens import TokenBuffer

from ..engine import test_pictures as flux
from ..engine import test_zimage as zimage
from .host_device import HostDevice, HostGraph

STEPS = 4
FOLDERS = {"flux": flux.FOLDER, "zimage": zimage.FOLDER}
Latents = npt.NDArray[np.float32]


def new_denoiser(device: Any, samples: int = 8, family: str = "flux") -> Denoiser:
    return Denoiser(open_folder(FOLDERS[family]), CudaPictures(device), max_samples=samples)


def steps_of(denoiser: Denoiser) -> CapturedSteps:
    assert isinstance(denoiser._steps, CapturedSteps)
    return denoiser._steps


def space_of(denoiser: Denoiser) -> Workspace:
    assert isinstance(denoiser.transformer, FluxTransformer)
    return denoiser.transformer._space


def begun(denoiser: Denoiser, seed: int, *, side: int = 16, texts: int = 5) -> Drawing:
    """A drawing with a random prompt; a negative prompt, and another guidance, for odd seeds."""
    family, rng = denoiser._folder.family, np.random.default_rng(seed)
    ids, odd = TokenBuffer(np.arange(1, 4)), bool(seed % 2)
    fields: dict[str, Any] = {"guidance_scale": 2.0 + seed}
    shapes: dict[str, tuple[int, ...]] = {"prompt": (texts, family.text_width)}
    if family.pooled_width:  # Flux
        fields["tokens_2"] = ids
        shapes["pooled"] = (family.pooled_width,)
        if odd:
            fields |= {"negative_tokens": ids, "negative_tokens_2": ids, "true_cfg_scale": 2.0}
    elif odd:
        fields["negative_tokens"] = ids
    else:
        fields["guidance_scale"] = 0.0
    unit = denoiser._folder.pixels_per_token
    noise = rng.standard_normal((side * 32 // unit**2, family.token_width)).astype(np.float32)
    context = PixelContext(
        tokens=ids, height=side, width=32, num_inference_steps=STEPS, latents=noise, **fields
    )
    names = [p + name for p in (("", "negative_") if odd else ("",)) for name in shapes]
    state = {
        name: rng.standard_normal(shapes[name.removeprefix("negative_")]).astype(np.float32)
        for name in names
    }
    return denoiser.start(context, state)


def latents_of(denoiser: Denoiser, *, seeds: tuple[int, ...] = (2, 4)) -> list[Latents]:
    """Latents of drawings of one shape that are computed together, then of others that follow."""
    found = []
    for shift in (1, 0, 6):  # the last two are replays of one graph
        drawings = [begun(denoiser, seed + shift) for seed in seeds]
        while not drawings[0].is_done:
            denoiser.step(drawings)
        found += [denoiser._backend.download(drawing.latents) for drawing in drawings]
    return found


def launched(device: HostDevice, family: str) -> list[Latents]:
    """Latents of steps that are launched kernel by kernel."""
    denoiser = new_denoiser(device, family=family)
    steps_of(denoiser)._refused = True
    return latents_of(denoiser)


@pytest.fixture(scope="module")
def expected(host_device: HostDevice) -> list[Latents]:
    return launched(host_device, "flux")


def same(found: list[Latents], expected: list[Latents]) -> bool:
    return all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_latents_are_those_of_single_launches(
    host_device: HostDevice, expected: list[Latents], seed: int | None
) -> None:
    """Also on a device that carries its queue out late."""
    denoiser = new_denoiser(host_device if seed is None else host_device.late(seed))
    assert same(latents_of(denoiser), expected)
    assert steps_of(denoiser).replays > STEPS


def test_latents_of_z_image_are_those_of_single_launches(host_device: HostDevice) -> None:
    expected = launched(host_device, "zimage")
    denoiser = new_denoiser(host_device.late(4), family="zimage")
    assert same(latents_of(denoiser), expected)
    assert steps_of(denoiser).replays > STEPS


@pytest.mark.parametrize("planted", [False, True], ids=["right", "planted"])
def test_calls_of_one_shape_in_a_step_get_noise_of_their_own(
    host_device: HostDevice, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """Single samples are computed by other kernels than several, so they have other bits."""
    single, found = new_denoiser(host_device, 1), new_denoiser(host_device, 1)
    steps_of(single)._refused = True
    if planted:
        monkeypatch.setattr(captured._Call, "noise", lambda call: call._found)
    pairs = []
    for denoiser in (single, found):
        drawings = [begun(denoiser, seed) for seed in (2, 4)]
        while not drawings[0].is_done:
            denoiser.step(drawings)
        pairs.append([denoiser._backend.download(drawing.latents) for drawing in drawings])
    assert steps_of(found).replays == 2 * STEPS - 2
    assert same(*pairs) != planted


@pytest.mark.parametrize("bug", ["prompt", "latents", "sigma"])
def test_planted_bugs_of_replays_change_latents(
    host_device: HostDevice, expected: list[Latents], monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    def stale(call: Any, inputs: Any) -> None:
        arrays = zip(captured._arrays(inputs), captured._arrays(call._fixed), strict=True)
        kept = inputs.prompts if bug == "prompt" else inputs.latents
        for source, place in arrays:
            if call._layers == 0 or not any(source is array for array in kept):
                call._backend.put_columns(source, 0, place)

    denoiser = new_denoiser(host_device)
    if bug in ("prompt", "latents"):
        monkeypatch.setattr(captured._Call, "_copy_in", stale)
    else:
        monkeypatch.setattr(CapturedWork, "replay", lambda work, _: work.graph.replay())
    assert not same(latents_of(denoiser), expected)


def test_an_abort_within_a_replay_changes_no_drawing(
    host_device: HostDevice, expected: list[Latents]
) -> None:
    """Layers are reported as often as of single launches."""

    class Stop(Exception):
        pass

    denoiser = new_denoiser(host_device.late(3))
    layers: list[int] = []
    denoiser.watch(lambda: layers.append(1))
    drawings, counts = [begun(denoiser, seed) for seed in (2, 4)], []
    for _ in range(3):
        denoiser.step(drawings)
        counts.append(len(layers))
        layers.clear()
    assert counts[0] > 1 and len(set(counts)) == 1

    def stop() -> None:
        raise Stop

    denoiser.watch(stop)
    with pytest.raises(Stop):
        denoiser.step(drawings)
    assert [drawing.step for drawing in drawings] == [3, 3]
    denoiser.watch(lambda: None)
    while not drawings[0].is_done:
        denoiser.step(drawings)
    assert same([denoiser._backend.download(d.latents) for d in drawings], expected[2:4])


def test_a_step_that_cannot_be_captured_is_launched_kernel_by_kernel(
    host_device: HostDevice, expected: list[Latents], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def refuse(_: HostDevice, work: Callable[[], None]) -> HostGraph:
        tries.append(1)
        work()
        raise CaptureFailed("not supported")

    monkeypatch.setattr(HostDevice, "capture", refuse)
    denoiser = new_denoiser(host_device)
    assert same(latents_of(denoiser), expected)
    assert tries == [1]
    assert steps_of(denoiser).replays == 0


def test_kept_graphs_are_few_and_share_the_arrays_of_the_largest_shape(
    host_device: HostDevice,
) -> None:
    """Decoding pixels frees all."""
    denoiser, alone = new_denoiser(host_device), new_denoiser(host_device)
    steps, space = steps_of(denoiser), space_of(denoiser)
    steps_of(alone)._refused = True
    largest, most = (0, 0), 0
    for shape in ((64, 9), (32, 3), (48, 4), (32, 7), (16, 2), (64, 9), (80, 4)):
        drawing = begun(denoiser, 2, side=shape[0], texts=shape[1])
        for _ in range(3):
            denoiser.step([drawing])
        if shape > largest:
            largest = shape
            alone.step([begun(alone, 2, side=shape[0], texts=shape[1])])
            assert len(steps._calls) == 1, "a larger shape drops all others"
            most = steps.nbytes
        assert space.nbytes == space_of(alone).nbytes
        assert len(steps._calls) <= captured.MAX_KEPT
        assert steps.nbytes <= captured.MAX_KEPT * most
    assert steps.replays >= 6
    while not drawing.is_done:
        denoiser.step([drawing])
    denoiser.finish(drawing)
    assert steps.nbytes == space.nbytes == 0
    assert not steps._calls
