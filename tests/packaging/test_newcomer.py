"""A newcomer's path: the commands of the pages, run from a wheel in a new environment.

The environment holds the wheel; what the wheel depends on comes from the environment of the tests,
so that no package index is needed.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.deploy.config import demo_model_folder

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
TIMEOUT = 800.0


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin folder of a new environment with the wheel."""
    folder = tmp_path_factory.mktemp("newcomer")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    build = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    run(sys.executable, "-c", build, str(folder), cwd=source)
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(source)
    run(sys.executable, "-m", "venv", str(folder / "venv"))
    bin_folder = folder / "venv/bin"
    pip = [str(bin_folder / "python"), "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    run(*pip, str(wheel))
    # A plain path: the editable installation of the tests' environment stays out.
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(str(bin_folder / "python"), "-I", "-c", "import baton; print(baton.__path__[0])")
    assert where.strip() == str(site / "baton")
    return bin_folder


@pytest.fixture
def home() -> Iterator[Path]:
    """A home folder with a model, as the pages name it. Paths of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="home-") as name:
        shutil.copytree(demo_model_folder(), Path(name) / "models/Qwen3-0.6B")
        yield Path(name)


def run(*words: str, **options) -> str:
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def script(text: str, bin_folder: Path, home: Path) -> str:
    """Run a page's commands in bash, at another HTTP port; returns all output."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BATON_", "PYTHON", "XDG_"))}
    environment = {
        **kept,
        "HOME": str(home),
        "TMPDIR": str(home),
        "PATH": f"{bin_folder}{os.pathsep}{kept['PATH']}",
        "BATON_HTTP_PORT": str(port),
        "BATON_KV_MEMORY": "32MiB",
    }
    text = "trap 'baton down >/dev/null 2>&1' EXIT\nset -ex\n" + text.replace(":8000/", f":{port}/")
    return run("bash", "-c", text, cwd=home, env=environment)


def blocks(page: str, heading: str, language: str = "") -> list[str]:
    """The code blocks of a language below a heading of a page, up to the next heading."""
    text = f"\n{(ROOT / page).read_text()}".partition(f"\n{heading}\n")[2]
    text = re.split(r"\n#+ ", text)[0]
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [code for kind, code in found if kind == language]


def test_the_readme_s_commands(installed, home):
    model, *_ = blocks("README.md", "## Your own model")
    (curl,) = blocks("README.md", "## Over HTTP")
    made, *lines = model.splitlines()
    assert made.startswith("python3 -m venv")
    assert lines.pop(0) == "pip install ."
    lines.insert(lines.index("baton status") + 1, curl)
    said = script("\n".join(lines), installed, home)
    assert "ready: 1 prefill, 2 decode" in said
    assert '"finish_reason":"stop"' in said
    assert "gateway      1 of 1 ready" in said


def test_the_commands_of_the_operations_page(installed, home):
    (block,) = re.findall(r"^```\n(baton serve.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line.partition("#")[0].strip() for line in block.splitlines()]
    lines = [re.sub(r"\[(?:MODEL|ADDRESS|(--[\w-]+))\]", r"\1", line) for line in lines]
    lines = [line.replace("[SETTING=VALUE]", "max-num-seqs=8") for line in lines]
    lines = [line.replace("FOLDER", "keys") for line in lines]
    (curl,) = blocks("README.md", "## Over HTTP")
    curl = curl.strip()
    serve, *rest = lines
    assert serve.startswith("baton serve ")
    launch = next(line for line in rest if line.startswith("baton launch"))
    rest = [line for line in rest if not line.startswith(("baton install", "baton launch"))]
    after = rest.index("baton down") + 1
    rest = rest[:after]
    traced = next(at for at, line in enumerate(rest) if line.startswith("baton trace"))
    rest.insert(traced, f"{curl} -H 'X-Request-Id: REQUEST_ID'")
    rest = [line.replace("REQUEST_ID", "my-first-request") for line in rest]
    said = script("\n".join([launch, *rest]), installed, home)
    assert "request chatcmpl-my-first-request" in said
    assert "rollout finished" in said
    assert "100 ok" in said


def test_the_commands_of_the_operations_page_without_a_cluster(installed, home):
    (block,) = re.findall(r"^```\n(baton serve.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line.partition("#")[0].strip() for line in block.splitlines()]
    lines = [line.replace("FOLDER", "keys") for line in lines]
    lines = lines[lines.index("baton down") + 1 :]
    demos = [line for line in lines if line.startswith("baton demo")]
    assert len(demos) == 4
    said = script("\n".join(lines), installed, home)
    assert said.count("demo finished") == len(demos)


PAGE = (ROOT / "docs/operations.md").read_text()


@pytest.mark.parametrize(
    ("page", "heading", "expected"),
    [
        ("README.md", "## From Python", r"read by prefill-0, written by decode-[01]\n"),
        ("docs/python.md", "# From Python", r"Baton serves language models .* stop \d+\n"),
    ],
)
def test_the_python_program(installed, home, page, heading, expected):
    (text,) = blocks(page, heading, "python")
    (home / "program.py").write_text(text)
    lines = ["baton launch --decode 2", f"python {home / 'program.py'}", "baton down"]
    said = script("\n".join(lines), installed, home)
    assert re.search(expected, said), said


def test_the_program_with_its_own_cluster(installed, home):
    (text,) = blocks("docs/python.md", "## A cluster for one program", "python")
    (home / "own.py").write_text(text.replace("org/name", "models/Qwen3-0.6B"))
    said = script("python own.py", installed, home)
    assert len(said.splitlines()) >= 3, said


def test_the_commands_of_the_page_about_images(installed, home):
    demo, served = blocks("docs/images.md", "## Try it")
    said = script(f"{demo}\n{served}", installed, home)
    assert "demo finished" in said
    answers = re.findall(r'"content":"([^"]*)"', said)
    assert len(answers) == 2
    for answer in answers:
        assert f"> What is in the picture?\n  {answer}\n" in said
    assert said.count(answers[0]) >= 4  # shown, over HTTP in the demo, by curl and by generate


def test_the_first_commands_of_the_http_page(installed, home):
    text = (ROOT / "docs/http.md").read_text()
    first = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    calling, answering = blocks("docs/http.md", "## Tool calls")
    said = script("\n".join([first, calling, answering, "baton down"]), installed, home)
    assert "I am the demo model" in said
    assert said.count('"finish_reason":"tool_calls"') == 1
    assert said.count('"finish_reason":"stop"') == 2
