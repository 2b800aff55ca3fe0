"""The sampler on the device against the CPU's; the method is docs/sampling.md."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baton.engine.kernels.cuda import reference_sampling, sampling
from baton.engine.kernels.cuda.reference import from_bf16, to_bf16
from baton.engine.sampling.philox import uniform as cpu_uniform
from baton.engine.sampling.sampler import log_probs
from baton.engine.sampling.sampler import sample as cpu_sample
from baton.engine.scheduling.plan import SampleSpec
from baton.proto.errors import InternalError
from baton.proto.sampling import SamplingParams

EMPTY = np.empty(0, np.int32)
NEAR = 1e-6
"""A token may differ from the CPU's where the share drawn, or a limit, is this near a boundary."""


class Mask:
    """A grammar that stands still."""

    def __init__(self, allowed):
        self.row = np.asarray(allowed, np.bool_)

    def allowed(self):
        return self.row.copy()


def spec_of(position=0, history=EMPTY, prompt_length=0, banned=(), logprobs=0, mask=None, **params):
    params.setdefault("seed", 1)
    return SampleSpec(
        SamplingParams(**params), position, np.asarray(history, np.int32), prompt_length, banned,
        logprobs, mask,
    )  # fmt: skip


def random_spec(rng, vocab, **given):
    """Any mix of parameters; few rows have all of them."""

    def some(share, value, default):
        return value if rng.random() < share else default

    history = rng.integers(0, vocab, rng.integers(0, 40))
    fields = {
        "position": int(rng.integers(0, 1 << 40)),
        "seed": int(rng.integers(0, 1 << 64, dtype=np.uint64)),
        "temperature": float(some(0.9, rng.choice([0.3, 0.8, 1.0, 1.3, 5.0]), 0.0)),
        "top_k": int(some(0.4, rng.integers(1, 256), -1)),
        "top_p": float(some(0.5, rng.choice([0.0, 0.3, 0.9, 0.95, 0.999]), 1.0)),
        "min_p": float(some(0.3, rng.choice([0.01, 0.2, 1.0]), 0.0)),
        "banned": tuple(int(t) for t in rng.choice(vocab, min(vocab - 1, rng.integers(0, 4)))),
    }
    if rng.random() < 0.4:
        fields |= {
            "history": history,
            "prompt_length": len(history) // 2,
            "repetition_penalty": float(rng.choice([1.0, 1.3, 0.5])),
            "frequency_penalty": float(rng.choice([0.0, 0.4, -1.0])),
            "presence_penalty": float(rng.choice([0.0, 0.6])),
        }
    if rng.random() < 0.3:
        allowed = rng.random(vocab) < rng.choice([0.1, 0.9])
        allowed[rng.integers(0, vocab)] = True
        fields["mask"] = Mask(allowed)
    return spec_of(**(fields | given))


def random_logits(rng, rows, vocab, rounded=False):
    logits = rng.standard_normal((rows, vocab)) * rng.choice([0.0, 0.5, 3.0, 10.0], (rows, 1))
    logits += rng.choice([0.0, -20.0, 15.0], (rows, 1))
    return (np.round(logits) if rounded else logits).astype(np.float32)


