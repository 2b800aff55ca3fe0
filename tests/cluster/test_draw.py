"""Pictures as users ask for them, through a cluster: the clients, the command, HTTP, offline."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from baton import LLM
from baton.cli.command import main
from baton.client import AsyncClient, Client
from baton.engine.pictures.draw import PictureEngine
from baton.proto.contexts.pixels import decode_png, encode_png
from baton.proto.errors import InputError, TaskMismatch

from ..clients.recorder import read_recording
from ..processes import wait_until
from .conftest import command_environment
from .picture_driver import FOLDER
from .test_recorded_clients import exchange

pytestmark = pytest.mark.cluster

TEXT = "a red house by the sea"
SETTINGS = {"width": 32, "height": 48, "steps": 3, "seed": 7}
RECORDING = Path(__file__).parents[1] / "data" / "http" / "pictures" / "openai_python.http"
ROUTE = "/v1/images/generations"
HTTP = {"prompt": TEXT, "size": "32x48", "steps": 3, "seed": 7}


@pytest.fixture(scope="module")
def pools(shared_cluster):
    return shared_cluster(prefill=1, decode=2, model=FOLDER, worker_timeout=1.0)


@pytest.fixture(scope="module")
def engine():
    return PictureEngine(FOLDER, prompt_tokens=512)


def drawn(engine, negative=None, text=TEXT, **fields):
    fields = {"width": 32, "height": 48, "num_inference_steps": 3, "seed": 7, **fields}
    return engine.draw(engine.request(text, negative, **fields))


def previewed(engine, steps, wanted):
    """The previews of the engine after the ``wanted`` numbers of steps, as they arrive."""
    request = engine.request(TEXT, width=32, height=48, num_inference_steps=steps, seed=7)
    drawing = engine.denoiser.start(request, engine.encoder.encode(request))
    found = []
    for done in range(1, max(wanted) + 1):
        engine.denoiser.step([drawing])
        if done in wanted:
            found.append((encode_png(engine.denoiser.preview(drawing)), done, steps))
    return found


def test_a_picture_and_its_previews_are_the_engines(client, engine):
    steps, previews = [], []
    picture = client.image(
        TEXT, **SETTINGS, on_progress=lambda *both: steps.append(both),
        on_preview=lambda *one: previews.append(one),
    )  # fmt: skip
    assert steps == [(done, 3) for done in range(4)]
    assert previews == previewed(engine, 3, (1, 2))
    assert np.array_equal(picture.pixels(), drawn(engine))
    assert (picture.prefill, picture.decode[:6]) == ("prefill-0", "decode")


def test_a_negative_prompt_and_guidance_are_the_engines(client, engine):
    found = client.image(TEXT, **SETTINGS, negative_prompt="blue", guidance=2.0).pixels()
    assert np.array_equal(found, drawn(engine, "blue", true_cfg_scale=4.0, guidance_scale=2.0))
    assert not np.array_equal(found, drawn(engine))


def test_the_async_client_draws_several_at_a_time(pools, engine):
    async def run():
        async with AsyncClient(pools.address, connect_timeout=20.0) as client:
            sizes = [{**SETTINGS, "width": 16 * at, "seed": at} for at in range(1, 5)]
            return await asyncio.gather(*(client.image(TEXT, **one) for one in sizes))

    for at, picture in enumerate(asyncio.run(run()), 1):
        assert np.array_equal(picture.pixels(), drawn(engine, width=16 * at, seed=at))


@pytest.mark.long
def test_a_killed_worker_changes_no_picture(pools, client, engine):
    pools.wait_ready()
    pids, killed = pools.pids(), []

    def strike(done, total):
        if done == 5 and not killed:
            killed.extend(pids[name] for name in ("decode-0", "decode-1"))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    previews = []
    picture = client.image(
        TEXT, **{**SETTINGS, "steps": 100}, previews=16, on_progress=strike,
        on_preview=lambda *one: previews.append(one),
    )  # fmt: skip
    assert killed
    assert previews == previewed(engine, 100, [100 * n // 17 for n in range(1, 17)])
    assert np.array_equal(picture.pixels(), drawn(engine, num_inference_steps=100))
    for name, pid in zip(("decode-0", "decode-1"), killed, strict=True):
        pools.wait_replaced(name, pid)


def test_an_unwanted_picture_frees_its_blocks(pools, client):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.image(TEXT, **{**SETTINGS, "steps": 250}, on_progress=stop)
    pools.wait_idle()


def test_what_the_cluster_refuses(client):
    with pytest.raises(TaskMismatch, match="is a picture model"):
        client.complete("hello")
    with pytest.raises(InputError, match="width must be a multiple of 16"):
        client.image(TEXT, width=40)


# --------------------------------------------------------------------------- the command


OPTIONS = ["--width=32", "--height=48", "--steps=3", "--seed=7", "--negative=blue"]


@pytest.fixture
def draw(pools, monkeypatch, capsys, tmp_path):
    """Run ``baton draw`` in this process; returns exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_ADDRESS", pools.address)

    def run(*words):
        try:
            code = main(["draw", *words])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


