"""``baton serve org/name``: the files fetched from a hub, its address, and the failure without it.

The hub is a small server in this process; huggingface_hub reads its variables at import, so the
command runs in separate processes.
"""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from baton.deploy.config import ServeSettings
from baton.deploy.plan.hub import is_hub_name, with_local_model
from baton.proto.layout import model_name

MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SPEECH = {"speech.json": b"{ }", "snac/config.json": b"{}", "snac/model.safetensors": b"y"}
UNWANTED = {
    "snac/pytorch_model.bin": b"x",
    "modeling_own.py": b"raise SystemExit('code of a model was run')",
    "pytorch_model.bin": b"x",
    "original/model.safetensors": b"x",
    "consolidated.safetensors": b"x",
    "README.md": b"x",
}


class Hub(http.server.ThreadingHTTPServer):
    """The routes of a hub that a download needs, with one model, ``org/tiny``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {path.name: path.read_bytes() for path in MODEL.iterdir() if path.is_file()}
        self.files |= SPEECH | UNWANTED
        self.fetched: list[str] = []
        self.tokens: set[str] = set()
        self.status = 0  # of every answer, unless 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        hub.tokens.add(self.headers.get("authorization", ""))
        if hub.status:
            self.reply(hub.status, b"{}")
        elif path == "/api/models/org/tiny/revision/main":
            files = [{"rfilename": name} for name in hub.files]
            content = {"id": "org/tiny", "sha": COMMIT, "siblings": files}
            self.reply(200, json.dumps(content).encode())
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": blob(data)}
                for name, data in hub.files.items()
            ]
            self.reply(200, json.dumps(tree).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
            if self.command == "GET":
                hub.fetched.append(name)
            self.reply(200, hub.files[name], ETag=f'"{blob(hub.files[name])}"')
        else:
            missing = "RepoNotFound" if path.startswith("/api/models/") else "EntryNotFound"
            self.reply(404, b"{}", **{"X-Error-Code": missing})

    def reply(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub():
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


SCRIPT = """
import sys
from baton.deploy.config import ServeSettings
from baton.deploy.plan.hub import with_local_model
from baton.proto.errors import ConfigError
for name in sys.argv[1:]:
    try:
        print("folder", with_local_model(ServeSettings(model=name), print).model, flush=True)
    except ConfigError as problem:
        print("refused", problem, flush=True)
"""


def ask(home: Path, *names: str, endpoint: str, **variables: str) -> list[str]:
    """Resolve models in a new process; returns its output."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "XDG_"))}
    hub = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, *names],
        capture_output=True, text=True, cwd=home, env={**kept, **hub, **variables}, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "\r" not in ran.stderr, "a progress bar without a terminal"
    return ran.stdout.splitlines()


def test_a_model_of_the_hub_is_fetched_once_and_without_code(hub, tmp_path):
    lines = ask(tmp_path, "org/tiny", "org/none", endpoint=hub.url, HF_TOKEN="hf_secret")
    assert lines[0] == f"getting org/tiny from {hub.url} (cache: {tmp_path}/hub)"
    folder = Path(lines[2].removeprefix("folder "))
    assert folder == tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    wanted = set(hub.files) - set(UNWANTED)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    assert found == set(hub.fetched) == wanted
    assert len(hub.fetched) == len(wanted)
    assert all((folder / name).read_bytes() == hub.files[name] for name in hub.fetched)
    assert "Bearer hf_secret" in hub.tokens and "hf_secret" not in "".join(lines)
    sentence = f"refused org/none is no folder here, and {hub.url} has no such model, or shows it"
    assert lines[-1].startswith(sentence)

    # A second time, and without the hub, the cache is enough.
    count = len(hub.fetched)
    hub.status = 500
    offline = ask(tmp_path, "org/tiny", "org/none", endpoint=hub.url, HF_HUB_OFFLINE="1")
    missing = f"refused org/none is no folder here, and is not in the hub's cache {tmp_path}/hub"
    assert offline == [f"folder {folder}", f"{missing} and HF_HUB_OFFLINE is set"]
    assert len(hub.fetched) == count


def test_one_gguf_file_and_all_parts_of_a_split_one_are_fetched(hub, tmp_path):
    hub.files |= {name: name.encode() for name in ("m-Q4_0.gguf", "m-Q8_0.gguf")}
    parts = [f"s-0000{part}-of-00002.gguf" for part in (1, 2)]
    hub.files |= {name: name.encode() for name in parts}
    lines = ask(
        tmp_path, "org/tiny/m-Q4_0.gguf", f"org/tiny/{parts[0]}", "org/tiny/none.gguf",
        endpoint=hub.url,
    )  # fmt: skip
    folder = tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert f"folder {folder / 'm-Q4_0.gguf'}" in lines
    assert f"folder {folder / parts[0]}" in lines
    assert lines[-1] == "refused org/tiny has no file none.gguf"
    assert sorted(hub.fetched) == ["m-Q4_0.gguf", *parts]


def test_a_hub_that_fails_or_is_not_there_is_one_sentence(hub, tmp_path):
    hub.status = 403
    (_, refused) = ask(tmp_path, "org/tiny", endpoint=hub.url)
    assert "or shows it only with an HF_TOKEN" in refused
    (_, refused) = ask(tmp_path, "org/tiny", endpoint="http://127.0.0.1:1")
    start = "refused org/tiny is no folder here, and cannot be downloaded from http://127.0.0.1:1: "
    assert refused.startswith(start) and len(refused) > len(start)


def test_a_folder_wins_and_other_names_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("", "/a/b", "./a/b", "a", "a/b/c", "~/a", "../a", "a/..b/"):
        assert not is_hub_name(name), name
    assert is_hub_name("org/a.b-1_c")
    (tmp_path / "org" / "a.b-1_c").mkdir(parents=True)
    assert not is_hub_name("org/a.b-1_c")
    assert is_hub_name("org/name/m-Q4_K_M.gguf")
    assert not is_hub_name("org/name/sub/m.gguf")
    settings = ServeSettings(model="org/a.b-1_c")
    assert with_local_model(settings, print) is settings


def test_the_name_of_a_model_from_the_hub():
    assert model_name(f"/x/hub/models--org--a--b/snapshots/{COMMIT}") == "org/a--b"
    assert model_name("/models/llama") == "llama"
    assert model_name("/models/snapshots/x") == "x"


def test_a_picture_model_is_fetched_with_its_folders_and_nothing_else(hub, tmp_path):
    flux = Path(__file__).parents[1] / "data" / "pictures" / "flux"
    files = [path for path in flux.rglob("*") if path.is_file() and path.suffix != ".npz"]
    wanted = {str(path.relative_to(flux)): path.read_bytes() for path in files}
    shard = "text_encoder_2/model-00001-of-00002.safetensors"
    wanted |= {shard: b"s", "text_encoder_2/model.safetensors.index.json": b"{}"}
    unwanted = {
        "flux1-dev.safetensors": b"x",
        "ae.safetensors": b"x",
        "transformer/diffusion_pytorch_model.fp16.safetensors": b"x",
        "text_encoder/model.fp16.safetensors": b"x",
        "text_encoder/pytorch_model.bin": b"x",
        "model_extra/model.safetensors": b"x",
        "vae/flax.msgpack": b"x",
    }
    hub.files = wanted | unwanted
    lines = ask(tmp_path, "org/tiny", endpoint=hub.url)
    folder = Path(lines[-1].removeprefix("folder "))
    got = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert got == wanted.keys()
