"""Speech through both pools: a killed worker changes no sample."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import wave
from contextlib import closing
from importlib.util import find_spec

import numpy as np
import pytest

from baton import LLM
from baton.client.speech import AudioPrompt, speech_context
from baton.engine.audio.pcm import wav_header
from baton.gateway.speech_route import one_voice
from baton.proto.errors import DeadlineExceeded, InputError
from baton.proto.layout import AudioCard
from baton.proto.sampling import SamplingParams

from ..engine.audio.test_flac import decode
from .conftest import command_environment
from .driver import lost_requests
from .speaker import (
    CODEC,
    EXAMPLE,
    TEXTS,
    assert_same,
    make_speaker,
    samples_here,
    speak_all,
    speech_params,
)

pytestmark = pytest.mark.cluster
REFERENCE = np.load(CODEC / "reference.npz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_speaker(tmp_path_factory.mktemp("speech") / "speaker")


@pytest.fixture(scope="module")
def pools(shared_cluster, folder):
    return shared_cluster(model=folder, prefill=2, decode=2, worker_timeout=1.0)


@pytest.fixture(scope="module")
def undisturbed(pools, folder):
    with pools.client() as client:
        return samples_here(folder, client.model())


def test_the_samples_are_those_of_the_pipeline(pools, undisturbed):
    assert pools.client().model().card.audio == AudioCard(
        sample_rate=8000, frame_samples=96, frame_tokens=7, codebook_size=32
    )
    assert_same(speak_all(pools.address), undisturbed)
    assert_same(speak_all(pools.address), undisturbed)  # the prompts are in the prefix caches now


def test_a_voice_by_audio_tokens_changes_the_speech(pools, undisturbed):
    with pools.client() as client:
        named = np.concatenate(list(client.speak(TEXTS[2], speech_params(2), voice="bob")))
        outputs = list(client.generate(speech_context(client.model(), TEXTS[3], EXAMPLE, None)))
    assert not np.array_equal(named[:1000], undisturbed[2][:1000])
    assert outputs[-1].cached_tokens >= 64  # of the example, which is the beginning of the prompt


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ("prefill-0", 1),
        ("decode-0", 8),
        pytest.param("decode-0", 1, marks=pytest.mark.long),
        pytest.param("decode-0", 16, marks=pytest.mark.long),
    ],
)
def test_a_killed_worker_changes_no_sample(pools, undisturbed, name, begun):
    before = lost_requests(pools)
    for _ in range(5):  # the request may be at another worker, or have ended
        pools.wait_ready()
        pid, killed = pools.pids()[name], []

        def strike(chunks, pid=pid, killed=killed):
            if not killed and sum(map(len, chunks)) >= begun:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

        found = speak_all(pools.address, strike)
        assert_same(found, undisturbed)
        pools.wait_replaced(name, pid)
        if lost_requests(pools) > before or name.startswith("prefill"):
            return
    pytest.fail("nothing ran on the killed worker")


def test_speech_that_is_not_wanted_any_more_frees_its_blocks(pools):
    with pools.client() as client:
        with closing(client.speak(TEXTS[0], speech_params(0, 1500))) as chunks:
            assert len(next(chunks)) > 0
        pools.wait_idle()
        with pytest.raises(DeadlineExceeded):
            list(client.speak(TEXTS[0], speech_params(0, 1500), deadline=0.001))


def test_what_cannot_be_spoken_is_refused(pools):
    with pools.client() as client:
        with pytest.raises(InputError, match="voices are ada, bob"):
            next(client.speak("Hello.", voice="eve"))
        with pytest.raises(InputError, match="empty"):
            next(client.speak(" "))
        context = speech_context(client.model(), "Hello.", None, None)
        context.audio_prompt_tokens = np.ones(3, np.int32)
        with pytest.raises(InputError, match="audio_prompt_tokens"):
            next(client.generate(context))


def test_a_text_without_speech_is_an_error_and_writes_no_file(pools, tmp_path):
    environment = command_environment(tmp_path) | {"BATON_ADDRESS": pools.address}
    command = [sys.executable, "-P", "-m", "baton.cli", "speak", TEXTS[0], "--max-new-tokens=1"]
    done = subprocess.run(
        [*command, "-o", "out.wav"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, list(tmp_path.glob("*.wav"))) == (1, "", [])
    assert done.stderr.startswith(f"baton: the model spoke nothing for '{TEXTS[0][:80]}'")
    assert done.stderr.count("\n") == 1


def test_the_command_writes_a_wav_file(pools, tmp_path):
    environment = command_environment(tmp_path) | {"BATON_ADDRESS": pools.address}
    options = ["--voice=bob", "--seed=0", "--temperature=1.0", "--max-new-tokens=300"]
    command = [sys.executable, "-P", "-m", "baton.cli", "speak", TEXTS[0], *options]
    target = tmp_path / "out.wav"
    done = subprocess.run(
        [*command, "-o", str(target)], env=environment, capture_output=True, check=True
    )
    assert target.name.encode() in done.stdout
    with wave.open(str(target)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 8000)
        written = file.readframes(file.getnframes())
    params = SamplingParams(max_new_tokens=300, temperature=1.0, seed=0)
    with pools.client() as client:
        chunks = list(client.speak(TEXTS[0], params, voice="bob"))
    assert written == np.concatenate(chunks).tobytes()
    lossless = target.with_suffix(".flac")
    subprocess.run([*command, "-o", str(lossless)], env=environment, check=True)
    samples = np.frombuffer(written, np.int16).tolist()
    assert decode(lossless.read_bytes(), len(samples))[:2] == (8000, samples)
    example = tmp_path / "voice.npy"
    np.save(example, EXAMPLE.audio_prompt_tokens)
    recorded = tmp_path / "voice.wav"
    recorded.write_bytes(wav_header(8000, 5750) + REFERENCE["samples"].tobytes())
    books = [REFERENCE[f"encoded_{index}"].reshape(30, -1) for index in range(3)]
    order = [books[0], books[1][:, :1], books[2][:, :2], books[1][:, 1:], books[2][:, 2:]]
    for file, voice in (
        (example, EXAMPLE),
        (recorded, AudioPrompt(np.concatenate(order, axis=1).ravel(), EXAMPLE.text)),
    ):
        voiced = ["--voice-from", file, "--voice-text", EXAMPLE.text, *options[1:], "-o", "-"]
        other = subprocess.run([*command[:6], *voiced], env=environment, capture_output=True)
        with pools.client() as client:
            chunks = list(client.speak(TEXTS[0], params, voice=voice))
        assert (other.stdout, other.stderr) == (np.concatenate(chunks).tobytes(), b"")
    piped = subprocess.run([*command, "-o", "-"], env=environment, capture_output=True, check=True)
    assert piped.stdout == written


# --------------------------------------------------------------------------- over HTTP

ROUTE = "/v1/audio/speech"
ASKED = {"input": TEXTS[0], "voice": "bob", "temperature": 1.0, "seed": 0, "ignore_eos": True}


def begun(gateway, **fields):
    """Ask for speech; return the connection and the response, whose body may still be generated."""
    connection = gateway.connection()
    body = {"model": "speaker", "max_tokens": 300, **ASKED, **fields}
    connection.request("POST", ROUTE, json.dumps(body).encode())
    return connection, connection.getresponse()


def test_http_gives_the_same_samples(gateway, undisturbed):
    connection, response = begun(gateway)
    with closing(connection):
        assert (response.status, response.headers["content-type"]) == (200, "audio/wav")
        assert response.read() == wav_header(8000) + undisturbed[0].tobytes()


def test_http_takes_a_voice_by_its_audio_tokens(gateway, undisturbed):
    fields = {
        "audio_prompt_tokens": EXAMPLE.audio_prompt_tokens.tolist(),
        "audio_prompt_text": "Hi.",
    }
    connection, response = begun(gateway, input=TEXTS[2], seed=2, voice=None, **fields)
    with closing(connection):
        assert response.read() == wav_header(8000) + undisturbed[2].tobytes()


def test_http_gives_the_same_samples_as_flac(gateway, undisturbed):
    connection, response = begun(gateway, response_format="flac")
    with closing(connection):
        assert (response.status, response.headers["content-type"]) == (200, "audio/flac")
        assert decode(response.read())[:2] == (8000, undisturbed[0].tolist())


def test_http_streams_on_after_a_kill(gateway, pools, undisturbed):
    pools.wait_ready()
    pids = [pools.pids()[name] for name in ("decode-0", "decode-1")]
    connection, response = begun(gateway, response_format="pcm")
    with closing(connection):
        assert (response.status, response.headers["content-type"]) == (200, "audio/pcm")
        first = response.read(192)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert first + response.read() == undisturbed[0].tobytes()
    for name, pid in zip(("decode-0", "decode-1"), pids, strict=True):
        pools.wait_replaced(name, pid)


def test_a_http_client_that_leaves_frees_the_blocks(gateway, pools):
    connection, response = begun(gateway, max_tokens=1500)
    response.read(192)
    response.close()
    connection.close()
    pools.wait_idle()


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"response_format": "midi"}, "response_format"),
        ({"voice": "eve"}, "voice"),
        ({"input": " "}, None),
        ({"input": "a" * 4097}, "input"),
        ({"speed": 2}, "speed"),
        ({"stream_format": "sse"}, "stream_format"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1}, None),  # no samples
        ({"audio_prompt_tokens": [0] * 7}, "voice"),  # beside a named voice
        ({"voice": None, "audio_prompt_tokens": [0] * 6}, "audio_prompt_tokens"),
        ({"voice": None, "audio_prompt_tokens": [32] * 7}, "audio_prompt_tokens"),
        ({"audio_prompt_text": "Hi."}, "audio_prompt_text"),
    ],
    ids=str,
)
def test_what_http_cannot_speak_is_refused(gateway, fields, parameter):
    status, content, _ = gateway.ask("POST", ROUTE, {**ASKED, **fields})
    assert (status, content["error"]["param"]) == (400, parameter), content


def test_what_cannot_change_the_samples_is_named_in_a_header(gateway, undisturbed):
    connection, response = begun(gateway, response_format="pcm", pitch=1, user="me")
    content, warnings = response.read(), json.loads(response.headers["x-warnings"])
    connection.close()
    assert warnings == [
        "pitch is ignored: it is not a known parameter",
        "user is ignored: requests are not recorded by user",
    ]
    connection, response = begun(gateway, response_format="pcm")
    assert (response.read(), response.headers["x-warnings"]) == (content, None)
    connection.close()


@pytest.mark.parametrize("form", ["mp3", "opus", "aac"])
def test_a_compressed_format_is_written_or_names_its_package(gateway, form):
    if find_spec("av") is None:
        status, content, _ = gateway.ask("POST", ROUTE, {**ASKED, "response_format": form})
        assert (status, content["error"]["param"]) == (400, "response_format")
        assert "pip install 'baton-serve[audio]'" in content["error"]["message"]
        return
    connection, response = begun(gateway, response_format=form)
    begin = {"mp3": b"\xff", "opus": b"OggS", "aac": b"\xff"}[form]
    content = response.read()
    connection.close()
    assert (response.status, content[: len(begin)]) == (200, begin)


def test_a_model_without_named_voices_ignores_them():
    warnings = []
    assert one_voice("alloy", warnings, strict=False) is None
    assert warnings == ["voice is ignored: the model has no named voices"]
    assert one_voice("alloy", [], strict=True) == "alloy"


def test_llm_speaks(undisturbed, folder, tmp_path):
    with LLM(str(folder), kv_memory="8MiB", log=str(tmp_path / "log")) as llm:
        assert_same([llm.speak(TEXTS[0], speech_params(0), voice="bob")], undisturbed[:1])
