"""The start-up banner and the lines of metrics, as pure functions from facts to lines."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from baton import __version__
from baton.engine.kernels.load import (
    BUILD_KERNELS,
    compiled_kernels_problem,
    kernels_title,
    weights_dtype,
)
from baton.engine.loading.embedding_config import EMBED
from baton.engine.loading.json_files import read_json
from baton.gateway.config import GatewayConfig
from baton.kv_transfer.shared_pool import can_share
from baton.proto.errors import BatonError
from baton.proto.layout import model_name
from baton.proto.limits import MAX_DESCRIBED_BYTES
from baton.router.describe import read_text_files
from baton.runtime.keys.api_keys import KEY_VARIABLE
from baton.runtime.process.memory import size_text
from baton.text.model_files import TokenizerSettings

from ..config import (
    ANY_HTTP_PORT,
    HTTP_PORT,
    ServeSettings,
    block_size,
    kv_size,
    listed,
    shares_memory,
)
from ..plan.plan import ClusterPlan
from ..report import ClusterReport, WorkerReport
from ..roles import GATEWAY, POOLS


class BannerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the start-up banner."""

    version: str
    model: str
    address: str
    transport: str
    security: str
    context: int = 0
    """Maximum context length in tokens; 0 if unknown."""
    block_size: int = 0
    kv_memory: str = ""
    warning: str = ""
    """Why the workers compute slower than possible; empty if they do not."""
    hints: tuple[str, ...] = ()
    """Commands to try."""
    http: str = ""
    """Where the gateways listen; empty without gateways."""
    dashboard: str = ""
    metrics: str = ""
    family: str = ""
    """The user's own model family, and the architecture that the folder names; empty: none."""


def facts(plan: ClusterPlan, *, hint: bool, context: int = 0) -> BannerFacts:
    """Make the contents of the banner from a plan.

    ``hint``: show commands to try. ``context``: maximum context length in tokens.
    """
    embeds = plan.settings.task == EMBED
    return BannerFacts(
        version=__version__,
        model=plan.model,
        address=plan.address,
        transport=_transport(plan.settings),
        security=_security(plan),
        context=context,
        block_size=min(block_size(plan.settings, role) for role in POOLS),
        kv_memory="" if embeds else _kv_memory(plan),
        warning=kernels_warning(plan.settings),
        hints=_hints(plan) if hint else (),
        http=_http(plan),
        dashboard=dashboard_of(plan.http_url),
        metrics=metrics_of(plan.settings),
        family=_family(plan),
    )


def _family(plan: ClusterPlan) -> str:
    name = plan.settings.model_family
    if not name:
        return ""
    names = read_json(Path(plan.model) / "config.json").get("architectures")
    first = names[0] if isinstance(names, list) and names else "no architecture"
    return f"{name} (config.json: {first})"


def dashboard_of(http_url: str) -> str:
    """Return the URL of the dashboard. ``http_url``: of the gateways; empty without any."""
    return http_url and f"{http_url.removesuffix('/v1')}/dashboard"


def metrics_of(settings: ServeSettings) -> str:
    """Describe where /metrics is served for Prometheus; empty if nowhere."""
    first, host = settings.metrics_port, settings.metrics_host.strip("[]")
    if not first:
        return ""
    last = first + settings.routers + settings.gateways - 1
    shown = f"[{host}]" if ":" in host else host
    more = f", and up to port {last}" if last > first else ""
    return f"http://{shown}:{first}/metrics{more}"


def kernels_warning(settings: ServeSettings) -> str:
    """Warning that the slow NumPy kernels are used, and how to build the compiled kernels.

    Empty if the compiled kernels work, and if the settings choose other kernels.
    """
    if settings.device != "cpu" or settings.kernels != "auto":
        return ""
    problem = compiled_kernels_problem()
    return problem and (
        f"the slow NumPy kernels are used, because the compiled ones are missing ({problem}). "
        f"To be up to 4 times faster, {BUILD_KERNELS}"
    )


