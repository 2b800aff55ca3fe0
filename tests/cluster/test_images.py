"""Requests with images through whole clusters: tokens of transformers, alone and together."""

from __future__ import annotations

import base64
import os
import signal
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from baton.cli.command import main
from baton.proto.errors import InputError
from baton.proto.sampling import SamplingParams

from ..processes import wait_until
from .driver import Job, ask, ask_all, collect, lost_requests
from .http import Gateway
from .streams import Job as StreamJob
from .streams import begun, check_a_kill, run, tokens
from .vision_model import (
    DATA,
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    picture,
    png,
    reference,
    vision_folder,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("left_idle")]

GREEDY = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
QUESTION = "What is it? "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vision_folder(tmp_path_factory.mktemp("m") / "seer")


@pytest.fixture(scope="module")
def pools(shared_cluster, folder, tmp_path_factory):
    """Small blocks and chunks, so that prefixes are found and chunks end between images."""
    sockets = tmp_path_factory.mktemp("r")
    return shared_cluster(
        prefill=2, decode=2, routers=2, address=f"ipc://{sockets}/a.sock,ipc://{sockets}/b.sock",
        model=folder, block_size=8, max_num_batched_tokens=48, worker_timeout=1.0,
    )  # fmt: skip


def job(prompt, images, params=GREEDY, **options) -> Job:
    return Job(list(prompt), params, {"images": list(images), **options})


def test_tokens_are_those_of_transformers(client):
    for prompt, images, greedy in reference():
        assert ask(client, job(prompt, images)).tokens == greedy


@pytest.mark.long
def test_tokens_of_qwen3_vl_are_those_of_transformers(shared_cluster, tmp_path_factory):
    data = DATA.with_name("qwen3_vl")
    folder = vision_folder(tmp_path_factory.mktemp("m") / "seer3", data)
    pools = shared_cluster(model=folder, block_size=8, max_num_batched_tokens=48)
    with pools.client() as client:
        for prompt, images, greedy in reference(data):
            assert ask(client, job(prompt, images)).tokens == greedy


def test_together_as_alone_and_after_a_prefix_hit(client):
    work = [
        job([*range(20, 30), IMAGE_START, IMAGE, IMAGE_END, 40 + i], [picture(48, 8 * i + 8, i)],
            SamplingParams(temperature=0.7, seed=i, max_new_tokens=24, ignore_eos=True),
            cache_salt="alone")
        for i in range(8)
    ]  # fmt: skip
    alone = [ask(client, one) for one in work]
    salted = [Job(w.prompt, w.params, {**w.options, "cache_salt": "together"}) for w in work]
    together = ask_all(client, salted)
    again = [ask(client, one) for one in work]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.tokens for one in again] == [one.tokens for one in alone]
    assert sum(one.cached_tokens > 0 for one in again) >= 4  # others went to the other worker


def test_another_image_under_the_same_text_is_no_prefix_hit(client):
    prompt = [30, IMAGE_START, IMAGE, IMAGE_END, *range(20, 40)]
    one, two = picture(64, 64, 1), picture(64, 64, 2)
    options = {"cache_salt": "swap"}
    first = ask(client, job(prompt, [one], **options))
    other = ask(client, job(prompt, [two], **options))
    assert other.cached_tokens < 8  # no block with a token of the image
    assert other.tokens == ask(client, job(prompt, [two], cache_salt="fresh")).tokens
    again = ask(client, job(prompt, [one], **options))
    assert again.tokens == first.tokens


def test_a_decode_worker_keeps_the_blocks_of_images(client):
    """Of three equal requests, two have the same decode worker."""
    prompt, image = [30, IMAGE_START, IMAGE, IMAGE_END, *range(20, 40)], picture(64, 64, 3)
    answers = [ask(client, job(prompt, [image], cache_salt="keep")).tokens for _ in range(3)]
    assert answers == answers[:1] * 3
    wait_until(
        lambda: any(
            handoff["cached_tokens"] >= 64  # of 86 tokens, 64 of which are the image's
            for handoff in client.status(handoffs=3)["handoffs"]["last"]
        ),
        what="a handoff that sends few blocks",
    )


def test_text_without_images(client):
    first = ask(client, Job(list(range(20, 90)), GREEDY))
    assert first.tokens == ask(client, Job(list(range(20, 90)), GREEDY)).tokens


