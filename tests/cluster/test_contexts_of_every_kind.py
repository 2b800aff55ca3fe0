"""Every context between real processes is byte for byte what the public encoder writes.

For each kind of model a cluster is tapped, and asked in every way that makes a context. A context
must have its request's name: the decoder would invent another one at each read.
"""

from __future__ import annotations

import io
import os
import signal
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from baton.client.speech import speech_context
from baton.proto import (
    PixelContext,
    SamplingParams,
    TextContext,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)

from ..processes import wait_until
from .http import Gateway
from .kept_contexts import Kept, kept_contexts
from .picture_driver import FOLDER
from .speaker import EXAMPLE, make_speaker
from .vision_model import mllama_folder, vision_folder

pytestmark = pytest.mark.cluster

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True)
EMBEDDER = Path(__file__).resolve().parents[1] / "data" / "embedders" / "bert"


def check(kept: Kept, made: int, *, commits: bool = True) -> None:
    """Compare all kept contexts, of at least ``made`` requests, with the public encoder's bytes."""
    names = {name for kind, name in kept.contexts if kind == "Submit"}
    assert len(names) >= made
    for name in names if commits else ():
        wait_until(lambda name=name: kept.contexts["Commit", name], what=f"the Commit of {name}")
    for (kind, name), found in list(kept.contexts.items()):
        assert commits or kind != "Commit"
        for frames in found:
            public = b"PixelContext" in frames[0]
            decode = msgpack_numpy_decoder(PixelContext if public else TextContext)
            context = decode(frames)
            assert context.request_id.value == name, kind
            again = [bytes(frame) for frame in msgpack_numpy_encoder().frames(context)]
            assert again == frames, (kind, type(context).__name__)


@pytest.fixture
def tapped(cluster):
    """Starts a tapped cluster of one pair."""
    with ExitStack() as taps:

        def start(**settings):
            running = cluster(prefill=1, **settings)
            return running, taps.enter_context(kept_contexts(running))

        yield start


def png(side: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(side).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def test_text(tapped, tmp_path):
    running, kept = tapped(decode=1)
    sampled = SamplingParams(
        temperature=1.0, top_p=1.0, repetition_penalty=1.0, min_p=0.0, max_new_tokens=2, seed=7,
        stop=["\n\n"], stop_token_ids=[3], logit_bias={5: 1.0}, ignore_eos=True,
    )  # fmt: skip
    chat = [{"role": "user", "content": "A fox"}]
    with running.client() as client:
        client.complete("Once upon a time", GREEDY)
        client.complete([[5, 6, 7], "There was"], sampled, n=2, log_probabilities=3)
        client.complete("A hen", GREEDY, cache_salt="tenant", request_id="named")
        client.complete(client.model().tokenizer.render_chat(chat), GREEDY)
        with closing(client.chat(chat, GREEDY)) as outputs:
            list(outputs)
        schema = '{"type": "integer"}'
        client.complete("One", SamplingParams(max_new_tokens=4), json_schema=schema)
        own = TextContext(max_length=20, tokens=np.arange(3, 9), sampling_params=GREEDY)
        client.complete(own)
        client.complete(own, request_id="renamed")
    gateway = Gateway(running, tmp_path).wait_ready()
    model = gateway.ask("GET", "/v1/models")[1]["data"][0]["id"]
    gateway.post("/v1/completions", model=model, prompt="A cat", max_tokens=2)
    gateway.post("/v1/chat/completions", model=model, messages=chat, max_tokens=2)
    gateway.post("/v1/responses", model=model, input="A dog", max_output_tokens=16)
    assert gateway.end() == 0
    check(kept, 14)
    assert {("Submit", "named"), ("Commit", "renamed")} <= kept.contexts.keys()


@pytest.mark.parametrize("make", [vision_folder, mllama_folder])
def test_images(tapped, tmp_path, make):
    running, kept = tapped(decode=1, model=make(tmp_path / "seer"), block_size=8)
    parts = [
        {"type": "image", "image": png(40)},
        {"type": "text", "text": "What?"},
        {"type": "image", "image": png(24)},
    ]
    with (
        running.client() as client,
        closing(client.chat([{"role": "user", "content": parts}], GREEDY)) as outputs,
    ):
        list(outputs)
        client.complete("no image", GREEDY)
    check(kept, 2)


@pytest.mark.parametrize("name", ["flux", "zimage"])
def test_pictures(tapped, name):
    running, kept = tapped(decode=1, model=FOLDER.with_name(name))
    size = {"width": 32, "height": 32, "steps": 2}
    with running.client() as client:
        client.image("a red cube", **size)
        client.image("a ball", negative_prompt="a hat", guidance=3.5, cache_salt="a", **size)
        client.image("a ball", seed=3, on_preview=lambda *_: None, request_id="named", **size)
    check(kept, 3)


def test_speech(tapped, tmp_path):
    running, kept = tapped(decode=1, model=make_speaker(tmp_path / "speaker"))
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=1)
    with running.client() as client:
        for voice in ("bob", EXAMPLE):
            list(client.speak("A fox.", params, voice=voice))
        list(client.generate(speech_context(client.model(), "A hen.", EXAMPLE, params)))
    check(kept, 3)


def test_embeddings(start_cluster):
    running = start_cluster(prefill=1, model=EMBEDDER)
    running.size = (1, 0)
    running.wait_ready()
    with kept_contexts(running) as kept:
        with running.client() as client:
            client.embed(["the cat sat", [5, 6, 7]])
        check(kept, 2, commits=False)
    running.end_clean()


def test_a_replay(start_cluster):
    """A second attempt gets the same context, and the tokens so far beside it."""
    running = start_cluster(prefill=1, decode=2).wait_ready()
    long = SamplingParams(temperature=0.0, max_new_tokens=300, ignore_eos=True)
    with kept_contexts(running) as kept, running.client() as client:
        workers = client.status()["workers"]
        endpoint = next(one["endpoint"] for one in workers if one["id"] == "decode-0")
        outputs = client.generate(
            "Once upon a time", long, request_id="replayed", target_endpoint=endpoint
        )
        next(outputs)
        os.kill(running.pids()["decode-0"], signal.SIGKILL)
        assert list(outputs)[-1].decode == "decode-1"
        assert len(kept.contexts["Assign", "replayed"]) > 1
        kept.frames("Assign", "replayed")  # all alike
        check(kept, 1)
