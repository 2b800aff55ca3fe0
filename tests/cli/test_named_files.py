"""Files that a user names: what is not a regular file is refused at once, and nothing waits."""

import os
import socket
from pathlib import Path

import pytest

from baton.cli.generate import _schema
from baton.cli.settings import read_file
from baton.cli.speak import audio_tokens
from baton.deploy.local.daemon import _open_log as open_log
from baton.deploy.ray.cluster_file import read_cluster_file
from baton.deploy.ray.release import read_wheel
from baton.engine.audio.chunks import load_audio
from baton.engine.grammar.compiler import load_tokenizer
from baton.engine.loading.json_files import read_json
from baton.engine.loading.safetensors import map_file
from baton.forecast.service import read_service
from baton.gateway.config import GatewayConfig
from baton.gateway.server import _check_certificate
from baton.images.processor import _file_content
from baton.loadgen.traces import read_trace
from baton.offline.cluster import _open_log as open_offline_log
from baton.proto.errors import BatonError
from baton.runtime.keys.api_keys import api_key_digests
from baton.text.model_files import PICTURE_FILES, has_tokenizer_files, read_files
from baton.text.tokenizer import Tokenizer


def certificate(file: Path) -> None:
    _check_certificate(
        GatewayConfig(routers=("ipc:///r",), ssl_certfile=str(file), ssl_keyfile=str(file))
    )


def cluster_file(file: Path) -> None:
    pytest.importorskip("yaml")
    read_cluster_file(file)


READERS = {
    "--config": ("c.toml", lambda file: read_file(str(file))),
    "--json-schema": ("s.json", lambda file: _schema(str(file))),
    "--api-key-file": ("keys", lambda file: api_key_digests(str(file), ())),
    "--trace": ("t.csv", read_trace),
    "--trace, compressed": ("t.jsonl.gz", read_trace),
    "--step-times": ("t.json", read_service),
    "--voice-from, list": ("v.json", audio_tokens),
    "--voice-from, array": ("v.npy", audio_tokens),
    "--image": ("i.png", _file_content),
    "WHEEL": ("b.whl", read_wheel),
    "--check": ("c.yaml", cluster_file),
    "--ssl-certfile": ("c.pem", certificate),
    "MODEL.gguf": ("m.gguf", map_file),
    "config.json": ("config.json", read_json),
    "tokenizer_config.json": ("tokenizer_config.json", lambda f: Tokenizer.from_folder(f.parent)),
    "model_index.json": ("model_index.json", lambda f: read_files(f.parent, PICTURE_FILES)),
    "tokenizer.json, grammar": ("tokenizer.json", lambda f: load_tokenizer(f.parent, 9, [1])),
    "speech.json": ("speech.json", lambda f: load_audio(f.parent)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "directory"])
@pytest.mark.parametrize("option", READERS)
def test_what_is_no_regular_file_is_refused(option, kind, tmp_path, monkeypatch):
    name, read = READERS[option]
    file = tmp_path / name
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "directory":
        file.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            monkeypatch.chdir(tmp_path)  # the path of a socket is short
            listener.bind(name)
    words = "Is a directory" if kind == "directory" else f"it is a {kind}, not a regular file"
    with pytest.raises(BatonError, match=words) as caught:
        read(file)
    assert str(file) in str(caught.value)
    assert "Errno" not in str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("opened", [open_log, open_offline_log])
def test_a_log_that_is_a_pipe_is_refused(opened, tmp_path):
    """Opening it would wait for a reader."""
    os.mkfifo(tmp_path / "log")
    with pytest.raises(BatonError, match=r"cannot write the log .*log: it is a pipe"):
        opened(tmp_path / "log")
    opened(Path(os.devnull)).close()


@pytest.mark.timeout(60)
def test_a_folder_with_a_pipe_is_not_that_of_the_served_model(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    assert not has_tokenizer_files(str(tmp_path), {"tokenizer.json": b"{}"})
