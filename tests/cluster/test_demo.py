import json
import random
import re
import signal
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from baton.cli.demo_media import PROMPTS, SCENE_SEED, SCENES, random_scene
from baton.proto.contexts.pixels import decode_png
from baton.tools.demo_flux.scenes import all_scenes, shows
from baton.tools.demo_model.sights import Sight, description, held_out

from ..suite.short import some_long
from .conftest import command_environment

pytestmark = pytest.mark.cluster
README = Path(__file__).parents[2] / "README.md"


def shape(line):
    """A line of the demo without its numbers and the model's text."""
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r'"[^"]*"', "TEXT", line))


def start_demo(folder, *options):
    """Start the demo with its files in ``folder``."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "baton.cli", "demo", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=command_environment(folder),
    )


def test_demo_answers_prompts_through_a_whole_cluster_and_leaves_nothing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("d")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "baton.cli", "demo"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        env=command_environment(folder),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Prefill workers read the prompt" in done.stdout  # readable text of the real model
    handoffs = re.findall(
        r"prefill-0 read the prompt, handed ([\d.]+) KiB .* to (decode-\d)", done.stdout
    )
    assert len(handoffs) >= 3
    assert all(float(size) > 0 for size, _ in handoffs)
    assert {decode for _, decode in handoffs} == {"decode-0", "decode-1"}
    killed = re.search(r"(\d+) tokens  SIGKILL to (decode-\d), pid \d+\n", done.stdout)
    went_on = re.search(r"(\d+) tokens  completed by (decode-\d)", done.stdout)
    assert killed is not None
    assert went_on is not None
    assert int(killed[1]) < int(went_on[1])
    assert {killed[2], went_on[2]} == {"decode-0", "decode-1"}
    assert f"{killed[2]} ended (killed by signal 9)" in done.stdout
    over_http = re.search(
        r"\n\$ curl http://127\.0\.0\.1:\d+/v1/chat/completions -d .*\n +(.+)\n", done.stdout
    )
    assert over_http is not None
    assert over_http[1].startswith("I am the demo model of Baton")
    assert f"all {went_on[1]} tokens equal those of the undisturbed answer" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("demo finished: the cluster is stopped")
    assert len(re.findall(r"TTFT [\d.]+ ms, \d+ tokens, \d+ tokens/s", done.stdout)) >= 3
    assert list(folder.iterdir()) == []
    (printed,) = re.findall(r"```\n(\$ curl.*?> Tell me.*?)```", README.read_text(), re.DOTALL)
    shown = {shape(line) for line in done.stdout.splitlines()}
    assert [line for line in printed.splitlines() if shape(line) not in shown] == []


def test_the_demo_with_images_answers_right_and_survives_a_kill(tmp_path_factory):
    folder, pictures = tmp_path_factory.mktemp("d"), tmp_path_factory.mktemp("p") / "new"
    with start_demo(folder, "--images", "--output", str(pictures)) as demo:
        output, errors = demo.communicate(timeout=90)
    assert demo.returncode == 0, output + errors
    assert "Traceback" not in output + errors
    rng = random.Random(SCENE_SEED)
    asked = dict(re.findall(r"\n> (.*)\n  (.*)\n  \[prefill-0 read the prompt", output))
    assert asked["How many objects are there?"] == "Two."
    for index in range(SCENES):
        sight = Sight(random_scene(rng))
        assert held_out(sight)  # no training picture has these shapes together
        file = pictures / f"picture-{index}.png"
        assert np.array_equal(np.array(Image.open(file)), sight.pixels())
        block = output.partition(f"--- {file}")[2].partition("---")[0]
        assert f"> What is in the picture?\n  {description(sight)}\n" in block
        for thing in sight.things:
            assert asked[f"What shape is the {thing.colour} object?"] == f"A {thing.shape}."
        if index == 0:
            over_http = re.search(r"\n\$ curl .* -d @(.*)\n  (.*)\n  \[HTTP 200", output)
            assert over_http is not None
            assert over_http[2] == description(sight)
            assert json.loads(Path(over_http[1]).read_text())["messages"]
        else:
            assert f': "{description(sight)}' in output  # of the answer with the kill
    killed = re.search(r"(\d+) tokens  SIGKILL to (decode-\d), pid \d+\n", output)
    went_on = re.search(r"(\d+) tokens  completed by (decode-\d)", output)
    assert killed is not None
    assert went_on is not None
    assert int(killed[1]) < int(went_on[1])
    assert {killed[2], went_on[2]} == {"decode-0", "decode-1"}
    assert f"all {went_on[1]} tokens equal those of the undisturbed answer" in output
    assert output.splitlines()[-1].startswith("demo finished: the cluster is stopped")
    assert list(folder.iterdir()) == []


def test_pictures_that_cannot_be_written_are_one_error(tmp_path):
    (tmp_path / "file").touch()
    with start_demo(tmp_path, "--images", "--output", str(tmp_path / "file")) as demo:
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 2
    assert errors == f"baton: cannot make {tmp_path / 'file'}: File exists\n"


def test_the_demo_draws_pictures_and_a_kill_changes_none(tmp_path_factory):
    folder, pictures = tmp_path_factory.mktemp("d"), tmp_path_factory.mktemp("p") / "new"
    with start_demo(folder, "--pictures", "--output", str(pictures)) as demo:
        output, errors = demo.communicate(timeout=90)
    assert demo.returncode == 0, output + errors
    drawn = re.findall(r"\n> (.+)\n  (/.+\.png)\n", output)
    assert [prompt for prompt, _ in drawn] == list(PROMPTS)
    scenes = {scene.prompt: scene for scene in all_scenes()}
    for prompt, path in drawn:
        assert shows(decode_png(Path(path).read_bytes()), scenes[prompt]), prompt
    killed = re.search(r"  step (\d+) of (\d+)  SIGKILL to (decode-\d), pid \d+\n", output)
    went_on = re.search(r"  finished by (decode-\d): all \d+ bytes equal", output)
    assert killed is not None
    assert went_on is not None
    assert int(killed[1]) < int(killed[2])
    assert killed[3] != went_on[1]
    assert f"{killed[3]} ended (killed by signal 9)" in output
    assert list(folder.iterdir()) == []
    files = {path.name: path.read_bytes() for path in pictures.iterdir()}
    assert sorted(files) == ["1.png", "2.png", "3.png", "killed.png", "undisturbed.png"]
    assert files["killed.png"] == files["undisturbed.png"]


def test_demo_speaks_digits_into_wav_files_also_while_a_worker_is_killed(tmp_path_factory):
    folder, wav = tmp_path_factory.mktemp("d"), tmp_path_factory.mktemp("wav")
    with start_demo(folder, "--speech", "--output", str(wav)) as demo:
        output, errors = demo.communicate(timeout=90)
    assert demo.returncode == 0, output + errors
    assert f"WAV files: {wav}\n" in output
    victims = re.findall(r"SIGKILL to (decode-\d), pid \d+\n", output)
    spoken = re.search(r"killed.wav: ([\d.]+) s of speech in .*, from (decode-\d)\n", output)
    assert spoken is not None
    assert {victims[-1], spoken[2]} == {"decode-0", "decode-1"}
    audio = {}
    for path in wav.iterdir():
        with wave.open(str(path)) as file:
            assert file.getparams()[:3] == (1, 2, 16000)
            audio[path.name] = file.readframes(file.getnframes())
    assert set(audio) == {"one-two-three.wav", "7-0-4.wav", "undisturbed.wav", "killed.wav"}
    assert audio["killed.wav"] == audio["undisturbed.wav"]
    assert len(audio["killed.wav"]) / 32000 == pytest.approx(float(spoken[1]), abs=0.01)
    assert f"all {len(audio['killed.wav']) // 2} samples equal" in output
    assert list(folder.iterdir()) == []


def test_wav_files_that_cannot_be_written_are_one_error(tmp_path):
    (tmp_path / "file").touch()
    with start_demo(tmp_path, "--speech", "--output", str(tmp_path / "file")) as demo:
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 2
    assert errors == f"baton: cannot make {tmp_path / 'file'}: File exists\n"


@pytest.mark.parametrize("moment", some_long("starting", "> ", "tokens/s"))
def test_an_interrupted_demo_is_silent_and_leaves_nothing(tmp_path_factory, moment):
    folder = tmp_path_factory.mktemp("d")
    with start_demo(folder) as demo:
        next(line for line in demo.stdout if moment in line)
        demo.send_signal(signal.SIGINT)
        _, said = demo.communicate(timeout=60)
    assert (demo.returncode, said) == (130, "")
    assert list(folder.iterdir()) == []


@pytest.mark.long
def test_a_demo_whose_output_nobody_reads_any_more_ends_in_silence(tmp_path_factory):
    folder = tmp_path_factory.mktemp("d")
    with start_demo(folder) as demo:
        next(line for line in demo.stdout if "starting" in line)
        demo.stdout.close()
        said = demo.stderr.read()
    assert (demo.wait(60), said) == (0, "")
    assert list(folder.iterdir()) == []