def _security(plan: ClusterPlan) -> str:
    """Describe which users and hosts can connect to the sockets."""
    if not plan.address.startswith("tcp://") and plan.settings.transport != "tcp":
        return "this user only (ipc socket files, mode 0600)"
    if plan.settings.keys:
        return f"holders of listed keys (CURVE on every tcp socket, {plan.settings.keys})"
    return "this machine only (loopback, no keys)"


def _transport(settings: ServeSettings) -> str:
    streamed = f"zmq over {settings.transport}"
    shared = shares_memory(settings) and can_share()
    return f"shared memory, or {streamed} where that fails" if shared else streamed


def served_name(plan: ClusterPlan) -> str:
    """The model's name over HTTP, which answers have."""
    return next(iter(listed(plan.settings, "served_model_name")), model_name(plan.model))


def _http(plan: ClusterPlan) -> str:
    """Describe the addresses of the gateways and the model they serve."""
    settings = plan.settings
    if not plan.http_url:
        return ""
    notes = [f"model {served_name(plan)}"]
    notes += [f"{settings.gateways} gateways"] if settings.gateways > 1 else []
    notes += ["with an API key"] if _has_api_key(plan) else []
    if settings.http_port == ANY_HTTP_PORT and plan.book.http_port != HTTP_PORT:
        notes.append(f"port {HTTP_PORT} is in use")
    return f"{plan.http_url} ({', '.join(notes)})"


def _has_api_key(plan: ClusterPlan) -> bool:
    configs = (spec.config for spec in plan.processes if spec.role == GATEWAY)
    return any(isinstance(config, GatewayConfig) and config.api_keys for config in configs)


def _hints(plan: ClusterPlan) -> tuple[str, ...]:
    """Return commands to try, suited to the model: without a tokenizer, text is impossible."""
    verb, rest, path, body = "status", "", "models", ""
    with contextlib.suppress(BatonError):
        files = read_text_files(plan.model, MAX_DESCRIBED_BYTES)
        if plan.settings.task == EMBED and "tokenizer.json" in files:
            verb, rest = "embed", " 'Who are you?'"
            path, body = "embeddings", '{"input": "Who are you?"}'
        elif "model_index.json" in files:
            verb, rest = "draw", " 'a red house' -o house.png"
            path, body = "images/generations", '{"prompt": "a red house"}'
        elif "tokenizer.json" in files:
            chats = "default" in TokenizerSettings(files, plan.model).templates
            verb, rest = "generate", " --chat 'Who are you?'" if chats else " 'Once upon a time'"
            path = "chat/completions" if chats else "completions"
            body = '{"messages": [{"role": "user", "content": "Who are you?"}]}'
            body = body if chats else '{"prompt": "Once upon a time"}'
    keys = f" --keys {plan.settings.keys}" if plan.settings.keys else ""
    native = f"baton {verb} --address {plan.address}{keys}{rest}"
    if not plan.http_url:
        return (native,)
    header = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if _has_api_key(plan) else ""
    data = f" -d '{body}'" if body else ""
    return native, f"curl {plan.http_url}/{path}{header}{data}"


def _kv_memory(plan: ClusterPlan) -> str:
    """Describe the KV memory per worker of both pools."""
    parts = []
    for role in ("prefill", "decode"):
        if not getattr(plan.settings, role):
            continue
        blocks, memory = kv_size(plan.settings, role)
        size = f"{blocks} blocks" if blocks else size_text(memory or plan.kv_default)
        chosen = "" if blocks or memory else ", from free memory"
        parts.append(f"{size} per {role} worker{chosen}")
    return "; ".join(parts)


