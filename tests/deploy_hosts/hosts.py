"""Hosts on one machine: each has separate network, processes, mounts, name, /tmp and home.

A host is a set of Linux namespaces. `ray stop` ends all Ray processes that it can see, which are
those of one host. ``Lab`` connects the hosts by a bridge in a separate network namespace, so the
machine's network is not affected. All hosts end with the test process, even if it is killed: the
kernel kills a host's first process with its parent.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

SUBNET = "10.77.0"
OUTSIDE = f"{SUBNET}.254"
_TOOLS = ("ip", "nsenter", "rsync", "setpriv", "ssh", "ssh-keygen", "sshd", "unshare")
_LISTEN = "0A"
_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
_REAPER = "import signal as s; s.signal(s.SIGCHLD, s.SIG_IGN)\nwhile 1: s.pause()"


def missing() -> str:
    """Return why hosts cannot be created here, or an empty text."""
    if os.geteuid() != 0:
        return "hosts made of namespaces need root"
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    lacking = [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]
    if lacking:
        return f"hosts made of namespaces need {', '.join(lacking)}"
    probe = "ip link add br0 type bridge && mount -t tmpfs tmpfs /run"
    command = ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "sh", "-c", probe]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


class Host:
    """One host. Its processes run as root in its namespaces, with its home as root's home."""

    def __init__(self, folder: Path, name: str, address: str, keep: list[Path]) -> None:
        self.name, self.address, self.folder = name, address, folder
        self.home = folder / "root"
        for path in (self.home, folder / "tmp"):
            path.mkdir(parents=True)
        script = folder / "start.sh"
        script.write_text(_start_script(folder, name, keep, daemon=address != OUTSIDE))
        flags = ["--net", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
        with (folder / "log").open("wb") as log:
            self._parent = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", *flags, "bash", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.pid = _until(lambda: _only_child(self._parent.pid), "the host's first process")
        self._namespace = Path(f"/proc/{self.pid}/ns/pid").readlink()

    def enter(self, *command: str) -> list[str]:
        """Return the command line that runs ``command`` inside the host."""
        spaces = [f"--{name}" for name in ("net", "pid", "mount", "uts")]
        return ["nsenter", "--target", str(self.pid), *spaces, "--wd=/", "--", *command]

    def run(
        self, command: str, timeout: float = 60, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command in the host and return its output (stdout and stderr together)."""
        return subprocess.run(
            self.enter("bash", "-c", command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            env=self.environment(**environment),
        )

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a login, without variables of the test."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"HOME": str(Path.home()), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb", **more}

    def processes(self) -> dict[int, str]:
        """Return the command lines in the host by pid, without the processes of the lab."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.pid:
                with contextlib.suppress(OSError):
                    if (entry / "ns/pid").readlink() == self._namespace:
                        line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        if line.strip():
                            found[int(entry.name)] = line.strip()
        return {
            pid: line for pid, line in found.items() if not line.startswith(("sshd", "nsenter"))
        }

    def listening(self) -> set[int]:
        """Return the TCP ports with listeners that other machines can reach."""
        found = set()
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.pid}/net/{name}").read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                address, _, port = local.rpartition(":")
                if state == _LISTEN and address not in _LOOPBACK:
                    found.add(int(port, 16))
        return found

    def close(self) -> None:
        """Kill all processes of the host."""
        self._parent.kill()
        self._parent.wait()
        _until(lambda: not self.processes(), "the host's end")


class Lab:
    """``count`` hosts with addresses from 10.77.0.1, and the machine ``outside``."""

    def __init__(
        self, folder: Path, count: int, keep: list[Path], everywhere: list[Path] | None = None
    ) -> None:
        """``keep``: paths in the machine's /tmp and home that ``outside`` can see.

        ``everywhere``: paths that all hosts can see.
        """
        self.folder, self.hosts = folder, []
        prefixes = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve()]
        machine_wide = [*prefixes, *(everywhere or [])]
        self.key = folder / "id"
        _check("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
        _check("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key"))
        self.outside = Host(folder / "outside", "outside", OUTSIDE, [*machine_wide, folder, *keep])
        try:
            self._in_outside(f"ip link add lab type bridge && ip addr add {OUTSIDE}/24 dev lab")
            self._in_outside("ip link set lab up && ip link set lo up")
            for number in range(1, count + 1):
                self._add(number, machine_wide)
        except BaseException:
            self.close()
            raise

    def _add(self, number: int, keep: list[Path]) -> None:
        address, folder = f"{SUBNET}.{number}", self.folder / f"h{number}"
        host = Host(folder, f"h{number}", address, keep)
        self.hosts.append(host)
        self._in_outside(f"ip link add v{number} type veth peer name eth0 netns {host.pid}")
        self._in_outside(f"ip link set v{number} master lab up")
        wire = f"ip addr add {address}/24 dev eth0 && ip link set eth0 up && ip link set lo up"
        _check("nsenter", "--target", str(host.pid), "--net", "sh", "-c", wire)
        route = ("ip", "route", "add", "default", "via", OUTSIDE)
        _check("nsenter", "--target", str(host.pid), "--net", *route)

    def _in_outside(self, command: str) -> None:
        # Enter only the network namespace: a veth's end needs a pid of the machine.
        _check("nsenter", "--target", str(self.outside.pid), "--net", "sh", "-c", command)

    def unplug(self, number: int, *, plugged: bool = False) -> None:
        """Disconnect (or reconnect) a host's network."""
        self._in_outside(f"ip link set v{number} {'up' if plugged else 'down'}")

    def lose_packets(self, source: int, target: int, *, lost: bool = True) -> None:
        """Drop (or pass again) packets from one host to another, without an error.

        The packets are sent to a hardware address that does not exist. Number 0: ``outside``.
        """
        address = self.hosts[target - 1].address if target else OUTSIDE
        where = f"{address} dev {'eth0' if source else 'lab'}"
        change = f"replace {where} lladdr 02:00:00:00:00:99 nud permanent"
        command = f"ip neigh {change if lost else f'del {where}'}"
        if not source:
            self._in_outside(command)
            return
        done = self.hosts[source - 1].run(command)
        assert done.returncode == 0, done.stdout

    def lose_share(self, one: int, other: int, percent: int) -> None:
        """Drop a share of the packets between two hosts, in both directions; 0: none."""
        for here, there in ((one, other), (other, one)):
            command = "nft delete table ip lossy"
            if percent:
                source = self.hosts[there - 1].address
                rule = f"ip saddr {source} numgen random mod 100 < {percent} drop"
                chain = "{ type filter hook input priority 0; }"
                command = (
                    "nft add table ip lossy"
                    f" && nft 'add chain ip lossy input {chain}'"
                    f" && nft 'add rule ip lossy input {rule}'"
                )
            done = self.hosts[here - 1].run(command)
            assert done.returncode == 0, done.stdout

    def wait_ssh(self) -> None:
        """Wait until every host accepts a login."""
        for host in self.hosts:
            command = f"ssh -i {self.key} -o BatchMode=yes -o StrictHostKeyChecking=no root@"
            _until(
                lambda c=command + host.address: self.outside.run(f"{c} true").returncode == 0,
                f"{host.name} over ssh",
            )

    def close(self) -> None:
        """End all hosts."""
        for host in [*self.hosts, self.outside]:
            host.close()


