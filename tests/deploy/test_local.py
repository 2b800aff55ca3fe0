"""What the supervisor does when the system refuses it something."""

import os
import subprocess
import sys

REFUSED = """
import sys
from baton.deploy import local
from baton.deploy.config import ServeSettings

def refuse(*_):
    raise OSError(28, "No space left on device")

local.Child = refuse
cluster = local.LocalCluster(ServeSettings(run_dir=sys.argv[1]), print, private=True)
print(cluster.run(), cluster.failure)
"""


def test_children_that_cannot_be_started_end_the_cluster_and_leave_nothing(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", REFUSED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.stderr == ""
    assert ended.stdout.startswith("1 router cannot run: cannot be started: ")
    assert "No space left on device" in ended.stdout
    assert list(tmp_path.iterdir()) == []
