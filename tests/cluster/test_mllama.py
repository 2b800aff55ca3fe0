"""Images in cross-attention through whole clusters: tokens of transformers, hits, kills."""

from __future__ import annotations

import pytest

from baton.proto.errors import InputError
from baton.proto.sampling import SamplingParams

from ..engine.mllama_cases import cases
from ..processes import wait_until
from .driver import Job, ask, ask_all
from .streams import Job as StreamJob
from .streams import check_a_kill
from .vision_model import TILED_IMAGE as IMAGE
from .vision_model import mllama_folder, picture, png

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("left_idle")]

GREEDY = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
ROW = 40
"""Positions of an image: 34 in blocks of 8."""


@pytest.fixture(scope="module")
def pools(shared_cluster, tmp_path_factory):
    """Small blocks and chunks, so that prefixes are found and chunks end between images."""
    return shared_cluster(
        prefill=2, decode=2, model=mllama_folder(tmp_path_factory.mktemp("m") / "crosser"),
        block_size=8, max_num_batched_tokens=48, worker_timeout=1.0,
    )  # fmt: skip


def job(prompt, images, params=GREEDY, **options) -> Job:
    return Job([int(token) for token in prompt], params, {"images": list(images), **options})


def test_tokens_are_those_of_transformers(client):
    """One to three images, with text before and between them, and a prompt without images."""
    for case in cases():
        assert ask(client, job(case.prompt, case.pixels)).tokens == case.greedy


def test_together_as_alone_and_after_a_prefix_hit(client):
    work = [
        job([*range(20, 30), IMAGE, 40 + i], [picture(30 + 4 * i, 20 + 9 * i, i)],
            SamplingParams(temperature=0.7, seed=i, max_new_tokens=24, ignore_eos=True),
            cache_salt="alone")
        for i in range(6)
    ]  # fmt: skip
    alone = [ask(client, one) for one in work]
    salted = [Job(w.prompt, w.params, {**w.options, "cache_salt": "together"}) for w in work]
    assert [one.tokens for one in ask_all(client, salted)] == [one.tokens for one in alone]
    again = [ask(client, one) for one in work]
    assert [one.tokens for one in again] == [one.tokens for one in alone]
    assert sum(one.cached_tokens >= ROW for one in again) >= 3  # others went to the other worker


def test_another_image_under_the_same_text_is_no_prefix_hit(client):
    prompt, options = [30, IMAGE, *range(20, 40)], {"cache_salt": "swap"}
    one, two = picture(32, 32, 1), picture(32, 32, 2)
    first = ask(client, job(prompt, [one], **options))
    other = ask(client, job(prompt, [two], **options))
    assert other.cached_tokens == 0
    assert other.tokens == ask(client, job(prompt, [two], cache_salt="fresh")).tokens
    assert first.tokens != other.tokens
    assert ask(client, job(prompt, [one], **options)).tokens == first.tokens


def test_a_decode_worker_keeps_the_blocks_of_images(client):
    """Of three equal requests, two have the same decode worker."""
    prompt, image = [30, IMAGE, *range(20, 40)], picture(64, 40, 3)
    answers = [ask(client, job(prompt, [image], cache_salt="keep")).tokens for _ in range(3)]
    assert answers == answers[:1] * 3
    wait_until(
        lambda: any(
            handoff["cached_tokens"] >= ROW
            for handoff in client.status(handoffs=3)["handoffs"]["last"]
        ),
        what="a handoff that sends few blocks",
    )


def test_a_chat_with_a_file_counts_the_positions_of_images(client):
    content = png(picture(50, 60, 5))
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    found = client.complete_chat(chat, GREEDY, images=[content])
    plain = client.complete_chat([{"role": "user", "content": "What?"}], GREEDY)
    assert found.usage.prompt_tokens == plain.usage.prompt_tokens + ROW + 1
    assert found.text != plain.text


def test_wrong_numbers_of_images_are_refused(client):
    for prompt, count in (([IMAGE, 20], 2), ([20, 21], 1), ([IMAGE, IMAGE], 1)):
        with pytest.raises(InputError, match="placeholders"):
            ask(client, job(prompt, [picture(16, 16, 1)] * count))
    assert len(ask(client, job([IMAGE], [picture(16, 16, 1)])).tokens) == 16


# --------------------------------------------------------------------------- faults


def stream_jobs(count: int, new: int) -> list[StreamJob]:
    """Requests with two images, of which no two are equal."""
    made = []
    for i in range(count):
        images = (picture(60, 60, 100 + i), picture(20, 40, 200 + i))
        prompt = (20 + i, IMAGE, 21, IMAGE, 22) if i % 2 else (20 + i, IMAGE, IMAGE, 22)
        params = SamplingParams(
            temperature=0.8 if i % 3 else 0, seed=i, max_new_tokens=new, ignore_eos=True
        )
        made.append(StreamJob(prompt, params, images))
    return made


WORK = stream_jobs(8, new=200)


@pytest.mark.parametrize(("name", "after"), [("prefill-0", 1), ("decode-0", 8)])
def test_a_lost_worker_changes_no_token(pools, undisturbed, name, after):
    check_a_kill(pools, WORK, undisturbed, name, after)
