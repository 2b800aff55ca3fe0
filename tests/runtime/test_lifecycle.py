"""Signals, parent's death and BLAS threads, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from baton.runtime.process.os_settings import die_with_parent, recycle_large_buffers

from ..processes import alive, wait_until


def python(code: str, *args: str, **kwargs) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, **kwargs)


@pytest.mark.integration
def test_signals_reach_the_loop_and_count():
    child = python(
        """
        from baton.runtime.process.os_settings import on_stop_signal
        from baton.runtime.net.loop import Loop
        loop = Loop()
        def stop(times):
            print("signal", times, flush=True)
            if times == 2:
                loop.stop()
        on_stop_signal(loop, stop)
        loop.call_at(loop.now(), lambda: print("ready", flush=True))
        loop.run()
        """
    )
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "signal 1\n"
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "signal 2\n"
    assert child.wait(30) == 0
    child.stdout.close()


def test_a_signal_before_the_loop_runs_is_not_lost():
    child = python(
        """
        import os, signal
        from baton.runtime.process.os_settings import on_stop_signal
        from baton.runtime.net.loop import Loop
        loop = Loop()
        on_stop_signal(loop, lambda times: (print("signal", times), loop.stop()))
        os.kill(os.getpid(), signal.SIGTERM)
        loop.run()
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        """
    )
    out, _ = child.communicate(timeout=30)
    assert out == "signal 1\nTrue\n"


@pytest.mark.integration
def test_a_child_dies_with_its_parent():
    parent = python(
        """
        import os, subprocess, sys, time
        code = (
            "import os, sys, time;"
            "from baton.runtime.process.os_settings import die_with_parent;"
            "die_with_parent(int(sys.argv[1]), 9); print(os.getpid(), flush=True); time.sleep(60)"
        )
        child = subprocess.Popen([sys.executable, "-c", code, str(os.getpid())])
        time.sleep(60)
        """
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not alive(pid), what="the end of the child")


def test_a_parent_that_is_gone_already_is_noticed(monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, sig: killed.append((pid, sig)))
    try:
        die_with_parent(1 << 22, signal.SIGTERM)
    finally:
        monkeypatch.undo()
        import ctypes

        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    assert killed == [(os.getpid(), signal.SIGTERM)]


@pytest.mark.integration
def test_blas_threads_are_limited_after_numpy_was_loaded():
    environment = {k: v for k, v in os.environ.items() if not k.endswith("NUM_THREADS")}
    child = python(
        """
        import ctypes, os
        import numpy as np
        from baton.runtime.process.os_settings import _loaded_libraries, limit_blas_threads
        limit_blas_threads()
        counts = []
        for path in _loaded_libraries("openblas"):
            library = ctypes.CDLL(path)
            for name in ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads"):
                getter = getattr(library, name, None)
                if getter is not None:
                    counts.append(getter())
        print(counts, os.environ["OMP_NUM_THREADS"])
        """,
        env=environment,
    )
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 0
    assert set(out.split("]")[0].strip("[").split(",")) <= {"1", ""}
    assert out.strip().endswith("1")


def test_large_buffers_are_recycled():
    assert recycle_large_buffers() in (True, False)
