"""Real clients of OpenAI's routes, unchanged, against a gateway: ``make test-clients``.

Each client has a separate environment, without which its test is skipped. With
``RECORD=1`` the files in ``tests/data/http`` are written anew, which
``test_recorded_clients.py`` replays without the clients.
"""

import json
import os
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ..clients.recorder import Recorder, write_recording
from .chromium import Chromium
from .conftest import wait_until
from .http import Gateway
from .speaker import make_speaker

pytestmark = [pytest.mark.cluster, pytest.mark.clients, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = Path(os.environ.get("CLIENT_VENVS", ROOT / ".venv-clients"))
SCRIPTS = ROOT / "tests" / "clients"
RECORDINGS = ROOT / "tests" / "data" / "http"
MODEL = "demo_model"
FLUX = ROOT / "tests" / "data" / "pictures" / "flux"
SCRIPTED = (
    "openai_python", "litellm_client", "langchain_client", "instructor_client", "agents_client",
)  # fmt: skip


@pytest.fixture(scope="module")
def pools(shared_cluster):
    return shared_cluster(prefill=1, decode=1, kv_memory="64MiB")


@pytest.fixture
def url(gateway, request):
    """The address for a client, of the recorder if requests shall be recorded."""
    if not os.environ.get("RECORD"):
        yield f"http://127.0.0.1:{gateway.port}"
        return
    recorder = Recorder(gateway.port)
    yield f"http://127.0.0.1:{recorder.port}"
    name = request.node.name.removeprefix("test_").replace("[", "_").rstrip("]")
    if requests := recorder.close():
        write_recording(RECORDINGS / f"{name.removeprefix('scripts_')}.http", requests)


@pytest.fixture(autouse=True)
def clean(request):
    """Afterwards no worker holds a block or a request."""
    yield
    if "url" not in request.fixturenames:
        return
    request.getfixturevalue("pools").wait_idle()


def environment(name: str) -> Path:
    folder = ENVIRONMENTS / name
    if not (folder / ".installed").exists():
        pytest.skip(f"make test-clients CLIENTS={name}")
    return folder


def run(command, folder: Path, **variables: str) -> str:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**kept, "HOME": str(folder), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    print(done.stdout[-2000:])
    return done.stdout


@pytest.mark.parametrize("name", SCRIPTED)
def test_scripts(name, url, tmp_path):
    python = environment(name) / "bin" / "python"
    said = run([python, SCRIPTS / f"{name}.py", f"{url}/v1", MODEL], tmp_path)
    assert said.rstrip().endswith(": ok")


def speaker(folder: Path) -> Path:
    """A speech model without named voices."""
    about = make_speaker(folder) / "speech.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "voices": []}))
    return folder


@pytest.mark.parametrize("script", ["pictures", "speech"])
def test_openai_python_with_other_models(start_cluster, tmp_path, script):
    """Pictures and speech, also with the client's defaults."""
    python = environment("openai_python") / "bin" / "python"
    model = FLUX if script == "pictures" else speaker(tmp_path / "speaker")
    served = start_cluster(model=model, prefill=1, decode=1)
    gateway = Gateway(served, tmp_path).wait_ready()
    recorder = Recorder(gateway.port) if os.environ.get("RECORD") else None
    try:
        url = f"http://127.0.0.1:{(recorder or gateway).port}/v1"
        said = run([python, SCRIPTS / f"openai_{script}.py", url, model.name], tmp_path)
        assert said.rstrip().endswith(": ok")
        if recorder is not None:
            (RECORDINGS / script).mkdir(exist_ok=True)
            write_recording(RECORDINGS / script / "openai_python.http", recorder.close())
        served.wait_idle()
    finally:
        assert gateway.end() == 0, gateway.text()


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_lm_eval_scores_choices_as_transformers(start_cluster, tmp_path, family):
    """A random checkpoint behind ``local-completions`` and with lm-eval's ``hf``."""
    script = [environment("lm_eval") / "bin" / "python", SCRIPTS / "lm_eval_client.py"]
    model = tmp_path / MODEL
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    run([*script, "make", family, model, ROOT / "deploy" / "demo_model"], tmp_path, **offline)
    served = start_cluster(model=model, prefill=1, decode=1).wait_ready()
    gateway = Gateway(served, tmp_path).wait_ready()
    recorder = Recorder(gateway.port) if os.environ.get("RECORD") else None
    try:
        url = f"http://127.0.0.1:{(recorder or gateway).port}/v1"
        said = run([*script, "compare", model, url, MODEL], tmp_path, **offline)
        assert said.rstrip().endswith(": ok")
        if recorder is not None:
            write_recording(RECORDINGS / "lm_eval_client.http", recorder.close())
        served.wait_idle()
    finally:
        assert gateway.end() == 0, gateway.text()


def test_openai_node(url, tmp_path):
    folder = environment("openai_node")
    said = run(["node", SCRIPTS / "openai_node.mjs", f"{url}/v1", MODEL, folder], tmp_path)
    assert said.rstrip().endswith(": ok")


PAGE = """<!doctype html><title>-</title><script>
const ask = async (url) => {
  const answer = await fetch(url + "/v1/chat/completions", {method: "POST",
    headers: {"Content-Type": "application/json", "Authorization": "Bearer sesame"},
    body: JSON.stringify({messages: [{role: "user", content: "Who are you?"}], temperature: 0,
      max_tokens: 8, stream: true})});
  return [answer.status, answer.headers.get("x-request-id"), await answer.text()];
};
const found = {};
const start = (url) => ask(url).then(
  (one) => found[url] = one, (error) => found[url] = [error.name]);
</script>"""


class PageHandler(BaseHTTPRequestHandler):
    """Serves ``PAGE``."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_page_of_another_origin(pools, tmp_path):
    """Chromium lets a page read answers if its origin is allowed, and blocks it otherwise."""
    browser = Chromium(tmp_path)
    pages = [ThreadingHTTPServer(("127.0.0.1", 0), PageHandler) for _ in range(2)]
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    keys.chmod(0o600)
    origins = [f"http://127.0.0.1:{page.server_address[1]}" for page in pages]
    for page in pages:
        threading.Thread(target=page.serve_forever, daemon=True).start()
    flags = (f"--api-key-file={keys}", f"--allowed-origins={origins[0]}")
    gateway = Gateway(pools, tmp_path, *flags).wait_ready()

    def asked_from(origin: str) -> list:
        browser.open(origin)
        wait_until(lambda: browser.run("location.origin + typeof start") == f"{origin}function", 60)
        url = f"http://127.0.0.1:{gateway.port}"
        browser.run(f"start('{url}'), 0")
        return json.loads(wait_until(lambda: browser.run(f"JSON.stringify(found['{url}'])"), 60))

    try:
        status, request_id, text = asked_from(origins[0])
        assert status == 200 and request_id and text.rstrip().endswith("data: [DONE]")
        assert asked_from(origins[1]) == ["TypeError"]
    finally:
        browser.end()
        for page in pages:
            page.shutdown()
            page.server_close()
        assert gateway.end() == 0, gateway.text()
    pools.wait_idle()


@pytest.mark.skipif(not shutil.which("java"), reason="java runs this client")
def test_java(url, tmp_path):
    said = run(["java", SCRIPTS / "JavaClient.java", f"{url}/v1", MODEL], tmp_path)
    assert said.rstrip().endswith(": ok")


def test_schemathesis(start_cluster, tmp_path):
    """A context so short that no answer is long. EXAMPLES=N sets the examples per route."""
    program = environment("schemathesis") / "bin" / "schemathesis"
    small = start_cluster(prefill=1, decode=1, max_model_len=64).wait_ready()
    gateway = Gateway(small, tmp_path).wait_ready()
    checks = (
        "not_a_server_error", "status_code_conformance", "content_type_conformance",
        "response_schema_conformance", "negative_data_rejection",
    )  # fmt: skip
    command = [
        program, "run", f"http://127.0.0.1:{gateway.port}/openapi.json",
        "--checks", ",".join(checks), "--max-examples", os.environ.get("EXAMPLES", "50"),
        "--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all",
        "--exclude-path-regex", "^/metrics",
    ]  # fmt: skip
    try:
        run(command, tmp_path)
        assert '"level": "error"' not in gateway.text()
    finally:
        assert gateway.end() == 0
        small.end_clean()


def hub(folder: Path) -> dict[str, str]:
    """The model's tokenizer as ``local/tiny`` in a hub cache, for tools that refuse folders."""
    commit = "0" * 40
    model = folder / "hub" / "models--local--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    target = model / "snapshots" / commit
    source = ROOT / "deploy" / "demo_model"
    target.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(source / name, target / name)
    return {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}


def aiperf(url: str, folder: Path, *options: str) -> dict:
    command = [
        environment("aiperf") / "bin" / "aiperf", "profile", "--model", MODEL, "--url", url,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", "local/tiny", "--ui", "none",
        "--no-gpu-telemetry", "--output-artifact-dir", folder / "out", *options,
    ]  # fmt: skip
    run(command, folder, **hub(folder))
    (found,) = (folder / "out").rglob("profile_export_aiperf.json")
    return json.loads(found.read_text())


LOAD = ("--concurrency", "4", "--request-count", "40", "--isl", "64", "--osl", "16")


def test_aiperf(url, tmp_path):
    found = aiperf(url, tmp_path, *LOAD)
    assert found["request_count"]["avg"] == 40
    assert not found["error_summary"]
    assert found["output_sequence_length"]["avg"] == pytest.approx(16, abs=1)


def test_aiperf_with_cancellations(url, tmp_path):
    cancelling = ("--request-cancellation-rate", "30", "--request-cancellation-delay", "0.05")
    long = ("--osl", "1000", "--extra-inputs", "ignore_eos:true")
    found = aiperf(url, tmp_path, *LOAD[:-2], *long, *cancelling)
    (summary,) = found["error_summary"]
    assert summary["error_details"]["code"] == 499
    assert 0 < summary["count"] < 30


def test_aiperf_replays_a_trace(url, tmp_path):
    lines = [
        {"timestamp": 50 * at, "input_length": 600, "output_length": 8, "hash_ids": [at % 4, 9]}
        for at in range(40)
    ]
    trace = tmp_path / "x.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    kind = ("--custom-dataset-type", "mooncake_trace", "--fixed-schedule")
    found = aiperf(url, tmp_path, "--input-file", str(trace), *kind)
    assert found["request_count"]["avg"] == 40
    assert not found["error_summary"]


def test_guidellm(url, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    command = [
        environment("guidellm") / "bin" / "guidellm", "run",
        "--backend", f"kind=openai_http,target={url}", "--profile", "kind=concurrent,streams=4",
        "--constraint", "kind=max_requests,count=40",
        "--tokenizer", f"kind=hf_auto,model={ROOT / 'deploy' / 'demo_model'}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--output", f"kind=json,path={output}", "--disable-progress",
    ]  # fmt: skip
    run(command, tmp_path, **hub(tmp_path))
    (written,) = output.rglob("*.json")
    (benchmark,) = json.loads(written.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (40, 0), totals