def _start_script(folder: Path, name: str, keep: list[Path], *, daemon: bool) -> str:
    """Run as the host's first process: its own /tmp, home, /run and /dev/shm, then sshd."""
    home = Path.home()
    lines = [
        "set -eu",
        f"mount -t tmpfs tmpfs /run; mkdir -p /run/sshd /run/own; mount --bind {folder} /run/own",
    ]
    for own, path in (("root", home), ("tmp", Path("/tmp"))):
        for kept in keep:
            if kept.is_relative_to(path):
                inside = f"/run/own/{own}/{kept.relative_to(path)}"
                lines.append(f"mkdir -p {inside}; mount --bind {kept} {inside}")
    lines += [f"mount --rbind /run/own/root {home}", "mount --rbind /run/own/tmp /tmp"]
    lines += ["chmod 1777 /tmp", "mount -t tmpfs tmpfs /dev/shm", f"hostname {name}"]
    if not daemon:
        return "\n".join([*lines, f"exec {sys.base_prefix}/bin/python3 -c {shlex.quote(_REAPER)}"])
    _write_daemon_files(folder)
    # allow login as root by key even if its password is locked
    lines += [
        "sed 's/^root:[^:]*:/root:*:/' /etc/shadow >/run/shadow",
        "mount --bind /run/shadow /etc/shadow",
        "exec $(command -v sshd || echo /usr/sbin/sshd) -D -e -f /run/own/sshd_config",
    ]
    return "\n".join(lines)


def _write_daemon_files(folder: Path) -> None:
    ssh = folder / "root/.ssh"
    ssh.mkdir(mode=0o700)
    shutil.copy(folder.parent / "id.pub", ssh / "authorized_keys")
    shutil.copy(folder.parent / "host_key", folder / "host_key")
    settings = {
        "AuthorizedKeysFile": ".ssh/authorized_keys",
        "HostKey": "/run/own/host_key",
        "KbdInteractiveAuthentication": "no",
        "MaxStartups": "50",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "PidFile": "none",
        "Port": "22",
        "PrintLastLog": "no",
        "PrintMotd": "no",
        "StrictModes": "no",
        "UseDNS": "no",
        "UsePAM": "no",
    }
    lines = "".join(f"{key} {value}\n" for key, value in settings.items())
    (folder / "sshd_config").write_text(lines)
    (folder / "host_key").chmod(0o600)


def _check(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"


def _only_child(pid: int) -> int:
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else 0
    return 0


def _until(condition, what: str, timeout: float = 30):
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"timed out waiting for {what}")
