"""A cluster without Ray: a router, two prefill and two decode workers, each on a separate host.

The processes are started as ``baton serve`` starts them.
"""

import json
import subprocess
import sys
from pathlib import Path

import msgspec

from baton.deploy.config import ServeSettings
from baton.deploy.plan.plan import AddressBook, resolve_plan
from baton.runtime.keys.keyring import make_folder

from .cluster import wait_until
from .hosts import Lab

ROOT = Path(__file__).parents[2]
ROUTER, PREFILL, DECODE = 1, 2, 4
PLACES = {"router": 1, "prefill-0": 2, "prefill-1": 3, "decode-0": 4, "decode-1": 5}
STREAMS = 24
# Streams that repeat their requests until a time. Prints the longest waits for a token, all
# different answers of each stream, and the errors.
STREAM = """
import asyncio, json, sys, time
from baton.client.async_client import AsyncClient
from baton.proto.sampling import SamplingParams
count, seconds, address, keys = json.loads(sys.argv[1])
waits, answers, failed = [], [set() for _ in range(count)], []
async def stream(client, i, until):
    prompt = [(7 * i + j) % 200 + 5 for j in range(20 + 9 * i)]
    chance = {"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0}
    while True:
        tokens, heard = [], time.monotonic()
        begun = heard
        try:
            params = SamplingParams(max_new_tokens=48, ignore_eos=True, **chance)
            async for output in client.generate(prompt, params):
                now = time.monotonic()
                waits.append((round(now - heard, 3), i, len(tokens), round(heard - start, 1)))
                heard = now
                tokens += output.tokens
            answers[i].add(tuple(tokens))
        except Exception as error:
            failed.append(f"{i}: {type(error).__name__}: {error}")
        if time.monotonic() >= until:
            return
        await asyncio.sleep(max(0.0, 0.5 - (time.monotonic() - begun)))
async def main():
    global start
    async with AsyncClient(address, keys=keys, connect_timeout=30.0) as client:
        start = time.monotonic()
        print("BEGUN", flush=True)
        await asyncio.gather(*(stream(client, i, start + seconds) for i in range(count)))
asyncio.run(main())
found = [[list(answer) for answer in kind] for kind in answers]
print("RESULT " + json.dumps(dict(waits=sorted(waits)[-5:], asked=len(waits), failed=failed,
                                  answers=found)))
"""


class PlainCluster:
    """A router, two prefill and two decode workers, each on a separate host."""

    def __init__(self, folder: Path, relayed: dict[str, str] | None = None) -> None:
        """``relayed``: by worker name, another address for its connection to the router."""
        shared = folder / "shared"
        for made in (shared, folder / "lab"):
            made.mkdir()
        self.keys = shared / "keys"
        make_folder(self.keys)
        self.lab = Lab(folder / "lab", len(PLACES), [], [ROOT, shared])
        self.running: list[subprocess.Popen[bytes]] = []
        hosts = {name: self.lab.hosts[number - 1] for name, number in PLACES.items()}
        at_router = f"tcp://{hosts['router'].address}"
        book = AddressBook(
            {"router": f"{at_router}:7070"},
            {"router": f"{at_router}:7170"},
            lambda stem: (
                f"tcp://{hosts[stem.partition('.')[0]].address}:"
                f"{7301 if stem.endswith('.data') else 7300}"
            ),
        )
        settings = ServeSettings(
            prefill=2,
            decode=2,
            gateways=0,
            keys=str(self.keys),
            handoff="zmq",
            kv_memory="64MiB",
        )
        plan = resolve_plan(settings, book, "5c" * 32)
        self.address = plan.address
        for spec in plan.processes:
            config, log = shared / f"{spec.name}.json", shared / f"{spec.name}.log"
            if address := (relayed or {}).get(spec.name):
                own = msgspec.structs.replace(spec.config, routers={"router": address})
                spec = msgspec.structs.replace(spec, config=own)
            config.write_bytes(spec.config_json())
            host = hosts[spec.name]
            command = [sys.executable, "-P", "-m", spec.module, "--config", str(config)]
            with log.open("wb") as file:
                self.running.append(
                    subprocess.Popen(
                        host.enter(*command),
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                        env=host.environment(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1"),
                    )
                )

    def begin(self, program: str, argument: object) -> subprocess.Popen[str]:
        """Start a Python program on the machine outside."""
        return subprocess.Popen(
            self.lab.outside.enter(sys.executable, "-P", "-c", program, json.dumps(argument)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.lab.outside.environment(),
        )

    def streams(self, seconds: float) -> subprocess.Popen[str]:
        """Start streams for ``seconds``; return after the first requests have started."""
        running = self.begin(STREAM, [STREAMS, seconds, self.address, str(self.keys)])
        line = running.stdout.readline()
        assert line == "BEGUN\n", line + running.communicate()[0]
        return running

    def status(self) -> dict:
        """Return the output of ``baton status --json``."""
        folder, python = f"BATON_KEYS={self.keys}", f"{sys.executable} -P -m baton.cli"
        done = self.lab.outside.run(f"{folder} {python} status --json --address {self.address}")
        return json.loads(done.stdout) if done.returncode == 0 else {"workers": [], "told": done}

    def wait_ready(self) -> None:
        """Wait until all four workers are ready."""
        wait_until(
            lambda: [w["state"] for w in self.status()["workers"]] == ["ready"] * 4, "workers"
        )

    def close(self) -> None:
        """End every process and every host."""
        self.lab.close()
        for process in self.running:
            process.wait()


def result(running: subprocess.Popen[str]) -> dict:
    """Return the results of the streams; assert that none failed."""
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 0 and "RESULT " in output, output[-2000:]
    found = json.loads(output.partition("RESULT ")[2])
    assert found["failed"] == []
    return found


def answers_undisturbed(cluster: PlainCluster) -> list:
    """Return the single answer of each stream without a fault."""
    found = result(cluster.streams(0.0))["answers"]
    assert [len(kinds) for kinds in found] == [1] * STREAMS
    return found