class Batch:
    """Logits and specs on a device, with poisoned outputs."""

    def __init__(self, device, logits, specs, extra_rows=0):
        self.device, (self.count, self.vocab) = device, logits.shape
        stride = -(-self.vocab // 4) * 4 + 8
        padded = np.zeros((self.count, stride), logits.dtype)
        padded[:, self.vocab :] = to_bf16([np.nan])[0] if logits.dtype == np.uint16 else np.nan
        padded[:, : self.vocab] = logits
        rows = np.zeros(self.count, sampling.ROW)
        masks, seen, counts = [], [], []
        for at, spec in enumerate(specs):
            mask = history = -1
            if spec.mask is not None:
                mask = len(masks)
                masks.append(sampling.mask_words(spec.mask.allowed(), spec.banned))
            if spec.params.needs_penalties:
                history = len(seen)
                words, count = sampling.history_arrays(spec.history, spec.prompt_length, self.vocab)
                seen.append(words)
                counts.append(count)
            sampling.fill_row(rows, at, spec, mask, history)
        self.rows = device.upload(rows.view(np.uint8).reshape(self.count, -1))
        self.logits = device.upload(padded)
        self.restrictions = sampling.Restrictions(*(
            device.upload(np.stack(arrays)) if arrays else None for arrays in (masks, seen, counts)
        ))  # fmt: skip
        self.space = sampling.workspace(device, self.count + extra_rows, self.vocab)

    def run(self, report=True, record=False):
        """Tokens, errors, and the log-probs' three arrays."""
        device, n = self.device, self.count
        tokens, errors = device.empty((n,), np.int32), device.empty((n,), np.int32)
        reported = sampling.Report(
            device.empty((n,), np.float32),
            device.empty((n, sampling.MAX_LOGPROBS), np.int32),
            device.empty((n, sampling.MAX_LOGPROBS), np.float32),
        )
        sampling.sample(
            device, self.logits, self.rows, self.space, tokens, errors, self.restrictions,
            reported if report else None, record=record,
        )  # fmt: skip
        outputs = [tokens, errors]
        if report:
            outputs += [reported.token, reported.ids, reported.values]
        return [device.download(a) for a in outputs]


def draw(device, logits, specs):
    tokens, errors = Batch(device, logits, specs).run(report=False)
    assert not errors.any()
    return tokens


def expected_tokens(logits, specs):
    return np.array([reference_sampling.sample(x, s) for x, s in zip(logits, specs, strict=True)])


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1000, 4100, 9001])
def test_equals_the_reference(device, rng, vocab, rounded):
    count = 12 if vocab > 4096 else 24
    logits = random_logits(rng, count, vocab, rounded)
    specs = [random_spec(rng, vocab) for _ in range(count)]
    np.testing.assert_array_equal(draw(device, logits, specs), expected_tokens(logits, specs))


@pytest.mark.sanitized
def test_bf16_logits_equal_the_reference(device, rng):
    logits = to_bf16(random_logits(rng, 24, 1001))
    specs = [random_spec(rng, 1001) for _ in range(24)]
    expected = expected_tokens(from_bf16(logits).astype(np.float32), specs)
    np.testing.assert_array_equal(draw(device, logits, specs), expected)


def test_equals_the_cpu_but_for_near_ties(device, rng):
    """Each difference is one a change of the share or of a limit by 1e-6 explains; few are."""
    different = 0
    for vocab in (50, 700, 3000):
        logits = random_logits(rng, 100, vocab)
        specs = [random_spec(rng, vocab) for _ in range(100)]
        for token, row, spec in zip(draw(device, logits, specs), logits, specs, strict=True):
            if token != cpu_sample(row, spec)[0]:
                different += 1
                assert token in neighbours(row, spec)
    print(f"{different} of 300 tokens differ from the CPU's")
    assert different <= 3


def neighbours(row, spec):
    """Tokens of the CPU's sampler with the share, top_p and min_p moved by NEAR."""
    tokens, params = set(), spec.params
    for top_p in {params.top_p * (1 - NEAR), params.top_p, min(1.0, params.top_p * (1 + NEAR))}:
        for min_p in {params.min_p * (1 - NEAR), params.min_p, min(1.0, params.min_p * (1 + NEAR))}:
            moved = replace(params, top_p=top_p, min_p=min_p)
            for share in (-NEAR, 0.0, NEAR):
                with pytest.MonkeyPatch.context() as patch:
                    uniform = cpu_uniform(params.seed, spec.position)
                    share = min(max(uniform + share, 0.0), 1 - 2.0**-53)
                    patch.setattr("baton.engine.sampling.sampler.uniform", lambda *_, s=share: s)
                    tokens.add(cpu_sample(row, replace(spec, params=moved))[0])
    return tokens


