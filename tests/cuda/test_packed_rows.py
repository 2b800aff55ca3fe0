"""Rows of captured steps that are kept from step to step are those that would be made anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.engine.kernels.cuda import sampling
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.llm import LLMEngine
from baton.engine.pipeline import device_steps
from baton.engine.pipeline.device_rows import NOWHERE, DeviceRows, GraphSizes
from baton.engine.scheduling.plan import Chunk, SampleSpec
from baton.proto.sampling import SamplingParams

from .host_device import HostDevice
from .small_model import GREEDY, load

VOCAB, BLOCK = 128, 8
SIZES = GraphSizes(table_width=6, max_length=44, blocks=60, block_size=BLOCK)
TABLES = {bytes([n]): np.arange(5 * n, 5 * n + 5, dtype=np.int32) for n in range(9)}


class Arrays:
    """A device whose memory is the host's."""

    def host_buffer(self, shape: Any, dtype: Any) -> Any:
        return np.zeros(shape, dtype)

    zeros = host_buffer

    def write(self, array: Any, values: Any) -> None:
        array[...] = values


def new_rows() -> DeviceRows:
    return DeviceRows(Arrays(), SIZES, VOCAB, (2, 4, 8))  # type: ignore[arg-type]


def chunk(request: bytes, spec: SampleSpec, token: int = 7) -> Chunk:
    tokens = np.array([token], np.int32)
    return Chunk(request, spec.position - 1, tokens, TABLES[request], spec)


def spec_of(seed: int, **fields: float) -> SampleSpec:
    nothing = np.empty(0, np.int32)
    return SampleSpec(SamplingParams(temperature=0.7, seed=seed, **fields), 5, nothing, 5)


def contents(rows: DeviceRows) -> dict[int, Any]:
    """What a step of the placed rows reads, in the order of its chunks."""
    found: dict[int, Any] = {}
    for at, row in enumerate(rows.rows):
        packed = rows.sampling[row].copy()
        for name in ("mask", "history"):
            packed[name] = 0 if packed[name] == row else packed[name]
        found[at] = (
            packed.tobytes(), int(rows.positions[row]), int(rows.slots[row]),
            int(rows.lengths[row]), rows.tables[row, :5].tolist(), int(rows.drawn[0, row]),
        )  # fmt: skip
    return found


def test_kept_rows_are_those_of_new_ones() -> None:
    kept = new_rows()
    specs = {bytes([n]): spec_of(n, top_p=0.5 + n / 10) for n in range(4)}
    for step in range(1, 9):
        specs = {name: replace(spec, position=5 + step) for name, spec in specs.items()}
        for name, spec in specs.items():
            if len(spec.history):
                history = np.arange(spec.position, dtype=np.int32)
                specs[name] = replace(spec, history=history)
        if step == 2:  # a minimum length is reached
            specs[b"\0"] = replace(specs[b"\0"], banned=(2, 7))
        if step == 3:
            specs[b"\0"] = replace(specs[b"\0"], banned=())
            specs[b"\1"] = replace(specs[b"\1"], logprobs=3)
        if step == 4:  # the same request is tried again, with the same values in another object
            specs[b"\2"] = spec_of(9, top_p=0.3)
            del specs[b"\1"]
        if step == 5:
            specs |= {bytes([n]): spec_of(n) for n in range(4, 9)}
        if step == 6:
            specs = {name: spec for name, spec in specs.items() if name in (b"\3", b"\7", b"\x08")}
        if step == 7:
            penal = replace(specs[b"\3"].params, repetition_penalty=1.2)
            specs[b"\3"] = replace(
                specs[b"\3"], params=penal, history=np.arange(12, dtype=np.int32), prompt_length=2
            )
        chunks = [chunk(name, spec, step + name[0]) for name, spec in specs.items()]
        fresh = new_rows()
        assert kept.place(chunks, step % 2, fed=False)
        assert fresh.place(chunks, step % 2, fed=False)
        assert contents(kept) == contents(fresh)
        assert kept.bucket == fresh.bucket, "requests move to lower rows"
        assert kept.needs == fresh.needs
        unused = np.setdiff1d(np.arange(8), kept.rows)
        assert (kept.slots[unused] == NOWHERE).all()
        assert not kept.lengths[unused].any()


def test_a_step_whose_tokens_are_on_the_device_keeps_rows_and_tokens() -> None:
    rows = new_rows()
    specs = {bytes([n]): spec_of(n) for n in range(6)}
    assert rows.place([chunk(*item) for item in specs.items()], 0, fed=False)
    rows.drawn[0] = np.arange(100, 108)
    later = {name: replace(spec, position=6) for name, spec in list(specs.items())[3:]}
    assert rows.place([chunk(*item) for item in later.items()], 1, fed=True)
    assert rows.rows == [3, 4, 5]
    assert rows.bucket == 8
    assert rows.drawn[0].tolist() == list(range(100, 108))
    joined = [*later.items(), (b"\x07", spec_of(7))]
    assert not rows.place([chunk(*item) for item in joined], 0, fed=True)


@pytest.mark.parametrize(
    "fault", ["token", "block", "long", "too few blocks", "many", "bias", "two tokens", "history"]
)
def test_what_no_captured_step_can_run_is_left_to_others(fault: str) -> None:
    rows, spec = new_rows(), spec_of(1)
    chunks = [chunk(bytes([n]), spec) for n in range(9 if fault == "many" else 2)]
    if fault == "token":
        chunks[0] = replace(chunks[0], tokens=np.array([VOCAB], np.int32))
    if fault == "block":
        chunks[0] = replace(chunks[0], block_table=np.array([60], np.int32))
    if fault == "too few blocks":
        chunks[0] = replace(chunks[0], start=40)
    if fault == "long":
        chunks[0] = replace(chunks[0], start=44, block_table=np.arange(6, dtype=np.int32))
    if fault == "bias":
        chunks[0].sample = replace(spec, params=replace(spec.params, logit_bias={3: 1.0}))
    if fault == "history":  # an earlier token is missing
        penal = replace(spec.params, repetition_penalty=1.2)
        chunks[0].sample = replace(spec, params=penal, history=np.arange(4, dtype=np.int32))
    if fault == "two tokens":
        chunks[0] = replace(chunks[0], tokens=np.array([1, 2], np.int32))
    assert not rows.place(chunks, 0, fed=False)
    assert rows.place([chunk(b"\1", spec)], 0, fed=False)


def test_a_row_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, specs = new_rows(), {bytes([n]): spec_of(n) for n in range(8)}
    assert rows.place([chunk(*item) for item in specs.items()], 0, fed=False)

    def again(*_: object) -> None:
        pytest.fail("packed again")

    monkeypatch.setattr(sampling, "fill_row", again)
    later = {name: replace(spec, position=9) for name, spec in list(specs.items())[:5]}
    assert rows.place([chunk(*item) for item in later.items()], 1, fed=False)
    assert rows.sampling["position"][rows.rows].tolist() == [9] * 5


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
