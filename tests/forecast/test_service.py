"""Times of steps: read from a file, and learned from a model."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count

import msgspec
import pytest

from baton.deploy.config import demo_model_folder
from baton.engine.loading.runner_config import RunnerConfig
from baton.forecast.calibration import Calibration, Prompt, Stream
from baton.forecast.learn import Step, calibrated, fitted, learn_service, steps
from baton.forecast.service import MAX_FILE, ServiceModel, read_service
from baton.forecast.spread import Spreads
from baton.proto.errors import ConfigError, InputError
from baton.runtime.process.cores import usable_cores

TRUE = {
    "prefill_s": 0.0, "chunk_s": 0.003, "prefill_token_s": 2e-4, "prefill_pair_s": 1e-7,
    "decode_s": 0.01, "decode_sequence_s": 1e-3, "decode_token_s": 1e-6, "hidden_s": 0.004,
}  # fmt: skip


def seconds(model, step):
    if not step.rows:
        return model.prefill(step.new, step.before)
    return model.mixed(step.rows, step.rows * step.context, step.new, step.pairs)


def test_the_parts_are_found_again():
    model = ServiceModel(**TRUE)
    parts, error = fitted({step: seconds(model, step) for step in steps(1024)})
    assert parts == pytest.approx(TRUE, rel=1e-3)
    assert error < 1e-6


def test_no_part_is_negative_and_the_error_is_told():
    times = {step: 0.01 / (1 + step.new + step.rows) for step in steps(256)}
    parts, error = fitted(times)
    assert min(parts.values()) >= 0
    assert error > 0.1


@pytest.mark.parametrize("part", [0.0, 1e-20])
@pytest.mark.parametrize("name", sorted(TRUE))
def test_what_is_learned_can_be_read_again(name, part, tmp_path):
    model = ServiceModel(**TRUE | {name: part})
    parts, error = fitted({step: seconds(model, step) for step in steps(1024)})
    assert error < 0.02
    learned = ServiceModel(**parts)
    file = tmp_path / "times.json"
    file.write_bytes(msgspec.json.encode({"step_times": learned}))
    assert read_service(file) == learned


def test_every_step_fits_the_context():
    for longest in (64, 256, 1024):
        for step in steps(longest):
            assert step.context + step.new + step.rows > 0
            assert step.before + step.new <= longest
            assert step.context <= longest


def test_a_model_is_measured_on_this_machine():
    ticks = count()
    runner = RunnerConfig(model=str(demo_model_folder()), thread_sharers=2, threads=0)
    service, _ = learn_service(runner, clock=lambda: float(next(ticks)))
    assert service.max_length == 2048
    assert service.kv_token_bytes == 4 * 2 * 2 * 32 * 2  # bfloat16, as the weights
    assert service.prefill_s + service.decode_s > 0
    assert Step(new=32).pairs == 512


def test_a_calibrated_model_has_the_cores_for_its_threads_and_the_larger_error():
    seen = Calibration(
        prompts=[Prompt(tokens=tokens, seconds=1.0) for tokens in (16, 64)],
        streams=[Stream(rows=1, context=9.0, gaps=[one]) for one in (0.1, 0.9)]
        + [Stream(rows=2, context=9.0, gaps=[one]) for one in (4.0, 9.0)],
        handoffs=[],
    )
    threads = usable_cores().count
    found = calibrated(RunnerConfig(model=str(demo_model_folder()), threads=threads), seen)
    assert found.service.cores == 1  # worker at a time
    assert found.error > 0.2  # streams of which one is ten times as slow: no model fits them


def test_spreads_are_read_again(tmp_path):
    spreads = Spreads(hop_s=(-0.001, 0.001), decode=(0.5, 1.5))
    model = ServiceModel(**TRUE, spreads=spreads)
    file = tmp_path / "times.json"
    file.write_bytes(msgspec.json.encode(model))
    assert read_service(file) == model
    twice = model.scaled(2.0)
    assert (twice.spreads.hop_s, twice.spreads.decode) == ((-0.002, 0.002), (0.5, 1.5))
    for wrong in (Spreads(decode=(0.0, 2.0)), Spreads(prefill=(-1.0,)), Spreads(hop_s=(1e9,))):
        file.write_bytes(msgspec.json.encode(replace(model, spreads=wrong)))
        with pytest.raises(InputError, match=r"spreads\.(decode|prefill|hop_s) has a value"):
            read_service(file)


def test_times_are_read_from_what_a_plan_prints(tmp_path):
    file = tmp_path / "times.json"
    file.write_text(json.dumps({"command": "x", "step_times": TRUE}))
    assert read_service(file) == ServiceModel(**TRUE)
    file.write_text("{}")
    assert read_service(file) == ServiceModel()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no times"), ("[]", "no times"), ('"x"', "no times"), ("\x00", "no times"),
        ("[" * 5000, "no times"),
        ('{"decode_s": "x"}', "decode_s"), ('{"decode_s": 0}', "decode_s"),
        ('{"decode_s": -1}', "decode_s"), ('{"decode_s": 1e400}', "no times"),
        ('{"decode_s": 1e300}', "decode_s"), ('{"kv_tokens": 0.5}', "kv_tokens"),
        ('{"decodes": 1}', "unknown field 'decodes'"), ('{"step_times": 3}', "no times"),
        (" " * (MAX_FILE + 1), "more than"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_in_one_sentence(tmp_path, text, named):
    file = tmp_path / "times.json"
    file.write_text(text)
    with pytest.raises(InputError, match=named):
        read_service(file)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        read_service(tmp_path / "nothing.json")