FLAT = [
    {"top_p": 0.9},
    {"top_p": 0.9999999},
    {"top_p": 0.3, "min_p": 0.4},
    {"min_p": 0.05},
    {"top_k": 200},
    {"top_k": 255, "top_p": 0.8, "min_p": 0.3},
    {},
]


@pytest.mark.sanitized
@pytest.mark.parametrize("scale", [0.0, 1e-7, 0.3])
def test_flat_rows_that_fit_no_list(device, rng, scale):
    """Thousands of tokens stay, or are equal where a filter cuts: the rows are walked again."""
    vocab = 2048 * 4 + 77
    logits = np.round(scale * rng.standard_normal((2 * len(FLAT), vocab)), 2 if scale > 0.1 else 8)
    specs = [spec_of(position=i, **params) for i, params in enumerate(FLAT * 2)]
    logits = logits.astype(np.float32)
    np.testing.assert_array_equal(draw(device, logits, specs), expected_tokens(logits, specs))


@pytest.mark.parametrize("vocab", [128256, sampling.MAX_VOCAB])
def test_large_vocabularies(device, rng, vocab):
    filters = [{}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"min_p": 0.05}, {"top_k": 1}]
    specs = [spec_of(position=i, logprobs=20, **params) for i, params in enumerate(filters)]
    logits = (3 * rng.standard_normal((len(specs), vocab))).astype(np.float32)
    tokens, errors, _, ids, _ = Batch(device, logits, specs).run()
    assert not errors.any()
    for token, top, row, spec in zip(tokens, ids, logits, specs, strict=True):
        expected = cpu_sample(row, spec)
        assert token == expected[0] or token in neighbours(row, spec)
        assert top.tolist() == list(expected[1].top)


def test_extreme_temperatures(device, rng):
    logits = np.round(random_logits(rng, 20, 300))
    temperatures = [1e-40, 1e-30, 1e-5, 1e30, 3e38]
    specs = [spec_of(position=i, temperature=temperatures[i % 5]) for i in range(20)]
    for token, row, spec in zip(draw(device, logits, specs), logits, specs, strict=True):
        assert token == cpu_sample(row, spec)[0]


def test_place_and_size_of_the_batch_do_not_matter(device, rng):
    vocab = 1500
    logits = random_logits(rng, 12, vocab)
    specs = [random_spec(rng, vocab, logprobs=3) for _ in range(12)]
    together = Batch(device, logits, specs).run()
    order = rng.permutation(12)
    moved = Batch(device, logits[order], [specs[i] for i in order], extra_rows=5).run()
    for whole, part in zip(together, moved, strict=True):
        assert whole[order].tobytes() == part.tobytes()
    for i in range(0, 12, 3):
        alone = Batch(device, logits[i : i + 1], [specs[i]]).run()
        for whole, part in zip(together, alone, strict=True):
            assert whole[i : i + 1].tobytes() == part.tobytes()


def test_under_shuffled_schedules(device, schedules, rng):
    vocab = 4200
    logits = random_logits(rng, 6, vocab, rounded=True)
    specs = [
        spec_of(position=9, logprobs=7, **params) for params in (FLAT[0], *FLAT[3:], {"top_k": 1})
    ]
    specs[-2] = replace(specs[-2], mask=Mask(rng.random(vocab) < 0.5), banned=(3,))
    logits[0], logits[1] = 0, 3 * rng.standard_normal(vocab)
    batch = Batch(device, logits, specs)
    outputs = schedules(batch.run)
    np.testing.assert_array_equal(outputs[0], expected_tokens(logits, specs))


