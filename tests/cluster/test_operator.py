"""What an operator sees of a real cluster: loading, figures, restarts, readiness."""

import os
import re
import signal
import time

import pytest

from ..processes import wait_until
from .driver import Job, ask_all, greedy

pytestmark = pytest.mark.cluster

PROMPTS, LENGTH, NEW = 6, 40, 10
INTERVAL = 0.25
FIGURES = re.compile(
    r"prompt ([\d.]+) tok/s, generation ([\d.]+) tok/s, running (\d+), waiting (\d+), "
    r"KV ([\d.]+) %, prefix hit ([\d.]+) %"
)


@pytest.fixture(scope="module")
def running(shared_cluster):
    return shared_cluster(prefill=1, decode=2, stats_interval=INTERVAL)


def figures(running) -> list[list[float]]:
    return [[float(each) for each in found] for found in FIGURES.findall(running.text())]


def test_loading_is_shown_for_every_worker(running):
    for name in ("prefill-0", "decode-0", "decode-1"):
        line = rf"^{name} loaded \d\S+ MiB of weights in [\d.]+ s$"
        assert re.search(line, running.text(), re.MULTILINE)
    assert "loading" not in running.text()  # a bar is for a terminal


def test_the_figures_of_status_and_line_add_up(cluster):
    # A cluster of its own: it counts since the start, also when the test is run again.
    running = cluster(prefill=1, decode=2, stats_interval=INTERVAL)
    prompts = [list(range(20 + i, 20 + i + LENGTH)) for i in range(PROMPTS)]
    jobs = [Job(prompt, greedy(NEW)) for prompt in prompts]
    with running.client() as client:
        began = time.monotonic()
        lines = len(figures(running))
        answers = ask_all(client, jobs) + ask_all(client, jobs)
        assert [len(answer.tokens) for answer in answers] == [NEW] * len(answers)

        def settled():
            status = client.status()
            workers = status["workers"]
            done = sum(w["generated_tokens"] for w in workers) == NEW * len(answers)
            firsts = sum(w["first_token_s"]["count"] for w in workers if w["role"] == "prefill")
            gaps = sum(w["between_tokens_s"]["count"] for w in workers if w["role"] == "decode")
            idle = not any(w["kv_blocks_used"] + w["requests_running"] for w in workers)
            done &= firsts == len(answers)
            done &= gaps == status["router"]["latency"]["between_tokens_s"]["count"]
            return status if done and idle else None

        status = wait_until(settled, what="the workers' heartbeats")
    workers = {worker["id"]: worker for worker in status["workers"]}
    prefill = workers["prefill-0"]
    assert prefill["prompt_tokens"] + prefill["prefix_hit_tokens"] == LENGTH * len(answers)
    assert prefill["prefix_hit_tokens"] >= 32 * PROMPTS  # two of its blocks each, the second time
    assert prefill["first_token_s"]["count"] == len(answers)
    gaps = sum(workers[name]["between_tokens_s"]["count"] for name in ("decode-0", "decode-1"))
    assert gaps == status["router"]["latency"]["between_tokens_s"]["count"] > 0
    for worker in workers.values():
        assert worker["state"] == "ready"
        assert worker["compute_seconds"] > 0
        assert 0 < worker["kv_blocks_cached"] <= worker["kv_blocks_total"]
        assert worker["kv_blocks_used"] == worker["requests_running"] == 0
        assert worker["requests_waiting"] == worker["outstanding_tokens"] == 0
    requests = status["router"]["requests"]
    assert (requests["submitted"], requests["finished"]) == (len(answers), len(answers))
    others = ("failed", "cancelled", "disconnected", "refused")
    assert {name: requests[name] for name in others} == dict.fromkeys(others, 0)

    # A line's rates are of its interval: of no less than was set, and of no more than is left
    # of the time when all others were that short. Intervals without work have no line.
    for column, count in ((1, NEW * len(answers)), (0, prefill["prompt_tokens"])):

        def adds_up(column=column, count=count):
            shown = figures(running)[lines:]
            longest = time.monotonic() - began - INTERVAL * (len(shown) - 1)
            return sum(line[column] for line in shown) * longest >= count - 1 and shown

        shown = wait_until(adds_up, what="lines with all tokens")
        assert sum(line[column] for line in shown) * INTERVAL <= count + 1
    # That bound is loose on a slow machine, so the line of the second time may still be missing.
    wait_until(lambda: any(line[5] > 0 for line in figures(running)[lines:]), what="a prefix hit")


def test_a_child_that_ends_again_and_again_is_started_later_each_time(running):
    for delay in ("0.5", "1.0"):
        pid = running.pids()["decode-1"]
        os.kill(pid, signal.SIGKILL)
        sentence = f"decode-1 ended (killed by signal 9); restarting in {delay} s"
        wait_until(lambda said=sentence: said in running.text(), what=sentence)
        running.wait_replaced("decode-1", pid)


def test_a_text_model_does_not_speak(running):
    spoken = running.command("speak", "hello", "-o", f"{running.folder}/out.wav")
    assert spoken.returncode == 1
    assert "'demo_model' is no speech model" in spoken.stderr


def test_waiting_for_workers_says_who_is_there(running):
    ready = running.command("wait-ready", "--decode=2")
    assert (ready.returncode, ready.stdout) == (0, "ready: 1 prefill, 2 decode\n")
    ready = running.command("wait-ready", "--admin", f"ipc://{running.folder}/nobody")
    assert (ready.returncode, ready.stdout) == (0, "ready: 1 prefill, 2 decode\n")
    assert "--prefill and --decode" in ready.stderr
    missing = running.command("wait-ready", "--prefill=1", "--decode=3", "--timeout=2")
    assert missing.returncode == 1
    assert missing.stderr == (
        "baton: not ready after 2 s: 1 of 1 prefill and 2 of 3 decode workers are; "
        "see baton status\n"
    )


def test_waiting_without_a_number_waits_for_every_worker_there_should_be(running):
    pid = running.pids()["decode-1"]
    os.kill(pid, signal.SIGKILL)
    with running.client() as client:

        def missed():
            return [w["state"] for w in client.status()["workers"] if w["pid"] == pid] != ["ready"]

        wait_until(missed, what="the router to miss it")
    ready = running.command("wait-ready")
    assert (ready.returncode, ready.stdout, ready.stderr) == (0, "ready: 1 prefill, 2 decode\n", "")
