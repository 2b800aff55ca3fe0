"""``python -m baton.offline.process REPORT PARENT``: a cluster that ends with its parent.

The settings arrive as one line of JSON over standard input. The cluster ends when standard input
is closed, or when the parent with pid PARENT is gone: a fork of the parent may keep the other end
open. REPORT is the descriptor of a pipe for one :class:`.cluster.Report`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import sys
import threading
from typing import Any

if __name__ == "__main__":
    gc.disable()  # until baton.runtime.process.garbage.end_of_imports

import msgspec

from baton.deploy.config import ServeSettings, check, convert
from baton.deploy.local.cluster import LocalCluster
from baton.deploy.local.terminal import terminal
from baton.deploy.plan.hub import with_local_model
from baton.deploy.plan.prepare import check_start
from baton.proto.errors import BatonError, RequestFailed
from baton.runtime.process.garbage import end_of_imports

from .cluster import Report

LOOK_S = 0.5
"""Seconds between checks that the parent is still the parent."""
GRACE_S = 1.0
"""Seconds for running requests at the end. The object that asked for them is gone."""


def main() -> int:
    """Run the cluster until its parent closes standard input or ends."""
    end_of_imports()
    report, parent = int(sys.argv[1]), int(sys.argv[2])
    try:
        settings = settings_of(msgspec.json.decode(sys.stdin.buffer.readline()))
        settings = with_local_model(settings, terminal)
        check_start(settings)
        cluster = LocalCluster(settings, terminal, private=True)
        cluster.on_ready(lambda: _say(report, Report(address=cluster.plan.address)))
        threading.Thread(target=_watch, args=(cluster, parent), daemon=True).start()
        code = cluster.run()
        failure: BatonError | None = RequestFailed(cluster.failure) if cluster.failure else None
    except BatonError as problem:
        code, failure = 1, problem
    except OSError as problem:
        code, failure = 1, RequestFailed(str(problem))
    if failure is not None:
        terminal(str(failure))
        _say(report, Report(code=failure.code, message=str(failure)))
    terminal.flush()
    return code


def settings_of(given: dict[str, Any]) -> ServeSettings:
    """Check settings of :class:`..offline.llm.LLM`. Raises ConfigError."""
    defaults: dict[str, Any] = {"grace": GRACE_S, "stats_interval": 0, "gateways": 0}
    return check(convert({**defaults, **given}))


_said = threading.Event()


def _say(report: int, what: Report) -> None:
    """Write the report, once."""
    if not _said.is_set():
        _said.set()
        with contextlib.suppress(BrokenPipeError):  # the parent has just died: _watch notices
            os.write(report, msgspec.json.encode(what))
        os.close(report)


def _watch(cluster: LocalCluster, parent: int) -> None:
    stdin = sys.stdin.buffer
    while os.getppid() == parent:
        if select.select([stdin], [], [], LOOK_S)[0] and not os.read(stdin.fileno(), 4096):
            break
    cluster.interrupt()


if __name__ == "__main__":
    sys.exit(main())