def test_in_a_graph(device, rng):
    """Captured once, replayed with other logits and parameters in the same arrays."""
    vocab, count = 600, 5
    first, then = random_logits(rng, 2 * count, vocab).reshape(2, count, vocab)
    batch = Batch(device, first, [spec_of(position=i) for i in range(count)])
    tokens, errors = device.empty((count,), np.int32), device.empty((count,), np.int32)
    graph = device.capture(
        lambda: sampling.sample(device, batch.logits, batch.rows, batch.space, tokens, errors)
    )
    specs = [spec_of(position=i, temperature=0.7, **FLAT[i]) for i in range(count)]
    other = Batch(device, then, specs)
    device.write(batch.logits, device.download(other.logits))
    device.write(batch.rows, device.download(other.rows))
    graph.replay()
    assert not device.download(errors).any()
    np.testing.assert_array_equal(device.download(tokens), expected_tokens(then, specs))


def test_rows_without_a_token_report_why(device):
    inf, nan = np.inf, np.nan
    base = np.zeros(200, np.float32)
    cases = [
        (base, {}, sampling.NO_ERROR),
        (np.full(200, -inf), {}, sampling.NO_TOKEN_LEFT),
        (base, {"mask": Mask(base > 1)}, sampling.NO_TOKEN_LEFT),
        (np.where(np.arange(200) == 7, nan, base), {}, sampling.NOT_FINITE),
        (np.where(np.arange(200) == 199, -nan, base), {"temperature": 0.0}, sampling.NOT_FINITE),
        (np.where(np.arange(200) == 64, inf, base), {"top_k": 5}, sampling.NOT_FINITE),
        (np.where(np.arange(200) == 64, -inf, base), {"top_p": 0.5}, sampling.NO_ERROR),
        (np.where(np.arange(200) == 9, nan, base), {"mask": Mask(np.arange(200) != 9)}, 0),
    ]
    logits = np.stack([row for row, _, _ in cases]).astype(np.float32)
    specs = [spec_of(logprobs=2, **fields) for _, fields, _ in cases]
    tokens, errors, logprob, ids, _ = Batch(device, logits, specs).run()
    assert errors.tolist() == [code for _, _, code in cases]
    for row, spec, token, error in zip(logits, specs, tokens, errors, strict=True):
        if error:
            assert token == 0
            with pytest.raises(InternalError):
                cpu_sample(row, replace(spec, logprobs=0))
        else:
            assert token == reference_sampling.sample(row, spec)
    assert np.isnan(logprob[1:6]).all()
    assert (ids[1:6] == -1).all()
    assert np.isnan(logprob[7])  # the raw row holds a NaN


def test_parameters_that_name_what_is_not_there(device):
    batch = Batch(device, np.zeros((3, 64), np.float32), [spec_of()] * 3)
    rows = device.download(batch.rows).view(sampling.ROW)[:, 0].copy()
    rows["mask"][0], rows["history"][1], rows["banned"][2] = 0, 5, 9
    batch.rows = device.upload(rows.view(np.uint8).reshape(3, -1))
    assert batch.run()[1].tolist() == [sampling.BAD_ROW] * 3


@pytest.mark.parametrize("vocab", [3, 128, 5000])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_log_probs_are_the_cpus(device, rng, vocab, dtype):
    logits = random_logits(rng, 8, vocab, rounded=True)
    logits[0] = 1.5  # all are equal
    logits[1] -= np.where(np.arange(vocab) == 2, 0, 200).astype(np.float32)
    stored = to_bf16(logits) if dtype == np.uint16 else logits
    logits = from_bf16(stored).astype(np.float32) if dtype == np.uint16 else logits
    specs = [random_spec(rng, vocab, logprobs=n) for n in (20, 20, 1, 5, 20, 2, 0, 11)]
    tokens, _, logprob, ids, values = Batch(device, stored, specs).run()
    for i, spec in enumerate(specs):
        if not spec.logprobs:
            assert np.isnan(logprob[i])
            assert (ids[i] == -1).all()
            continue
        expected = log_probs(logits[i], int(tokens[i]), spec.logprobs)
        count = len(expected.top)
        assert ids[i, :count].tolist() == list(expected.top)
        np.testing.assert_allclose(
            values[i, :count], list(expected.top.values()), rtol=1e-6, atol=1e-6
        )
        np.testing.assert_allclose(logprob[i], expected.logprob, rtol=1e-6, atol=1e-6)
        assert (ids[i, count:] == -1).all()
        assert (values[i, count:] == -np.inf).all()


