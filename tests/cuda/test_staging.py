"""Weights on their way to a device: pieces, slots that are filled again, a queue that runs late."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from baton.engine.kernels.bfloat16 import bfloat16_bits as to_bf16
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.pictures import CudaPictures
from baton.engine.kernels.cuda.staging import Staging
from baton.engine.loading.checkpoint import load_checkpoint
from baton.engine.models.decoder import Decoder

from .test_pictures import FOLDER as PICTURES
from .test_pictures import Halves


def parts_of(rng, *rows, width=24):
    return [rng.integers(0, 1 << 16, (count, width), np.uint16) for count in rows]


@pytest.mark.parametrize(("piece", "slots", "threads"), [(64, 1, 1), (64, 3, 4), (1 << 20, 2, 2)])
def test_parts_lie_one_below_the_other(device, rng, piece, slots, threads):
    staging = Staging(device, piece, slots, threads)
    for rows in ((5, 1, 7), (3,), (1, 1)):
        parts = parts_of(rng, *rows)
        found = staging.upload(parts)
        np.testing.assert_array_equal(device.download(found), np.concatenate(parts))
    staging.close()
    again = parts_of(rng, 4)
    np.testing.assert_array_equal(device.download(staging.upload(again)), again[0])
    staging.close()


def test_float32_parts_are_rounded_on_the_way(device, rng):
    """Beside parts in bfloat16, with every kind of number and a piece that ends anywhere."""
    words = rng.integers(0, 1 << 32, (9, 24), np.uint32)
    words[0, :4] = 0x7F800001, 0xFF800000, 0x7F7FFFFF, 0x3F808000  # NaN, -inf, largest, a tie
    values, bits = words.view(np.float32), parts_of(rng, 2)[0]
    staging = Staging(device, 100, 2, 2)
    found = device.download(staging.upload([values, bits]))
    np.testing.assert_array_equal(found, np.concatenate([to_bf16(values), bits]))
    assert found[0, :4].tolist() == [0x7FFF, 0xFF80, 0x7F80, 0x3F80]
    staging.close()


def test_a_slot_is_filled_again_when_the_device_has_read_it(host_device, rng):
    """A queue that runs late would copy what a later piece has put there."""
    late = host_device.late(3)
    parts = parts_of(rng, 40, 9)
    staging = Staging(late, 64, 2, 2)
    np.testing.assert_array_equal(late.download(staging.upload(parts)), np.concatenate(parts))
    staging.close()


def test_without_the_wait_the_late_queue_copies_other_pieces(host_device, rng):
    late = host_device.late(3)
    parts = parts_of(rng, 40, 9)
    planted = Staging(late, 64, 2, 2)
    record = late.record
    late.record = lambda: Done(record())  # the bug: the slot counts as read at once
    found = late.download(planted.upload(parts))
    assert (found != np.concatenate(parts)).any()


class Done:
    def __init__(self, event):
        self.event = event

    def wait(self):
        """Not at all."""


def test_an_upload_ends_its_threads(device, rng):
    before = threading.active_count()
    staging = Staging(device, 64, 2, 3)
    staging.upload(parts_of(rng, 6))
    assert threading.active_count() == before


def test_no_part_of_a_model_keeps_its_slots(device, folder):
    """Also not a picture's, whose parts are loaded one after the other."""
    for backend, load in (
        (CudaBackend(device), lambda backend: Decoder(load_checkpoint(folder), backend, 64)),
        (CudaPictures(device), lambda backend: Halves(PICTURES, backend)),
    ):
        close, closed = backend.staging.close, []

        def noting(staging=backend.staging, close=close, closed=closed):
            closed.append(len(staging._slots))
            close()

        backend.staging.close = noting
        load(backend)
        assert closed and any(closed) and not backend.staging._slots
    assert len(closed) > 2


def test_parts_that_do_not_fit_together_are_refused(device, rng):
    staging = Staging(device)
    with pytest.raises(ValueError, match="equal widths"):
        staging.upload([*parts_of(rng, 2), *parts_of(rng, 2, width=8)])
    with pytest.raises(ValueError, match="contiguous"):
        staging.upload([parts_of(rng, 4)[0][:, ::2]])
    with pytest.raises(ValueError, match="at least 1"):
        Staging(device, slots=0)