def test_the_command_writes_a_png(draw, engine, tmp_path):
    code, out, err = draw(TEXT, *OPTIONS, "-o", "a.png", "--previews=2")
    assert (code, err) == (0, "")
    previews = [decode_png((tmp_path / f"a.preview-{n}.png").read_bytes()) for n in (1, 2)]
    assert {one.shape for one in previews} == {(48, 32, 3)}
    assert out.startswith("a.png: 32 x 48, seed 7, ")
    expected = drawn(engine, "blue", true_cfg_scale=4.0)
    assert np.array_equal(decode_png((tmp_path / "a.png").read_bytes()), expected)


def test_the_command_writes_to_a_pipe(pools, engine, tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "baton.cli", "draw", *OPTIONS, "-o", "-"],
        env=command_environment(tmp_path) | {"BATON_ADDRESS": pools.address},
        input=TEXT.encode(), capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == b""
    assert np.array_equal(decode_png(done.stdout), drawn(engine, "blue", true_cfg_scale=4.0))


def test_the_command_shows_steps_on_a_terminal(draw, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, _, err = draw(TEXT, *OPTIONS, "-o", "a.png")
    assert [line for line in err.split("\r\x1b[K") if line] == [
        f"step {done} of 3" for done in range(3)
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["", "-o", "a.png"], 2, "the text is empty"),
        (["a"], 2, "missing -o/--output"),
        (["a", "-o", "/nowhere/a.png"], 2, "cannot write /nowhere/a.png: there is no folder"),
        (["a", "-o", "/"], 2, "cannot write /: it is a folder"),
        (["a", "-o", "a.png", "--width=40"], 2, "width must be a multiple of 16"),
        (["a", "-o", "a.png", "--width=4e2"], 2, "--width: '4e2' is not a whole number"),
        (["a", "-o", "a.png", "--steps=0"], 2, "steps must be a whole number, 1 to 250"),
        (["a", "-o", "a.png", "--previews=17"], 2, "previews must be a whole number, 0 to 16"),
        (["a", "-o", "-", "--previews=1"], 2, "--previews needs a file"),
        (["a", "-o", "a.png", "--guidance=nan"], 2, "guidance must be a number"),
    ],
)
def test_the_command_refuses(draw, tmp_path, words, code, said):
    found, _, err = draw(*words)
    assert (found, err.count("\n")) == (code, 1), err
    assert said in err
    assert not list(tmp_path.glob("*.png"))


# --------------------------------------------------------------------------- over HTTP


def test_http_gives_the_same_picture(gateway, engine):
    answer = gateway.post(ROUTE, **HTTP, model="flux", n=2, response_format="b64_json")
    for at, one in enumerate(answer["data"]):
        pixels = decode_png(base64.b64decode(one["b64_json"]))
        assert np.array_equal(pixels, drawn(engine, seed=7 + at))
    assert answer["usage"]["output_tokens"] == 2 * 2 * 3


def test_a_http_client_that_leaves_frees_the_blocks(gateway, pools):
    connection = gateway.connection()
    connection.request("POST", ROUTE, b'{"prompt": "a", "n": 3, "steps": 250, "size": "64x64"}')
    wait_until(lambda: any(one["requests_running"] for one in pools.workers().values()))
    connection.close()
    pools.wait_idle()


def test_recorded_requests_of_openai_python_get_their_answers(gateway):
    """As ``tests/clients/openai_pictures.py`` sent them."""
    records = list(read_recording(RECORDING))
    assert {status for status, _ in records} == {200, 400}
    for status, request in records:
        found, _, body = exchange(gateway.port, request)
        assert found == status, (request, body)
        if body.startswith(b"event: "):
            assert b"image_generation.completed" in body
            continue
        answer = json.loads(body)
        if found == 200:
            (form,) = answer["data"][0].keys() & {"b64_json", "url"}
            assert answer["data"][0][form]
        else:
            assert answer["error"]["message"]


def test_http_refuses_text(gateway):
    status, content, _ = gateway.ask(
        "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}
    )
    assert (status, content["error"]["code"]) == (400, "task_mismatch")


# --------------------------------------------------------------------------- offline


def test_llm_draws(engine, tmp_path):
    with LLM(str(FOLDER), log=str(tmp_path / "log")) as llm:
        picture = llm.image(TEXT, **SETTINGS)
        assert isinstance(llm.client, Client)
    assert np.array_equal(picture.pixels(), drawn(engine))
