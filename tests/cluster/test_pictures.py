"""Pictures through whole clusters: the pixels of the engine in one process, bit for bit."""

from __future__ import annotations

import os
import signal

import msgspec
import numpy as np
import pytest

from baton.engine.pictures.draw import PictureEngine
from baton.proto.errors import BatonError, InputError
from baton.proto.requests import build_wire_context
from baton.proto.sampling import SamplingParams

from ..processes import wait_until
from .picture_driver import FOLDER, Drawing, Reference, lose, lose_a_stopped_one

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("left_idle")]

LONG = 120  # steps that take a second or more
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@pytest.fixture(scope="module")
def pools(shared_cluster, tmp_path_factory):
    sockets = tmp_path_factory.mktemp("r")
    return shared_cluster(
        prefill=2, decode=2, routers=2, address=f"ipc://{sockets}/a.sock,ipc://{sockets}/b.sock",
        model=FOLDER, worker_timeout=1.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def reference():
    return Reference()


@pytest.fixture
def check(client, reference):
    """Draw requests together, and compare each with the engine's picture."""

    def drawn(*requests):
        running = [Drawing(client, request) for request in requests]
        for one, request in zip(running, requests, strict=True):
            assert np.array_equal(one.pixels(), reference.draw(request))
            assert one.steps[-1] == request.num_inference_steps
        return running

    return drawn


def test_pixels_are_those_of_one_process(check, reference):
    request = reference.request()
    (drawing,) = check(request)
    assert drawing.steps == [0, 1, 2, 3, 4]
    assert drawing.positions[0] == len(request.tokens)
    assert drawing.ended.status == "maximum_length"
    assert drawing.ended.prefill.startswith("prefill-")
    assert drawing.ended.decode.startswith("decode-")


def test_together_as_alone(check, reference):
    """Other sizes, numbers of steps, prompts and negative prompts in one batch."""
    guided = {"negative_prompt": "a hat", "true_cfg_scale": 3.0}
    own = np.random.default_rng(1).standard_normal((24, 16)).astype(np.float32)
    check(
        *(reference.request(seed=seed) for seed in range(4)),
        *(reference.request(height=64, width=16 * n, seed=n) for n in (1, 2, 3)),
        *(reference.request("a blue ball", num_inference_steps=n) for n in (1, 2, 9)),
        *(reference.request(seed=seed, **guided) for seed in (1, 2)),
        reference.request(guidance_scale=0.5),
        reference.request(negative_prompt="a hat"),  # without true CFG it has no effect
        reference.request(latents=own),
    )


def test_a_negative_prompt_takes_effect(client, reference):
    pictures = [
        Drawing(client, reference.request(negative_prompt=text, true_cfg_scale=4.0)).pixels()
        for text in ("a hat", "a boat")
    ]
    plain = Drawing(client, reference.request()).pixels()
    assert not np.array_equal(*pictures)
    assert not np.array_equal(pictures[0], plain)


def test_a_known_prompt_is_neither_encoded_nor_sent_again(client, check, reference):
    """All blocks of the state are found: 49 vectors in 64 positions, and 64 more to exclude."""
    first = reference.request("the prompt that comes again")
    again = [reference.request("the prompt that comes again", seed=seed) for seed in (1, 2, 3)]
    check(first)
    found = [drawing for request in again for drawing in check(request)]
    assert {drawing.ended.cached_tokens for drawing in found} == {64}
    sent = client.status(handoffs=3)["handoffs"]["last"]
    assert {(one["cached_tokens"], one["blocks"]) for one in sent} == {(64, 1)}
    # With a negative prompt the prompt's blocks are still found.
    other = reference.request(
        "the prompt that comes again", negative_prompt="a hat", true_cfg_scale=2.0
    )
    (drawing,) = check(other)
    assert drawing.ended.cached_tokens == 64


def test_prompts_of_the_usual_length(client):
    """512 tokens: so many that a text prompt would be sent layer by layer."""
    usual = Reference(PictureEngine(FOLDER, prompt_tokens=512))
    for fields in ({}, {"negative_prompt": "a hat", "true_cfg_scale": 2.0}):
        request = usual.request("a usual prompt", num_inference_steps=1, **fields)
        assert np.array_equal(Drawing(client, request).pixels(), usual.draw(request))


def test_a_cancelled_picture_frees_its_blocks(pools, client, reference):
    requests = [
        reference.request(seed=seed, num_inference_steps=steps, height=256)
        for seed, steps in enumerate((250, 250, 40))
    ]
    *running, kept = [Drawing(client, request) for request in requests]
    for drawing in running:
        ended = drawing.until(3).cancel().ended
        assert (ended.status, ended.media) == ("cancelled", None)
        assert drawing.steps[-1] < 250
    assert np.array_equal(kept.pixels(), reference.draw(requests[-1]))


# --------------------------------------------------------------------------- refusals


def test_wrong_requests_end_with_one_error(client, reference):
    wrong = {
        "height must be": {"height": 8},
        "multiple of 16": {"width": 40},
        "num_inference_steps must be": {"num_inference_steps": 0},
        "must be .* in 1..250": {"num_inference_steps": 10**6},
        "latents must be floats": {"latents": np.zeros((3, 3), np.float32)},
        "latents must be finite": {"latents": np.full((24, 16), np.inf, np.float32)},
        "true_cfg_scale must be": {"true_cfg_scale": -1.0},
    }
    for message, fields in wrong.items():
        with pytest.raises(InputError, match=message):
            Drawing(client, reference.request(**fields)).pixels()


def test_tokens_that_the_encoders_do_not_have(client, reference):
    for name in ("tokens", "tokens_2"):
        request = reference.request("other words")
        getattr(request, name).all[0] = 60_000
        with pytest.raises(InputError, match=r"token ids must be in 0..99"):
            Drawing(client, request).pixels()


def test_text_for_a_picture_model(client, reference):
    card = client._model().card
    text = msgspec.structs.replace(card, task="generate", kinds=["TextContext"])
    wire = build_wire_context([1, 2, 3], text, SamplingParams(max_new_tokens=3))
    drawing = Drawing(client, reference.request(), wire=wire)
    with pytest.raises(InputError, match="takes no text"):
        drawing.pixels()
    with pytest.raises(BatonError):
        client.embed([[1, 2, 3]])


# --------------------------------------------------------------------------- lost processes


def many(reference, count=6, **fields):
    return [
        reference.request(f"picture {n}", seed=n, num_inference_steps=LONG, **fields)
        for n in range(count)
    ]


def test_a_decode_worker_dies_between_steps(pools, client, reference):
    lose(pools, client, reference, "decode-0", 30, many(reference, 4))


@pytest.mark.long
@pytest.mark.parametrize("name", ["decode-0", "decode-1"])
@pytest.mark.parametrize("step", [0, LONG - 10])
def test_a_decode_worker_dies_at_another_step(pools, client, reference, name, step):
    guided = {"negative_prompt": "a hat", "true_cfg_scale": 2.0, "height": 192}
    lose(pools, client, reference, name, step, many(reference, 4, **guided))


@pytest.mark.parametrize("role", ["prefill", pytest.param("decode", marks=pytest.mark.long)])
def test_workers_die_while_a_prompt_is_encoded_or_sent(pools, client, reference, role):
    """Stopped prefill workers encode nothing; stopped decode workers grant no blocks."""
    requests = [reference.request(f"{role} {n}", seed=n) for n in range(4)]
    lose_a_stopped_one(pools, client, reference, role, requests)


@pytest.mark.long
@pytest.mark.parametrize("name", ["router-0", "router-1"])  # the client uses one of them
def test_a_router_dies(pools, client, reference, name):
    requests = many(reference, 3)
    running = [Drawing(client, request) for request in requests]
    for drawing in running:
        drawing.until(10)
    pid = pools.pids()[name]
    os.kill(pid, signal.SIGKILL)
    for drawing, request in zip(running, requests, strict=True):
        assert np.array_equal(drawing.pixels(), reference.draw(request))
        assert drawing.steps == list(range(LONG + 1))
    pools.wait_said(f"{name} serves again")
    wait_until(lambda: set(pools.workers()) >= set(WORKERS), what="all workers to register again")


@pytest.mark.long
def test_workers_die_again_and_again(pools, client, reference):
    """Eight blows in any order, each when the oldest picture has gone on; no pixel differs."""
    requests = [
        reference.request(
            f"again {n % 5}", seed=n, height=128, width=64, num_inference_steps=60 + n
        )
        for n in range(16)
    ]
    guided = [n % 3 == 0 for n in range(16)]
    for request, other in zip(requests, guided, strict=True):
        if other:
            request.negative_tokens, request.negative_tokens_2 = request.tokens, request.tokens_2
            request.true_cfg_scale = 1.5
    running = [Drawing(client, request) for request in requests]
    rng = np.random.default_rng(5)
    for blow in range(8):
        running[blow].until(int(rng.integers(0, 40)))
        name = str(rng.choice(WORKERS))
        pid = pools.pids().get(name)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            pools.wait_replaced(name, pid)
    for drawing, request in zip(running, requests, strict=True):
        assert np.array_equal(drawing.pixels(), reference.draw(request))
        assert drawing.steps[-1] == request.num_inference_steps
