"""Z-Image through whole clusters: the pixels of the engine in one process, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.pictures.draw import PictureEngine
from baton.proto.errors import InputError

from .picture_driver import FOLDER, Drawing, Reference, lose, lose_a_stopped_one

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("left_idle")]

ZIMAGE = FOLDER.with_name("zimage")
LONG = 120  # steps that take a second or more
GUIDED = {"negative_prompt": "a hat", "guidance_scale": 3.0}


@pytest.fixture(scope="module")
def pools(shared_cluster, tmp_path_factory):
    sockets = tmp_path_factory.mktemp("r")
    return shared_cluster(
        prefill=2, decode=2, address=f"ipc://{sockets}/a.sock", model=ZIMAGE, worker_timeout=1.0
    )


class Requests(Reference):
    """Requests without guidance, unless they ask for it."""

    def request(self, prompt="a red cube", **fields):
        return super().request(prompt, **{"guidance_scale": 0.0, **fields})


@pytest.fixture(scope="module")
def reference():
    return Requests(PictureEngine(ZIMAGE))


def check(client, reference, *requests):
    """Draw requests together, and compare each with the engine's picture."""
    running = [Drawing(client, request) for request in requests]
    for one, request in zip(running, requests, strict=True):
        assert np.array_equal(one.pixels(), reference.draw(request))
        assert one.steps == list(range(request.num_inference_steps + 1))
    return running


def test_alone_and_together(client, reference):
    """Prompts of several lengths, sizes, numbers of steps and guidance in one batch."""
    own = np.random.default_rng(1).standard_normal((24, 16)).astype(np.float32)
    requests = [
        *(reference.request("a cube" + " or two" * n, seed=n) for n in range(4)),
        *(reference.request(height=64, width=16 * n, seed=n) for n in (1, 2, 3)),
        *(reference.request("a blue ball", num_inference_steps=n) for n in (1, 2, 9)),
        *(reference.request(seed=seed, **GUIDED) for seed in (1, 2)),
        reference.request(guidance_scale=2.0),  # the negative prompt is empty
        reference.request(latents=own),
    ]
    check(client, reference, requests[0])
    check(client, reference, *requests)
    check(client, reference, requests[0])


def test_a_known_prompt_is_neither_encoded_nor_sent_again(client, reference):
    """All blocks of the state are found; with a negative prompt those of the prompt still are."""
    prompt = "the prompt that comes again"
    first = reference.request(prompt)
    blocks = -(-len(first.tokens) // 16)
    check(client, reference, first)
    again = [reference.request(prompt, seed=seed) for seed in (1, 2, 3)]
    again.append(reference.request(prompt, **GUIDED))
    found = [drawing for request in again for drawing in check(client, reference, request)]
    assert {drawing.ended.cached_tokens for drawing in found} == {16 * blocks}


def test_the_client_draws_the_engine_s_picture(client, reference):
    settings = {"width": 32, "height": 48, "seed": 7, "steps": 4}
    plain = client.image("a red cube", **settings)
    assert np.array_equal(plain.pixels(), reference.draw(reference.request()))
    named = {"cfg_normalization": 0.8, "cfg_truncation": 0.3}
    guided = client.image("a red cube", negative_prompt="a hat", guidance=3.0, **named, **settings)
    request = reference.request(**GUIDED)
    for name, value in named.items():
        request.extra_params[name] = np.array([value])
    assert np.array_equal(guided.pixels(), reference.draw(request))
    assert not np.array_equal(guided.pixels(), plain.pixels())
    previews = []
    client.image("a red cube", **settings, on_preview=lambda png, done, total: previews.append(png))
    assert len(previews) == 3
    for wrong, message in (
        ({"true_cfg": 3.0}, "true_cfg has no effect"),
        ({"negative_prompt": "a hat"}, "negative_prompt has no effect without guidance"),
        ({"cfg_truncation": 0.5}, "cfg_truncation has no effect without guidance"),
    ):
        with pytest.raises(InputError, match=message):
            client.image("a red cube", **wrong)


def test_a_cancelled_picture_ends_between_steps(client, reference):
    request = reference.request(num_inference_steps=250, height=256)
    ended = Drawing(client, request).until(3).cancel()
    assert (ended.ended.status, ended.ended.media) == ("cancelled", None)
    assert ended.steps[-1] < 250


def test_a_decode_worker_dies_between_steps(pools, client, reference):
    requests = [
        reference.request(f"picture {n}", seed=n, num_inference_steps=LONG) for n in range(4)
    ]
    lose(pools, client, reference, "decode-0", 30, requests)


def test_a_prefill_worker_dies_while_it_encodes(pools, client, reference):
    """Stopped prefill workers encode nothing; one of them dies."""
    requests = [reference.request(f"prefill {n}", seed=n) for n in range(4)]
    lose_a_stopped_one(pools, client, reference, "prefill", requests)


def test_wrong_requests_end_with_one_error(client, reference):
    wrong = {
        "true_cfg_scale has no meaning": {"true_cfg_scale": 2.0},
        "latents must be floats": {"latents": np.zeros((3, 3), np.float32)},
    }
    for message, fields in wrong.items():
        with pytest.raises(InputError, match=message):
            Drawing(client, reference.request(**fields)).pixels()
    request = reference.request()
    request.tokens_2 = request.tokens
    with pytest.raises(InputError, match="tokens_2 has no meaning"):
        Drawing(client, request).pixels()
    request = reference.request(guidance_scale=2.0)
    request.negative_tokens = None
    with pytest.raises(InputError, match="needs negative_tokens"):
        Drawing(client, request).pixels()
