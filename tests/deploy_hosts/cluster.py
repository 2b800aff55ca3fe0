"""A cluster that `ray up` creates on a lab's hosts, controlled from the machine outside."""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from baton.deploy.ray.cluster_file import FixedCluster, router_address, write_cluster_file

_NODES = """
import json, ray
ray.init(address="auto", logging_level="error")
live = [n for n in ray.nodes() if n["Alive"]]
print(json.dumps({n["NodeManagerAddress"]: n["Labels"].get("pool") for n in live}))
"""


class RayCluster:
    """``ray up`` and ``ray down`` of one cluster file, as run by a user."""

    def __init__(self, lab, wheel, *, name="lab", **settings) -> None:
        self.lab, self.outside = lab, lab.outside
        folder = lab.folder / name
        folder.mkdir()
        self.file, self.token = folder / "cluster.yaml", folder / "token"
        self.token.write_text("0123456789abcdef" * 4)
        self.token.chmod(0o600)
        self.keys = folder / "keys"
        made = self.outside_run(f"baton keygen {self.keys}")
        assert made.returncode == 0, made.stdout
        cluster = FixedCluster(
            name=name,
            head=lab.hosts[0].address,
            wheel=str(wheel),
            user="root",
            ssh_key=str(lab.key),
            token=str(self.token),
            keys=str(self.keys),
            python=f"{sys.base_prefix}/bin/python3.11",
            **settings,
        )
        self.address = router_address(cluster.head)
        self.file.write_text(write_cluster_file(cluster))

    def outside_run(self, command: str, timeout: float = 120):
        """Run a user's command without colours; return its output."""
        done = self.outside.run(
            f"PATH=~/.baton/venv/bin:$PATH; {command}",
            timeout=timeout,
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(self.token),
            PYTHONSAFEPATH="1",
        )
        done.stdout = re.sub(r"\x1b\[[0-9;]*[a-zA-Z]", "", done.stdout)
        return done

    def outside_begin(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a Python program outside, with Baton installed and a pipe as stdout."""
        python = f"{Path.home()}/.baton/venv/bin/python"
        return subprocess.Popen(
            self.outside.enter(python, "-P", "-c", program, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.outside.environment(),
        )

    def outside_python(self, program: str, *arguments: str) -> str:
        """Run a Python program outside to its end."""
        running = self.outside_begin(program, *arguments)
        output, _ = running.communicate(timeout=120)
        assert running.returncode == 0, output
        return output

    def verb(self, words: str, *, keys: str | None = None, code: int = 0) -> str:
        """Run a ``baton`` command outside."""
        folder = str(self.keys) if keys is None else keys
        where = f"BATON_ADDRESS={self.address} BATON_KEYS={shlex.quote(folder)}"
        done = self.outside_run(f"{where} baton {words}")
        assert done.returncode == code, done.stdout
        return done.stdout

    def members(self) -> dict[str, dict[str, int]]:
        """Return the pids of Baton's routers and workers by name, for every host with any."""
        found: dict[str, dict[str, int]] = {}
        for host in self.lab.hosts:
            for pid, line in host.processes().items():
                if named := re.search(r"/([a-z0-9-]+)\.json --parent", line):
                    found.setdefault(host.name, {})[named[1]] = pid
        return found

    def up(self, *flags: str):
        """``ray up``."""
        words = shlex.join(["ray", "up", "-y", "--no-config-cache", *flags, str(self.file)])
        return self.outside_run(words)

    def down(self):
        """``ray down``."""
        return self.outside_run(f"ray down -y {shlex.quote(str(self.file))}")

    def on_head(self, command: str, timeout: float = 60) -> str:
        """Run a command in a login shell on the head; return its output."""
        return self.lab.hosts[0].run(f". ~/.bashrc; {command}", timeout).stdout

    def on_head_python(self, program: str) -> str:
        """Run a Python program in Baton's environment on the head; return its output."""
        done = self.lab.hosts[0].run(f". ~/.bashrc; python -P -c {shlex.quote(program)}")
        assert done.returncode == 0, done.stdout
        return done.stdout

    def nodes(self) -> dict[str, str]:
        """Return the pool of every live Ray node, by address."""
        return json.loads(self.on_head_python(_NODES).splitlines()[-1])

    def raylets(self) -> dict[str, int]:
        """Return the raylet's pid on each host with a raylet."""
        return {
            host.name: pid
            for host in self.lab.hosts
            for pid, line in host.processes().items()
            if line.split()[0].endswith("/raylet")
        }

    def left(self) -> dict[str, dict[int, str]]:
        """Return the remaining processes on each host with any."""
        found = {host.name: host.processes() for host in self.lab.hosts}
        return {name: processes for name, processes in found.items() if processes}

    def monitor_log(self) -> str:
        """Return the autoscaler's log, for a failed test."""
        return self.on_head("tail -n 60 /tmp/ray/session_latest/logs/monitor.log")


def wait_until(condition, what: str, timeout: float = 90):
    """Poll until the condition is true; return its value."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"timed out waiting for {what}")
