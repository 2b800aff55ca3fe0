"""Where a prefill worker's pool comes from."""

import os
from types import SimpleNamespace

import numpy as np

from baton.kv_transfer.shared_pool import PoolOwner
from baton.prefill_worker.__main__ import _device_ticket, _shared_or_own


def test_where_memory_cannot_be_shared_the_worker_has_its_own(monkeypatch):
    def forbidden(*_args):
        raise PermissionError("not in this sandbox")

    owner = PoolOwner()
    monkeypatch.setattr(os, "memfd_create", forbidden)
    pool = _shared_or_own(owner, 4096)
    assert pool.nbytes == 4096 and not pool.any() and owner.ticket is None
    monkeypatch.undo()
    pool = _shared_or_own(owner, 4096)
    assert pool.nbytes == 4096 and not pool.any() and owner.ticket is not None
    pool[:] = np.arange(4096, dtype=np.uint8)


def test_where_gpu_memory_cannot_be_shared_the_worker_says_so_and_serves():
    def refused(_pool):
        raise OSError("this system cannot share GPU memory: not supported")

    config = SimpleNamespace(share_pool=True)
    runner = SimpleNamespace(backend=SimpleNamespace(pool_ticket=refused), pool=None)
    assert _device_ticket(config, runner) is None