def test_chat_over_http_is_the_native_chat(pools, client, tmp_path):
    content = png(picture(50, 60, 5))
    native = client.complete_chat(
        [{"role": "user", "content": QUESTION}], GREEDY, images=[content]
    ).text
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.png").write_bytes(content)
    gateway = Gateway(pools, tmp_path, "--image-hosts=127.0.0.1").wait_ready()
    serve = partial(SimpleHTTPRequestHandler, directory=tmp_path / "files")
    try:
        url = "data:image/png;base64," + base64.b64encode(content).decode()
        parts = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": QUESTION},
        ]
        body = {
            "messages": [{"role": "user", "content": parts}],
            "temperature": 0, "max_tokens": 16, "ignore_eos": True,
        }  # fmt: skip
        status, answer, _ = gateway.ask("POST", "/v1/chat/completions", body)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, native)
        same = [
            {"type": "input_image", "image_url": url, "detail": "low"},
            {"type": "input_text", "text": QUESTION},
        ]
        asked = {
            "input": [{"role": "user", "content": same}],
            "temperature": 0, "max_output_tokens": 16, "ignore_eos": True,
        }  # fmt: skip
        status, answer, _ = gateway.ask("POST", "/v1/responses", asked)
        assert (status, answer["output"][0]["content"][0]["text"]) == (200, native)
        with ThreadingHTTPServer(("127.0.0.1", 0), serve) as files:
            threading.Thread(target=files.serve_forever).start()
            try:
                parts[0]["image_url"]["url"] = f"http://127.0.0.1:{files.server_port}/a.png"
                status, answer, _ = gateway.ask("POST", "/v1/chat/completions", body)
            finally:
                files.shutdown()
        assert (status, answer["choices"][0]["message"]["content"]) == (200, native)
        parts[0]["image_url"]["url"] = "https://example.com/a.png"
        status, answer, _ = gateway.ask("POST", "/v1/chat/completions", body)
        assert (status, answer["error"]["code"]) == (400, "image_host_refused")
        parts[0]["image_url"]["url"] = "data:image/png;base64,AAAA"
        status, answer, _ = gateway.ask("POST", "/v1/chat/completions", body)
        assert (status, answer["error"]["code"]) == (400, "input")
    finally:
        assert gateway.end() == 0, gateway.text()


def test_the_command_line_sends_images(pools, client, tmp_path, capsys):
    file = tmp_path / "picture.png"
    file.write_bytes(png(picture(50, 60, 5)))
    asked = client.complete_chat(
        [{"role": "user", "content": QUESTION}],
        SamplingParams(temperature=0, max_new_tokens=16),
        images=[file],
    )
    sampling = ["--temperature=0", "--max-new-tokens=16", f"--address={pools.address}"]
    assert main(["generate", "--chat", f"--image={file}", QUESTION, *sampling]) == 0
    assert capsys.readouterr().out == asked.text + "\n"
    assert main(["generate", "--chat", "--image=/nowhere.png", QUESTION, *sampling]) == 1
    assert "cannot read the image /nowhere.png" in capsys.readouterr().err


def test_a_wrong_hash_reaches_no_cache(client, monkeypatch):
    from baton.images import processor

    with monkeypatch.context() as patched:
        patched.setattr(processor, "image_hash", lambda _: 5)
        with pytest.raises(InputError, match="image_hash"):
            ask(client, job([IMAGE], [picture(16, 16, 1)]))
    assert len(ask(client, job([IMAGE], [picture(16, 16, 1)])).tokens) == 16


# --------------------------------------------------------------------------- faults


def stream_jobs(count: int, new: int, side: int = 160) -> list[StreamJob]:
    """Requests with two images of ``side`` and half of it, of which no two are equal."""
    made = []
    for i in range(count):
        images = (picture(side, side, 100 + i), picture(side // 2, side // 2, 200 + i))
        prompt = (20 + i, IMAGE_START, IMAGE, IMAGE_END, 21, IMAGE_START, IMAGE, IMAGE_END, 22)
        params = SamplingParams(
            temperature=0.8 if i % 2 else 0, seed=i, max_new_tokens=new, ignore_eos=True
        )
        made.append(StreamJob(prompt, params, images))
    return made


WORK = stream_jobs(8, new=200)


@pytest.mark.parametrize(
    ("name", "after"), [("prefill-0", 1), pytest.param("decode-0", 8, marks=pytest.mark.long)]
)
def test_a_lost_worker_changes_no_token(pools, undisturbed, name, after):
    check_a_kill(pools, WORK, undisturbed, name, after)


@pytest.mark.long
def test_a_lost_router_changes_no_token(pools, undisturbed):
    """The client sends the images again, to the other router."""
    for name in ("router-0", "router-1"):  # a client uses one of them
        pid = pools.pids()[name]

        async def strike(streams, pid=pid):
            await begun(streams, 6)
            os.kill(pid, signal.SIGKILL)

        assert tokens(run(pools.address, WORK, strike)) == undisturbed
        wait_until(
            lambda name=name, pid=pid: pools.pids().get(name) not in (None, pid),
            what=f"another {name}",
        )
        pools.wait_ready()


def test_a_cancelled_request_frees_its_blocks(client):
    generations = [
        client.generate(list(one.prompt), one.params, images=list(one.images)) for one in WORK[:6]
    ]
    for at, generation in enumerate(generations):
        if at % 2:
            next(generation)
        generation.close()
    answer = collect(client.generate(list(WORK[0].prompt), GREEDY, images=list(WORK[0].images)))
    assert len(answer.tokens) == 16


@pytest.mark.long
def test_a_preempted_request_with_images_is_computed_again(cluster, folder):
    """The decode worker has too few blocks for all; it cannot compute images again."""
    small = cluster(
        prefill=1, decode=1, model=folder, block_size=8, decode_kv_blocks=120, prefill_kv_blocks=400
    )
    work = stream_jobs(6, new=300, side=80)
    alone = [tokens(run(small.address, [one]))[0] for one in work]
    before = lost_requests(small)
    assert tokens(run(small.address, work)) == alone
    assert lost_requests(small) > before
    small.wait_idle()