def test_recorded_tokens_enter_the_history(device, rng):
    vocab = 130
    logits = random_logits(rng, 4, vocab)
    history = rng.integers(0, vocab, 9).astype(np.int32)
    specs = [
        spec_of(position=i, history=history, prompt_length=4, presence_penalty=0.5)
        for i in range(3)
    ]
    batch = Batch(device, logits, [*specs, spec_of(position=3)])
    tokens = batch.run(record=True)[0]
    seen = device.download(batch.restrictions.seen)
    counts = device.download(batch.restrictions.counts)
    for i in range(3):
        words, count = sampling.history_arrays(np.append(history, tokens[i]), 4, vocab)
        np.testing.assert_array_equal(seen[i], words)
        np.testing.assert_array_equal(counts[i], count)


def test_a_grammar_that_leaves_only_banned_tokens_lifts_the_bans():
    allowed = np.zeros(40, np.bool_)
    allowed[[3, 38]] = True
    assert sampling.mask_words(allowed, (3,)).tolist() == [0, 1 << 6]
    assert sampling.mask_words(allowed, (3, 38)).tolist() == [1 << 3, 1 << 6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": ((2, 64), np.float64)}, "logits is float64"),
        ({"logits": ((2, 62), np.float32)}, "multiple of 4"),
        ({"logits": ((2, 60), np.float32)}, "not less than the vocabulary"),
        ({"logits": ((3, 64), np.float32)}, "workspace is for 2"),
        ({"rows": ((2, 95), np.uint8)}, "rows has shape"),
        ({"tokens": ((2,), np.int64)}, "tokens is int64"),
        ({"errors": ((1,), np.int32)}, "errors has shape"),
        ({"masks": ((1, 3), np.uint32)}, "masks has shape"),
        ({"seen": ((1, 2), np.uint32)}, "two arrays"),
        ({"seen": ((1, 2), np.uint32), "counts": ((1, 63), np.int32)}, "counts has shape"),
    ],
)
def test_wrong_arrays_are_refused(device, change, message):
    shapes = {
        "logits": ((2, 64), np.float32), "rows": ((2, 96), np.uint8), "tokens": ((2,), np.int32),
        "errors": ((2,), np.int32), "masks": None, "seen": None, "counts": None,
    } | change  # fmt: skip
    a = {name: of and device.zeros(*of) for name, of in shapes.items()}
    restrictions = sampling.Restrictions(a["masks"], a["seen"], a["counts"])
    space = sampling.workspace(device, 2, 64)
    with pytest.raises(ValueError, match=message):
        sampling.sample(
            device, a["logits"], a["rows"], space, a["tokens"], a["errors"], restrictions
        )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (spec_of(banned=tuple(range(9))), "9 banned"),
        (spec_of(logprobs=21), "21 log-probs"),
        (spec_of(presence_penalty=1.0), "need a history"),
        (spec_of(logits_processors=[lambda row: None]), "run on the host"),
        (spec_of(logit_bias={3: 1.5}), "the host adds biases"),
    ],
)
def test_what_rows_cannot_hold_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        sampling.fill_row(np.zeros(1, sampling.ROW), 0, spec)


def test_workspaces_and_histories_are_checked(device):
    with pytest.raises(ValueError, match="vocabulary of 262145"):
        sampling.workspace(device, 1, 262145)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sampling.history_arrays(np.array([5], np.int32), 0, 5)
