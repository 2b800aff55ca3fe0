"""Sampling rows that are kept from step to step are those that would be packed anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.engine.kernels.cuda import sampling
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.llm import LLMEngine
from baton.engine.pipeline import device_steps
from baton.engine.pipeline.device_sampler import DeviceSampler, SampleRows
from baton.engine.scheduling.plan import Chunk, SampleSpec
from baton.proto.errors import BatonError
from baton.proto.sampling import SamplingParams

from .host_device import HostDevice
from .test_model import GREEDY, load

VOCAB = 128
NOTHING = np.empty(0, np.int32)


class Nobody:
    """A device that packing rows does not need."""


def packed(sampler: DeviceSampler, specs: dict[bytes, SampleSpec]) -> SampleRows:
    chunks = [
        Chunk(request, spec.position - 1, np.zeros(1, np.int32), np.zeros(2, np.int32), spec)
        for request, spec in specs.items()
    ]
    failed: dict[bytes, BatonError] = {}
    rows = sampler.rows_of(chunks, failed)
    assert not failed
    return rows


def new_sampler() -> DeviceSampler:
    return DeviceSampler(Nobody(), VOCAB)  # type: ignore[arg-type]


def spec_of(seed: int, **fields: float) -> SampleSpec:
    return SampleSpec(SamplingParams(temperature=0.7, seed=seed, **fields), 5, NOTHING, 5)


def test_kept_rows_are_those_of_a_new_sampler() -> None:
    kept = new_sampler()
    specs = {bytes([n]): spec_of(n, top_p=0.5 + n / 10) for n in range(4)}
    for step in range(1, 7):
        specs = {name: replace(spec, position=5 + step) for name, spec in specs.items()}
        if step == 2:  # a minimum length is reached
            specs[b"\0"] = replace(specs[b"\0"], banned=(2, 7))
        if step == 3:
            specs[b"\0"] = replace(specs[b"\0"], banned=())
            specs[b"\1"] = replace(specs[b"\1"], logprobs=3)
        if step == 4:  # the same request is tried again, with the same words in another object
            specs[b"\2"] = spec_of(9, top_p=0.3)
            del specs[b"\1"]
        if step == 5:
            history = np.array([1, 2, 3], np.int32)
            penal = replace(specs[b"\3"].params, repetition_penalty=1.2)
            specs[b"\3"] = replace(specs[b"\3"], params=penal, history=history, prompt_length=2)
        found, expected = packed(kept, specs), packed(new_sampler(), specs)
        assert found.rows.tobytes() == expected.rows.tobytes()
        assert found.plain == expected.plain
        assert found.reported == expected.reported
        assert len(found.seen) == len(expected.seen)


def test_a_row_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, specs = new_sampler(), {bytes([n]): spec_of(n) for n in range(8)}
    packed(sampler, specs)

    def again(*_: object) -> None:
        pytest.fail("packed again")

    monkeypatch.setattr(sampling, "fill_row", again)
    later = {name: replace(spec, position=9) for name, spec in list(specs.items())[:5]}
    assert packed(sampler, later).rows["position"].tolist() == [9] * 5
    assert len(sampler._packed) == 5  # rows of ended requests are not kept


def test_tokens_and_errors_of_a_step_are_one_copy(
    host_device: HostDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[tuple[int, ...]] = []
    read = host_device.read
    runner = load(folder, CudaBackend(host_device))
    monkeypatch.setattr(host_device, "read", lambda a, out: (copies.append(a.shape), read(a, out)))
    (context,) = LLMEngine(runner).generate([[5, 3, 9]], [GREEDY])
    assert len(context.tokens.generated) == 6
    assert copies == [(2, device_steps.BUCKETS[-1])] * 5