def startup(facts: BannerFacts, report: ClusterReport) -> list[str]:
    """Return the lines of the banner, shown after every worker is ready."""
    lines = [
        f"baton {facts.version}",
        f"  model      {facts.model}",
        *([f"  family     {facts.family}"] if facts.family else []),
        *_engine_lines(report),
        f"  address    {facts.address}",
        *([f"  http       {facts.http}"] if facts.http else []),
        *([f"  dashboard  {facts.dashboard}"] if facts.dashboard else []),
        *([f"  metrics    {facts.metrics}"] if facts.metrics else []),
        f"  security   {facts.security}",
        f"  handoff    {facts.transport}",
    ]
    if facts.kv_memory:
        lines.append(f"  KV memory  {facts.kv_memory}")
    for role in ("prefill", "decode"):
        lines += [_pool_line(role, worker) for worker in report.of_role(role)]
    lines += _short_memory(facts, report)
    if facts.warning:
        lines.append(f"  warning    {facts.warning}")
    return [*lines, *(f"  try        {hint}" for hint in facts.hints)]


def _engine_lines(report: ClusterReport) -> list[str]:
    """Lines about the model and the kernels; empty for a router without these fields."""
    router = report.router
    if not router.numerics:
        return []
    cached = f", KV cache {router.kv_dtype}" if router.task != EMBED else ""
    title = kernels_title(router.numerics)
    threads = report.threads and f"; {report.threads}"
    return [
        f"  engine     {router.architecture}, weights {weights_dtype(router.numerics)}{cached}",
        f"  kernels    {title}{threads}",
        *([f"  weights    {report.shared_weights}"] if report.shared_weights else []),
    ]


def _short_memory(facts: BannerFacts, report: ClusterReport) -> list[str]:
    """Warn if the KV memory of a worker is smaller than one context of maximum length."""
    blocks = min((worker.kv_blocks_total for worker in report.workers), default=0)
    tokens = blocks * facts.block_size
    if not 0 < tokens < facts.context:
        return []
    limit = f"contexts are limited to {tokens} tokens, the KV memory of one worker"
    return [f"  warning    {limit}; for all {facts.context} give more --kv-memory"]


def _pool_line(role: str, worker: WorkerReport) -> str:
    return (
        f"  {role:<10} {worker.id}  pid {worker.pid}  "
        f"{worker.kv_blocks_total} KV blocks  {worker.endpoint}"
    )


def is_busy(before: ClusterReport, after: ClusterReport) -> bool:
    """Whether there were requests between two reports, or are now."""
    counters = ("prompt_tokens", "generated_tokens", "prefix_hit_tokens")
    waiting = any(w.requests_running or w.requests_waiting for w in after.workers)
    return waiting or any(_grown(counter, before, after) for counter in counters)


def throughput(before: ClusterReport, after: ClusterReport, seconds: float) -> str:
    """Return one line of metrics for the ``seconds`` between two reports.

    Counters are compared per incarnation, because a restarted worker counts from zero.
    """
    prompt = _grown("prompt_tokens", before, after)
    generated = _grown("generated_tokens", before, after)
    hits = _grown("prefix_hit_tokens", before, after)
    total = sum(worker.kv_blocks_total for worker in after.workers)
    used = sum(worker.kv_blocks_used for worker in after.workers)
    running = sum(worker.requests_running for worker in after.workers)
    waiting = sum(worker.requests_waiting for worker in after.workers)
    return (
        f"prompt {prompt / seconds:.1f} tok/s, generation {generated / seconds:.1f} tok/s, "
        f"running {running}, waiting {waiting}, "
        f"KV {_percent(used, total)}, prefix hit {_percent(hits, hits + prompt)}"
    )


def _grown(counter: str, before: ClusterReport, after: ClusterReport) -> int:
    base = {(w.id, w.incarnation): getattr(w, counter) for w in before.workers}
    return sum(getattr(w, counter) - base.get((w.id, w.incarnation), 0) for w in after.workers)


def _percent(part: int, whole: int) -> str:
    return f"{100.0 * part / whole if whole else 0.0:.1f} %"
