"""``baton.LLM``: lists of prompts on a new cluster, which leaves no process or file."""

import asyncio
import fcntl
import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from baton import LLM, SamplingParams
from baton.deploy.config import ServeSettings
from baton.offline.cluster import _address
from baton.offline.process import settings_of
from baton.offline.settings import ClusterSettings
from baton.proto.errors import ConfigError, RequestFailed, TaskMismatch

from ..processes import alive, wait_until

pytestmark = pytest.mark.cluster
EMBEDDER = Path(__file__).parents[1] / "data" / "embedders" / "bert"
GREEDY = SamplingParams(temperature=0, max_new_tokens=6)

# As users write scripts: without a guard, and an LLM that is never closed.
SCRIPT = f"""
import sys
from baton import LLM
llm = LLM({str(EMBEDDER)!r}, kv_memory="8MiB", progress=True)
print(llm.embed(["the cat", "the cat", "a dog"]).shape)
print(llm._cluster._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The temporary folder of the clusters."""
    return tmp_path_factory.mktemp("l")


@pytest.fixture(scope="module")
def llm(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        made = LLM(kv_memory="32MiB")
    pid = made._cluster._process.pid
    yield made
    made = None
    gc.collect()
    # Deleted, not closed. Pytest may keep a reference until it drops the fixture.
    wait_until(lambda: not alive(pid) or close(pid), what="the end of the cluster")


def close(pid: int) -> bool:
    for one in gc.get_objects():
        if isinstance(one, LLM) and one._cluster._process.pid == pid:
            one.close()
    return not alive(pid)


def test_results_have_the_order_of_the_prompts(llm, capsys):
    prompts = ["Once upon a time", [5, 6, 7], "Who are you?"]
    results = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [one.token_ids for one in results] == [one.token_ids for one in alone]
    assert [one.prompt for one in results] == prompts
    assert all(one.finish_reason in ("stop", "length") for one in results)
    assert [len(one.outputs) for one in llm.generate(prompts, GREEDY, n=2)] == [2, 2, 2]
    assert len(llm.tokenizer.encode(prompts[0])) == results[0].usage.prompt_tokens
    assert capsys.readouterr().err == ""  # no bar without a terminal


def test_chats_and_what_the_model_does_not_do(llm):
    talk = [{"role": "user", "content": "What is Baton?"}]
    (one,) = llm.chat(talk, SamplingParams(temperature=0, max_new_tokens=20))
    assert "two pools" in one.text
    assert [result.token_ids for result in llm.chat([talk, talk], GREEDY)] == [
        one.token_ids[:6]
    ] * 2
    with pytest.raises(TaskMismatch, match="embedding"):
        llm.embed(["a"])


def test_it_works_where_an_event_loop_runs(llm):
    async def cell():
        return llm.generate(["a", "b"], GREEDY)

    assert len(asyncio.run(cell())) == 2


def test_a_script_that_is_killed_leaves_no_process_and_no_file(tmp_path):
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert script.stdout is not None and script.stderr is not None
    shape, pid = script.stdout.readline(), script.stdout.readline()
    assert shape == "(3, 32)\n" and alive(int(pid)), script.stderr.read()
    script.send_signal(signal.SIGKILL)
    script.wait()
    assert "3/3 texts" in script.stderr.read()
    wait_until(lambda: not alive(int(pid)), what="the end of the cluster")
    # An empty folder of this user may stay: sockets of long paths lie there.
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": "/nope"}, "no model folder /nope"),
        ({"address": "ipc:///x"}, "LLM starts a cluster of its own; for a running one"),
        ({"log": "/nope/x"}, "cannot write the log /nope/x: No such file or directory"),
    ],
)
def test_a_wrong_start_is_one_sentence(settings, sentence):
    with pytest.raises(ConfigError) as caught:
        LLM(**settings)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


def test_the_wait_for_the_start_is_bounded():
    reading, writing = os.pipe()
    late = pytest.raises(RequestFailed, match=r"did not start within 0\.01 s \(start_timeout\)")
    with os.fdopen(reading, "rb") as report, os.fdopen(writing, "wb"), late:
        _address(report, None, 0.01)


def test_a_program_with_many_open_files_reads_the_report():
    """select(2) knows descriptors below 1024 alone."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2048:
        pytest.skip("too few open files allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    reading, writing = os.pipe()
    try:
        high = fcntl.fcntl(reading, fcntl.F_DUPFD, 1500)
        os.write(writing, b'{"address": "ipc:///a"}')
        os.close(writing)
        with os.fdopen(high, "rb") as report:
            assert _address(report, None, 60.0) == "ipc:///a"
    finally:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_wrong_setting_is_named():
    with pytest.raises(ConfigError, match=r"^prefil is not a setting; did you mean prefill\?"):
        settings_of({"prefil": 2})
    assert settings_of({"prefill": 2, "model": "x"}).prefill == 2


def test_type_checkers_know_every_setting():
    named, given = get_type_hints(ClusterSettings), get_type_hints(ServeSettings)
    own = {"model", "prefill", "decode", "address"}
    assert named.keys() == given.keys() - own
    wrong = {name for name in named if given[name] not in (named[name], *get_args(named[name]))}
    assert not wrong
