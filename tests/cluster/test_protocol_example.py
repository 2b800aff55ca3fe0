"""The program printed in docs/protocol.md, run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.deploy.config import demo_model_folder
from baton.proto.sampling import SamplingParams
from baton.text.tokenizer import Tokenizer

from ..processes import wait_until
from .driver import Job, ask

pytestmark = pytest.mark.cluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
NEW_TOKENS = 16


def example() -> str:
    """The page's one Python block."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return block


def run(folder: Path, address: str, prompt: list[int]) -> list[str]:
    script = folder / "request.py"
    script.write_text(example())
    # Isolated: neither the working directory nor PYTHONPATH can lend it our package.
    done = subprocess.run(
        [sys.executable, "-I", str(script), address, *map(str, prompt)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def running(lasting_cluster):
    return lasting_cluster(prefill=1, decode=2)


def test_it_is_short_and_needs_only_pyzmq_and_msgspec():
    lines = [line for line in example().splitlines() if line.strip()]
    assert len(lines) <= 35
    imports = re.findall(r"^(?:import|from) (\w+)", example(), re.MULTILINE)
    assert set(imports) <= {"struct", "sys", "msgspec", "zmq"}


def test_it_gives_the_tokens_the_client_gives(running, tmp_path):
    question = [{"role": "user", "content": "Tell me a story about a fox."}]
    prompt = Tokenizer.from_folder(demo_model_folder()).encode_chat(question).tolist()
    with running.client() as client:
        params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS)
        wanted = ask(client, Job(prompt, params))
    assert len(wanted.tokens) == NEW_TOKENS
    assert run(tmp_path, running.address, prompt) == [*map(str, wanted.tokens), wanted.status]
    with running.client() as client:  # the program's last message may still be on its way
        wait_until(
            lambda: client.status()["router"]["requests"]["unacknowledged"] == 0,
            what="both ends to be acknowledged",
        )


def test_it_prints_why_a_request_was_refused(running, tmp_path):
    words = run(tmp_path, running.address, [100_000])
    assert " ".join(words) == "token id 100000 at position 0 is outside the vocabulary of 1024"
